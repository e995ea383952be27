"""Training with numbers before and after: the task ``openvocab``, then what it did to CLIP and to unseen classes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramify.evaluate.segmentation import Confusion
from ramify.files import write_text
from ramify.train.evaluate import evaluate_run, load_model
from ramify.train.loop import autocast, fit
from ramify.train.recipe import Recipe
from ramify.train.tasks.openvocab import OpenVocab
from ramify.train.tasks.segment import resize_scores
from ramify.vlm.openvocab.scores import split_scores
from ramify.vlm.openvocab.segmenter import OpenVocabSegmenter
from ramify.vlm.radii import radius_summary, radius_table

REPORT = "openvocab.json"
NUMBERS = ("miou", "miou_seen", "miou_unseen", "miou_harmonic")


class ZeroShot(OpenVocab):
    """Scores of the cosines alone, at the size of a window, without the head."""

    def evaluate(self, model: Any, batches: Any, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        text = model.text_features(self._classes)
        confusion = Confusion(len(self._classes), text.device)
        for batch in batches:
            scores = model.zero_shot(batch["image"], text=text)
            for score, truth, extent in zip(scores, batch["truth"], batch["extent"], strict=True):
                confusion.add(resize_scores(score, extent, truth.shape).argmax(0), truth)
        return split_scores(gather(confusion.matrix[None]).sum(0), self._classes, self._unseen)


def train_and_report(recipe: Recipe, out: Path, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train the recipe, then compare: cosines alone before and after, and the head; radius of texts before and after.

    Writes ``openvocab.json`` into the run's folder, and the adapter beside it (``adapter/``) where there is one.

    Returns:
        What the file holds: method, parameters, rows of numbers, radius.
    """
    result = fit(recipe, out, resume=resume, quiet=quiet)
    if os.environ.get("RANK", "0") != "0":  # one process is enough for the rest
        return {}
    model, _ = load_model(out)
    assert isinstance(model, OpenVocabSegmenter)
    task, numbers, tuned = _cosine_numbers(recipe, model)
    with torch.no_grad():
        radius = {"before": task.radius_before, "after": radius_summary(model.text_features(task._classes))}
    # All rows are of the best weights; the run's own last numbers are of the last ones.
    head = result.numbers if result.best_step == result.step else evaluate_run(out, recipe=recipe)
    rows = {"cosine before": numbers, "cosine after": tuned, "head": head}
    report: dict[str, Any] = {
        "model": recipe.model.name,
        "method": model.settings.method,
        "parameters": {
            "adapter": sum(p.numel() for p in model.adapter_parameters()),
            "head": sum(p.numel() for p in model.head.parameters()),
        },
        "classes": {"seen": list(task._seen), "unseen": list(task._unseen)},
        "rows": {name: {key: row[key] for key in NUMBERS if key in row} for name, row in rows.items()},
        "radius": radius,
        "step": result.best_step,
    }
    if model.handle is not None:
        model.handle.save(out / "adapter")
    write_text(out / REPORT, json.dumps(report, indent=2) + "\n")
    return report


def _cosine_numbers(recipe: Recipe, tuned: OpenVocabSegmenter) -> tuple[OpenVocab, dict[str, float], dict[str, float]]:
    """Numbers of the cosines alone, of CLIP as it was and as it has become."""
    task = ZeroShot(recipe)
    dataset = task.build_dataset("val")
    fresh = task.build_model(task.describe(dataset))
    device = torch.device("cuda" if torch.cuda.is_available() and recipe.run.device != "cpu" else "cpu")
    loader = task.build_loader(dataset, False)
    found = []
    try:
        for model in (fresh, tuned):
            model.to(device).eval()
            loader.set_epoch(0)
            with torch.no_grad(), autocast(recipe, device):
                batches = (task.to_device(batch, device) for batch in loader)
                found.append(task.evaluate(model, batches, lambda counts: counts))
    finally:
        loader.close()
    return task, found[0], found[1]


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    unseen = report["classes"]["unseen"]
    columns = [key for key in NUMBERS if unseen or key in ("miou", "miou_seen")]
    lines = ["".join([f"{'':<16}", *(f"{key.removeprefix('miou_'):>10}" for key in columns)])]
    for name, row in report["rows"].items():
        lines.append("".join([f"{name:<16}", *(f"{row.get(key, 0.0):>10.4f}" for key in columns)]))
    lines += radius_table({"text": report["radius"]})
    count = report["parameters"]
    lines.append(f"trained: {count['adapter']:,} parameters of {report['method']}, {count['head']:,} of the head")
    return lines

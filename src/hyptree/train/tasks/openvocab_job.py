"""Training with numbers before and after: the task ``openvocab``, then what it did to CLIP and to unseen classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyptree.errors import UserError
from hyptree.files import write_text
from hyptree.signals import is_main_process
from hyptree.train.evaluate import load_model
from hyptree.train.loop import fit
from hyptree.train.run.recipe import Recipe
from hyptree.train.tasks.openvocab import OpenVocab
from hyptree.vlm.openvocab.segmenter import OpenVocabSegmenter
from hyptree.vlm.radii import radius_summary, radius_table

REPORT = "openvocab.json"
NUMBERS = ("miou", "miou_seen", "miou_unseen", "miou_harmonic")


def train_and_report(recipe: Recipe, out: Path, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train the recipe, then compare: cosines alone before and after, and the head; radius of texts before and after.

    Under torchrun every process calls this; the first one does what comes after training, the others give nothing.

    Writes ``openvocab.json`` into the run's folder, and the adapter beside it (``adapter/``) where there is one.

    Returns:
        What the file holds: method, parameters, rows of numbers, radius.
    """
    if recipe.task != "openvocab":
        raise UserError(f"this is a recipe of the task {recipe.task}; expected openvocab")
    result = fit(recipe, out, resume=resume, quiet=quiet)
    if not is_main_process():
        return {}
    model, _ = load_model(out)
    assert isinstance(model, OpenVocabSegmenter)
    task = OpenVocab(recipe)
    dataset = task.build_dataset("val")
    before = _numbers(task, dataset, task.build_model(task.describe(dataset)))
    # All rows are of the best weights; the run's own last numbers are of the last ones.
    after = result.numbers if result.best_step == result.step else _numbers(task, dataset, model)
    with torch.no_grad():
        radius = {"before": task.radius_before, "after": radius_summary(model.text_features(task._classes))}
    rows = {
        "cosine before": {name: before[name.replace("miou", "cosine")] for name in NUMBERS if name in before},
        "cosine after": {name: after[name.replace("miou", "cosine")] for name in NUMBERS if name in after},
        "head": {name: after[name] for name in NUMBERS if name in after},
    }
    report: dict[str, Any] = {
        "model": recipe.model.name,
        "method": model.settings.method,
        "parameters": {
            "adapter": sum(p.numel() for p in model.adapter_parameters()),
            "head": sum(p.numel() for p in model.head.parameters()),
        },
        "classes": {"seen": list(task._seen), "unseen": list(task._unseen)},
        "rows": rows,
        "radius": radius,
        "step": result.best_step,
    }
    if model.handle is not None:
        model.handle.save(out / "adapter")
    write_text(out / REPORT, json.dumps(report, indent=2) + "\n")
    return report


def _numbers(task: OpenVocab, dataset: Any, model: nn.Module) -> dict[str, float]:
    """The task's numbers in this process alone: the others are gone once ``fit`` has returned."""
    wanted = task.recipe.run.device
    device = torch.device(wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    loader = task.build_loader(dataset, False)
    try:
        return task.score(model.to(device), loader, device)
    finally:
        loader.close()


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

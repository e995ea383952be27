"""Segmentation and detection as tasks: what they score, what they refuse, and that their recipes run and learn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

pytest.importorskip("pycocotools", reason="install hyptree[eval]")

from hyptree.cli import main
from hyptree.config import load
from hyptree.data.sample import IGNORE, Sample
from hyptree.errors import UserError
from hyptree.files import save_tensors
from hyptree.train import evaluate_run, fit, load_model
from hyptree.train.model import load_weights
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Task
from hyptree.train.tasks import build_task
from hyptree.train.tasks.detect import Detect, KeepBoxes, make_target
from hyptree.train.tasks.segment import KeepLabelMap, Segment, resize_scores

ROOT = Path(__file__).resolve().parents[2]
TINY_HEAD = ("model.name=hcformer_pico", "model.head.pyramid_channels=32")
QUICK = ("run.device=cpu", "run.tensorboard=false", "run.log_steps=1", "schedule.warmup=0", "data.workers=0")


def recipe(name: str, *overrides: str) -> Recipe:
    return load(Recipe, ROOT / "recipes" / f"{name}.yaml", [*QUICK, *overrides])


def one(samples: Any) -> Any:
    """A gather of one process."""
    return samples


# ------------------------------------------------------------------------------------------- segmentation: the numbers


class ReadsColours(nn.Module):
    """Scores of pictures in which the class k has the brightness 10 k + 5: what a perfect model would say."""

    def __init__(self, task: Segment, num_classes: int):
        super().__init__()
        self.data, self.num_classes = task.recipe.data, num_classes
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        grey = (images[:, 0] * self.data.std[0] + self.data.mean[0]) * 255
        classes = ((grey - 5) / 10).round().long().clamp(0, self.num_classes - 1)
        return 20 * F.one_hot(classes, self.num_classes).permute(0, 3, 1, 2).float()


def coloured_sample(height: int, width: int, num_classes: int, block: int = 5) -> Sample:
    """Blocks of classes with the brightness that ``ReadsColours`` knows; some blocks do not count."""
    rows, columns = -(-height // block), -(-width // block)
    coarse = torch.randint(num_classes, (rows, columns))
    classes = coarse.repeat_interleave(block, 0).repeat_interleave(block, 1)[:height, :width]
    image = (10 * classes + 5).to(torch.uint8).expand(3, -1, -1).clone()
    semantic = classes.to(torch.uint8)
    semantic[:block, :block] = IGNORE
    return Sample(image, f"{height}x{width}", semantic=semantic)


def segment_task(num_classes: int, *overrides: str) -> Segment:
    task = build_task(load(Recipe, None, ["task=segment", *TINY_HEAD, *overrides]))
    assert isinstance(task, Segment)
    task._classes = tuple(f"class {k}" for k in range(num_classes))
    return task


def test_predictions_are_scored_at_the_size_of_the_labels() -> None:
    """Pictures of several shapes are doubled and padded for the model; perfect answers still score 1.

    Two classes, because doubling mixes neighbours 3 : 1, which rounds back to the nearer of two but not of six.
    """
    task = segment_task(2, "data.size=80")
    transform = task.transform(train=False)
    samples = [coloured_sample(40, 40, 2), coloured_sample(25, 40, 2), coloured_sample(40, 15, 2)]
    batch = task.collate([transform(sample) for sample in samples], train=False)
    assert batch["image"].shape == (3, 3, 80, 80)
    assert batch["extent"] == [(80, 80), (50, 80), (80, 30)]
    for sample, truth in zip(samples, batch["truth"], strict=True):
        assert torch.equal(truth, sample.semantic)

    scores = task.evaluate(ReadsColours(task, 2), [batch], one)
    assert scores["pixel_accuracy"] == scores["miou"] == 1.0
    # The same answers read with the padding still on are shifted: the extent matters.
    wrong = task.evaluate(ReadsColours(task, 2), [batch | {"extent": [(80, 80)] * 3}], one)
    assert wrong["miou"] < 0.8


def test_scores_lose_their_padding_before_they_are_resized() -> None:
    scores = torch.randn(4, 8, 10)
    assert torch.equal(resize_scores(scores, (6, 10), (6, 10)), scores[:, :6])
    expected = F.interpolate(scores[None, :, :6, :5], size=(12, 11), mode="bilinear", align_corners=False)[0]
    assert torch.equal(resize_scores(scores, (6, 5), (12, 11)), expected)
    assert resize_scores(scores.bfloat16(), (6, 10), (7, 9)).dtype == torch.float32


def test_loss_is_the_mean_over_pixels_that_count() -> None:
    task = segment_task(5)
    logits = torch.randn(2, 5, 7, 9, requires_grad=True)
    truth = torch.randint(5, (2, 7, 9), dtype=torch.uint8)
    truth[torch.rand(2, 7, 9) < 0.3] = IGNORE
    loss, numbers = task.training_loss(lambda images: logits, {"image": None, "semantic": truth})  # type: ignore[arg-type]
    kept = truth != IGNORE
    chosen = logits.permute(0, 2, 3, 1)[kept].log_softmax(-1)
    torch.testing.assert_close(loss, -chosen[range(len(chosen)), truth[kept].long()].mean())
    assert numbers["pixel_accuracy"] == (chosen.argmax(-1) == truth[kept]).float().mean()


def test_a_batch_in_which_nothing_counts_has_no_loss() -> None:
    logits = torch.randn(1, 5, 4, 4, requires_grad=True)
    nothing = torch.full((1, 4, 4), IGNORE, dtype=torch.uint8)
    loss, _ = segment_task(5).training_loss(lambda images: logits, {"image": None, "semantic": nothing})  # type: ignore[arg-type]
    loss.backward()
    assert loss == 0 and not logits.grad.any()


# ---------------------------------------------------------------------------------------------- detection: the numbers


def instances(height: int, width: int, boxes: list[list[int]], labels: list[int]) -> Sample:
    masks = torch.zeros(len(boxes), height, width, dtype=torch.bool)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
        mask[y1:y2, x1:x2] = True
    return Sample(
        torch.randint(256, (3, height, width), dtype=torch.uint8),
        f"{height}x{width}",
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        box_labels=torch.tensor(labels, dtype=torch.int64),
        masks=masks,
    )


class KnowsTheAnswer(nn.Module):
    """Gives the truth of each picture, in the pixels of what it sees."""

    def __init__(self, samples: list[Sample]):
        super().__init__()
        self.samples = list(samples)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        answers = []
        for image, sample in zip(images, self.samples, strict=True):
            (h, w), (height, width) = image.shape[-2:], sample.image.shape[-2:]
            masks = F.interpolate(sample.masks[:, None].float(), size=(h, w), mode="area")
            scale = torch.tensor([w / width, h / height] * 2)
            count = len(sample.boxes)
            answers.append(
                {
                    "boxes": sample.boxes * scale,
                    "labels": sample.box_labels,
                    "scores": torch.rand(count),
                    "masks": masks,
                }
            )
        return answers


def detect_task(*overrides: str) -> Detect:
    task = build_task(load(Recipe, None, ["task=detect", *TINY_HEAD, *overrides]))
    assert isinstance(task, Detect)
    task.build_model({"box_classes": ["a", "b", "c"], "has_masks": True})
    return task


def test_detections_are_scored_in_the_pixels_of_the_dataset() -> None:
    task = detect_task("data.size=96")
    transform = task.transform(train=False)
    samples = [
        instances(48, 64, [[4, 4, 24, 28], [30, 10, 60, 40]], [1, 3]),
        instances(64, 32, [[2, 8, 30, 50]], [2]),
        instances(40, 40, [], []),
    ]
    batch = task.collate([transform(sample) for sample in samples], train=False)
    assert [tuple(image.shape) for image in batch["image"]] == [(3, 72, 96), (3, 96, 48), (3, 96, 96)]
    assert batch["full_size"] == [(48, 64), (64, 32), (40, 40)]
    assert torch.equal(batch["truth"][0]["boxes"], samples[0].boxes)
    scores = task.evaluate(KnowsTheAnswer(samples), [batch], one)
    assert scores["box_ap"] == pytest.approx(1.0, abs=1e-9)
    assert scores["mask_ap"] == pytest.approx(1.0, abs=1e-9)


def test_boxes_and_masks_are_brought_to_the_picture() -> None:
    actual = {
        "boxes": torch.tensor([[10.0, 20, 30, 40]]),
        "masks": torch.rand(1, 1, 60, 50),
        "labels": torch.tensor([1]),
    }
    from hyptree.data.pictures.single import resize_detections

    moved = resize_detections(actual, (60, 50), (120, 25))
    assert moved["boxes"].tolist() == [[5, 40, 15, 80]]
    assert moved["masks"].shape == (1, 1, 120, 25)
    assert resize_detections(actual, (60, 50), (60, 50)) is actual
    none = {"boxes": torch.zeros(0, 4), "masks": torch.zeros(0, 1, 60, 50)}
    assert resize_detections(none, (60, 50), (120, 25))["masks"].shape == (0, 1, 120, 25)


def test_crowds_and_empty_boxes_are_not_learned() -> None:
    sample = instances(20, 20, [[2, 2, 8, 8], [5, 5, 5, 9], [1, 1, 18, 18]], [1, 2, 3])
    sample.crowd = torch.tensor([False, False, True])
    target = make_target(sample)
    assert target["labels"].tolist() == [1]
    assert target["boxes"].tolist() == [[2, 2, 8, 8]]
    assert target["masks"].shape == (1, 20, 20) and target["masks"].dtype == torch.uint8
    truth = KeepBoxes(lambda s: s)(sample).truth
    assert truth is not None and truth["crowd"].tolist() == [False, False, True]  # scoring wants to know them


# ----------------------------------------------------------------------------------------------------- what is refused


class NoDense:
    classes, semantic_classes, box_classes = ("a",), (), ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: segment_task(3).describe(NoDense()), "data world has no label maps to segment"),
        (lambda: detect_task().describe(NoDense()), "data world has no boxes to detect"),
        (
            lambda: segment_task(3, "model.head.droput=0.1").build_model({"semantic_classes": ["a"]}),
            "unknown key model.head.droput; did you mean 'dropout'",
        ),
        (
            lambda: segment_task(3, "model.head.channels=48").build_model({"semantic_classes": ["a"]}),
            "model.head: channels must be a multiple of 32",
        ),
        (
            lambda: segment_task(3, "model.name=vit_tiny_patch16_224").build_model({"semantic_classes": ["a"]}),
            "choose a hierarchical model",
        ),
        (
            lambda: detect_task("model.head.has_masks=true").build_model({"box_classes": ["a"], "has_masks": False}),
            "has_masks is true, but data world has no masks",
        ),
        (lambda: detect_task().write_results("x.json"), "evaluate first"),
    ],
)
def test_mistakes_of_the_user_are_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_detection_asks_for_its_scorer_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(UserError, match=r"needs pycocotools: pip install hyptree\[eval\]$"):
        fit(recipe("world_detect", "data.num_train=4", "data.num_val=2"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists(), "nothing was trained"


def test_a_transform_leaves_the_label_map_alone() -> None:
    sample = coloured_sample(30, 20, 4)
    before = sample.semantic.clone()
    scored = KeepLabelMap(segment_task(4, "data.size=64").transform(train=False).transform)(sample)  # type: ignore[attr-defined]
    assert scored.truth is not None and torch.equal(scored.truth["semantic"], before)
    assert scored.full_size == (30, 20) and scored.extent == (64, 43)


# ------------------------------------------------------------------------------------------- weights to start from


def test_a_dense_model_starts_from_a_classifier(tmp_path: Path) -> None:
    classify = load(Recipe, None, ["model.name=hcformer_pico"])
    classifier = build_task(classify).build_model({"classes": ["a", "b"], "semantic_classes": [], "box_classes": []})
    for parameter in classifier.parameters():
        nn.init.normal_(parameter)  # so that none is equal by being fresh
    save_tensors(tmp_path / "weights.safetensors", classifier.state_dict())
    model = segment_task(3, *TINY_HEAD).build_model({"semantic_classes": ["a", "b", "c"]})
    fresh = load_weights(model, tmp_path / "weights.safetensors")
    backbone = {name: p for name, p in model.named_parameters() if name.startswith("pyramid.backbone.")}
    assert backbone and not set(backbone) & set(fresh)
    assert set(fresh) >= {name for name, _ in model.named_parameters()} - set(backbone)
    x = torch.randn(1, 3, 64, 64)
    ours, theirs = model.eval().pyramid.backbone(x), classifier.eval().forward_intermediates(x, intermediates_only=True)
    torch.testing.assert_close(ours[-1], theirs[-1])

    # Detection from segmentation: under other names again.
    save_tensors(tmp_path / "dense.safetensors", model.state_dict())
    detector = detect_task().build_model({"box_classes": ["a"], "has_masks": False})
    fresh = load_weights(detector, tmp_path / "dense.safetensors")
    kept = [p for name, p in detector.named_parameters() if name not in fresh and ".fpn." not in name]
    assert all(torch.equal(a, b) for a, b in zip(kept, backbone.values(), strict=True))

    save_tensors(tmp_path / "other.safetensors", {"layer.weight": torch.zeros(2, 2)})
    with pytest.raises(UserError, match=r"no weight in .* fits this model"):
        load_weights(model, tmp_path / "other.safetensors")


# ---------------------------------------------------------------------------------------------------- the recipes run

SMALL = {
    "world_segment": ("data.num_train=16", "data.num_val=6", "data.batch_size=4", "data.size=32"),
    "world_detect": (
        *("data.num_train=8", "data.num_val=4", "data.batch_size=2", "data.size=64", "model.head.pyramid_channels=32"),
        *("model.head.head_channels=32", "model.head.num_proposals=30", "model.head.num_learned=16"),
        *("model.head.min_score=0.0", "model.head.max_detections=5"),
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_world_recipes_train_resume_and_evaluate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = recipe(name, *SMALL[name], "schedule.steps=4", "run.eval_every=0", "run.save_steps=2", "run.ema=0.5")
    whole = fit(short, tmp_path / "whole", quiet=True)
    task = build_task(short)
    assert whole.step == 4 and task.metric in whole.numbers

    # Stop in the third step, go on from the checkpoint after the second.
    kind, calls = type(task), []
    loss_of = kind.training_loss

    def stop_in_third(self: Any, model: Any, batch: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("power failure")
        return loss_of(self, model, batch)

    monkeypatch.setattr(kind, "training_loss", stop_in_third)
    with pytest.raises(RuntimeError, match="power failure"):
        fit(short, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    parts = fit(short, tmp_path / "parts", resume=True, quiet=True)
    assert parts.numbers == whole.numbers
    weights, again = (load_model(tmp_path / out)[0].state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(weights[key], again[key]) for key in weights)

    actual = evaluate_run(tmp_path / "whole")
    assert actual["samples"] == short.data.num_val
    assert actual[task.metric] == pytest.approx(whole.numbers[task.metric], abs=1e-12)
    results = tmp_path / "whole" / "results-val.json"
    assert not results.exists()

    # On the command line: no single classes, and detections in a file.
    assert main(["eval", str(tmp_path / "whole")]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert float(shown[task.metric]) == pytest.approx(actual[task.metric], abs=1e-4)
    assert any("/" in key for key in actual) == (name == "world_segment")
    assert not any("/" in key for key in shown)
    if name == "world_detect":
        assert shown["results"] == str(results)
        assert {"image_id", "category_id", "bbox", "score"} <= json.loads(results.read_text())[0].keys()
        monkeypatch.setattr(kind, "write_results", lambda self, path: Path(tmp_path).write_text("a folder"))
        assert main(["eval", str(tmp_path / "whole")]) == 2
        assert f"cannot write {results}: Is a directory" in capsys.readouterr().err
    else:
        assert "results" not in shown and not results.exists()


@pytest.mark.parametrize(
    ("name", "path", "num_classes"),
    [("camvid_segment", "camvid/camvid_240x180.npz", 11), ("pets_segment", "oxford-pets/oxford_pets_128.npz", 3)],
)
def test_recipes_run_on_real_data(name: str, path: str, num_classes: int, shared_data: Path, tmp_path: Path) -> None:
    if not (shared_data / path).exists():
        pytest.skip(f"no {path} in {shared_data}")
    short = recipe(
        *(name, f"data.root={shared_data / path}", "data.num_train=4", "data.num_val=3", "data.batch_size=2"),
        *("data.size=96", "schedule.steps=2", "run.eval_every=0"),
    )
    result = fit(short, tmp_path / "run", quiet=True)
    assert 0 < result.numbers["pixel_accuracy"] < 1 and 0 < result.numbers["miou"] < 1
    model, _ = load_model(tmp_path / "run")
    with torch.no_grad():
        assert model(torch.randn(1, 3, 64, 96)).shape == (1, num_classes, 64, 96)


def write_coco(root: Path, split: str, num: int, rng: np.random.Generator) -> None:
    """A few pictures with rectangles, numbered and classified as COCO does: with gaps."""
    images, annotations = [], []
    (root / f"{split}2017").mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    for i in range(num):
        height, width = 48, 64 - 8 * (i % 2)
        pixels = rng.integers(0, 60, (height, width, 3)).astype(np.uint8)
        for k in range(i % 3):
            x, y, w, h = 4 + 26 * k, int(rng.integers(2, 12)), 20, int(rng.integers(12, 30))
            pixels[y : y + h, x : x + w] = (220, 60, 60) if k else (60, 60, 220)
            corners = [x, y, x + w, y, x + w, y + h, x, y + h]
            annotations.append(
                {"id": 100 + len(annotations), "image_id": 1000 + i, "category_id": 24 if k else 7, "iscrowd": 0}
                | {"bbox": [x, y, w, h], "area": w * h, "segmentation": [corners]}
            )
        Image.fromarray(pixels).save(root / f"{split}2017" / f"{i:012}.png")
        images.append({"id": 1000 + i, "file_name": f"{i:012}.png", "height": height, "width": width})
    categories = [{"id": 7, "name": "train"}, {"id": 24, "name": "zebra"}]
    text = json.dumps({"images": images, "annotations": annotations, "categories": categories})
    (root / "annotations" / f"instances_{split}2017.json").write_text(text)


def test_coco_recipe_trains_and_its_results_carry_the_files_numbers(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    write_coco(tmp_path / "coco", "train", 4, rng)
    write_coco(tmp_path / "coco", "val", 3, rng)
    short = recipe(
        *("coco_detect", *TINY_HEAD, f"data.root={tmp_path / 'coco'}", "data.num_classes=2", "data.size=64"),
        *("data.batch_size=2", "schedule.steps=2", "run.eval_every=0", "run.precision=fp32"),
        *("model.head.head_channels=32", "model.head.num_proposals=20", "model.head.min_score=0.0"),
        *("model.head.max_detections=3", "model.head.anchor_scale=4"),
    )
    numbers = fit(short, tmp_path / "run", quiet=True).numbers
    assert {"box_ap", "box_ap50", "mask_ap", "mask_ap50"} <= set(numbers)

    task = build_task(short)
    assert isinstance(task, Detect)
    dataset = task.build_dataset("val")
    assert task.describe(dataset)["category_ids"] == [7, 24]
    model = task.build_model(task.describe(dataset)).eval()
    with torch.no_grad():
        task.evaluate(model, iter(task.build_loader(dataset, False)), one)
    task.write_results(tmp_path / "detections.json")
    results = json.loads((tmp_path / "detections.json").read_text())
    assert len(results) == 9  # three for each picture
    assert {result["image_id"] for result in results} == {1000, 1001, 1002}
    assert {result["category_id"] for result in results} <= {7, 24}
    # The dataset's own file takes them: the official way to score.
    from pycocotools.coco import COCO

    assert len(COCO(str(dataset.annotation_file)).loadRes(results).getAnnIds()) == 9


def test_paper_recipes_say_what_the_paper_says() -> None:
    ade = load(Recipe, ROOT / "recipes" / "ade20k_segment.yaml", [])
    assert (ade.data.size, ade.data.batch_size, ade.data.num_classes) == (512, 16, 150)
    assert (ade.optim.lr, ade.schedule.name, ade.schedule.power, ade.schedule.steps) == (2e-4, "poly", 0.9, 80_000)
    coco = load(Recipe, ROOT / "recipes" / "coco_detect.yaml", [])
    assert (coco.optim.lr, coco.data.batch_size, coco.data.num_classes) == (1e-4, 16, 80)
    assert (coco.schedule.epochs, coco.schedule.steps) == (12, None)  # 1x


def test_a_dataset_without_masks_gets_boxes_alone(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    write_coco(tmp_path, "train", 3, rng)
    path = tmp_path / "annotations" / "instances_train2017.json"
    data = json.loads(path.read_text())
    for annotation in data["annotations"]:
        del annotation["segmentation"]
    path.write_text(json.dumps(data))
    task = build_task(load(Recipe, None, ["task=detect", *TINY_HEAD, "data.name=coco", f"data.root={tmp_path}"]))
    description = task.describe(task.build_dataset("train"))
    assert description["has_masks"] is False
    model = task.build_model(description)
    assert type(model).__name__ == "BoxDetector"


# ----------------------------------------------------------------------------------------------------- slow: they learn


def train_by_heart(task: type[Task], num_images: int, short: Recipe, out: Path) -> dict[str, float]:
    """Numbers after training and scoring on the same few pictures of the world."""
    from hyptree.data.world import World
    from hyptree.train.tasks import TASKS

    class SamePictures(task):  # type: ignore[valid-type,misc]
        def build_dataset(self, split: str) -> Any:
            return World("train", num_images=num_images, size=self.recipe.data.size)

    globals()["SamePictures"] = SamePictures
    TASKS["by-heart"] = f"{__name__}:SamePictures"
    short.task = "by-heart"
    try:
        return fit(short, out, quiet=True).numbers
    finally:
        del TASKS["by-heart"], globals()["SamePictures"]


@pytest.mark.slow
def test_segmentation_learns_pictures_by_heart(tmp_path: Path) -> None:
    from hyptree.data.world import World

    short = recipe(
        *("world_segment", "data.batch_size=16", "data.augment.flip=0", "schedule.steps=200", "run.eval_every=0"),
        *("optim.lr=0.003", "run.ema=null"),
    )
    numbers = train_by_heart(Segment, 32, short, tmp_path / "run")
    world = World("train", num_images=32, size=64)
    maps = torch.stack([world[i].semantic for i in range(32)])
    # Saying background everywhere has its share as IoU there, and 0 for each class of the truth.
    nothing_learned = float((maps == 0).float().mean()) / len(maps.unique())
    assert nothing_learned < 0.1
    assert numbers["miou"] > 0.5


@pytest.mark.slow
def test_detection_learns_a_handful_of_pictures_by_heart(tmp_path: Path) -> None:
    short = recipe(
        *("world_detect", "data.size=96", "data.batch_size=4", "data.augment.flip=0", "schedule.steps=120"),
        *("run.eval_every=0", "optim.lr=0.002", "run.ema=null"),
    )
    numbers = train_by_heart(Detect, 4, short, tmp_path / "run")
    assert numbers["box_ap50"] > 0.5
    assert numbers["mask_ap50"] > 0.5

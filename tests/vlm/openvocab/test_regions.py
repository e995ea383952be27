"""Boxes named by text, base and novel AP, and panoptic maps, on pictures whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("pycocotools", reason="install hyptree[eval]")
pytest.importorskip("transformers", reason="install hyptree[vlm]")

from hyptree.cli import main
from hyptree.config import load
from hyptree.data.sample import IGNORE, BadSample, Sample
from hyptree.data.world import World
from hyptree.errors import UserError
from hyptree.evaluate.pictures.openvocab_scores import BaseNovelScorer
from hyptree.evaluate.pictures.panoptic import PanopticMap, PanopticQuality, join_panoptic, panoptic_truth
from hyptree.train import fit
from hyptree.train.run.recipe import Recipe
from hyptree.train.tasks import build_task
from hyptree.train.tasks.detect import OpenVocabDetect, WithoutBoxes
from hyptree.vlm.encoders.encoder import load_encoder
from hyptree.vlm.openvocab.detector import OpenVocabDetector, region_features
from tests.vlm.openvocab.test_segmenter import ROOT, small_recipe
from tests.vlm.small_models import save_dual

# ------------------------------------------------------------------------------------------------------------- regions


def test_region_features_are_means_over_whole_cells() -> None:
    features = torch.randn(5, 6, 8)
    # A picture of 24 x 32 pixels: a cell is 4 x 4. These boxes cover rows 1-2 and columns 2-5, and everything.
    boxes = torch.tensor([[8.0, 4.0, 24.0, 12.0], [0.0, 0.0, 32.0, 24.0]])
    actual = region_features(features, boxes, (24, 32), cells=8)
    assert actual.shape == (2, 5)
    # The samples lie between the centres of cells, so neighbours outside of the box count a little: a linear map.
    line = torch.arange(8.0).expand(1, 6, 8)
    middle = region_features(line, boxes, (24, 32), cells=8)
    torch.testing.assert_close(middle, torch.tensor([[3.5], [3.5]]), atol=1e-5, rtol=0)
    down = region_features(torch.arange(6.0).view(1, 6, 1).expand(1, 6, 8), boxes, (24, 32), cells=8)
    torch.testing.assert_close(down, torch.tensor([[1.5], [2.5]]), atol=1e-5, rtol=0)
    constant = region_features(features[:, :1, :1].expand(5, 6, 8), boxes, (24, 32))
    torch.testing.assert_close(constant, features[:, 0, 0].expand(2, 5), atol=1e-5, rtol=1e-5)


class FixedBoxes(nn.Module):
    """A detector that always gives the same, with its own wrong labels."""

    def __init__(self, boxes: list[list[float]], scores: list[float], size: tuple[int, int]):
        super().__init__()
        self.answer = {
            "boxes": torch.tensor(boxes),
            "scores": torch.tensor(scores),
            "labels": torch.arange(1, len(boxes) + 1),
            "masks": torch.rand(len(boxes), 1, *size),
        }

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [dict(self.answer) for _ in images]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dual(tmp_path_factory.mktemp("regions") / "clip", "clip")


@torch.no_grad()
def test_boxes_are_named_by_cosine_and_scores_are_joined(clip_folder: Path) -> None:
    encoder = load_encoder(f"hf:{clip_folder}")
    boxes = [[0.0, 0.0, 16.0, 16.0], [16.0, 8.0, 40.0, 30.0]]
    detector = FixedBoxes(boxes, [0.9, 0.4], (32, 48))
    model = OpenVocabDetector(detector, encoder, size=48, text_weight=0.3)
    picture = torch.randint(0, 256, (3, 32, 48), dtype=torch.uint8)
    classes = ["truck", "animal", "road"]
    text = F.normalize(encoder.encode_text([f"A photo of a {name} in the scene" for name in classes]), dim=-1)
    named = model.class_probabilities(picture, torch.tensor(boxes), text)
    torch.testing.assert_close(named.sum(1), torch.ones(2))
    (actual,) = model.detect([picture], classes)
    assert len(actual["labels"]) == 6 and actual["masks"].shape == (6, 1, 32, 48)
    for label, score, box in zip(actual["labels"].tolist(), actual["scores"], actual["boxes"].tolist(), strict=True):
        region = boxes.index(box)
        expected = [0.9, 0.4][region] ** 0.7 * float(named[region, label - 1]) ** 0.3
        assert float(score) == pytest.approx(expected, rel=1e-5)
    assert (actual["scores"].diff() <= 0).all()


@torch.no_grad()
def test_boxes_come_back_in_the_pixels_of_the_picture(clip_folder: Path) -> None:
    detector = FixedBoxes([[10.0, 10.0, 20.0, 20.0]], [0.5], (24, 32))
    model = OpenVocabDetector(detector, load_encoder(f"hf:{clip_folder}"), size=32)
    (actual,) = model.detect([torch.zeros(3, 48, 64, dtype=torch.uint8)], ["truck"])
    assert actual["boxes"].tolist() == [[20.0, 20.0, 40.0, 40.0]] and actual["masks"].shape == (1, 1, 48, 64)


def test_detectors_show_what_they_are_unsure_of_and_are_left_as_they_were(clip_folder: Path) -> None:
    from hyptree.models.decoders import pyramid_backbone
    from hyptree.models.detection import mask_rcnn

    detector = mask_rcnn(
        pyramid_backbone("hcformer_pico"), 3, pyramid_channels=16, head_channels=16, num_proposals=20, min_score=0.9
    )
    model = OpenVocabDetector(detector, load_encoder(f"hf:{clip_folder}"), size=64, min_score=0.0)
    picture = World("val", num_images=1, size=64)[0].image
    (actual,) = model.detect([picture], ["truck", "car"])
    assert len(actual["labels"]) > 0 and set(actual["labels"].tolist()) <= {1, 2}
    assert detector.roi_heads.score_thresh == 0.9


def test_ap_of_base_and_novel_by_hand() -> None:
    """Perfect on base classes, everything wrong on novel ones: 1 and 0, and their mean by number of classes."""
    classes = ["car", "bus", "dog"]
    scorer = BaseNovelScorer(classes, ["dog"], has_masks=False)
    boxes = torch.tensor([[0.0, 0, 20, 20], [30, 30, 60, 60], [70, 0, 90, 25]])
    truth = {"boxes": boxes, "labels": torch.tensor([1, 2, 3])}
    actual = {"boxes": boxes, "labels": torch.tensor([1, 2, 2]), "scores": torch.tensor([0.9, 0.9, 0.5])}
    scorer.add("one", (100, 100), truth, actual)
    numbers = scorer.scores()
    assert numbers["box_ap_base"] == pytest.approx(1) and numbers["box_ap_novel"] == 0
    assert numbers["box_ap"] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="novel class 'cat' is not one of the 3"):
        BaseNovelScorer(classes, ["cat"])


# ------------------------------------------------------------------------------------------------------------ panoptic

CLASSES = ("sky", "grass", "cat", "dog")
THINGS = ("dog", "cat")


def test_instances_are_laid_over_stuff() -> None:
    semantic = torch.zeros(4, 4, 8)
    semantic[0, :2], semantic[1, 2:] = 1, 1  # sky above grass
    semantic[3, 0, 7] = 2  # a dog that nobody found: void
    masks = torch.zeros(3, 1, 4, 8)
    masks[0, :, :, :3] = 1  # the surest, a cat
    masks[1, :, :, 2:5] = 0.9  # a dog, a third of it behind the cat
    masks[2, :, :, 1:4] = 1  # hidden by both
    instances = {"labels": torch.tensor([2, 1, 1]), "scores": torch.tensor([0.9, 0.8, 0.7]), "masks": masks}
    actual = join_panoptic(semantic, instances, CLASSES, THINGS, min_stuff=1)
    expected = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 0]] + [[1, 1, 1, 2, 2, 3, 3, 3]] + [[1, 1, 1, 2, 2, 4, 4, 4]] * 2)
    assert torch.equal(actual.segments, expected)
    assert actual.classes == {1: 2, 2: 3, 3: 0, 4: 1}
    fewer = join_panoptic(semantic, instances, CLASSES, THINGS, min_score=0.85, min_stuff=10)
    assert fewer.classes == {1: 2, 2: 1}  # sky has nine pixels beside the dog that was not found


def test_truth_of_the_world_is_itself_perfect() -> None:
    world = World("val", num_images=6, size=64)
    quality = PanopticQuality(world.semantic_classes, world.box_classes)
    for i in range(6):
        sample = world[i]
        truth = panoptic_truth(sample, world.semantic_classes, world.box_classes)
        semantic = F.one_hot(sample.semantic.long(), 31).permute(2, 0, 1).float()
        instances = {"labels": sample.box_labels, "scores": torch.ones(len(sample.masks)), "masks": sample.masks}
        joined = join_panoptic(semantic, instances, world.semantic_classes, world.box_classes, min_stuff=1)
        quality.add(joined, truth)
    assert quality.scores()["pq"] == 1


def test_panoptic_truth_knows_void_and_crowds() -> None:
    semantic = torch.tensor([[0, 0, 2, 2], [1, 3, IGNORE, 2]], dtype=torch.uint8)
    masks = torch.zeros(1, 2, 4, dtype=torch.bool)
    masks[0, 0, 2:] = masks[0, 1, 3] = True
    sample = Sample(
        torch.zeros(3, 2, 4, dtype=torch.uint8),
        "a",
        semantic=semantic,
        boxes=torch.zeros(1, 4),
        box_labels=torch.tensor([2]),
        masks=masks,
        crowd=torch.tensor([True]),
    )
    truth = panoptic_truth(sample, CLASSES, THINGS)
    assert torch.equal(truth.segments, torch.tensor([[2, 2, 1, 1], [3, 0, 0, 1]]))  # a dog without a mask is void
    assert truth.classes == {1: 2, 2: 0, 3: 1} and truth.crowd == frozenset({1})
    with pytest.raises(BadSample, match="needs its label map and the masks"):
        panoptic_truth(Sample(sample.image, "b", semantic=semantic), CLASSES, THINGS)
    with pytest.raises(ValueError, match="no class 'cow'"):
        join_panoptic(torch.zeros(4, 2, 2), {}, CLASSES, ("cow",))
    assert isinstance(truth, PanopticMap)


# ---------------------------------------------------------------------------------------------------------- end to end


def detect_recipe(*overrides: str) -> Recipe:
    settings = (
        *("data.size=32", "data.num_train=8", "data.num_val=3", "data.batch_size=4", "run.device=cpu", "run.ema=null"),
        *("run.tensorboard=false", "data.cache=null", "schedule.steps=1", "schedule.warmup=0", "run.eval_every=0"),
        *("model.head.pyramid_channels=16", "model.head.head_channels=16", "model.head.num_proposals=20"),
    )
    return load(Recipe, ROOT / "recipes" / "openvocab_detect_world.yaml", [*settings, *overrides])


def test_novel_objects_are_not_shown_in_training() -> None:
    task = build_task(detect_recipe("data.num_train=60"))
    assert isinstance(task, OpenVocabDetect)
    shown, plain = task.build_dataset("train"), World("train", num_images=60, size=32)
    assert isinstance(shown, WithoutBoxes) and shown.box_classes == plain.box_classes
    hidden = {plain.box_classes.index(name) + 1 for name in task.novel}
    num_hidden = 0
    for i in range(60):
        before, after = plain[i], shown[i]
        keep = [label not in hidden for label in before.box_labels.tolist()]
        num_hidden += keep.count(False)
        assert torch.equal(after.boxes, before.boxes[keep]) and torch.equal(after.masks, before.masks[keep])
        assert torch.equal(after.image, before.image)
    assert num_hidden > 5
    assert not isinstance(task.build_dataset("val"), WithoutBoxes)
    with pytest.raises(UserError, match="no class 'buss'; did you mean 'bus'"):
        build_task(detect_recipe("model.args.novel=[buss]")).build_dataset("train")


def test_a_detector_of_base_classes_carries_a_plugin() -> None:
    from hyptree.models.himapper.dense import HiMapperFeatures

    task = build_task(detect_recipe("model.plugin.name=himapper", "model.plugin.num_leaves=8", "model.plugin.width=32"))
    model = task.build_model(task.describe(task.build_dataset("val")))
    assert any(isinstance(module, HiMapperFeatures) for module in model.modules())


def test_the_command_joins_two_runs(clip_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(detect_recipe(), tmp_path / "detector", quiet=True)
    short = ("schedule.steps=1", "data.num_train=4", "model.args.method=frozen", "model.args.adapter={}")
    fit(small_recipe(clip_folder, *short), tmp_path / "segmenter", quiet=True)
    runs = ["--detector", str(tmp_path / "detector"), "--segmenter", str(tmp_path / "segmenter")]
    assert main(["vlm", "eval-openvocab", *runs, "--limit", "2", "--json", "--out", str(tmp_path / "n.json")]) == 0
    actual: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert actual == json.loads((tmp_path / "n.json").read_text())
    for name in ("box_ap", "box_ap_base", "box_ap_novel", "mask_ap_base", "pq", "sq", "rq", "pq_stuff", "pq_novel"):
        assert 0 <= actual[name] <= 1, name
    for flags, message in (
        (["--limit", "0"], "limit must be 1 picture or more"),
        (["--text-weight", "2"], "from 0 to 1"),
    ):
        assert main(["vlm", "eval-openvocab", *runs, *flags]) == 2
        assert message in capsys.readouterr().err
    swapped = ["--detector", runs[3], "--segmenter", runs[1]]
    assert main(["vlm", "eval-openvocab", *swapped]) == 2
    assert "run of the task openvocab; expected detect" in capsys.readouterr().err

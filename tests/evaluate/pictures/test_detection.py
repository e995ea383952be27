"""COCO's numbers on cases small enough to compute by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("pycocotools", reason="install hyptree[eval]")

from hyptree.evaluate.pictures.detection import CocoScorer, encode_masks
from tests.processes import run_in_two

SIZE = (120, 160)
ONE = pytest.approx(1.0, abs=1e-12)  # pycocotools adds a spacing of floats to its denominators


def square_masks(boxes: Tensor, size: tuple[int, int] = SIZE) -> Tensor:
    """(N, H, W) masks that fill boxes with whole corners."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
        mask[y1:y2, x1:x2] = True
    return masks


def things(boxes: Tensor, labels: list[int], scores: list[float] | None = None) -> dict[str, Tensor]:
    boxes = boxes.reshape(-1, 4).float()
    actual = {"boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64), "masks": square_masks(boxes)}
    if scores is not None:
        actual["scores"] = torch.tensor(scores)
        actual["masks"] = actual["masks"][:, None].float()
    return actual


def random_boxes(count: int) -> Tensor:
    corner = torch.randint(0, 60, (count, 2))
    return torch.cat([corner, corner + torch.randint(10, 50, (count, 2))], 1)


def test_perfect_detections_have_ap_one() -> None:
    scorer = CocoScorer(["a", "b", "c"])
    for i in range(4):
        boxes, labels = random_boxes(3), torch.randint(1, 4, (3,)).tolist()
        scorer.add(str(i), SIZE, things(boxes, labels), things(boxes, labels, [0.9, 0.8, 0.7]))
    scores = scorer.scores()
    assert scores["box_ap"] == ONE and scores["mask_ap"] == ONE
    assert scores["box_ap50"] == ONE and scores["mask_ap75"] == ONE and scores["box_ar100"] == ONE


@pytest.mark.parametrize(
    ("shift", "num_thresholds"),
    # A 50 px wide box moved by s to the right overlaps itself by IoU (50 - s) / (50 + s):
    # 0.33 for 25, 0.61 for 12, 0.74 for 7.5, 0.82 for 5, 0.96 for 1. AP is the share of 0.5, 0.55, ..., 0.95 reached.
    [(25.0, 0), (12.0, 3), (7.5, 5), (5.0, 7), (1.0, 10)],
)
def test_shifted_boxes_reach_the_thresholds_below_their_iou(shift: float, num_thresholds: int) -> None:
    box = torch.tensor([[20.0, 30.0, 70.0, 80.0]])
    iou = (50 - shift) / (50 + shift)
    assert num_thresholds == sum(iou >= 0.5 + 0.05 * i for i in range(10))
    scorer = CocoScorer(["a"], has_masks=False)
    scorer.add("x", SIZE, things(box, [1]), things(box + torch.tensor([shift, 0, shift, 0]), [1], [0.5]))
    assert scorer.scores()["box_ap"] == pytest.approx(num_thresholds / 10, abs=1e-9)


def test_a_false_alarm_above_and_a_miss_cost_what_the_curve_says() -> None:
    """Two objects, three detections by score: wrong, right, and the second object is never found.

    Precision at the only recall reached (1/2) is 1/2; COCO reads the curve at 101 recalls, 51 of them up to 0.5, so AP
    is 51/101 * 1/2 at every threshold.
    """
    objects = torch.tensor([[10.0, 10, 40, 40], [80.0, 60, 110, 90]])
    detections = torch.tensor([[50.0, 5, 70, 25], [10.0, 10, 40, 40]])
    scorer = CocoScorer(["a"])
    scorer.add("x", SIZE, things(objects, [1, 1]), things(detections, [1, 1], [0.9, 0.8]))
    scores = scorer.scores()
    assert scores["box_ap"] == pytest.approx(51 / 101 / 2, abs=1e-9)
    assert scores["mask_ap"] == pytest.approx(51 / 101 / 2, abs=1e-9)
    assert scores["box_ar100"] == pytest.approx(0.5, abs=1e-9)


def test_right_place_wrong_class_is_worth_nothing() -> None:
    boxes = random_boxes(2)
    scorer = CocoScorer(["a", "b"])
    scorer.add("x", SIZE, things(boxes, [1, 1]), things(boxes, [2, 2], [0.9, 0.9]))
    assert scorer.scores()["box_ap"] == 0.0


def test_mask_ap_looks_at_masks() -> None:
    box = torch.tensor([[20.0, 20, 60, 60]])
    actual = things(box, [1], [0.9])
    actual["masks"][..., 40:, :] = 0  # half of the mask: IoU 0.5 reaches one threshold of ten
    scorer = CocoScorer(["a"])
    scorer.add("x", SIZE, things(box, [1]), actual)
    scores = scorer.scores()
    assert scores["box_ap"] == ONE
    assert scores["mask_ap"] == pytest.approx(0.1, abs=1e-9)


def test_a_crowd_is_neither_missed_nor_a_false_alarm() -> None:
    boxes = torch.tensor([[10.0, 10, 40, 40], [60.0, 10, 150, 110]])
    truth = things(boxes, [1, 1]) | {"crowd": torch.tensor([False, True])}
    inside = torch.tensor([[10.0, 10, 40, 40], [70.0, 20, 90, 40], [100.0, 50, 130, 80]])
    scorer = CocoScorer(["a"])
    scorer.add("x", SIZE, truth, things(inside, [1, 1, 1], [0.5, 0.9, 0.8]))
    assert scorer.scores()["box_ap"] == ONE


def test_sizes_are_scored_apart_and_left_out_where_there_are_none() -> None:
    small, large = torch.tensor([[5.0, 5, 25, 25]]), torch.tensor([[10.0, 10, 115, 115]])
    scorer = CocoScorer(["a"])
    scorer.add("1", SIZE, things(small, [1]), things(small, [1], [0.9]))
    scorer.add("2", SIZE, things(large, [1]), things(torch.zeros(0, 4), [], []))
    scores = scorer.scores()
    assert scores["box_ap_small"] == ONE
    assert scores["box_ap_large"] == 0.0
    assert "box_ap_medium" not in scores


def test_nothing_found_and_nothing_there() -> None:
    boxes, nothing = random_boxes(1), torch.zeros(0, 4)
    scorer = CocoScorer(["a"])
    assert scorer.scores() == {"box_ap": 0.0, "mask_ap": 0.0}  # no picture at all
    scorer.add("x", SIZE, things(nothing, []), things(nothing, [], []))
    assert scorer.scores() == {"box_ap": 0.0, "mask_ap": 0.0}
    scorer.add("y", SIZE, things(nothing, []), things(boxes, [1], [0.7]))
    assert scorer.scores() == {"box_ap": 0.0, "mask_ap": 0.0}
    scorer.add("z", SIZE, things(boxes, [1]), things(nothing, [], []))
    assert scorer.scores()["box_ap50"] == 0.0
    assert scorer.results()[0]["image_id"] == "y" and len(scorer.results()) == 1


def test_results_carry_the_datasets_own_numbers(tmp_path: Path) -> None:
    scorer = CocoScorer(["person", "zebra"], category_ids=[1, 24], image_ids={"000000000139.jpg": 139})
    box = torch.tensor([[10.0, 20, 40, 60]])
    scorer.add("000000000139.jpg", SIZE, things(box, [2]), things(box, [2], [0.75]))
    scorer.write(tmp_path / "detections.json")
    (result,) = json.loads((tmp_path / "detections.json").read_text())
    assert result["image_id"] == 139
    assert result["category_id"] == 24
    assert result["bbox"] == [10, 20, 30, 40]
    assert result["score"] == 0.75
    assert result["segmentation"] == encode_masks(square_masks(box))[0]
    assert scorer.scores()["box_ap"] == ONE


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    boxes = random_boxes(1)
    scorer = CocoScorer(["a"])
    scorer.add("x", SIZE, things(boxes, [1]), things(boxes, [1], [0.9]))
    assert scorer.scores()["box_ap"] == ONE
    assert capsys.readouterr() == ("", "")


def test_a_picture_seen_twice_counts_once() -> None:
    """As when the last batches of several processes are filled up."""
    boxes = random_boxes(2)
    scorer = CocoScorer(["a"])
    for _ in range(2):
        scorer.add("x", SIZE, things(boxes, [1, 1]), things(boxes, [1, 1], [0.9, 0.8]))
    assert scorer.scores()["box_ap"] == ONE
    assert len(scorer.results()) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CocoScorer(["a", "b"], [1]), "expected 2 category_ids"),
        (lambda: CocoScorer(["a"]).add("x", SIZE, things(random_boxes(1), [2]), {}), "labels must be from 1 to 1"),
        (lambda: CocoScorer(["a"]).add("x", SIZE, things(random_boxes(1), [0]), {}), "labels must be from 1 to 1"),
        (lambda: CocoScorer(["a"]).add("x", (50, 50), things(random_boxes(1), [1]), {}), "the picture is"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def score_noisy(scorer: CocoScorer, numbers: range) -> None:
    """Pictures whose detections are near the truth; picture i is the same whoever adds it."""
    for i in numbers:
        generator = torch.Generator().manual_seed(i)
        corner = torch.randint(0, 60, (3, 2), generator=generator)
        boxes = torch.cat([corner, corner + torch.randint(10, 50, (3, 2), generator=generator)], 1)
        noise = torch.randint(-4, 5, (3, 4), generator=generator)
        labels = torch.randint(1, 3, (3,), generator=generator).tolist()
        scores = torch.rand(3, generator=generator).tolist()
        scorer.add(f"picture {i}", SIZE, things(boxes, labels), things((boxes + noise).clamp(0), labels, scores))


def one_of_two(rank: int, folder: str, shares: list[range]) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    scorer = CocoScorer(["a", "b"])
    score_noisy(scorer, shares[rank])
    scorer.gather()
    Path(folder, f"{rank}.json").write_text(json.dumps([scorer.scores(), len(scorer.results())]))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("shares", [[range(4), range(4, 7)], [range(7), range(0)], [range(4), range(3, 7)]])
def test_two_processes_score_as_one(shares: list[range], tmp_path: Path) -> None:
    alone = CocoScorer(["a", "b"])
    score_noisy(alone, range(7))
    expected = alone.scores()
    assert 0.1 < expected["box_ap"] < 0.9 and 0.1 < expected["mask_ap"] < 0.9
    run_in_two(one_of_two, str(tmp_path), shares)
    for rank in range(2):
        scores, num_results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert scores == expected
        assert num_results == 21

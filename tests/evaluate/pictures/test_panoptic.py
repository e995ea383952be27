"""Panoptic quality on maps whose numbers can be written down by hand."""

from __future__ import annotations

import pytest
import torch

from hyptree.evaluate.pictures.panoptic import PanopticMap, PanopticQuality

CLASSES = ("grass", "cat", "dog")


def rows(*lengths: tuple[int, int], width: int = 10) -> torch.Tensor:
    """A map of one row: ``(segment, pixels)`` one after the other."""
    row = torch.cat([torch.full((count,), segment) for segment, count in lengths])
    assert len(row) == width
    return row[None]


def test_a_perfect_map_has_quality_one(seed: int) -> None:
    segments = torch.randint(0, 5, (6, 7))
    classes = {1: 0, 2: 1, 3: 1, 4: 2}
    quality = PanopticQuality(CLASSES, ["cat", "dog"])
    renamed = {1: 13, 2: 12, 3: 11, 4: 10}
    other = torch.tensor([0, 13, 12, 11, 10])[segments]
    predicted = PanopticMap(other, {renamed[i]: k for i, k in classes.items()})
    quality.add(predicted, PanopticMap(segments, classes))
    actual = quality.scores()
    assert all(actual[f"{key}{part}"] == 1 for key in ("pq", "sq", "rq") for part in ("", "_things", "_stuff"))


def test_by_hand() -> None:
    """Truth: grass 4, cat 4, dog 2. Predicted: grass 5 (IoU 4/5), cat 3 (IoU 3/4), and a cat where the dog is."""
    truth = PanopticMap(rows((1, 4), (2, 4), (3, 2)), {1: 0, 2: 1, 3: 2})
    predicted = PanopticMap(rows((1, 5), (2, 3), (3, 2)), {1: 0, 2: 1, 3: 1})
    quality = PanopticQuality(CLASSES, ["cat", "dog"], novel=["dog"])
    quality.add(predicted, truth)
    actual = quality.scores()
    assert actual["pq/grass"] == pytest.approx(4 / 5)
    assert actual["pq/cat"] == pytest.approx((3 / 4) / (1 + 1 / 2))  # one match, one false positive
    assert actual["pq/dog"] == 0  # one false negative
    assert actual["pq"] == pytest.approx((4 / 5 + 1 / 2 + 0) / 3)
    assert actual["sq"] == pytest.approx((4 / 5 + 3 / 4 + 0) / 3)
    assert actual["rq"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert actual["pq_stuff"] == pytest.approx(4 / 5) and actual["pq_things"] == pytest.approx(1 / 4)
    assert actual["pq_base"] == pytest.approx((4 / 5 + 1 / 2) / 2) and actual["pq_novel"] == 0


def test_half_is_no_match() -> None:
    truth = PanopticMap(rows((1, 6), (0, 4)), {1: 1})
    quality = PanopticQuality(CLASSES)
    quality.add(PanopticMap(rows((1, 3), (0, 7)), {1: 1}), truth)  # IoU exactly 1/2
    assert quality.scores()["pq/cat"] == 0
    assert quality.counts[1].tolist() == [0, 0, 1, 1]
    quality = PanopticQuality(CLASSES)
    quality.add(PanopticMap(rows((1, 4), (0, 6)), {1: 1}), truth)
    assert quality.scores()["pq/cat"] == pytest.approx(4 / 6)


def test_void_is_left_out_of_the_union_and_excuses() -> None:
    truth = PanopticMap(rows((1, 4), (0, 6)), {1: 1})
    quality = PanopticQuality(CLASSES)
    # Three pixels on the cat, three on void: union 4 + 6 - 3 - 3 = 4. A dog on void alone is no mistake.
    quality.add(PanopticMap(rows((5, 1), (1, 6), (2, 3)), {5: 2, 1: 1, 2: 2}), truth)
    assert quality.scores()["pq/cat"] == pytest.approx(3 / 4)
    assert quality.counts[2].tolist() == [0, 0, 1, 0]  # the dog on the cat's first pixel is one


def test_crowds_need_not_be_found_and_excuse_their_own_class() -> None:
    truth = PanopticMap(rows((1, 6), (2, 4)), {1: 1, 2: 0}, crowd=frozenset({1}))
    quality = PanopticQuality(CLASSES)
    quality.add(PanopticMap(rows((1, 3), (2, 3), (3, 4)), {1: 1, 2: 2, 3: 0}), truth)
    assert quality.counts[1].tolist() == [0, 0, 0, 0]
    assert quality.counts[2].tolist() == [0, 0, 1, 0]  # a dog in a crowd of cats is wrong
    assert quality.scores()["pq/grass"] == 1


def test_several_pictures_and_processes_add_up() -> None:
    truth = PanopticMap(rows((1, 10)), {1: 1})
    good, bad = PanopticMap(rows((1, 10)), {1: 1}), PanopticMap(rows((1, 10)), {1: 2})
    both, first, second = (PanopticQuality(CLASSES) for _ in range(3))
    for predicted, other in ((good, first), (bad, second)):
        both.add(predicted, truth)
        other.add(predicted, truth)
    gathered = first.scores(lambda counts: torch.cat([counts, second.counts[None]]))
    assert gathered == both.scores()
    assert gathered["pq/cat"] == pytest.approx(1 / 1.5) and gathered["pq/dog"] == 0


def test_nothing_is_zero_and_wrong_input_is_named() -> None:
    assert PanopticQuality(CLASSES).scores()["pq"] == 0
    with pytest.raises(ValueError, match="segment 3, which has no class"):
        PanopticMap(rows((3, 10)), {1: 0})
    with pytest.raises(ValueError, match="segment 0 is void"):
        PanopticMap(rows((0, 10)), {0: 0})
    with pytest.raises(ValueError, match="'cow' is not one of the 3 classes"):
        PanopticQuality(CLASSES, ["cow"])
    quality = PanopticQuality(CLASSES)
    with pytest.raises(ValueError, match="must have one shape"):
        quality.add(PanopticMap(rows((1, 10)), {1: 0}), PanopticMap(rows((1, 5), width=5), {1: 0}))
    with pytest.raises(ValueError, match="class 7 is none of 0 to 2"):
        quality.add(PanopticMap(rows((1, 10)), {1: 7}), PanopticMap(rows((1, 10)), {1: 0}))

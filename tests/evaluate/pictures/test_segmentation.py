"""The confusion matrix and IoU against loops over pixels written here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hyptree.data.sample import IGNORE
from hyptree.evaluate.pictures.segmentation import Confusion, segmentation_scores


def naive_iou(predicted: Tensor, truth: Tensor, num_classes: int) -> list[float]:
    """IoU of each class pixel by pixel; NaN for a class that is nowhere."""
    pairs = [(int(t), int(p)) for t, p in zip(truth.flatten(), predicted.flatten(), strict=True) if int(t) != IGNORE]
    iou = []
    for k in range(num_classes):
        both = sum(t == k and p == k for t, p in pairs)
        either = sum(t == k or p == k for t, p in pairs)
        iou.append(both / either if either else math.nan)
    return iou


def random_maps(num_classes: int, shape: tuple[int, ...], share_ignored: float = 0.2) -> tuple[Tensor, Tensor]:
    truth = torch.randint(num_classes, shape, dtype=torch.uint8)
    predicted = torch.where(torch.rand(shape) < 0.6, truth.long(), torch.randint(num_classes, shape))
    truth[torch.rand(shape) < share_ignored] = IGNORE
    return predicted, truth


@pytest.mark.parametrize("num_classes", [2, 11, 150])
def test_scores_equal_a_loop_over_pixels(num_classes: int) -> None:
    predicted, truth = random_maps(num_classes, (3, 13, 17))
    confusion = Confusion(num_classes)
    for p, t in zip(predicted, truth, strict=True):  # picture by picture is the same as all at once
        confusion.add(p, t)
    names = [f"c{k}" for k in range(num_classes)]
    scores = confusion.scores(names)

    iou = naive_iou(predicted, truth, num_classes)
    present = [value for value in iou if not math.isnan(value)]
    assert scores["miou"] == pytest.approx(sum(present) / len(present), abs=1e-12)
    for name, value in zip(names, iou, strict=True):
        if math.isnan(value):
            assert f"iou/{name}" not in scores
        else:
            assert scores[f"iou/{name}"] == pytest.approx(value, abs=1e-12)
    counted = truth != IGNORE
    assert scores["pixel_accuracy"] == pytest.approx((predicted == truth)[counted].double().mean().item(), abs=1e-12)
    assert confusion.matrix.sum() == counted.sum()


def test_rows_are_true_and_columns_predicted() -> None:
    confusion = Confusion(3)
    confusion.add(torch.tensor([2, 2, 1]), torch.tensor([0, 0, 1], dtype=torch.uint8))
    assert confusion.matrix.tolist() == [[0, 0, 2], [0, 1, 0], [0, 0, 0]]


def test_a_class_that_is_nowhere_does_not_count_but_a_wrongly_predicted_one_does() -> None:
    # Truth: three pixels of class 0, one of class 1. Class 2 is predicted once and never true; class 3 is nowhere.
    confusion = Confusion(4)
    confusion.add(torch.tensor([0, 0, 2, 1]), torch.tensor([0, 0, 0, 1], dtype=torch.uint8))
    scores = confusion.scores(["a", "b", "c", "d"])
    assert scores["iou/a"] == pytest.approx(2 / 3)
    assert scores["iou/c"] == 0
    assert "iou/d" not in scores
    assert scores["miou"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert scores["mean_accuracy"] == pytest.approx((2 / 3 + 1) / 2)  # classes of the truth alone


def test_gathering_two_processes_equals_one() -> None:
    predicted, truth = random_maps(5, (2, 9, 9))
    whole, first, second = Confusion(5), Confusion(5), Confusion(5)
    whole.add(predicted, truth)
    first.add(predicted[0], truth[0])
    second.add(predicted[1], truth[1])
    gathered = first.scores(gather=lambda own: torch.cat([own, second.matrix[None]]))
    assert gathered == whole.scores()


def test_pictures_without_a_pixel_that_counts_give_zeros() -> None:
    confusion = Confusion(3)
    confusion.add(torch.zeros(4, 4, dtype=torch.long), torch.full((4, 4), IGNORE, dtype=torch.uint8))
    assert confusion.scores(["a", "b", "c"]) == {"miou": 0.0, "pixel_accuracy": 0.0, "mean_accuracy": 0.0}


@pytest.mark.parametrize(("predicted", "truth", "named"), [(0, 3, 3), (7, 0, 7), (-1, 0, -1)])
def test_a_class_out_of_range_is_named(predicted: int, truth: int, named: int) -> None:
    confusion = Confusion(3)
    with pytest.raises(ValueError, match=f"found class {named} where there are 3"):
        confusion.add(torch.tensor([predicted]), torch.tensor([truth]))
    assert confusion.matrix.sum() == 0


def test_shapes_and_names_must_fit() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\) and truth \(2, 3\)"):
        Confusion(3).add(torch.zeros(2, 2), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="expected 2 class names, got 1"):
        segmentation_scores(torch.eye(2, dtype=torch.int64), ["only"])
    with pytest.raises(ValueError, match="num_classes"):
        Confusion(0)

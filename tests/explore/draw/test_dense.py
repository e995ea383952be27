"""Pictures of predictions: what is coloured, what is left alone, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hyptree.data.sample import IGNORE
from hyptree.explore.draw.dense import class_colours, draw_detections, draw_segmentation

CLASSES = ("background", "cat", "dog")


def grey(height: int, width: int, value: int = 100) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def test_colours_differ_and_stay_with_their_class() -> None:
    colours = class_colours(40)
    assert colours.dtype == np.uint8 and colours.shape == (40, 3)
    assert np.array_equal(class_colours(7), colours[:7])
    gaps = np.abs(colours[:, None].astype(int) - colours[None]).sum(-1) + 1000 * np.eye(40, dtype=int)
    assert gaps.min() >= 12
    neighbours = np.abs(np.diff(colours.astype(int), axis=0)).sum(1)
    assert neighbours.min() > 100


def test_classes_are_blended_and_the_background_is_not() -> None:
    labels = np.zeros((40, 60), np.uint8)
    labels[10:30, 10:30], labels[10:30, 40:55] = 1, IGNORE
    drawn = draw_segmentation(grey(40, 60), torch.from_numpy(labels), CLASSES, side=60)
    assert drawn.dtype == np.uint8 and drawn.shape[1:] == (60, 3)
    assert drawn.shape[0] > 40  # the legend
    assert (drawn[5, 5] == 100).all()
    assert np.abs(drawn[20, 20].astype(int) - (100 + class_colours(3)[1].astype(int)) / 2).max() <= 1
    assert (drawn[20, 48] == 114).all()  # half of 128, half of 100
    assert (drawn[10, 20] == 250).all() and (drawn[20, 10] == 250).all()  # borders


def test_small_pictures_are_enlarged_by_whole_steps() -> None:
    labels = np.zeros((20, 32), np.uint8)
    assert draw_segmentation(grey(20, 32), labels, CLASSES, side=100).shape == (80, 128, 3)  # no class, no legend
    nothing = draw_detections(grey(20, 32), np.zeros((0, 4)), np.zeros(0), side=100)
    assert nothing.shape == (80, 128, 3) and (nothing == 100).all()


def test_a_long_legend_is_cut_and_counted() -> None:
    labels = np.arange(40 * 40).reshape(40, 40) % 40
    names = [f"a rather long name {k}" for k in range(40)]
    drawn = draw_segmentation(grey(40, 40), labels, names, side=200)
    assert drawn.shape == (200 + 3 * 22 + 6, 200, 3)


def test_boxes_masks_and_names_are_drawn_where_they_belong() -> None:
    boxes = torch.tensor([[20.0, 60, 60, 100], [120.0, 60, 180, 140]])
    masks = torch.zeros(2, 1, 200, 200)
    masks[0, 0, 60:100, 20:60] = 0.9
    drawn = draw_detections(
        grey(200, 200), boxes, torch.tensor([1, 2]), masks,
        scores=torch.tensor([0.8, 0.3]), classes=("cat", "dog"), side=200,
    )  # fmt: skip
    colour = class_colours(3)[1].astype(int)
    assert (drawn[60, 40] == colour).all() and (drawn[99, 40] == colour).all()  # upper and lower edge
    assert np.abs(drawn[80, 40].astype(int) - (100 + colour) / 2).max() <= 1  # the mask
    assert (drawn[50, 22] == colour).all()  # the name's ground, above the box
    assert (drawn[:, 110:] == 100).all()  # 0.3 is not sure enough
    assert (drawn[110:, :] == 100).all()
    everything = draw_detections(grey(200, 200), boxes, [1, 2], masks, side=200)
    assert (everything[100, 179] == class_colours(3)[2]).all()  # without scores all are drawn


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: draw_segmentation(grey(4, 4), np.zeros((3, 4)), CLASSES), r"must be \(H, W\) like the picture"),
        (lambda: draw_segmentation(grey(4, 4), np.full((4, 4), 3), CLASSES), "has class 3, but there are names for 3"),
        (lambda: draw_segmentation(grey(4, 4), np.zeros((4, 4)), 256 * ["a"]), "256 classes cannot be told from 255"),
        (lambda: draw_detections(grey(4, 4), np.zeros((2, 4)), [1]), "2 boxes, 1 labels"),
        (
            lambda: draw_detections(grey(4, 4), np.zeros((1, 4)), [1], np.ones((2, 4, 4))),
            r"one of \(4, 4\)",
        ),
        (lambda: draw_detections(grey(4, 4), np.zeros((1, 4)), [1], scores=[np.nan]), "scores must be finite"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

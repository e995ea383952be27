"""The built-in world: what a sample holds agrees with itself, and a picture follows from (seed, split, index)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyptree.data.world import CLASSES, FAMILIES, GROUPS, PARTS, World, class_tree, contact_sheet
from hyptree.data.world.dataset import VERSION


@pytest.fixture(scope="module")
def world() -> World:
    return World("train", num_images=150, size=64, seed=3)


def test_masks_boxes_semantic_and_parts_agree(world: World) -> None:
    num_small = 0
    for i in range(len(world)):
        s = world[i]
        assert s.image.shape == (3, 64, 64) and s.image.dtype == torch.uint8
        assert s.semantic is not None and s.parts is not None and s.masks is not None
        assert s.boxes is not None and s.box_labels is not None
        assert s.semantic.dtype == s.parts.dtype == torch.uint8
        assert s.boxes.dtype == torch.float32 and s.box_labels.dtype == torch.int64 and s.masks.dtype == torch.bool
        assert len(s.boxes) == len(s.masks) == len(s.box_labels) >= 1
        assert s.box_labels[0] == s.label + 1  # the main object comes first
        expected = torch.zeros_like(s.semantic)
        for mask, box, label in zip(s.masks, s.boxes, s.box_labels, strict=True):
            rows, columns = torch.nonzero(mask, as_tuple=True)
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert not expected[mask].any()  # no pixel belongs to two objects
            expected[mask] = int(label)
        assert torch.equal(s.semantic, expected)
        assert torch.equal(s.parts > 0, s.semantic > 0)  # objects are parts all over, and only they
        assert int(s.parts.max()) <= len(PARTS)
        num_small += len(s.masks) - 1
    assert num_small > 40


def test_tree_has_the_classes_first_and_four_levels() -> None:
    tree = class_tree()
    assert tree.label is not None
    assert tuple(tree.label[: len(CLASSES)]) == CLASSES and 24 <= len(CLASSES) <= 32 == len(set(CLASSES)) + 2
    assert tree.num_nodes == len(CLASSES) + len(FAMILIES) + len(GROUPS) + 1
    assert np.flatnonzero(tree.is_leaf).tolist() == list(range(len(CLASSES)))
    assert tree.depth[: len(CLASSES)].tolist() == [3] * len(CLASSES)
    assert tree.label[tree.parent[CLASSES.index("truck")]] == "road vehicle"


def test_whole_split_access_equals_single_samples(world: World) -> None:
    images, labels = world.images(), world.labels()
    assert images.shape == (150, 3, 64, 64) and labels.shape == (150,)
    for i in (0, 63, 64, 149):
        assert torch.equal(images[i], world[i].image) and labels[i] == world[i].label
    assert torch.equal(world[-1].image, images[-1])
    with pytest.raises(IndexError, match="150"):
        world[150]


def test_contact_sheet_shows_the_pictures(world: World) -> None:
    sheet = contact_sheet(world, num_images=7, columns=3, gap=2)
    assert sheet.shape == (3 * 66 - 2, 3 * 66 - 2, 3)
    assert np.array_equal(sheet[66:130, 66:130], world[4].image.permute(1, 2, 0).numpy())


# Mean colour of the four quarters of pictures 0 to 2 of seed 0, printed by
#   F.adaptive_avg_pool2d(World("train", num_images=3).images().float(), 2).round().int().flatten(1).tolist()
GOLDEN_VERSION = 4
GOLDEN = [
    [171, 198, 180, 203, 171, 206, 166, 191, 191, 218, 127, 160],
    [134, 162, 105, 130, 107, 136, 110, 137, 129, 133, 82, 100],
    [179, 164, 127, 120, 163, 157, 135, 125, 189, 175, 90, 89],
]


def test_old_seeds_give_old_pictures() -> None:
    """Whoever changes the pictures raises VERSION (stored ones must not be taken for new ones) and this table."""
    assert VERSION == GOLDEN_VERSION
    quarters = torch.nn.functional.adaptive_avg_pool2d(World("train", num_images=3).images().float(), 2).flatten(1)
    assert (quarters - torch.tensor(GOLDEN)).abs().max() < 1

"""Pictures of merged patches: mean colours inside, borders between clusters, colours that stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from hyptree import tokens
from hyptree.tokens.draw import cluster_colours, draw


def noise(seed: int, height: int = 48, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_the_room_gives_the_function_whatever_was_imported_before() -> None:
    import hyptree.explore.draw.reduced_pictures  # noqa: F401  it imports the module of the same name

    assert tokens.draw is draw


def test_inside_is_the_mean_of_the_cluster(seed: int) -> None:
    picture = noise(seed)
    source = torch.tensor([0, 0, 1, 1, 0, 2, 2, 1, 3, 3, 3, 3])  # 3 x 4 patches of 16 pixels
    shown = np.asarray(draw(picture, source, (3, 4), border=0))
    assert shown.shape == picture.shape
    for k in range(4):
        inside = np.kron((source.numpy() == k).reshape(3, 4), np.ones((16, 16))).astype(bool)
        assert np.abs(shown[inside] - picture[inside].mean(0)).max() <= 0.5


def test_border_lies_where_clusters_meet_and_has_their_colours(seed: int) -> None:
    picture = noise(seed, 32, 32)
    source = np.array([0, 1, 0, 1])
    shown = np.asarray(draw(picture, source, (2, 2), border=2))
    left, right = cluster_colours(source)[:2]
    assert (left != right).any()
    assert (shown[:, 14:16] == left).all() and (shown[:, 16:18] == right).all()
    assert (shown[:2, :14] == left).all() and (shown[-2:, 18:] == right).all()
    assert (shown[2:-2, 2:14] == shown[8, 8]).all(), "no line between patches of one cluster"


def test_every_cluster_can_be_told_from_its_neighbours() -> None:
    colours = cluster_colours(np.arange(196)).astype(int).reshape(14, 14, 3)
    across = np.abs(colours[:, 1:] - colours[:, :-1]).sum(-1)
    down = np.abs(colours[1:] - colours[:-1]).sum(-1)
    assert min(across.min(), down.min()) > 60


def test_a_merged_cluster_keeps_the_colour_of_one_of_its_parts(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randint(12, (49,), generator=generator)
    step = torch.randint(4, (12,), generator=generator)
    after = step[before]
    old, new = cluster_colours(before), cluster_colours(after)
    for k in after.unique().tolist():
        mine = after.numpy() == k
        assert len(np.unique(new[mine], axis=0)) == 1
        assert (old[mine] == new[mine][0]).all(1).any()
    renamed = torch.randperm(12, generator=generator)[before]
    assert (cluster_colours(renamed) == old).all(), "the numbers of clusters do not matter"


def test_dropped_patches_are_faded_and_have_no_border(seed: int) -> None:
    picture = noise(seed, 32, 32) // 2
    shown = np.asarray(draw(picture, [-1, 0, -1, 1], (2, 2), border=2)).astype(int)
    assert shown[:, :16].min() > 150 and (np.ptp(shown[:, :16], axis=-1) < 12).all()
    assert (shown[:16, 16:18] == cluster_colours([-1, 0, -1, 1])[1]).all()


def test_size_and_sources_of_pictures(seed: int) -> None:
    picture = noise(seed, 20, 30)
    shown = draw(Image.fromarray(picture), torch.arange(6), (2, 3), side=90)
    assert isinstance(shown, Image.Image) and shown.size == (90, 60)
    assert np.asarray(shown).shape == (60, 90, 3)
    uneven = np.asarray(draw(noise(seed, 23, 31), np.arange(6), (2, 3), border=1))
    assert uneven.shape == (23, 31, 3)


@pytest.mark.parametrize(
    ("source", "grid", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.long), (2, 2), "take one row"),
        (torch.zeros(4), (2, 2), "whole numbers"),
        (torch.zeros(4, dtype=torch.long), (2, 3), "source has 4 patches, but the grid is 2 x 3"),
        (torch.zeros(0, dtype=torch.long), (0, 0), "take one row"),
        (torch.zeros(4096, dtype=torch.long), (64, 64), "the picture has 48 x 64"),
    ],
)
def test_wrong_sources_are_named(source: torch.Tensor, grid: tuple[int, int], message: str, seed: int) -> None:
    with pytest.raises(ValueError, match=message):
        draw(noise(seed), source, grid)


def test_wrong_pictures_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(3, H, W\) uint8, a path or a PIL image; got \(3, 8, 8\) of float32"):
        draw(np.zeros((3, 8, 8), np.float32), [0], (1, 1))
    with pytest.raises(ValueError, match="colours has shape"):
        draw(np.zeros((8, 8, 3), np.uint8), [0], (1, 1), colours=np.zeros((2, 3)))

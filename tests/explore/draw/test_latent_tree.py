"""The tree class > attribute > image: rows, frames, the disk, figures."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from hyptree.explore.draw.latent_tree import (
    GOOD,
    LatentTree,
    branches,
    dendrogram_caption,
    disk_of,
    svg_dendrogram,
    svg_tree_disk,
)
from hyptree.explore.draw.style import overlap
from hyptree.geometry import Poincare, lorentz, poincare
from hyptree.tree import Tree
from hyptree.vlm import LatentHierarchyHead
from tests.explore.html import read

NAMES = ("dog", "cat", "c & d", "ship", "car")


def random_tree(
    seed: int, num_attributes: int = 4, count: int = 9, lift_scale: float = 1.0
) -> tuple[LatentHierarchyHead, LatentTree]:
    """A head with random features, its tree, and random thumbnails."""
    generator = torch.Generator().manual_seed(seed)
    text, images = torch.randn(5, 12, generator=generator), torch.randn(count, 12, generator=generator)
    text, images = (lift_scale * torch.nn.functional.normalize(rows, dim=-1) for rows in (text, images))
    head = LatentHierarchyHead.for_classes(text, num_attributes, seed=seed, lift="raw")
    with torch.no_grad():
        head.attributes.add_(0.3 * lift_scale * torch.randn(head.attributes.shape, generator=generator))
    rng = np.random.default_rng(seed)
    thumbnails = list(rng.integers(0, 256, (count, 20, 30, 3), dtype=np.uint8))
    return head, LatentTree(head.to_tree(text, images, NAMES), thumbnails)


def by_hand() -> LatentTree:
    """Classes 0, 1, 2; attributes 3 (under 0), 4 (under 1), 5 (under 1); pictures under 3, 3, 4; 5 has none."""
    rng = np.random.default_rng(0)
    tree = Tree(
        [-1, -1, -1, 0, 1, 1, 3, 3, 4],
        [2, 2, 2, 1, 1, 1, 0, 0, 0],
        embedding=0.1 * rng.normal(size=(9, 3)),
        manifold=Poincare(0.5),
        label=["dog", "cat", "ship", "x", "y", "z", "p0", "p1", "p2"],
    )
    return LatentTree(tree, labels=[0, 1, 2])


def test_rows_of_a_tree_made_by_hand() -> None:
    latent = by_hand()
    assert [(row.node, row.attribute, row.pictures) for row in branches(latent)] == [
        (0, 3, [0, 1]),
        (1, 4, [2]),
        (1, 5, []),
    ]
    assert [latent.is_right(i) for i in range(3)] == [True, False, False]
    text = dendrogram_caption(latent)
    assert "3 classes, 3 learned attributes, 3 pictures" in text
    assert "1 of 3 pictures hang under their own class (green frame); 2 could" in text
    assert "1 attributes have no picture" in text and "Nothing hangs under ship." in text
    svg = svg_dendrogram(latent)
    assert svg.count(f'stroke="{GOOD}"') == 1 and ">no picture<" in svg and ">ship<" not in svg


def test_every_picture_and_attribute_is_in_one_row(seed: int) -> None:
    _, latent = random_tree(seed)
    rows = branches(latent)
    assert sorted(picture for row in rows for picture in row.pictures) == list(range(9))
    assert sorted(row.attribute for row in rows if row.attribute is not None) == latent.attributes.tolist()
    svg = svg_dendrogram(latent)
    reader = read(svg)
    assert svg.count("<image ") == 9 and svg.count("data:image/") == 9
    assert "image 8" in reader.text
    assert "own class" not in dendrogram_caption(latent)


def test_without_attributes_pictures_hang_under_classes(seed: int) -> None:
    _, latent = random_tree(seed, num_attributes=0)
    rows = branches(latent)
    assert {row.attribute for row in rows} == {None}
    assert sorted(picture for row in rows for picture in row.pictures) == list(range(9))
    assert svg_dendrogram(latent).count("<image ") == 9
    assert "0 learned attributes" in dendrogram_caption(latent)


@pytest.mark.parametrize("lift_scale", [0.2, 8.0])  # so close that the picture is enlarged, and far enough
def test_distances_from_the_middle_of_the_disk_are_true(seed: int, lift_scale: float) -> None:
    head, latent = random_tree(seed, lift_scale=lift_scale)
    tree, points, zoom = disk_of(latent)
    kept = [NAMES[k] for k in latent.classes.tolist() if latent.tree.num_children[k]]
    assert list(tree.label or ())[1 : 1 + len(kept)] == kept and (tree.depth[1:] >= 1).all()
    ball = torch.as_tensor(np.array(latent.tree.embedding), dtype=torch.float64)
    classes = [k for k in latent.classes.tolist() if latent.tree.num_children[k]]
    middle = poincare.from_lorentz(lorentz.centroid(poincare.to_lorentz(ball[classes], head.c), c=head.c), head.c)
    order = [*classes, *range(5, latent.tree.num_nodes)]
    # In units of curvature -1, times the factor that the caption tells.
    true = zoom * head.c**0.5 * poincare.dist(middle.expand(len(order), -1), ball[order], head.c).numpy()
    drawn = 2 * np.arctanh(np.linalg.norm(points[1:], axis=1))
    np.testing.assert_allclose(drawn, true, rtol=1e-6)
    np.testing.assert_allclose(points[0], 0, atol=1e-12)
    assert (zoom > 1.05) == (lift_scale < 1)
    svg, text = svg_tree_disk(latent)
    assert svg.count('class="node"') == tree.num_nodes and (f"{zoom:.1f} times" in text) == (zoom > 1.05)
    read(svg)


def test_names_on_the_disk_are_apart(seed: int) -> None:
    latent = random_tree(seed, num_attributes=12)[1]
    found = (
        r'<text data-node="(\d+)" transform="translate\((\S+) (\S+)\) .*? dy="(\S+)" font-size="(\S+)".*?>(.*?)</text>'
    )
    actual = re.findall(found, svg_tree_disk(latent)[0])
    tree = disk_of(latent)[0]
    assert actual and len({node for node, *_ in actual}) == len(actual)
    assert all(tree.height[int(node)] in (1, 2) for node, *_ in actual)
    boxes = []
    for _, x, y, down, size, text in actual:
        half, base = 0.25 * float(size) * len(text), float(y) + (0.73 * float(size) if down == "0.73em" else 0)
        boxes.append((float(x) - half, base - 0.7 * float(size), float(x) + half, base))
    for i, a in enumerate(boxes):
        assert not any(overlap(a, b) for b in boxes[:i])


def test_numbers_of_thumbnails_must_fit(seed: int) -> None:
    latent = random_tree(seed)[1]
    with pytest.raises(ValueError, match="the tree has 9 pictures, got 2 thumbnails"):
        LatentTree(latent.tree, latent.thumbnails[:2])
    with pytest.raises(ValueError, match="got 1 labels"):
        LatentTree(latent.tree, labels=[0])

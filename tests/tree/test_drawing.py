"""Names in pictures of trees: inside the picture, whole where they fit, and not on top of each other."""

import re

import numpy as np
import pytest

from hyptree.explore import svg_disk
from hyptree.explore.draw.disk import RADIUS, SIZE
from hyptree.tree import Tree

pytest.importorskip("matplotlib")


def taxonomy(names_of_leaves):
    """A root with 5 children, each with 3 children, each with 3 leaves."""
    parent = [-1] + [0] * 5 + [1 + k // 3 for k in range(15)] + [6 + k // 3 for k in range(45)]
    inner = ["everything"] + [f"branch {k}" for k in range(5)] + [f"kind {k}" for k in range(15)]
    return Tree(parent, label=inner + list(names_of_leaves))


def boxes(ax):
    """Text and (2, 2) corners in pixels of everything written into the axes, as the file shows it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(ax.figure)
    canvas.draw()
    return [(t.get_text(), t.get_window_extent(canvas.get_renderer()).get_points()) for t in ax.texts]


@pytest.mark.parametrize("longest", [4, 30, 200])
@pytest.mark.parametrize("options", [{"size": 4.0}, {"size": 8.0, "title": "a tree"}, {"layout": "sarkar"}])
def test_no_name_leaves_the_picture(tmp_path, seed, longest, options):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, 45)
    tree = taxonomy("".join(rng.choice(list("abcdemw "), n)) + "x" for n in lengths)
    ax = tree.draw(tmp_path / "tree.png", names=True, **options)
    written = boxes(ax)
    assert len(written) == tree.num_nodes
    low, high = ax.figure.bbox.get_points()
    for text, corners in written:
        assert (corners[0] >= low).all() and (corners[1] <= high).all(), text
    whole = {text for text, _ in written}
    if longest == 4:
        assert whole >= {name for name in tree.label if len(name) <= 4}
    if longest == 200:
        assert any(text.endswith("…") for text in whole)
        assert all(len(text) < 90 for text in whole)


def test_names_that_would_cover_others_are_left_out(tmp_path):
    """Fewer names than nodes: the larger of two that meet stays, and none lies on another."""
    tree = taxonomy(f"leaf {k}" for k in range(45)).relabel(lambda i: f"node {i} with a name that takes its space")
    written = boxes(tree.draw(tmp_path / "tree.png", names=21))
    assert 3 <= len(written) < 21 and written[0][0] == tree.label[0]
    for k, (_, (low, high)) in enumerate(written):
        for _, (other_low, other_high) in written[:k]:
            assert (low >= other_high).any() or (other_low >= high).any()


def test_a_name_stands_on_the_side_without_children():
    """Children above: the name goes below; children below or on both sides: above. For both pictures of a tree."""
    from matplotlib.figure import Figure

    tree = Tree([-1, 0, 0, 1, 1, 2, 2], label=["root", "up", "down", "a", "b", "c", "d"])
    points = np.array([[0, 0], [0, 0.5], [0, -0.5], [-0.1, 0.8], [0.1, 0.8], [-0.1, -0.8], [0.1, -0.8]], float)
    names = re.findall(r'translate\(\S+ (\S+)\).*? dy="([^"]*)".*?>(\w+)</text>', svg_disk(tree, points))
    place = {name: ((SIZE / 2 - float(y)) / RADIUS, down) for y, down, name in names}  # upwards, as in the disk
    assert place["up"][0] < 0.5 and place["up"][1] == "0.73em"
    assert place["down"][0] > -0.5 and place["down"][1] == "0"
    assert place["root"][0] > 0 and place["root"][1] == "0"
    ax = tree.draw(ax=Figure(figsize=(6, 6)).add_subplot(), layout=points, names=True)
    written = dict(boxes(ax))
    dot = {name: ax.transData.transform(point) for name, point in zip(tree.label, points, strict=True)}
    assert written["up"][1, 1] < dot["up"][1] and written["down"][0, 1] > dot["down"][1]
    assert written["root"][0, 1] > dot["root"][1]

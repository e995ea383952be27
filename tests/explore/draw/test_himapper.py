"""Pictures of a Hi-Mapper: what is drawn is what the output says, nothing is cut off, nothing more is claimed."""

from __future__ import annotations

import colorsys
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.text import Text

from hyptree.explore.draw import himapper
from hyptree.explore.draw.himapper import (
    _painted,
    _under_map,
    plot_assignment,
    plot_poincare,
    plot_tree_maps,
    plot_tree_stats,
    stat_curves,
)
from hyptree.explore.draw.nodes import even_warning, forest, node_colours, read_nodes
from hyptree.geometry import lorentz
from hyptree.tree.layout import flat_points
from tests.explore.fake_nodes import fake_output

SHAPES = [(32, 4), (8, 3), (16, 2), (4, 1), (24, 2)]


def picture(seed: int, height: int = 40, width: int = 56) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def texts(figure: Figure) -> list[str]:
    return [actual.get_text() for actual in figure.findobj(Text) if isinstance(actual, Text) and actual.get_text()]


def said(figure: Figure) -> str:
    return re.sub(r"\s+", " ", " ".join(texts(figure)))


def quiet(make: Callable[..., Figure], *arguments: Any, **options: Any) -> Figure:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*arguments, **options)


# ---- the arrays ------------------------------------------------------------------------------------------------------


def test_forest_hangs_i_under_half_of_i() -> None:
    tree = forest((8, 4, 2))
    assert tree.parent.tolist() == [8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, -1, -1]
    assert tree.label is not None and tree.label[10] == "level 2 node 2" and tree.label[13] == "level 3 node 1"


def test_two_dimensions_are_shown_exactly(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    c = float(torch.rand((), generator=generator)) * 3 + 0.1
    x = lorentz.expmap0(torch.randn(12, 2, generator=generator, dtype=torch.float64), c)
    places, kept = flat_points(x.numpy(), c)
    assert kept == 1
    a, b = places[:, None], places[None]
    gap = ((a - b) ** 2).sum(-1) / ((1 - (a**2).sum(-1)) * (1 - (b**2).sum(-1)))
    on_disk = np.arccosh(1 + 2 * gap) / c**0.5
    np.testing.assert_allclose(on_disk, lorentz.pairwise_dist(x, x, c).numpy(), atol=1e-9)
    np.testing.assert_allclose(places, lorentz.to_poincare(x, c).numpy() * c**0.5, atol=1e-12)  # not even turned


def test_more_dimensions_keep_their_radius(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = lorentz.expmap0(torch.randn(20, 16, generator=generator, dtype=torch.float64), 0.5)
    places, kept = flat_points(x.numpy(), 0.5)
    radius = 2 * np.arctanh(np.linalg.norm(places, axis=1)) / 0.5**0.5
    np.testing.assert_allclose(radius, lorentz.dist0(x, 0.5).numpy(), rtol=1e-9)
    assert 2 / 16 < kept < 0.9
    # Points of a plane inside many dimensions lose nothing: all distances survive, only the plane is turned.
    turn = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64))[0][:2]
    plane = lorentz.expmap0(torch.randn(9, 2, generator=generator, dtype=torch.float64) @ turn, 0.5)
    places, kept = flat_points(plane.numpy(), 0.5)
    assert kept == pytest.approx(1)
    back = lorentz.from_poincare(torch.from_numpy(places), 1.0)
    distance = lorentz.pairwise_dist(back, back, 1.0) / 0.5**0.5
    np.testing.assert_allclose(distance.numpy(), lorentz.pairwise_dist(plane, plane, 0.5).numpy(), atol=1e-6)


def test_flat_space_is_projected_without_a_disk(seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(30, 5))
    places, kept = flat_points(x, None)
    assert (np.linalg.norm(places, axis=1) <= np.linalg.norm(x, axis=1) + 1e-12).all()
    assert kept == pytest.approx((places**2).sum() / (x**2).sum())
    np.testing.assert_array_equal(flat_points(x[:, :2], None)[0], x[:, :2])


def test_map_numbers_are_those_of_known_maps() -> None:
    out = fake_output(0, num_leaves=4, depth=2, grid=(4, 4), batch=1)
    out.maps[0][0] = 0
    out.maps[0][0, 0, 1, 2] = 1  # one patch
    out.maps[0][0, 1, :2] = 1 / 8  # half of them
    out.maps[0][0, 2] = out.maps[0][0, 3] = 1 / 16  # all
    leaves, top = read_nodes(out).level_maps()
    np.testing.assert_allclose(leaves.entropy, [0, np.log(8) / np.log(16), 1, 1], atol=1e-6)
    assert leaves.from_even == pytest.approx((15 / 16 + 1 / 2 + 0 + 0) / 4)
    assert leaves.apart == pytest.approx((7 / 8 + 0) / 2)
    assert leaves.num_winners == 3  # the patch of node 0, the half of node 1, node 2 before its equal node 3
    assert (leaves.level, leaves.num_nodes, top.level, top.num_nodes) == (1, 4, 2, 2)


def test_children_share_the_hue_of_their_root() -> None:
    levels = node_colours((32, 16, 8, 4))
    assert [len(level) for level in levels] == [32, 16, 8, 4]
    hue = [np.array([colorsys.rgb_to_hls(*colour)[0] for colour in level]) for level in levels]
    for k, level in enumerate(hue):
        np.testing.assert_allclose(level, hue[3].repeat(2 ** (3 - k)), atol=0.02)
    assert np.diff(np.sort(hue[3])).min() > 0.05
    light = np.array([sum(colour) for colour in levels[0]]).reshape(4, 8)
    assert (np.diff(light) > 0.05).all()  # leaves of a tree differ, from dark to light
    assert len(node_colours((32, 16))[1]) == 16 and len(np.unique(node_colours((32, 16))[1], axis=0)) == 16


def test_warning_names_the_even_levels(seed: int) -> None:
    out = fake_output(seed)
    assert even_warning(read_nodes(out).level_maps()) is None
    out.maps[1][:] = 1 / 35
    text = even_warning(read_nodes(out).level_maps())
    assert text is not None and "level 2 are close to uniform" in text and "0.00" in text


# ---- the figures -----------------------------------------------------------------------------------------------------


def test_every_node_is_drawn_with_its_entropy(seed: int) -> None:
    out = fake_output(seed)
    figure = plot_tree_maps(picture(seed), out, b=1)
    expected = [f"H {value:.2f}" for level in read_nodes(out, 1).level_maps() for value in level.entropy]
    assert sorted(text for text in texts(figure) if text.startswith("H ")) == sorted(expected)
    assert len(figure.axes[0].images) == 1 + 14 + 3  # the picture, its nodes, a scale for each level
    share = [float(level[1].max()) * 35 for level in out.maps]
    for top in share:
        assert f"{top:.3g}×" in texts(figure)


def test_maps_are_coloured_on_the_scale_of_their_level() -> None:
    grey = np.full((20, 20, 3), 128, np.uint8)
    weight = np.zeros((5, 5), np.float32)
    weight[2, 2] = 1
    strong, weak = (_under_map(grey, scale * weight, 0.5).astype(int) for scale in (1.0, 0.3))
    middle = strong.shape[0] // 2
    assert (strong[0, 0] == weak[0, 0]).all() and np.ptp(strong[0, 0]) == 0  # where nobody looks: grey
    redness = [shown[middle, middle, 0] - shown[middle, middle, 2] for shown in (strong, weak)]
    assert redness[0] > 60 and strong[middle, middle].sum() < weak[middle, middle].sum()


def test_each_level_fills_its_own_scale(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[np.ndarray] = []
    real = himapper._under_map
    monkeypatch.setattr(himapper, "_under_map", lambda *inputs: drawn.append(inputs[1]) or real(*inputs))
    out = fake_output(seed)
    quiet(plot_tree_maps, picture(seed), out)
    maps = read_nodes(out, 0).need_maps()
    assert [len(level) for level in maps] == [8, 4, 2] and len(drawn) == 14
    for level, actual in zip(maps, (drawn[:8], drawn[8:12], drawn[12:]), strict=True):
        np.testing.assert_allclose(np.stack(actual), level / level.max(), rtol=1e-5)


def test_even_maps_are_warned_of_on_the_figure_and_aloud(seed: int) -> None:
    with pytest.warns(UserWarning, match="level 1, 2, 3 are close to uniform"):
        figure = plot_tree_maps(picture(seed), fake_output(seed, sharp=0))
    assert "Warning: the maps of level 1, 2, 3 are close to uniform" in said(figure)
    assert all(text in ("H 1.00",) for text in texts(figure) if text.startswith("H "))
    assert "Warning" not in said(plot_tree_maps(picture(seed), fake_output(seed)))


def test_captions_claim_no_parts(seed: int) -> None:
    out = fake_output(seed)
    figures = [plot_tree_maps(picture(seed), out), plot_assignment(picture(seed), out), plot_poincare(out)]
    for figure in figures:
        assert not re.search(r"discover|finds? (the )?(parts|objects)|segment", said(figure), re.IGNORECASE)
    assert "it is no object or part, and a parent's map is not made of its children's" in said(figures[0])
    assert "nor that the region is a thing" in said(figures[1])


def test_patches_have_the_colour_of_their_node(seed: int) -> None:
    rng = np.random.default_rng(seed)
    winner, colours = rng.integers(0, 4, (3, 5)), node_colours((4, 2))[0]
    black = np.zeros((30, 50, 3), np.uint8)
    painted = _painted(black, winner, colours, pixels=100)
    assert painted.shape == (60, 100, 3)
    for row in range(3):
        for column in range(5):
            seen = painted[20 * row + 10, 20 * column + 10] / 255
            np.testing.assert_allclose(seen, 0.72 * colours[winner[row, column]], atol=0.005)
    two = _painted(black, np.array([[0, 1]]), colours, pixels=100)
    assert (two[:, 50:52] == 255).all() and (two[:, 49] < 255).any() and (two[:, 52] < 255).any()


def test_assignment_of_all_levels(seed: int) -> None:
    out = fake_output(seed)
    figure = plot_assignment(picture(seed), out)
    assert len(figure.axes[0].images) == 4
    winners = len(np.unique(out.maps[1][0].flatten(1).argmax(0)))
    assert f"level 2: {winners} of 4 nodes win a patch" in texts(figure)
    painted = np.asarray(figure.axes[0].images[2].get_array())
    expected = _painted(picture(seed), out.maps[1][0].argmax(0).numpy(), node_colours((8, 4, 2))[1])
    np.testing.assert_array_equal(painted, expected)


@pytest.mark.parametrize(("dims", "words"), [(6, "angles are a projection"), (2, "the picture is exact")])
def test_disk_says_what_it_keeps(seed: int, dims: int, words: str) -> None:
    figure = plot_poincare(fake_output(seed, dims=dims))
    assert words in said(figure) and "Curvature -0.70" in said(figure)
    assert ("projection" in said(figure)) == (dims > 2)


def test_disk_has_nodes_edges_and_rim(seed: int) -> None:
    out = fake_output(seed)
    figure = plot_poincare(out, b=1)
    (ax,) = figure.axes
    points = torch.cat([level[1] for level in out.hyperbolic]).numpy()
    places, _ = flat_points(points, float(out.curvature))
    lines, dots = ax.collections
    np.testing.assert_allclose(np.asarray(dots.get_offsets()), places, atol=1e-9)
    area = dots.get_sizes().tolist()  # type: ignore[attr-defined]
    assert area == sorted(area) and [area.count(one) for one in dict.fromkeys(area)] == [8, 4, 2]
    tree = forest((8, 4, 2))
    segments = lines.get_segments()  # type: ignore[attr-defined]
    assert len(segments) == 12
    for child, segment in enumerate(segments):
        np.testing.assert_allclose(segment[0], places[tree.parent[child]], atol=1e-7)
        np.testing.assert_allclose(segment[-1], places[child], atol=1e-7)
        assert (np.linalg.norm(segment, axis=1) < 1).all()
    (rim,) = ax.patches
    assert rim.get_radius() == 1  # type: ignore[attr-defined]
    assert not plot_poincare(fake_output(seed, c=None)).axes[0].patches  # flat space has no rim


@pytest.mark.parametrize(("num_leaves", "depth"), SHAPES)
def test_nothing_is_cut_off(seed: int, num_leaves: int, depth: int) -> None:
    out = fake_output(seed, num_leaves=num_leaves, depth=depth, sharp=0 if depth == 3 else 3)
    for make, arguments in (
        (plot_tree_maps, (picture(seed), out)),
        (plot_assignment, (picture(seed), out)),
        (plot_assignment, (picture(seed, 60, 40), out)),
        (plot_poincare, (out,)),
    ):
        figure = quiet(make, *arguments)
        figure.draw_without_rendering()
        width, height = figure.bbox.size
        boxes = [one.get_window_extent() for one in figure.findobj(Text) if one.get_text() and one.get_visible()]  # type: ignore
        for box in boxes:
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        for k, one in enumerate(boxes):  # no text lies on another
            for other in boxes[k + 1 :]:
                wide, tall = (
                    min(one.x1, other.x1) - max(one.x0, other.x0),
                    min(one.y1, other.y1) - max(one.y0, other.y0),
                )
                assert min(wide, tall) <= 1.0


# ---- the log ---------------------------------------------------------------------------------------------------------


def rows(seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    names = ("contrastive", "himapper/kl", "distance_ratio", "image_dependence", "curvature", "parent_retrieval")
    actual = [{"step": s, "split": "train", **{n: float(rng.random()) for n in names}} for s in range(10, 60, 10)]
    return [
        *actual,
        {"step": 50, "split": "val", "distance_ratio": 0.25, "kl": float("nan")},
        {"step": 50, "top1": 0.5},
    ]


def test_log_is_drawn_value_by_value(seed: int, tmp_path: Path) -> None:
    log = rows(seed)
    charts = {panel.title: panel.series for panel in stat_curves(log)}
    assert len(charts) == 6
    kl = "KL of the top level (1 value is not finite and left out)"
    assert charts[kl][0].y == [row["himapper/kl"] for row in log[:5]]
    assert [line.name for line in charts["Parent / same-level distance"]] == ["training", "validation"]
    figure = plot_tree_stats(log)
    assert [ax.get_title().partition("\n")[0] for ax in figure.axes] == list(charts)
    drawn = figure.axes[2].lines
    np.testing.assert_array_equal(drawn[0].get_xydata(), [(row["step"], row["distance_ratio"]) for row in log[:5]])
    np.testing.assert_array_equal(drawn[1].get_xydata(), [(50, 0.25)])
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in log))
    for source in (tmp_path, str(tmp_path / "metrics.jsonl")):
        again = plot_tree_stats(source)
        np.testing.assert_array_equal(again.axes[2].lines[0].get_xydata(), drawn[0].get_xydata())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda out: plot_tree_maps(picture(0), out, b=2), "b must be from 0 to 1, got 2"),
        (lambda out: plot_tree_stats([{"step": 1, "loss": 2.0}]), "is it the log of a Hi-Mapper"),
    ],
)
def test_mistakes_are_named(make: Callable[[Any], object], message: str, seed: int) -> None:
    with pytest.raises(ValueError, match=message):
        make(fake_output(seed))


def test_outputs_without_maps_nodes_or_halves(seed: int) -> None:
    out = fake_output(seed)
    out.maps = None
    assert plot_poincare(out).axes
    with pytest.raises(ValueError, match="return_maps=True"):
        plot_tree_maps(picture(seed), out)
    out.hyperbolic = out.hyperbolic[::2]
    with pytest.raises(ValueError, match=r"\[8, 2\] nodes"):
        plot_poincare(out)
    out.hyperbolic = []
    with pytest.raises(ValueError, match="enabled=False"):
        plot_poincare(out)

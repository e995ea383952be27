"""The demo of trees: its tree, its numbers, its pictures and its page."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from hyptree import cli
from hyptree.explore import Section, branch_colors, draw_disk, page, svg_disk
from hyptree.explore.draw.disk import RADIUS, SIZE, _arc
from hyptree.explore.pages import tree_demo as demo
from hyptree.explore.pages.page import table
from hyptree.tree import Tree
from hyptree.tree.layout import geodesic
from tests.explore.html import read

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a whole demo and what it printed, as into a pipe."""
    import contextlib

    folder, printed = tmp_path_factory.mktemp("demo") / "made" / "on the way", io.StringIO()
    with contextlib.redirect_stdout(printed):
        demo.run(folder, seed=7)
    return folder, printed.getvalue()


def small_tree() -> Tree:
    return Tree([-1, 0, 0, 1, 1, 2], label=["root", "a", "b", "a<1>", "a&2", "b1"])


def small_points(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    angle, radius = rng.uniform(0, 2 * np.pi, 6), rng.uniform(0.1, 0.95, 6)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)


# ---- the tree and its embedding --------------------------------------------------------------------------------------


def test_outline_becomes_a_tree() -> None:
    tree = demo.demo_tree("all\n  x: u, v w\n  y\n    z: q\n")
    assert tree.label == ["all", "x", "u", "v w", "y", "z", "q"]
    assert tree.parent.tolist() == [-1, 0, 1, 1, 0, 4, 5]


def test_demo_tree_is_readable_and_has_one_name_per_node() -> None:
    tree = demo.demo_tree()
    assert 60 <= tree.num_nodes <= 120 and len(tree.roots) == 1
    assert tree.label is not None and len(set(tree.label)) == tree.num_nodes
    assert all(name and name == name.strip() for name in tree.label)


def test_hyperbolic_plane_beats_the_flat_one_and_short_sarkar(finished: tuple[Path, str]) -> None:
    numbers = json.loads((finished[0] / "numbers.json").read_text())
    flat, curved, sarkar, limit = numbers["scores"]
    assert curved["distortion"] < 0.11 and flat["distortion"] > 0.2
    assert curved["distortion"] < 0.6 * sarkar["distortion"]
    assert curved["map"] > 0.85 > 0.4 > flat["map"]
    assert limit["distortion"] < 0.02 and limit["map"] == 1.0


def test_numbers_are_those_of_the_points_that_were_drawn(finished: tuple[Path, str]) -> None:
    numbers, tree = json.loads((finished[0] / "numbers.json").read_text()), demo.demo_tree()
    points = np.array([numbers["points"][name] for name in tree.label or []])
    actual = tree.distortion(embedding=points, manifold="poincare", scale="best")
    assert math.isclose(actual.average, numbers["scores"][1]["distortion"], rel_tol=1e-6)
    assert np.linalg.norm(points[0]) < 1e-12, "the root is in the centre"


def test_fit_gives_an_edge_its_length() -> None:
    from hyptree.geometry import Euclidean, Lorentz

    for manifold in (Lorentz(), Lorentz(4.0), Euclidean()):
        points = demo.fit(Tree([-1, 0]), manifold, edge=0.7, steps=200)
        assert math.isclose(float(manifold.dist(points[0], points[1])), 0.7, rel_tol=1e-8)


def test_same_seed_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STEPS_PER_LEVEL", 8)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        demo.run(tmp_path / name, seed=seed)
    for file in ("index.html", "numbers.json", "disk.png"):
        a, b, c = ((tmp_path / run / file).read_bytes() for run in "abc")
        assert a == b and a != c, file


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_piped_output_is_plain_and_ends_with_the_page(finished: tuple[Path, str]) -> None:
    folder, text = finished
    assert "\x1b" not in text and "\r" not in text
    assert text.count("hyperbolic plane: ") >= 2 and text.count("flat plane: ") >= 2
    assert text.rstrip().splitlines()[-1] == str(folder / "index.html")
    assert max(map(len, text.splitlines()[:-2])) <= 80


def test_output_that_is_a_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    assert cli.main(["tree", "demo", "--out", str(tmp_path / "taken")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "taken" in error


# ---- the page --------------------------------------------------------------------------------------------------------


def test_page_stands_alone(finished: tuple[Path, str]) -> None:
    html = (finished[0] / "index.html").read_text(encoding="utf-8")
    reader = read(html)
    outside = [
        (tag, name, value) for tag, name, value in reader.attributes if name in ("src", "href", "srcset", "action")
    ]
    assert not outside, "the page loads something"
    assert set(re.findall(r"https?://[^\s\"'<]*", html)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in html and "url(" not in html
    assert len(html) < 300_000


def test_page_shows_every_name_and_number(finished: tuple[Path, str]) -> None:
    folder = finished[0]
    texts = read((folder / "index.html").read_text(encoding="utf-8")).text
    for name in demo.demo_tree().label or []:
        assert name in texts
    assert "things › animals › mammals › wolf" in texts
    for row in json.loads((folder / "numbers.json").read_text())["scores"]:
        assert f"{row['distortion']:.1%}" in texts and f"{row['map']:.2f}" in texts


def test_page_escapes_what_it_is_told(tmp_path: Path) -> None:
    parts = [Section("5 < 6", table(["<b>"], [["a & b"]]))]
    html = page(tmp_path / "new" / "p.html", "<i>", "x & y", parts).read_text(encoding="utf-8")
    texts = read(html).text
    assert {"<i>", "x & y", "5 < 6", "<b>", "a & b"} <= set(texts)


# ---- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_svg_edges_are_geodesics(seed: int) -> None:
    """The middle of each SVG arc, found from its radius and sweep alone, lies where the geodesic has it."""
    points = small_points(seed)
    for p, q in zip(points[:3], points[3:], strict=True):
        match = re.fullmatch(r"M(\S+) (\S+)A(\S+) \S+ 0 0 ([01]) (\S+) (\S+)", _arc(p, q, flat=False))
        assert match
        x1, y1, r, sweep, x2, y2 = map(float, match.groups())
        (mx, my), (dx, dy) = ((x1 + x2) / 2, (y1 + y2) / 2), (x2 - x1, y2 - y1)
        half = math.hypot(dx, dy) / 2
        sagitta = r - math.sqrt(r * r - half * half)
        # Sweep 1 goes clockwise on the screen: the arc lies to the left of the way from start to end there.
        side = 1 if sweep else -1
        actual = np.array([mx + side * sagitta * dy / (2 * half), my - side * sagitta * dx / (2 * half)])
        arc = geodesic(p[None], q[None], 4001)[0]
        on_screen = np.stack([SIZE / 2 + RADIUS * arc[:, 0], SIZE / 2 - RADIUS * arc[:, 1]], 1)
        assert np.linalg.norm(on_screen - actual, axis=1).min() < 0.2


def test_svg_has_every_edge_node_and_name() -> None:
    svg = svg_disk(small_tree(), small_points(), move=True)
    reader = read(svg)
    assert svg.count("<path") == 5 and svg.count('class="node"') == 6 and svg.count("<text") == 6
    assert "root › a › a<1>" in reader.text and "a&2" in reader.text
    data = next(json.loads(value or "") for _, name, value in reader.attributes if name == "data-tree")
    assert data["parent"] == small_tree().parent.tolist()
    assert np.allclose(data["points"], small_points(), atol=1e-8)


def test_flat_picture_has_straight_edges_and_no_rim() -> None:
    svg = svg_disk(small_tree(), 100 * small_points(), flat=True)
    assert not re.search(r' d="[^"]*A', svg) and 'class="rim"' not in svg


def test_colours_are_those_of_the_branches() -> None:
    colors = branch_colors(small_tree())
    assert colors[1] == colors[3] == colors[4] and colors[2] == colors[5]
    assert len({colors[0], colors[1], colors[2]}) == 3


def test_png_is_a_picture_of_the_disk(tmp_path: Path) -> None:
    from matplotlib.image import imread

    bare = Tree(small_tree().parent)
    draw_disk(bare, small_points(), tmp_path / "disk.png", dpi=50)
    draw_disk(small_tree(), small_points(), tmp_path / "named.png", dpi=50)
    image, named = imread(tmp_path / "disk.png"), imread(tmp_path / "named.png")
    assert image.shape[:2] == named.shape[:2] == (400, 400) and np.abs(image - named).max() > 0.5
    for node, (x, y) in enumerate(small_points()):
        row, column = int(200 - y * 192 / 1.06), int(200 + x * 192 / 1.06)
        expected = np.array([int(branch_colors(small_tree())[node][k : k + 2], 16) / 255 for k in (1, 3, 5)])
        patch = image[row - 3 : row + 4, column - 3 : column + 4, :3].reshape(-1, 3)
        assert np.abs(patch - expected).sum(1).min() < 0.35, f"no dot of node {node}"


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (np.zeros((5, 2)), r"shape \(5, 2\), expected \(6, 2\)"),
        (np.full((6, 2), 0.8), "node 0 lies at .*, outside the unit disk"),
        (np.full((6, 2), np.nan), "node 0 lies at .*, not finite"),
    ],
)
def test_bad_points_are_refused(points: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        svg_disk(small_tree(), points)

"""The table, the plot and the page of ``hyptree reduce``, from made-up results."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage

from hyptree.explore.draw.reduced_pictures import Drawing, LayerTree, Shown, strip, svg_dendrogram
from hyptree.explore.pages.reduction import pareto_front, table_rows, text_table, to_csv, write_page, write_plot
from hyptree.train.reduction.reduce import Results, Row
from hyptree.tree import Tree
from hyptree.tree.drawing import first_leaf
from tests.explore.html import read

ROWS = [
    Row("none", "", 1.0, [16, 16], 2.0, 1000.0, 1.0, 0.9, 0.99),
    Row("atc", "average", 0.5, [8, 4], 1.0, 1800.0, 1.8, 0.88, 0.98),
    Row("atc", "average", 0.25, [4, 1], 0.7, 2500.0, 2.5, 0.8, 0.95),
    Row("topk", "", 0.5, [8, 4], 1.0, 1700.0, 1.7, 0.85, 0.97),
    Row("random", "", 0.25, [4, 1], 0.7, 2600.0, 2.6, 0.5, 0.7),
]


def results(rows: list[Row] = ROWS, **about: object) -> Results:
    known = {"model": "vit_<small>", "device": "cpu, 1 threads", "data": "world", "layers": [1, 2], "size": 32}
    return Results({**known, "notes": [], **about}, ["machine   none"], list(rows))


def test_table_says_every_number_once() -> None:
    head, cells = table_rows(results())
    assert head == ["method", "keep", "tokens", "GFLOPs", "images/s", "speed-up", "top-1", "top-5"]
    assert cells[1] == ["atc average", "0.5", "8 4", "1", "1,800.0", "1.80x", "88.00%", "98.00%"]
    lines = text_table(results()).splitlines()
    assert len(lines) == 2 + len(ROWS) and lines[0].startswith("method") and len({len(line) for line in lines}) == 1


def test_table_without_accuracy_has_no_empty_columns() -> None:
    bare = [Row("none", "", 1.0, [16, 16], 2.0, 1000.0, 1.0)]
    head, cells = table_rows(results(bare))
    assert head[-1] == "speed-up" and cells == [["none", "1", "16 16", "2", "1,000.0", "1.00x"]]


def test_csv_reads_back() -> None:
    back = list(csv.DictReader(io.StringIO(to_csv(results()))))
    assert len(back) == len(ROWS)
    assert back[2]["tokens"] == "4 1" and float(back[2]["top1"]) == 0.8 and back[3]["linkage"] == ""


def test_front_holds_what_nothing_beats() -> None:
    assert [(row.name, row.keep) for row in pareto_front(ROWS)] == [
        ("random", 0.25), ("atc average", 0.25), ("atc average", 0.5), ("none", 1.0)
    ]  # fmt: skip
    assert pareto_front([Row("none", "", 1.0, [16], 2.0, 1000.0, 1.0)]) == []


def merges(seed: int, num: int, k: int) -> LayerTree:
    points = np.random.default_rng(seed).random((num, 3))
    return LayerTree(3, linkage(points, "average"), np.arange(num), k)


def test_leaves_that_are_merged_stand_side_by_side(seed: int) -> None:
    tree = merges(seed, 25, 8)
    place = first_leaf(Tree.from_linkage(tree.links))[:25]
    assert sorted(place) == list(range(25))
    for k in range(2, 25):
        labels = fcluster(tree.links, k, "maxclust")
        in_order = labels[np.argsort(place)]
        assert (np.diff(in_order) != 0).sum() == k - 1, "every cluster is one stretch"


def test_dendrogram_colours_the_merges_that_were_made(seed: int) -> None:
    tree = merges(seed, 12, 5)
    colours = np.tile(np.array([[200, 10, 20]], np.uint8), (12, 1))
    svg = svg_dendrogram(tree, colours)
    assert svg.count('stroke="#c80a14"') == 12 - 5, "one link for every merge"
    assert svg.count('stroke="#b9bfcc"') == 5 - 1
    assert svg.count('class="cut"') == 1 and svg.count("<rect") == 12
    spans = [(int(a), int(b)) for a, b in re.findall(r'data-from="(\d+)" data-to="(\d+)"', svg)]
    assert spans[-1] == (0, 12)
    assert [b - a for a, b in spans] == tree.links[:, 3].astype(int).tolist(), "a link covers the leaves below it"
    heights = [float(height) for height in re.findall(r"tokens, distance ([\d.]+)", svg)]
    assert heights == pytest.approx(tree.links[:, 2], abs=5e-4)


def shown(seed: int) -> Shown:
    rng = np.random.default_rng(seed)
    picture = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    first = dataclasses.replace(merges(seed, 16, 8), layer=1)
    label = fcluster(first.links, 8, "maxclust") - 1
    second = LayerTree(2, linkage(rng.random((8, 3)), "average"), label, 4)
    label2 = (fcluster(second.links, 4, "maxclust") - 1)[label]
    atc = Drawing("atc average", 0.5, [label, label2])
    dropped = np.where(np.arange(16) % 2, -1, np.arange(16))
    other = Drawing("topk", 0.25, [dropped, np.where(np.arange(16) % 4, -1, np.arange(16))])
    return Shown("a <b>.png", picture, (4, 4), (1, 2), [atc, other], [first, second], atc)


def test_strip_has_a_row_for_each_reduction_and_a_column_for_each_layer(seed: int) -> None:
    one = shown(seed)
    whole, part = strip(one), strip(dataclasses.replace(one, drawings=one.drawings[:1]))
    assert whole.size == (3 * 336 + 2 * 8, 2 * (336 + 22) + 8) and part.size == (3 * 336 + 2 * 8, 336 + 22)
    assert np.array_equal(np.asarray(whole)[: part.height], np.asarray(part))


def check_page(path: Path) -> str:
    """The page's text, after a look at its tags and at what it loads."""
    html = path.read_text(encoding="utf-8")
    for _, name, value in read(html).attributes:
        if name in ("src", "href"):
            assert (value or "").startswith("data:image/")
    addresses = set(re.findall(r"https?://[^\s\"'<]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg"} and "@import" not in html and "url(" not in html
    return html


def test_page_is_whole_and_loads_nothing(tmp_path: Path, seed: int) -> None:
    plot = write_plot(results(), tmp_path / "pareto.png")
    path = write_page(tmp_path / "index.html", results(notes=["fresh <weights>"]), [shown(seed)], plot)
    html = check_page(path)
    assert "vit_&lt;small&gt;" in html and "a &lt;b&gt;.png" in html and "fresh &lt;weights&gt;" in html
    assert html.count('<figure class="merge">') == 2, "a dendrogram for each layer"
    assert html.count("<details") == 2 and html.count("<details open") == 1
    assert html.count("<figcaption>layer 1: 8 tokens<") == 2 and html.count("<figcaption>layer 2: 4 tokens<") == 2
    best = re.search(r'<tr class="best">.*?</tr>', html)
    assert best is not None and "88.00%" in best[0], "the most accurate of those that are fast"


def test_page_without_pictures_and_plot(tmp_path: Path) -> None:
    bare = [Row("none", "", 1.0, [16, 16], 2.0, 1000.0, 1.0)]
    html = check_page(write_page(tmp_path / "index.html", results(bare, data=None)))
    assert "data-from" not in html and "no data" in html and "<img" not in html


def test_plot_is_a_picture_with_and_without_accuracy(tmp_path: Path) -> None:
    from PIL import Image

    bare = [dataclasses.replace(row, top1=None, top5=None) for row in ROWS]
    two, one = write_plot(results(), tmp_path / "two.png"), write_plot(results(bare), tmp_path / "one.png")
    with Image.open(two) as wide, Image.open(one) as narrow:
        assert wide.width == pytest.approx(2 * narrow.width, abs=2) and wide.height == narrow.height
        assert len(wide.convert("RGB").getcolors(2**24) or []) > 50

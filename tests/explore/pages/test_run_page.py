"""The page of a run: stands alone, says what the run says, hands the browser the model's own clusters."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyptree.data.pictures.single import fit, model_input
from hyptree.data.pictures.transforms import eval_transform
from hyptree.data.sample import Sample
from hyptree.data.settings import DataSettings
from hyptree.explore.draw.charts import (
    _short,
    _spread,
    line_chart,
    run_curves,
    svg_confusion,
    ticks,
)
from hyptree.explore.draw.scenes import Answer, Scene, _base64, class_path, disk_points, explorer_html
from hyptree.explore.explanation import block_tree
from hyptree.explore.pages.run_page import Answers, PageRecord, run_page
from hyptree.explore.pages.run_pictures import Subject, page_of_run
from hyptree.geometry import Poincare
from hyptree.lab.figures.panels import Panel, Series
from hyptree.models.clusters import read_clusters
from hyptree.tree import Tree
from tests.explore.fake import tiny
from tests.explore.html import explorer_data, read

CLASSES = ("oak", "pine", "rose", "car", "bus")
TREE = Tree([5, 5, 6, 7, 7, 8, 8, 9, 9, -1], label=[*CLASSES, "tree", "flower", "vehicle", "plant", "thing"])


def fresh_scenes(seed: int, count: int = 2) -> tuple[list[Scene], Any]:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = tiny()
    pictures = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(count)]
    clusters = read_clusters(model, model_input(model, pictures))
    regions = np.kron(rng.integers(-1, 3, (8, 8)), np.ones((4, 4), int))
    answer = Answer([("plant", "tree", "oak"), ("vehicle", "car")], [0.7, 0.2], ("plant", "tree", "pine"))
    scenes = [
        Scene(p, f"a <b> & picture {k}", own, answer, regions)
        for k, (p, own) in enumerate(zip(pictures, clusters, strict=True))
    ]
    return scenes, clusters


def metrics() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(1, 721):
        rows.append(
            {"step": step, "epoch": step / 240, "split": "train", "time": step / 10, "loss": 3 / step, "lr": 1e-3}
        )
        if step % 240 == 0:
            rows.append(
                {
                    "step": step,
                    "epoch": step / 240,
                    "split": "val",
                    "time": step / 10,
                    "loss": 1.5,
                    "top1": 0.1 * step / 240,
                    "mistake_height": 2.5,
                }
            )
    return rows


def full_record(seed: int) -> PageRecord:
    scenes, _ = fresh_scenes(seed)
    rng = np.random.default_rng(seed)
    confusion = rng.integers(0, 9, (5, 5))
    shots = [
        (scenes[0].picture, scenes[0].answer),
        (scenes[1].picture, Answer([("vehicle", "bus")], [0.9], ("vehicle", "bus"))),
    ]
    score = {"asa": 0.912, "boundary_recall": math.nan, "undersegmentation": 0.05, "purity": 0.8}
    return PageRecord(
        "A <title>",
        "A lead & more.",
        scenes,
        ["sky", "wheel", "leaf"],
        {"leaf accuracy": "83.1%"},
        metrics(),
        [
            {"method": "stage 1", "num_clusters": 61.24, **score},
            {"method": "SLIC", "num_clusters": 60, "rival": True, **score},
        ],
        Answers(confusion, CLASSES, TREE, [(p, a) for p, a in shots if a is not None]),
        "The end.",
    )


@pytest.fixture
def html(tmp_path: Path, seed: int) -> str:
    return run_page(tmp_path / "new" / "page.html", full_record(seed)).read_text(encoding="utf-8")


def test_page_stands_alone(html: str) -> None:
    reader = read(html)
    loads = [
        (tag, name, value or "")
        for tag, name, value in reader.attributes
        if name in ("src", "href", "srcset", "action")
    ]
    assert loads and all(tag == "img" and value.startswith("data:image/") for tag, _, value in loads)
    assert not re.search(r"https?://", html)
    assert "@import" not in html and "url(" not in html and "fetch(" not in html
    assert len(html) < 300_000


def test_page_has_its_sections_and_numbers(html: str) -> None:
    text = read(html).text
    for title in ("What it clustered", "Do clusters follow things?", "How it learned", "Where it is right and wrong"):
        assert title in text
    assert {"A <title>", "A lead & more.", "leaf accuracy", "83.1%", "61.2", "91.2%", "–", "The end."} <= set(text)


def test_empty_parts_are_left_out(tmp_path: Path, seed: int) -> None:
    record = PageRecord("t", "l", fresh_scenes(seed)[0])
    text = read(run_page(tmp_path / "p.html", record).read_text(encoding="utf-8")).text
    assert "What it clustered" in text
    assert not {"Do clusters follow things?", "How it learned", "Where it is right and wrong"} & set(text)


def test_pictures_have_words_for_those_who_cannot_see_them(html: str) -> None:
    attributes = read(html).attributes
    images = sum(tag == "img" and name == "src" for tag, name, _ in attributes)
    words = [value for tag, name, value in attributes if tag == "img" and name == "alt"]
    assert len(words) == images and all(words) and "a <b> & picture 1" in words
    drawings = [value for tag, name, value in attributes if tag == "svg" and name == "role"]
    assert (
        len(drawings) == sum(tag == "svg" and name == "viewbox" for tag, name, _ in attributes) + 1
    )  # the tree gets its own


# ---- the explorer's data ---------------------------------------------------------------------------------------------


def unpack(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)


def test_explorer_holds_the_models_clusters(html: str, seed: int) -> None:
    _, clusters = fresh_scenes(seed)
    data = explorer_data(html)
    assert [layer["title"] for layer in data["layers"]] == [
        "all stages",
        "stage 1, block 1",
        "stage 1, block 2",
        "stage 2, block 1",
    ]
    assert [layer["heads"] for layer in data["layers"]] == [1, 3, 3, 2]
    for picture, own in zip(data["images"], clusters, strict=True):
        for block, heads in zip(own, picture["layers"][1:], strict=True):
            for head, packed in enumerate(heads):
                leaf = unpack(packed["leaf"], "<u2").reshape(packed["h"], packed["w"])
                assert_same_partition(leaf, block.patch_cluster[head])
                sure = unpack(packed["sure"], "u1").reshape(leaf.shape) / 255
                assert np.allclose(sure, block.patch[head].max(-1), atol=0.5 / 255 + 1e-6)
                parent = unpack(packed["parent"], "<u2").astype(int)
                parent[0] = -1
                tree = Tree(parent)  # is one
                assert set(np.unique(leaf)) == set(tree.leaves())
                xy = unpack(packed["xy"], "<i2").reshape(-1, 2) / 32768
                assert len(xy) == tree.num_nodes and (np.linalg.norm(xy, axis=1) < 1).all()
                if block.window_cluster is not None and block.has_groups:
                    assert_same_partition(parent[leaf], block.window_cluster[head])


def assert_same_partition(a: np.ndarray, b: np.ndarray) -> None:
    pairs = {(int(x), int(y)) for x, y in zip(a.ravel(), b.ravel(), strict=True)}
    assert len(pairs) == len({x for x, _ in pairs}) == len({y for _, y in pairs})


def test_explorer_says_what_a_cluster_shows(seed: int) -> None:
    scenes, _ = fresh_scenes(seed, 1)
    data = explorer_data(explorer_html(scenes, ["sky", "wheel", "leaf"]))
    packed = data["images"][0]["layers"][1][0]
    leaf = np.kron(unpack(packed["leaf"], "<u2").reshape(8, 8).astype(int), np.ones((4, 4), int))
    parent = unpack(packed["parent"], "<u2").astype(int)
    regions = scenes[0].regions
    assert regions is not None
    for node, (region, share) in enumerate(packed["mostly"]):
        inside = (leaf == node) | ((parent[leaf] == node) & (leaf != 0)) | (node == 0)
        seen = regions[inside & (regions >= 0)]
        if not len(seen):
            assert region == -1
            continue
        count = np.bincount(seen, minlength=3)
        assert count[region] == count.max() and share == round(100 * count.max() / count.sum())


def test_text_inside_the_page_cannot_end_the_script(seed: int) -> None:
    scenes, _ = fresh_scenes(seed, 1)
    html = explorer_html(scenes, ["</script><b>"])
    read(html)
    assert explorer_data(html)["regions"] == ["</script><b>"]
    with pytest.raises(ValueError, match="no pictures"):
        explorer_html([])


def test_disk_keeps_distances_from_the_middle(seed: int) -> None:
    _, clusters = fresh_scenes(seed, 1)
    tree = block_tree(clusters[0][0], 0)
    points, zoom = disk_points(tree)
    assert tree.embedding is not None and zoom >= 1 and np.allclose(points[0], 0)
    manifold = tree.manifold
    own = torch.as_tensor(np.array(tree.embedding), dtype=torch.float64)
    groups = torch.as_tensor(tree.depth == 1)
    middle = manifold.centroid(own[groups])
    expected = manifold.dist(own, middle.expand_as(own)).numpy()
    actual = 2 * np.arctanh(np.linalg.norm(points, axis=1))
    assert np.allclose(actual[1:], zoom * expected[1:], rtol=1e-6, atol=1e-9)


def test_points_of_another_space_are_not_taken_for_lorentz_points(seed: int) -> None:
    tree = Tree([-1, 0, 0], embedding=0.1 * np.random.default_rng(seed).normal(size=(3, 3)), manifold=Poincare(0.5))
    with pytest.raises(ValueError, match="expected those of a Lorentz space"):
        disk_points(tree)


# ---- curves, confusion, answers --------------------------------------------------------------------------------------


def test_curves_are_chosen_from_the_metrics() -> None:
    charts = {panel.title: panel.series for panel in run_curves(metrics())}
    assert list(charts) == ["Loss", "Validation", "Learning rate"]
    assert [line.name for line in charts["Loss"]] == ["training", "validation"]
    assert [line.name for line in charts["Validation"]] == ["top-1"]  # a height is no share
    assert charts["Validation"][0].y == pytest.approx([0.1, 0.2, 0.3])
    assert len(charts["Loss"][0].x) == 240
    assert np.mean(charts["Loss"][0].y) == pytest.approx(np.mean([3 / s for s in range(1, 721)]))
    assert run_curves([]) == []


def test_values_that_are_not_finite_are_counted_and_not_drawn() -> None:
    losses = [3.0, math.nan, 1.0, math.inf]
    rows = [{"step": k, "split": "train", "loss": loss, "lr": 0.1} for k, loss in enumerate(losses)]
    rows.append({"step": 4, "split": "val", "loss": math.nan, "top1": 0.5})
    first, *rest = run_curves(rows)
    assert first.title == "Loss (3 values are not finite and left out)"
    assert [line.y for line in first.series] == [[3.0, 1.0]]
    assert [panel.title for panel in rest] == ["Validation", "Learning rate"]


def test_numbers_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ValueError, match="from 0 to 65536 do not fit into <u2"):
        _base64(np.array([0, 2**16]), "<u2")


def test_chart_draws_points_where_their_values_are() -> None:
    svg = line_chart(Panel("t", "epoch", "", [Series("a", [0, 1, 2], [0.0, 5.0, 10.0])], number=".2f"))
    read(svg)
    points = re.search(r'points="([^"]*)"', svg)
    assert points
    (x0, y0), (x1, y1), (x2, y2) = (map(float, p.split(",")) for p in points[1].split())
    assert x1 - x0 == pytest.approx(x2 - x1) and y0 - y1 == pytest.approx(y1 - y2) and y0 > y2
    assert "a ends at 10.00" in svg


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.013, 0.87), (-3, 410), (2, 2), (0, 1e-3)])
def test_ticks_enclose_the_values(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low and marks[-1] >= high * (1 - 1e-9) and 2 <= len(marks) <= 7
    assert np.allclose(np.diff(marks), marks[1] - marks[0])


def test_ticks_are_short() -> None:
    assert [_short(*pair) for pair in ((0.25, ".0%"), (5e-4, ".1e"), (0.0, ".1e"), (2.5, ".2f"))] == [
        "25%",
        "5e-4",
        "0",
        "2.5",
    ]


def test_names_of_lines_do_not_overlap(seed: int) -> None:
    places = np.random.default_rng(seed).uniform(10, 220, 4)
    moved = np.array(_spread(places, 30.0, 206.0))
    assert (np.diff(np.sort(moved)) >= 30 - 1e-9).all()
    assert (np.argsort(moved) == np.argsort(places)).all()
    assert moved.min() >= 14 and moved.max() <= 206
    assert _spread([50.0, 120.0, 204.0], 30.0, 206.0) == [50.0, 120.0, 204.0]  # those with room stay
    assert _spread([50.0, 200.0, 204.0], 30.0, 206.0) == [50.0, 176.0, 206.0]


@pytest.mark.parametrize("names", [["learning rate"], ["training", "validation"]])
def test_values_at_the_end_of_lines_stay_off_the_numbers_below_the_axis(names: list[str]) -> None:
    svg = line_chart(
        Panel("t", "epoch", "", [Series(name, [0, 10, 20], [0.0, 1e-3, 1e-5]) for name in names], number=".1e")
    )
    axis = float(re.findall(r'<line class="grid" [^>]*y2="([^"]*)"', svg)[0])
    numbers = float(re.findall(r'<text class="tick" [^>]*y="([^"]*)" text-anchor="middle">20<', svg)[0])
    lasts = [float(y) for y in re.findall(r'<tspan class="last" x="[^"]*" y="([^"]*)"', svg)]
    assert len(lasts) == len(names) and svg.count(">1e-5</tspan>") == len(names)
    assert max(lasts) <= axis + 4 < numbers - 12  # baselines of letters of 12 pixels
    if len(names) == 1:
        assert lasts[0] == pytest.approx(float(re.findall(r'<circle class="end [^>]*cy="([^"]*)"', svg)[0]) + 4, abs=1)


def test_confusion_shows_every_count_in_the_order_of_the_tree(seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 5, (5, 5))
    svg = svg_confusion(counts, TREE, CLASSES)
    text = "".join(read(svg).text)
    for true in range(5):
        for output in range(5):
            entry = f"{CLASSES[true]} called {CLASSES[output]}: {counts[true, output]} of {counts[true].sum()}"
            assert (entry in text) == bool(counts[true, output])
    # Families with several classes (trees, vehicles) and the group plant are outlined.
    assert svg.count('class="family"') == 3


def test_accuracy_up_the_tree() -> None:
    confusion = np.zeros((5, 5), int)
    confusion[0, 0], confusion[0, 1], confusion[1, 2], confusion[3, 4], confusion[4, 0] = 4, 3, 2, 5, 6
    answers = Answers(confusion, CLASSES, TREE)
    assert answers.accuracy() == 4 / 20
    assert answers.accuracy(2) == (4 + 3) / 20  # trees among trees; car and bus hang directly under vehicle
    assert answers.accuracy(1) == (4 + 3 + 2 + 5) / 20
    assert Answers(confusion, CLASSES, None).accuracy(1) == 4 / 20


def test_class_paths_leave_out_the_root() -> None:
    assert class_path(TREE, 0, CLASSES) == ("plant", "tree", "oak")
    assert class_path(None, 3, CLASSES) == ("car",)


def test_page_data_is_plain_json(html: str) -> None:
    json.dumps(explorer_data(html))
    assert "NaN" not in json.dumps(explorer_data(html))


# ---- what a page is made from ----------------------------------------------------------------------------------------


class Sorted:
    """Pictures in the order of their classes, as folders give them; the last third is of other sizes."""

    semantic_classes: tuple[str, ...] = ("background", "thing")

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return 30

    def __getitem__(self, k: int) -> Sample:
        shape = (3, 32, 32) if k < 20 else (3, 40, 40)
        mask = torch.zeros(shape[1:], dtype=torch.uint8)
        image = torch.from_numpy(np.random.default_rng(k).integers(0, 256, shape, dtype=np.uint8))
        return Sample(image, f"picture {k}", label=k // 6, semantic=mask)


def test_of_many_pictures_some_of_every_class_are_measured_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    torch.manual_seed(seed)
    subject = Subject(tiny(), "tiny", 32, classes=CLASSES, tree=TREE, task="classify", data=DataSettings())
    monkeypatch.setattr("hyptree.data.build.build_dataset", lambda data, split: Sorted(seed))
    page_of_run(subject, tmp_path, tmp_path / "all.html", num_pictures=2)
    assert "measured on" not in read((tmp_path / "all.html").read_text(encoding="utf-8")).text
    assert "the page does without scores of clusters: the pictures have different sizes" in capsys.readouterr().err
    monkeypatch.setattr("hyptree.explore.pages.run_pictures.MOST", 10)
    page_of_run(subject, tmp_path, tmp_path / "some.html", num_pictures=2)
    html = (tmp_path / "some.html").read_text(encoding="utf-8")
    assert {"measured on", "10 of 30 pictures"} <= set(read(html).text)
    rows = re.findall(r"<title>(\w+) called \w+: \d+ of (\d+)</title>", html)
    assert {name: int(count) for name, count in rows} == dict.fromkeys(CLASSES, 2)


def test_pictures_are_seen_as_the_evaluation_of_the_run_sees_them(seed: int) -> None:
    image = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (3, 60, 90), dtype=np.uint8))
    settings = DataSettings(size=32, crop_pct=0.8)
    subject = Subject(tiny(), "tiny", settings.size, crop_pct=settings.crop_pct)
    seen = subject.see(image.permute(1, 2, 0).numpy()).astype(float)
    transform = eval_transform(32, "classify", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), crop_pct=0.8)
    expected = 255 * transform(Sample(image, "x", label=0)).image.permute(1, 2, 0).numpy()
    assert np.abs(seen - expected).mean() < 2  # another implementation of the same resampling
    assert np.array_equal(
        Subject(tiny(), "tiny", 32).see(image.permute(1, 2, 0).numpy()), fit(image.permute(1, 2, 0).numpy(), 32)
    )

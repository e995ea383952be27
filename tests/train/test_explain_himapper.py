"""``hyptree explain`` on a run with Hi-Mapper: its page from validation pictures and from pictures of one's own."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import hyptree
from hyptree import cli
from hyptree.explore.draw.himapper import plot_tree_stats
from hyptree.train.explain import subject_of_run
from tests.explore.html import read

pytest.importorskip("matplotlib")

RECIPE = """
data: {name: world, size: 32, num_train: 32, num_val: 24, batch_size: 16, cache: false}
model:
  name: resnet18
  args: {channels: [4, 8, 8, 16], output_stride: 8}
  plugin: {name: himapper, num_leaves: 8, depth: 3, width: 16, heads: 2}
schedule: {steps: 2}
run: {device: cpu, tensorboard: false, log_steps: 1, threads: 1}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("mapped")
    (folder / "small.yaml").write_text(RECIPE)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert cli.main(["train", str(folder / "small.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_page_of_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(run), "--out", str(tmp_path / "p.html"), "--pictures", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(tmp_path / "p.html")
    html = (tmp_path / "p.html").read_text(encoding="utf-8")
    reader = read(html)
    expected = (
        *("Where a Hi-Mapper looks", "Where its tree looks", "The tree in numbers", "How its tree came about"),
        *("How it learned", "Where it is right and wrong"),
    )
    for title in expected:
        assert title in reader.text
    assert "What it clustered" not in reader.text and 'id="explorer"' not in html
    assert html.count('<details class="mapped"') == 2 and "Hi-Mapper on resnet18" in "".join(reader.text)
    # What is warned of on the page is said on the command line, and the other way round.
    assert ("close to uniform" in shown.err) == ('class="warned"' in html)
    # Numbers of the tree have charts of their own and are not taken for accuracies.
    learned = html[html.index("How it learned") : html.index("Where it is right and wrong")]
    assert "Validation" in learned and "image dependence" not in learned and "parent retrieval" not in learned


def test_curves_are_those_of_the_log(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figure = plot_tree_stats(run)
    titles = [ax.get_title().partition("\n")[0] for ax in figure.axes]
    ratio = figure.axes[titles.index("Parent / same-level distance")].lines[0].get_xydata()
    expected = [(row["step"], row["distance_ratio"]) for row in rows if row["split"] == "train"]
    assert len(expected) == 2
    np.testing.assert_allclose(ratio, expected)
    assert {"Contrastive loss", "KL of the top level", "Image dependence", "Curvature c"} <= set(titles)


def test_pictures_of_ones_own(run: Path, tmp_path: Path, seed: int) -> None:
    path = tmp_path / "wide <1>.png"
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 70, 3), dtype=np.uint8)).save(path)
    assert cli.main(["explain", str(run), str(path), "--out", str(tmp_path / "p.html")]) == 0
    reader = read((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert ("img", "alt", "maps of the nodes on wide <1>.png") in reader.attributes
    assert "What the picture is called" in reader.text and "How it learned" not in reader.text


def test_table_is_refused_in_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(run), "--table"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "has a tree of queries, whose maps are no regions" in shown.err


def test_subject_says_what_it_is(run: Path) -> None:
    subject = subject_of_run(run)
    assert subject.has_queries and subject.name == "Hi-Mapper on resnet18" and subject.size == 32


LARGE, SMALL = "num_train: 32, num_val: 24, batch_size: 16", "num_train: 8, num_val: 3, batch_size: 4"
DENSE = {
    "segment": "pyramid_channels: 32, channels: 32",
    "detect": "anchor_scale: 4, head_channels: 32, num_proposals: 10, num_learned: 8, pyramid_channels: 32",
}


@pytest.mark.parametrize("task", list(DENSE))
def test_the_tree_below_a_dense_head(task: str, tmp_path: Path, seed: int) -> None:
    if task == "detect":
        pytest.importorskip("pycocotools", reason="install hyptree[eval]")
    path, out = tmp_path / "photo.png", str(tmp_path / "p.html")
    picture = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(picture).save(path)
    head = f"task: {task}\n" + RECIPE.replace("size: 32", "size: 64").replace(LARGE, SMALL)
    (tmp_path / "r.yaml").write_text(head.replace("  plugin:", f"  head: {{{DENSE[task]}}}\n  plugin:"))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert cli.main(["train", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "run")]) == 0
        assert cli.main(["explain", str(tmp_path / "run"), "--out", out, "--pictures", "1"]) == 0
        own = read(Path(out).read_text(encoding="utf-8"))
        assert cli.main(["explain", str(tmp_path / "run"), str(path), "--out", out]) == 0
    photo = read(Path(out).read_text(encoding="utf-8"))
    assert "Hi-Mapper on resnet18" in "".join(own.text) and "How it learned" in own.text
    assert "Where it is right and wrong" not in own.text and "What the picture is called" not in photo.text
    assert ("img", "alt", "maps of the nodes on photo.png") in photo.attributes
    subject = subject_of_run(tmp_path / "run")
    tree = hyptree.explain(subject.model, picture, size=64)
    assert tree.num_nodes == 14 and np.allclose(tree.support.sum((1, 2)), 1, atol=1e-5)

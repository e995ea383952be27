"""Ways to reduce tokens over several runs: what is measured, what is kept, the numbers in the table, mistakes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from hyptree.cli import call
from hyptree.config import load
from hyptree.errors import UserError
from hyptree.train.loop import fit
from hyptree.train.run.recipe import Recipe
from results import reduction as tables
from results.reduction import ALL, WAYS, Measured, Settings, cell, measure, measure_run, to_markdown

pytest.importorskip("timm")

TINY = [
    "data.size=32", "data.num_train=32", "data.num_val=24", "data.batch_size=16", "model.name=vit_tiny_patch16_224",
    "model.args.img_size=32", "model.args.patch_size=8", "model.args.embed_dim=24", "model.args.depth=4",
    "model.args.num_heads=3", "schedule.steps=1", "run.device=cpu", "run.tensorboard=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Two runs of a tiny ViT with 16 tokens on the built-in world."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        fit(load(Recipe, None, [*TINY, f"run.seed={seed}"]), root / f"seed{seed}", quiet=True)
    return root / "seed0", root / "seed1"


def settings(runs: tuple[Path, ...], **options: object) -> Settings:
    return Settings(runs, device="cpu", **{"keep": (0.5,), "batch_size": 8} | options)


def test_every_way_is_measured_at_equal_token_counts(runs, monkeypatch):
    seen = []

    def watch(subject, way, keep):
        counts, top1 = reduced(subject, way, keep)
        seen.append((way, counts))
        return counts, top1

    reduced = tables._reduced_accuracy
    monkeypatch.setattr(tables, "_reduced_accuracy", watch)
    lines: list[str] = []
    first, second = measure(settings(runs), lines.append)
    assert [way for way, _ in seen] == [*WAYS] * 2
    assert {tuple(counts) for _, counts in seen} == {(8, 4, 2)}
    assert first.tokens == {"0.5": [8, 4, 2]} and set(first.top1) == {ALL, *(cell(way, 0.5) for way in WAYS)}
    assert len(lines) == 2 * (1 + len(WAYS)) and first.about != second.about  # other weights
    assert all(0 <= value <= 1 for run in (first, second) for value in run.top1.values())

    seen.clear()
    assert measure(settings(runs)) == [first, second] and seen == []  # kept in the folders
    measure_run(settings(runs, keep=(0.75, 0.5), ways=("ToMe", "random")), runs[0])
    assert seen == [("ToMe", [12, 9, 6]), ("random", [12, 9, 6])]  # only what was missing
    seen.clear()
    measure_run(settings(runs, num_val=10, ways=("ToMe",)), runs[0])
    assert seen == [("ToMe", [8, 4, 2])]  # other pictures: nothing that was kept counts


def test_the_whole_model_is_measured_as_evaluation_measures_it(runs, tmp_path):
    from hyptree.train import evaluate_run

    actual = measure_run(settings(runs, ways=(), fresh=True), runs[1])
    assert actual.top1 == {ALL: evaluate_run(runs[1])["top1"]}


def test_mean_spread_and_paired_differences():
    ways, keep = ("ATC, average", "ToMe"), (0.5, 0.25)
    top1 = {("ATC, average", 0.5): [0.8, 0.7, 0.9], ("ToMe", 0.5): [0.79, 0.68, 0.87]}
    top1 |= {("ATC, average", 0.25): [0.5, 0.4, 0.3], ("ToMe", 0.25): [0.6, 0.6, 0.6]}
    runs = [
        Measured({}, {ALL: 0.95, **{cell(*key): values[i] for key, values in top1.items()}}, {"0.5": [8], "0.25": [4]})
        for i in range(3)
    ]
    text = to_markdown(Settings((Path("a"),), keep=keep, ways=ways), runs)
    assert "All tokens: 95.00 ± 0.00." in text and "| keep 0.5 (8) | keep 0.25 (4) |" in text
    assert f"| ATC, average | **80.00 ± {statistics.stdev([80, 70, 90]):.2f}** | 40.00 ± 10.00 |" in text
    assert f"| ToMe | 78.00 ± {statistics.stdev([79, 68, 87]):.2f} | **60.00 ± 0.00** |" in text
    assert "| ATC, average | +2.00 ± 1.00 | -20.00 ± 10.00 |" in text  # run by run: 1, 2, 3 points
    alone = to_markdown(Settings((Path("a"),), keep=keep, ways=ways), runs[:1])
    assert "| ToMe | 79.00 | **60.00** |" in alone and "| ATC, average | +1.00 | -10.00 |" in alone
    for run in runs:
        run.top1[cell("ATC, average", 0.5)] = run.top1[cell("ToMe", 0.5)]
    assert to_markdown(Settings((Path("a"),), keep=keep, ways=ways), runs).count("**78.00") == 2  # both are the best


def test_command_writes_the_table_into_a_page(runs, tmp_path, capsys):
    page = tmp_path / "RESULTS.md"
    words = [*map(str, runs), "--keep", "0.5", "--ways", "ATC, single", "ToMe", "--device", "cpu", "--batch-size", "8"]
    assert call(tables.table, "reduction", [*words, "--results", str(page), "--name", "small"]) == 0
    text = page.read_text()
    assert "<!-- small -->" in text and "| ATC, single | " in text and "Difference to ToMe" in text
    assert "torch" in text and str(runs[0]) not in text
    assert text.split("<!-- small -->\n")[1].split("<!-- /small -->")[0] in capsys.readouterr().out
    assert call(tables.table, "reduction", [*words, "--ways", "ToMee"]) == 2
    assert capsys.readouterr().err.strip() == ("hyptree: error: unknown way 'ToMee'; did you mean 'ToMe'?")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": (1.0,)}, "keep must be between 0 and 1, got 1; all tokens are measured anyway"),
        ({"precision": "fp16"}, "precision must be fp32 or bf16, got 'fp16'"),
        ({"jobs": 0}, "jobs and batch_size must be 1 or more, got 0 and 8"),
        ({"runs": ()}, "folders of different runs, at least one, got 0"),
    ],
)
def test_mistakes_are_one_line(options, message):
    with pytest.raises(UserError) as caught:
        settings(options.pop("runs", (Path("a"),)), **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_broken_file_is_named(runs, tmp_path):
    path = tmp_path / "reduction.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(UserError, match=r"reduction\.json does not hold accuracies"):
        tables._read(path, {})
    assert tables._read(tmp_path / "none.json", {"a": 1}) == Measured({"a": 1})

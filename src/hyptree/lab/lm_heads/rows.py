"""Reads rows of a matrix from a safetensors or a GGUF file, so that no more than they need is ever in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyptree.errors import UserError, require
from hyptree.files import check_weights

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Names of the format for numbers that directions can be made of."""


@dataclass(frozen=True)
class Matrix:
    """A matrix (or a vector) whose rows can be read apart."""

    shape: tuple[int, ...]
    """Slowest axis first, as in torch."""
    rows: Callable[[int, int], Tensor]
    """From one row up to another: (stop - start, width) float32; a ``UserError`` for numbers without directions."""
    kind: Any = ""
    """How the file writes its numbers."""

    def columns(self, width: int) -> Matrix:
        """Its first columns."""
        return replace(self, shape=(self.shape[0], width), rows=lambda start, stop: self.rows(start, stop)[:, :width])


def loaded(tensor: Tensor) -> Matrix:
    """One that is in memory already."""
    return Matrix(tuple(tensor.shape), lambda start, stop: tensor[start:stop].float())


def read_safetensors(path: Path | str) -> dict[str, Matrix]:
    """Every tensor of a safetensors file by name, from its header alone."""
    path = Path(path)
    check_weights(path)
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            return {
                name: Matrix(tuple(s.get_shape()), partial(_rows, path, name, s.get_dtype()), s.get_dtype())
                for name, s in slices.items()
            }
    except (OSError, SafetensorError) as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} is missing or damaged: {what}") from error


def _rows(path: Path, name: str, kind: str, start: int, stop: int) -> Tensor:
    if kind not in DTYPES:
        raise UserError(f"{name} in {path} has numbers of kind {kind}; expected {', '.join(DTYPES)}")
    # Opened for each block: pages that were looked at count as the program's memory as long as a file is mapped.
    with safe_open(path, "pt") as file:
        return file.get_slice(name)[start:stop].to(torch.float32, copy=True)


def read_gguf(path: Path | str) -> dict[str, Matrix]:
    """Every tensor of a GGUF file by name, from its header alone; their kind is a ``gguf.GGMLQuantizationType``."""
    path = Path(path)
    gguf = require("gguf", "lab")
    try:
        tensors = gguf.GGUFReader(path).tensors
    except (ValueError, LookupError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} is damaged or no GGUF file: {error}") from error
    return {
        t.name: Matrix(
            tuple(map(int, reversed(t.shape))),
            partial(_gguf_rows, path, t.name, t.tensor_type, t.data_offset, t.data[0].nbytes),
            t.tensor_type,
        )
        for t in tensors
    }


def _gguf_rows(path: Path, name: str, kind: Any, offset: int, row_bytes: int, start: int, stop: int) -> Tensor:
    """Every row is a whole number of blocks, so rows can be read apart."""
    data = np.fromfile(path, np.uint8, (stop - start) * row_bytes, offset=offset + start * row_bytes)
    try:
        values = require("gguf.quants", "lab").dequantize(data.reshape(stop - start, -1), kind)
    except NotImplementedError as error:
        raise UserError(f"{name} in {path} is {kind.name}, which gguf cannot decode") from error
    return torch.from_numpy(np.array(values, np.float32))

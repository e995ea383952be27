"""Reads rows of a matrix from a GGUF file, plain or quantised, without any other part of the file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.errors import UserError, require
from hyptree.lab.lm_heads.rows import Matrix


def read_gguf(path: Path | str) -> dict[str, Matrix]:
    """Every tensor of a GGUF file by name, from its header alone; their kind is a ``gguf.GGMLQuantizationType``.

    Raises:
        UserError: not a GGUF file, or a damaged one.
    """
    path = Path(path)
    gguf = require("gguf", "lab")
    try:
        tensors = gguf.GGUFReader(path).tensors
    except (ValueError, LookupError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} is damaged or no GGUF file: {error}") from error
    return {
        t.name: Matrix(
            tuple(map(int, reversed(t.shape))),
            partial(_rows, path, t.name, t.tensor_type, t.data_offset, t.data[0].nbytes),
            t.tensor_type,
        )
        for t in tensors
    }


def _rows(path: Path, name: str, kind: Any, offset: int, row_bytes: int, start: int, stop: int) -> Tensor:
    """Every row is a whole number of blocks, so rows can be read apart."""
    data = np.fromfile(path, np.uint8, (stop - start) * row_bytes, offset=offset + start * row_bytes)
    try:
        values = require("gguf.quants", "lab").dequantize(data.reshape(stop - start, -1), kind)
    except NotImplementedError as error:
        raise UserError(f"{name} in {path} is {kind.name}, which gguf cannot decode") from error
    return torch.from_numpy(np.array(values, np.float32))

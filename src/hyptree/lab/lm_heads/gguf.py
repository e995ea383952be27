"""Reads rows of a matrix from a GGUF file, plain or quantised, without any other part of the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.errors import UserError, require


@dataclass(frozen=True)
class GgufTensor:
    """Where a matrix lies in a file, and how its numbers are written."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """Slowest axis first, as in torch."""
    kind: Any
    """``gguf.GGMLQuantizationType``; every row is a whole number of its blocks, so rows can be read apart."""
    offset: int
    row_bytes: int

    def rows(self, start: int, stop: int) -> Tensor:
        """(stop - start, width) float32.

        Raises:
            UserError: a kind of quantisation that the library cannot decode.
        """
        num_bytes = (stop - start) * self.row_bytes
        data = np.fromfile(self.path, np.uint8, num_bytes, offset=self.offset + start * self.row_bytes)
        try:
            values = require("gguf.quants", "lab").dequantize(data.reshape(stop - start, -1), self.kind)
        except NotImplementedError as error:
            raise UserError(f"{self.name} in {self.path} is {self.kind.name}, which gguf cannot decode") from error
        return torch.from_numpy(np.array(values, np.float32))


def read_gguf(path: Path | str) -> dict[str, GgufTensor]:
    """Every tensor of a GGUF file by name, from its header alone.

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
        t.name: GgufTensor(
            path, t.name, tuple(map(int, reversed(t.shape))), t.tensor_type, t.data_offset, t.data[0].nbytes
        )
        for t in tensors
    }

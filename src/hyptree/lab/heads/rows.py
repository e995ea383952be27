"""Reads rows of a matrix from a safetensors file by plain reads, so that no more than they need is ever in memory.

The library of the format maps whole files: every page that was looked at then counts as the program's memory, which
for a head of some gigabytes is what streaming is meant to avoid. The format is a length, a JSON header and bytes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hyptree.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Names of the format for numbers that directions can be made of."""


class Rows(Protocol):
    """A matrix whose rows can be read apart."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> Tensor:
        """(stop - start, width) float32."""
        ...


@dataclass(frozen=True)
class LoadedRows:
    """Rows of a tensor that is there already."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop].float()


@dataclass(frozen=True)
class FirstColumns:
    """Rows without their last columns."""

    source: Rows
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[0], self.width

    def rows(self, start: int, stop: int) -> Tensor:
        return self.source.rows(start, stop)[:, : self.width]


@dataclass(frozen=True)
class SafeTensor:
    """Where a tensor lies in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    """Of its first byte in the file."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of a matrix, or numbers of a vector, as float32.

        Raises:
            UserError: numbers of a kind that has no directions, or a file that ends too early.
        """
        if self.kind not in DTYPES:
            raise UserError(f"{self.name} in {self.path} has numbers of kind {self.kind}; expected {', '.join(DTYPES)}")
        dtype = DTYPES[self.kind]
        shape = (stop - start, *self.shape[1:])
        row_bytes = dtype.itemsize * (self.shape[1] if len(self.shape) > 1 else 1)
        data = bytearray((stop - start) * row_bytes)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + start * row_bytes)
            view, filled = memoryview(data), 0
            while filled < len(data):  # one call gives 2 GiB at most
                count = file.readinto(view[filled:])
                if not count:
                    raise UserError(f"{self.path} is damaged: it ends inside {self.name}")
                filled += count
        return torch.frombuffer(data, dtype=dtype).reshape(shape).float()


def read_safetensors(path: Path | str) -> dict[str, SafeTensor]:
    """Every tensor of a safetensors file by name, from its header alone.

    Raises:
        UserError: no such file, or a damaged one.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            if 8 + length > size:
                raise UserError(f"{path} is damaged: it ends inside its header")
            header = json.loads(file.read(length))
        found = {
            name: SafeTensor(path, name, tuple(map(int, entry["shape"])), entry["dtype"], _place(entry, length, size))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        what = error.strerror if isinstance(error, OSError) else "its header cannot be read"
        raise UserError(f"{path} is missing or damaged: {what}") from error
    return found


def _place(entry: dict[str, list[int]], length: int, size: int) -> int:
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop or 8 + length + stop > size:
        raise ValueError("a tensor beyond the end of the file")
    return 8 + length + start

"""Reads rows of a matrix from a safetensors file, so that no more than they need is ever in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyptree.errors import UserError
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
    """A tensor of a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of a matrix, or numbers of a vector, as float32.

        Raises:
            UserError: numbers of a kind that has no directions.
        """
        if self.kind not in DTYPES:
            raise UserError(f"{self.name} in {self.path} has numbers of kind {self.kind}; expected {', '.join(DTYPES)}")
        # Opened for each block: pages that were looked at count as the program's memory as long as a file is mapped.
        with safe_open(self.path, "pt") as file:
            return file.get_slice(self.name)[start:stop].to(torch.float32, copy=True)


def read_safetensors(path: Path | str) -> dict[str, SafeTensor]:
    """Every tensor of a safetensors file by name, from its header alone.

    Raises:
        UserError: no such file, or a damaged one.
    """
    path = Path(path)
    check_weights(path)
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            return {name: SafeTensor(path, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} is missing or damaged: {what}") from error

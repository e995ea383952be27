"""Finds the output head (or the embedding it is tied to) in a checkpoint on disk, and reads it some rows at a time.

Only headers and the wanted rows are read: no model is built, and a head of any size needs the memory of one block.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramify.errors import UserError, suggest
from ramify.lab.gguf import GgufTensor, read_gguf

CANDIDATES = (
    "lm_head.weight",
    "embed_out.weight",
    "wte.weight",
    "embed_tokens.weight",
    "text_model.embeddings.token_embedding.weight",
    "token_embedding.weight",
)
"""Ends of names, in the order in which they are looked for: output heads, then embeddings of words."""

GGUF_CANDIDATES = ("output.weight", "token_embd.weight")
"""The same in GGUF files, which have names of their own."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Head:
    """A matrix on disk, one row per word."""

    path: Path
    """File that holds it."""
    name: str
    num_rows: int
    width: int
    tied: str
    """Whether it is a head of its own or an embedding that serves as one, in words."""
    _loaded: Tensor | None = field(default=None, repr=False, compare=False)
    _gguf: GgufTensor | None = field(default=None, repr=False, compare=False)

    def rows(self, block: int) -> Iterator[Tensor]:
        """All rows in order, at most ``block`` at a time, float32."""
        if self._loaded is not None:
            yield from (part.float() for part in self._loaded.split(block))
            return
        if self._gguf is not None:
            for start in range(0, self.num_rows, block):
                yield torch.from_numpy(self._gguf.rows(start, min(start + block, self.num_rows)))
            return
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            part = file.get_slice(self.name)
            for start in range(0, self.num_rows, block):
                yield part[start : start + block].float()


def find_head(path: Path | str, tensor: str | None = None, allow_pickle: bool = False) -> Head:
    """The head in a safetensors file, a folder with one, a folder with shards and their index, or a GGUF file.

    Args:
        tensor: its name; by default the first of :data:`CANDIDATES` that is there.
        allow_pickle: also read torch's older files, by ``weights_only``.

    Raises:
        UserError: nothing to read, a pickle, a damaged file, or no such tensor.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"cannot read {path}: no such file or folder")
    if path.suffix == ".gguf" and path.is_file():
        return _gguf_head(path, tensor)
    folder = path if path.is_dir() else path.parent
    loaded: dict[str, Tensor] = {}
    if path.is_file() and path.suffix in _PICKLES:
        loaded = _unpickle(path, allow_pickle)
        where = dict.fromkeys(loaded, path)
    else:
        where = _tensors(path)
    name = _choose(where, tensor, path, CANDIDATES)
    rows, width = _checked(tuple(loaded[name].shape) if loaded else _shape(where[name], name), name, path)
    return Head(where[name], name, rows, width, _tied(name, folder), loaded.get(name))


def _gguf_head(path: Path, tensor: str | None) -> Head:
    tensors = read_gguf(path)
    name = _choose(dict.fromkeys(tensors, path), tensor, path, GGUF_CANDIDATES)
    rows, width = _checked(tensors[name].shape, name, path)
    kinds = {"output.weight": "head of its own", "token_embd.weight": "input embedding"}
    tied = kinds.get(name, "named")
    if name == "token_embd.weight" and "output.weight" not in tensors:
        tied = "input embedding, tied"
    return Head(path, name, rows, width, tied, _gguf=tensors[name])


def _checked(shape: tuple[int, ...], name: str, path: Path) -> tuple[int, int]:
    if len(shape) != 2 or min(shape) < 2:
        raise UserError(f"{name} in {path} has shape {shape}, expected (words, width) with two words or more")
    return shape[0], shape[1]


def _tensors(path: Path) -> dict[str, Path]:
    """Name to file of every tensor, from headers alone."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(
                f"cannot read {path}: expected a .safetensors or .gguf file, or a folder that holds the first"
            )
        return dict.fromkeys(_names(path), path)
    index = path / _INDEX
    if index.is_file():
        try:
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise UserError(f"{index} is damaged: it has no weight_map") from error
        return {name: path / file for name, file in names.items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
        if pickles:
            _refuse(path / pickles[0])
        raise UserError(f"{path} holds no .safetensors file")
    return {name: file for file in files for name in _names(file)}


def _names(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _shape(path: Path, name: str) -> tuple[int, ...]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return tuple(file.get_slice(name).get_shape())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is missing or damaged: {error}") from error


def _unpickle(path: Path, allowed: bool) -> dict[str, Tensor]:
    if not allowed:
        _refuse(path)
    import pickle

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    tensors = (
        {name: value for name, value in found.items() if isinstance(value, Tensor)} if isinstance(found, dict) else {}
    )
    if not tensors:
        raise UserError(f"{path} holds no tensors by name")
    return tensors


def _refuse(path: Path) -> None:
    raise UserError(
        f"{path} is a pickle, which can run code when it is opened; convert it to safetensors, "
        "or name the file and add --allow-pickle to read it by weights_only"
    )


def _choose(where: dict[str, Path], tensor: str | None, path: Path, candidates: Sequence[str]) -> str:
    if tensor is not None:
        if tensor in where:
            return tensor
        hint = suggest(tensor, where) or f"tensors with 'embed', 'head' or 'wte': {_alike(where)}"
        raise UserError(f"{path} has no tensor {tensor!r}; {hint}")
    for end in candidates:
        found = sorted((name for name in where if name == end or name.endswith(f".{end}")), key=len)
        if found:
            return found[0]
    raise UserError(f"no head found in {path}; name one with --tensor: {_alike(where)}")


def _alike(where: dict[str, Path], most: int = 8) -> str:
    words = ("embed", "head", "wte", "token")
    likely = [name for name in sorted(where) if any(word in name for word in words)] or sorted(where)
    return ", ".join(likely[:most]) + (f" and {len(likely) - most} more" if len(likely) > most else "")


def _tied(name: str, folder: Path) -> str:
    settings: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    declared = settings.get("tie_word_embeddings") if isinstance(settings, dict) else None
    if name.endswith(("lm_head.weight", "embed_out.weight")):
        return "head, tied by its configuration" if declared else "head of its own"
    if declared is False:
        return "input embedding; the head is another tensor, which is not here"
    return "input embedding, tied" if declared else "input embedding"

"""Finds the output head (or the embedding it is tied to) in a checkpoint, and reads it some rows at a time.

Only headers and the wanted rows are read: no model is built, and a head of any size needs the memory of one block. Of a
sharded model on the Hub only the shard that holds the head is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hyptree.errors import UserError, suggest
from hyptree.files import path_inside, read_json, weight_map
from hyptree.lab.lm_heads.rows import Matrix, loaded, read_gguf, read_safetensors
from hyptree.runs import best_file

HEADS = ("lm_head.weight", "embed_out.weight")
"""Ends of the names of output heads."""

CANDIDATES = (
    *HEADS,
    "wte.weight",
    "embed_tokens.weight",
    "text_model.embeddings.token_embedding.weight",
    "token_embedding.weight",
    "word_embeddings.weight",
    "shared.weight",
)
"""Ends of names in the order in which they are looked for: output heads, then embeddings of words."""

CLASSIFIERS = ("head.fc.weight", "head.weight", "classifier.weight", "fc.weight")
"""Names of the last layer of models that tell classes apart, looked for after :data:`CANDIDATES`; whole names."""

GGUF_CANDIDATES = ("output.weight", "token_embd.weight")
"""The same in GGUF files, which have names of their own."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class LMHead:
    """A matrix on disk, one row per word or class."""

    path: Path
    """File that holds it."""
    name: str
    num_rows: int
    width: int
    tied: str
    """Whether it is a head of its own or an embedding that serves as one, in words."""
    source: Matrix = field(repr=False, compare=False)
    time: Tensor | None = field(default=None, repr=False, compare=False)
    """(num_rows) what a head on the hyperboloid keeps beside each row: see :attr:`time_kind`."""
    time_kind: str = ""
    """``weight`` of the time component of its input, or the ``offset`` of a hyperplane from the origin."""

    def rows(self, block: int) -> Iterator[Tensor]:
        """All rows in order, at most ``block`` at a time, float32."""
        for start in range(0, self.num_rows, block):
            yield self.source.rows(start, min(start + block, self.num_rows))


def find_lm_head(path: Path | str, tensor: str | None = None, allow_pickle: bool = False) -> LMHead:
    """The head in a checkpoint.

    Args:
        path: a safetensors file, a folder with one, a folder with shards and their index, a GGUF file, a run of
            ``hyptree train``, or the name ``org/name`` of a model on the Hub.
        tensor: its name, or an end of it that no other name has; by default the first of :data:`CANDIDATES` and
            :data:`CLASSIFIERS` that is there.
        allow_pickle: also read torch's older files, by ``weights_only``.
    """
    text, path = str(path), Path(path)
    if not require_lm_head(path):
        # Asked first, and by the one call that does not try for half a minute where there is no network.
        info = _ask_hub(text, lambda hub: hub.HfApi().model_info(text, timeout=20))
        names = sorted(one.rfilename for one in info.siblings or () if "/" not in one.rfilename)

        def fetch(name: str) -> Path:
            return Path(_ask_hub(text, lambda hub: hub.hf_hub_download(text, name)))

        settings = fetch("config.json").parent if "config.json" in names else None
        where = {name: Path(file) for name, file in _files_of_tensors(names, fetch, text, is_here=False).items()}
        return _head(where, tensor, text, lambda file: read_safetensors(fetch(str(file))), settings)
    if path.is_dir() and (path / "recipe.yaml").is_file():
        path = best_file(path)
    if path.is_dir() and not any(path.glob("*.safetensors*")) and len(files := sorted(path.glob("*.gguf"))) == 1:
        path = files[0]
    if path.is_file() and path.suffix == ".gguf":
        matrices = read_gguf(path)
        return _head(dict.fromkeys(matrices, path), tensor, path, lambda _: matrices, None, GGUF_CANDIDATES)
    if path.is_file() and path.suffix in _PICKLES:
        tensors = {name: loaded(value) for name, value in _unpickle(path, allow_pickle).items()}
        return _head(dict.fromkeys(tensors, path), tensor, path, lambda _: tensors, path.parent)
    if path.is_dir():
        names, inside = sorted(file.name for file in path.iterdir()), partial(path_inside, path)
        where = {name: inside(file) for name, file in _files_of_tensors(names, inside, path).items()}
        return _head(where, tensor, path, read_safetensors, path)
    if path.suffix != ".safetensors":
        raise UserError(f"cannot read {path}: expected a .safetensors or .gguf file, or a folder that holds the first")
    return _head(dict.fromkeys(read_safetensors(path), path), tensor, path, read_safetensors, path.parent)


def _head(
    where: Mapping[str, Path],
    tensor: str | None,
    path: Path | str,
    read: Callable[[Path], Mapping[str, Matrix]],
    folder: Path | None,
    candidates: Sequence[str] = CANDIDATES,
) -> LMHead:
    """The chosen tensor with what lies beside it; ``folder`` is that of the model's own configuration."""
    name = _choose(where, tensor, path, candidates)
    if scales := sorted(other for other in where if other.startswith(f"{name}_scale")):
        raise UserError(f"{name} in {path} is quantised in parts that {scales[0]} scales; give weights that are not")
    settings = _settings(folder)
    sources = read(where[name])
    if name not in sources:
        raise UserError(f"{where[name]} is damaged: the index says that it holds {name}, and it does not")
    shape = sources[name].shape
    if len(shape) != 2 or min(shape) < 2:
        raise UserError(f"{name} in {path} has shape {shape}, expected (words, width) with two words or more")
    rows, width = shape
    declared = settings.get("tie_word_embeddings")
    if candidates == GGUF_CANDIDATES and GGUF_CANDIDATES[0] not in where:
        declared = True  # such a file says so by what it leaves out
    head = LMHead(where[name], name, rows, width, _tied(name, declared), sources[name])
    for kind, end in (("weight", "weight_time"), ("offset", "offset")):
        beside = f"{name.removesuffix('weight')}{end}" if name.endswith("weight") else ""
        if beside in where:
            time = read(where[beside])[beside]
            if time.shape in ((rows,), (rows, 1)):
                return replace(head, time=time.rows(0, rows).reshape(rows), time_kind=kind)
    # Only where the embedding is in the same file: that of a large model may be in a shard that is not here.
    inputs = [other for other in sources if other.endswith("embed_tokens.weight")]
    if name.endswith(HEADS) and len(inputs) == 1:
        is_wider = sources[inputs[0]].shape == (rows, width - 1)
    else:
        is_wider = settings.get("model_type") == "helm" and settings.get("hidden_size") == width - 1
    return _split_time(head) if is_wider else head


def _split_time(head: LMHead, block: int = 8192) -> LMHead:
    """A head one wider than the embedding of its model: HELM's, whose last column multiplies the time of points."""
    time = torch.empty(head.num_rows)
    for place, rows in zip(time.split(block), head.rows(block), strict=True):
        place.copy_(rows[:, -1])
    width = head.width - 1
    return replace(head, width=width, source=head.source.columns(width), time=time, time_kind="weight")


def _files_of_tensors(
    names: Sequence[str], get: Callable[[str], Path], path: Path | str, is_here: bool = True
) -> dict[str, str]:
    """Name of every tensor to the name of its file, from headers alone.

    Args:
        names: of the files of a model. get: a file on this machine.
        is_here: files cost nothing to look into. On the Hub only an index, or a single file of weights, is fetched.
    """
    for kind in (".safetensors.index.json", ".safetensors"):
        files = [name for name in names if name.endswith(kind)]
        if f"model{kind}" in files and (kind != ".safetensors" or not is_here):
            files = [f"model{kind}"]
        if len(files) > 1 and (kind != ".safetensors" or not is_here):
            raise UserError(f"{path} holds several models: {', '.join(files)}; give the path of a file of weights")
        if files and kind != ".safetensors":
            return weight_map(get(files[0]))
    where: dict[str, str] = {}
    for file in files:
        for name in read_safetensors(get(file)):
            if name in where:
                raise UserError(f"{path}: both {where[name]} and {file} hold {name}; give the path of one of them")
            where[name] = file
    if files:
        return where
    if pickles := [name for name in names if Path(name).suffix in _PICKLES]:
        if is_here:
            _refuse(get(pickles[0]))
        raise UserError(f"{path} has only pickles, which can run code when they are opened; no safetensors")
    raise UserError(f"{path} holds no .safetensors file")


def _unpickle(path: Path, allowed: bool) -> dict[str, Tensor]:
    if not allowed:
        _refuse(path)
    from zipfile import is_zipfile

    try:  # torch's first format was no zip file, and only those are mapped
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # what is no pickle can fail anywhere in it
        raise UserError(
            f"cannot read {path}: it is damaged, not what torch.save writes, or holds more than tensors, which "
            "weights_only does not open"
        ) from error
    named = loaded.items() if isinstance(loaded, dict) else ()
    tensors = {name: value for name, value in named if isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{path} holds no tensors by name")
    return tensors


def _refuse(path: Path) -> None:
    raise UserError(
        f"{path} is a pickle, which can run code when it is opened; convert it to safetensors, "
        "or name the file and add --allow-pickle to read it by weights_only"
    )


def _choose(where: Mapping[str, Path], tensor: str | None, path: Path | str, candidates: Sequence[str]) -> str:
    if tensor is not None:
        matches = [tensor] if tensor in where else [name for name in where if name.endswith(f".{tensor}")]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise UserError(f"{path} has several tensors {tensor!r}; give the whole name: {_alike(matches)}")
        hint = suggest(tensor, where) or f"tensors with 'embed', 'head' or 'wte': {_alike(where)}"
        raise UserError(f"{path} has no tensor {tensor!r}; {hint}")
    for end in candidates:
        matches = sorted((name for name in where if name == end or name.endswith(f".{end}")), key=len)
        if matches:
            return matches[0]
    for name in CLASSIFIERS:
        if name in where:
            return name
    raise UserError(f"no head found in {path}; name one with --tensor: {_alike(where)}")


def _alike(where: Mapping[str, Path] | Sequence[str], most: int = 8) -> str:
    words = ("embed", "head", "wte", "token", "classifier")
    likely = [name for name in sorted(where) if any(word in name for word in words)] or sorted(where)
    return ", ".join(likely[:most]) + (f" and {len(likely) - most} more" if len(likely) > most else "")


def _settings(folder: Path | None) -> dict[str, Any]:
    """What the model's own configuration says; empty where there is none."""
    return read_json(folder / "config.json") if folder and (folder / "config.json").is_file() else {}


def _tied(name: str, declared: Any) -> str:
    if name.endswith(HEADS) or name == GGUF_CANDIDATES[0]:
        return "head, tied by its configuration" if declared else "head of its own"
    if name in CLASSIFIERS:
        return "classifier"
    if not name.endswith((*CANDIDATES, GGUF_CANDIDATES[1])):
        return "named"
    if declared is False:
        return "input embedding; the head is another tensor, which is not here"
    return "input embedding, tied" if declared else "input embedding"


T = TypeVar("T")

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def require_lm_head(path: Path | str) -> bool:
    """Whether a head is on this machine; False where the text can only be the name of a model on the Hub.

    A misspelt folder beside others is an error: it must not be looked for on the network.
    """
    here, is_file = Path(path).exists(), str(path).endswith((".safetensors", ".gguf"))
    if not here and (is_file or not _REPO.fullmatch(str(path)) or Path(path).parent.exists()):
        raise UserError(f"cannot read {path}: no such file or folder")
    return here


def _ask_hub(repo: str, question: Callable[[Any], T]) -> T:
    """An answer about a model ``org/name``. What was fetched stays in the Hub's own cache."""
    try:
        return question(import_module("huggingface_hub"))
    except Exception as error:  # its own errors, those of its HTTP library, of the disk: all mean "not to be had"
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{repo} is no file or folder here, and the Hub did not give it: {text}") from error

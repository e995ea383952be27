"""Tokens on disk: tokenised once, then mapped into memory, with the boundaries of the documents.

A folder per (text, tokenizer), named by a fingerprint of both: ``tokens.bin`` (uint16 or uint32, one document after the
other), ``starts.bin`` (int64, where each document begins) and ``about.json``. It is there as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyptree.data.text.sources import TextSource
from hyptree.data.text.tokenizer import Encoder, tokenizer_fingerprint
from hyptree.errors import UserError
from hyptree.files import new_folder

_VERSION = 1
"""Of what is in the folder."""
_BATCH = 1 << 20
"""Characters that are tokenised at once."""
_CHECKED = 1 << 30
"""Files up to so many bytes are read once to compare their checksum when they are opened; larger ones are trusted."""


@dataclass(frozen=True)
class Tokens:
    """A text as tokens, with the boundaries of its documents."""

    tokens: np.ndarray
    """(num_tokens,) one document after the other."""
    starts: np.ndarray
    """(num_documents,) where each begins."""
    fingerprint: str
    """Names text and tokenizer."""
    folder: Path | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, their begins and ends included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents that have tokens."""
        return len(self.starts)

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        end = self.starts[index + 1] if index + 1 < len(self.starts) else len(self.tokens)
        return self.tokens[self.starts[index] : end]

    def __reduce__(self) -> Any:
        # A mapped file goes to another process by its name, not by its content.
        if self.folder is not None:
            return _open, (self.folder, self.fingerprint)
        return Tokens, (self.tokens, self.starts, self.fingerprint)


def tokens_of(source: TextSource, tokenizer: Any, folder: Path | str, bos: bool = True, eos: bool = True) -> Tokens:
    """The tokens of a text, from the cache in ``folder`` if they are there, whole and of this text and tokenizer.

    Raises:
        UserError: the text is empty or cannot be read, or the cache cannot be written.
    """
    rules = (_VERSION, source.fingerprint(), tokenizer_fingerprint(tokenizer), bos, eos)
    fingerprint = hashlib.sha256(repr(rules).encode()).hexdigest()
    place = Path(folder) / f"tokens-{fingerprint[:16]}"
    try:
        return _open(place, fingerprint)
    except (OSError, ValueError, KeyError):
        shutil.rmtree(place, ignore_errors=True)  # damaged, or half of it was deleted: it can be made again
    with new_folder(place) as work:
        _write(work, fingerprint, source, Encoder(tokenizer, bos, eos))
    return _open(place, fingerprint)


def in_memory(documents: Iterable[Iterable[int]], fingerprint: str = "memory") -> Tokens:
    """Tokens from documents that are tokens already; no file."""
    parts = [np.asarray(list(document), np.int64) for document in documents]
    parts = [part for part in parts if len(part)]
    if not parts:
        raise UserError("there are no tokens: every document is empty")
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    tokens = np.concatenate(parts)
    return Tokens(tokens.astype(np.uint32 if tokens.max() > 0xFFFF else np.uint16), starts, fingerprint)


def _write(work: Path, fingerprint: str, source: TextSource, encode: Encoder) -> None:
    num_tokens = num_documents = 0
    with (work / "tokens.bin").open("wb") as tokens, (work / "starts.bin").open("wb") as starts:
        for batch in _batches(source):
            documents = [ids for ids in encode(batch) if len(ids)]
            begins = num_tokens + np.cumsum([0, *map(len, documents)])
            starts.write(begins[:-1].astype("<i8").tobytes())
            tokens.write(b"".join(ids.astype(encode.dtype.newbyteorder("<")).tobytes() for ids in documents))
            num_tokens, num_documents = int(begins[-1]), num_documents + len(documents)
    if not num_tokens:
        hint = "; give val_path, or smaller documents, of which some can be held out" if source.held_out else ""
        raise UserError(f"{source.name}: there is no text in it{hint}")
    about = {
        "fingerprint": fingerprint,
        "text": source.name,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "dtype": encode.dtype.name,
        "checksums": {
            name: zlib.crc32(np.memmap(work / f"{name}.bin", mode="r").data) for name in ("tokens", "starts")
        },
    }
    (work / "about.json").write_text(json.dumps(about, indent=1), encoding="utf-8")


def _batches(source: Iterable[str]) -> Iterator[list[str]]:
    """Documents in lists of about ``_BATCH`` characters."""
    batch: list[str] = []
    size = 0
    for text in source:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _open(folder: Path, fingerprint: str) -> Tokens:
    """The tokens in a folder; ``OSError``, ``ValueError`` or ``KeyError`` when they are not what they should be."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    if about["fingerprint"] != fingerprint:
        raise ValueError(f"{folder} holds another text")
    arrays = {}
    for name, dtype, count in (
        ("tokens", {"uint16": "uint16", "uint32": "uint32"}[about["dtype"]], about["num_tokens"]),
        ("starts", "int64", about["num_documents"]),
    ):
        file = folder / f"{name}.bin"
        array = np.memmap(file, np.dtype(dtype).newbyteorder("<"), "r")
        if len(array) != count:
            raise ValueError(f"{file} holds {len(array)} numbers where {count} are expected")
        if array.nbytes <= _CHECKED and zlib.crc32(array.view(np.uint8).data) != about["checksums"][name]:
            raise ValueError(f"{file} is damaged (its checksum differs)")
        arrays[name] = array.view(np.ndarray)  # memmap's own indexing is several times slower
    return Tokens(arrays["tokens"], arrays["starts"], fingerprint, folder)

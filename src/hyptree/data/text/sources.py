"""Which documents belong to a split, and a fingerprint that changes when they do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hyptree.data.text.readers import find_files, read_documents
from hyptree.data.text.settings import Documents, TextSettings
from hyptree.errors import UserError

VERSION = 1
"""Of how documents are read and held out; caches are named by it, so raise it when that changes."""
SPLITS = ("train", "val", "test")
_WHOLE = 1 << 30
"""Files up to so many bytes are known by their whole content, larger ones by size, date and both ends."""
_CHUNK = 1 << 22


@dataclass(frozen=True)
class TextSource:
    """The documents of one split. Iterating reads them from the beginning, one at a time."""

    paths: tuple[Path, ...] = ()
    """Files and folders; empty for the built-in corpus."""
    documents: Documents = "auto"
    field: str = "text"
    num_documents: int | None = None
    held_out: float = 0.0
    """Share of the documents that is validation; 0 when all of them belong to this split."""
    is_val: bool = False
    """Whether this source gives the documents that are held out, or the others."""

    @property
    def name(self) -> str:
        """How messages call this text."""
        names = str(self.paths[0]) if self.paths else "the built-in text"
        if len(self.paths) > 1:
            names += f" and {len(self.paths) - 1} more"
        if not self.held_out:
            return names
        return f"{names} ({'validation' if self.is_val else 'training'} share)"

    def __iter__(self) -> Iterator[str]:
        texts = islice(self._all(), self.num_documents)
        if not self.held_out:
            yield from texts
            return
        for text, is_val in hold_out(texts, self.held_out):
            if is_val == self.is_val:
                yield text

    def _all(self) -> Iterator[str]:
        if not self.paths:
            yield from builtin_documents()
        for file in find_files(self.paths):
            yield from read_documents(file, self.documents, self.field)

    def fingerprint(self) -> str:
        """Hexadecimal digits that are equal for equal text, read in the same way."""
        rules = (VERSION, self.documents, self.field, self.num_documents, self.held_out, self.is_val)
        digest = hashlib.sha256(repr(rules).encode())
        if not self.paths:
            for text in builtin_documents():
                digest.update(hashlib.sha256(text.encode()).digest())
        for file in find_files(self.paths):
            digest.update("".join(file.suffixes[-2:]).encode())
            digest.update(_digest(file))
        return digest.hexdigest()


def builtin_documents() -> Iterator[str]:
    """The English reference text inside CPython, one document for each topic, sorted by the topics' names."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def hold_out(documents: Iterable[str], share: float) -> Iterator[tuple[str, bool]]:
    """Every document, and whether it is held out: the next one whenever less than ``share`` of the characters is.

    So the share holds at any length of text, and whether a document is chosen does not depend on its own size.
    """
    total = held = 0
    for text in documents:
        is_val = held < share * total
        total += len(text)
        held += len(text) if is_val else 0
        yield text, is_val


def source_of(settings: TextSettings, split: str) -> TextSource:
    """The documents that the settings mean by ``train``, ``val`` or ``test``; ``test`` is the same text as ``val``.

    Raises:
        UserError: no such split.
    """
    if split not in SPLITS:
        raise UserError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    is_val = split != "train"
    common = {"documents": settings.documents, "field": settings.field, "num_documents": settings.num_documents}
    if settings.val_path:
        return TextSource(settings.val_path if is_val else settings.path, **common)  # type: ignore[arg-type]
    return TextSource(settings.path, **common, held_out=settings.val_share, is_val=is_val)  # type: ignore[arg-type]


def _digest(file: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        about = file.stat()
        with file.open("rb") as stream:
            if about.st_size <= _WHOLE:
                return hashlib.file_digest(stream, "sha256").digest()
            digest.update(f"{about.st_size} {about.st_mtime_ns}".encode())
            digest.update(stream.read(_CHUNK))
            stream.seek(-_CHUNK, 2)
            digest.update(stream.read(_CHUNK))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    return digest.digest()

"""Which documents belong to a split, and a fingerprint that changes when they do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hyptree.data.text.settings import Documents, TextSettings
from hyptree.errors import UserError, require
from hyptree.files import json_lines, open_packed

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


# ------------------------------------------------------------------------------------------------------------- readers
# Plain text, JSON lines and parquet, one document in memory at a time. Nothing of a text is changed. Between paragraphs
# and articles the blank lines are left out, since the boundary says the same; empty documents are left out as well.


_COMPRESSED = (".gz", ".xz")
_JSON = (".jsonl", ".ndjson")
_PARQUET = (".parquet",)
_TEXT = (".txt", ".text", ".md")
_TITLE = re.compile(r"= (?![= ]).*(?<![= ]) =")
"""A line like ``= Anarchism =``; ``= = Origins = =`` and ``== Origins ==`` are sections."""


def find_files(paths: tuple[Path, ...]) -> list[Path]:
    """The files among ``paths`` and inside its folders, those of a folder sorted by name.

    Raises:
        UserError: a path is not there, or a folder holds no text.
    """
    files: list[Path] = []
    for path in (path.expanduser() for path in paths):
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and _is_text(file, path))
            if not inside:
                kinds = ", ".join((*_TEXT, *_JSON, *_PARQUET))
                raise UserError(f"{path}: no text in this folder; expected files that end in {kinds} (or .gz, .xz)")
            files.extend(inside)
        else:
            raise UserError(f"cannot read {path}: no such file or folder")
    return files


def read_documents(file: Path, documents: Documents = "auto", field: str = "text") -> Iterator[str]:
    """The documents of one file, in their order; its name tells what it is, any unknown name means plain text.

    Raises:
        UserError: not UTF-8, not JSON, no such field, a damaged archive; each with the place.
    """
    kind = _kind(file)
    if kind in _PARQUET:
        texts = _read_parquet(file, field)
    elif kind in _JSON:
        texts = _read_json(file, field)
    else:
        texts = _read_text(file, documents)
    yield from (text for text in texts if text.strip())


def _kind(file: Path) -> str:
    """The suffix that says what is inside, without that of a compression."""
    name = file.with_suffix("") if file.suffix.lower() in _COMPRESSED else file
    return name.suffix.lower()


def _is_text(file: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return not hidden and _kind(file) in (*_TEXT, *_JSON, *_PARQUET)


def _lines(file: Path) -> Iterator[str]:
    """The lines of a file with their ends, decoded one by one, so that an error can name the byte."""
    offset = 0
    with open_packed(file, "rb") as stream:
        for number, line in enumerate(stream):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                where = offset + error.start
                raise UserError(
                    f"{file} is not UTF-8: byte {line[error.start]:#04x} at offset {where}; convert it to UTF-8 first"
                ) from error
            offset += len(line)
            yield text.removeprefix("\ufeff") if number == 0 else text  # the mark some editors put before the text


def _read_text(file: Path, documents: Documents) -> Iterator[str]:
    if documents == "files":
        yield "".join(_lines(file))
    elif documents == "lines":
        yield from (line.rstrip("\r\n") for line in _lines(file))
    else:
        yield from _split(_lines(file), documents)


def _split(lines: Iterator[str], documents: Documents) -> Iterator[str]:
    """Documents that begin after blank lines: each of them, or those with a title."""
    articles = {"articles": True, "paragraphs": False}.get(documents)  # None: the first line decides
    current: list[str] = []
    after_blank = True
    for line in lines:
        if not line.strip():
            after_blank = True
            if articles and current:
                current.append(line)
            continue
        is_title = _TITLE.fullmatch(line.strip()) is not None
        if articles is None:
            articles = is_title
        if current and after_blank and (is_title or not articles):
            yield _join(current)
            current = []
        current.append(line)
        after_blank = False
    yield _join(current)


def _join(lines: list[str]) -> str:
    """The lines of a document, without the blank ones at its end and the last line's end."""
    while lines and not lines[-1].strip():
        lines.pop()
    return "".join(lines).removesuffix("\n").removesuffix("\r")


def _read_json(file: Path, field: str) -> Iterator[str]:
    for where, record in json_lines(_lines(file), file):
        if field not in record:
            raise UserError(f"{where} has no field {field!r}, only {_names(record)}; set field")
        yield _checked(record[field], field, where)


def _read_parquet(file: Path, field: str) -> Iterator[str]:
    parquet: Any = require("pyarrow.parquet", "parquet", f"reading {file}")
    with open_packed(file, "rb"):  # for its words on what goes wrong
        try:
            table = parquet.ParquetFile(file)
        except ValueError as error:  # what pyarrow raises for any damage is one
            raise UserError(f"{file} is not a whole parquet file: {' '.join(str(error).split())}") from error
        names = list(table.schema_arrow.names)
        if field not in names:
            raise UserError(f"{file} has no column {field!r}, only {_names(names)}; set field")
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0).to_pylist():
                row += 1
                yield _checked(text, field, f"{file} row {row}")


def _names(names: Any) -> str:
    return ", ".join(map(repr, names)) or "no fields at all"


def _checked(text: Any, field: str, where: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{where}: field {field!r} must hold text, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise UserError(f"{where}: {text[error.start]!r} at character {error.start} is no Unicode character") from error
    return text

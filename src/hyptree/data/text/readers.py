"""From files to documents: plain text, JSON lines and parquet, one document in memory at a time.

Nothing of a text is changed. Between paragraphs and articles the blank lines are left out, since the boundary says the
same; empty documents are left out as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyptree.data.text.settings import Documents
from hyptree.errors import UserError, require
from hyptree.files import json_lines, open_packed

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

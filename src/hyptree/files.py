"""Files that are whole or not there: written beside their place, synced, renamed. Imports no torch by itself."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hyptree.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_HOST = "".join(letter for letter in platform.node() if letter.isalnum()) or "host"


def write_atomic(path: Path | str, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a temporary path beside ``path``, sync what it wrote, and rename it into place.

    A kill at any moment leaves the old file or the new one.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the umask allows; some writers (safetensors 0.8) shut others out
        write(temporary)
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)  # the rename itself is safe once the folder is on disk


def require_path(path: Path | str, kind: str = "file or folder", then: str = "") -> None:
    """Raise unless it is there. Verbs ask this first: importing torch, to find out then, takes seconds.

    Args:
        kind: what is missing, in words.
        then: what to do about it.
    """
    if not Path(path).exists():
        raise UserError(f"{path}: no such {kind}" + (f"; {then}" if then else ""))


def read_json(path: Path | str, *keys: str) -> dict[str, Any]:
    """What a JSON file of keys and values says.

    Args:
        keys: what it must have.

    Raises:
        UserError: it cannot be read, or is not such a file.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    missing = [key for key in keys if not isinstance(values, dict) or key not in values]
    if missing or not isinstance(values, dict):
        raise UserError(f"{path} is damaged: it has no {missing[0] if missing else 'keys and values'}")
    return values


@contextmanager
def open_packed(path: Path | str, mode: str = "rt", hint: str = "") -> Iterator[Any]:
    """A file to read, plain or compressed (.gz, .xz): bytes (``rb``), or text in UTF-8 with the ends of lines it has.

    Args:
        hint: what kind of text is expected, for the message.

    Raises:
        UserError: it is not there, not whole or no text; at any moment while it is open.
    """
    import csv
    import gzip
    import lzma
    import zlib

    path = Path(path)
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    options = {} if "b" in mode else {"encoding": "utf-8-sig", "newline": ""}
    try:
        with openers.get(path.suffix.lower(), open)(path, mode, **options) as file:
            yield file
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8{hint and '; ' + hint}") from error
    except FileNotFoundError as error:
        raise UserError(f"cannot read {path}: no such file") from error
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} is not a whole {path.suffix} file: {error}") from error
    except (OSError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def json_lines(lines: Iterable[str], path: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line of a file of JSON records is, and the record; blank lines are left out."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected a record {{...}}, got {type(record).__name__}")
        yield where, record


def find_file(folder: Path | str, inner: str, names: Iterable[str], what: str) -> Path:
    """The first of these files that is in a folder, or in its folder ``inner``.

    Args:
        what: whose folder it must be, for the message.
    """
    names = list(names)
    for place in (Path(folder), Path(folder, inner)):
        for name in names:
            if (place / name).is_file():
                return place / name
    raise UserError(f"{folder} has no {names[0]}; it must be the folder of {what}, or the one above")


def cache_folder(name: str) -> Path:
    """Where what can be made again is kept: ``name`` in HYPTREE_CACHE, else in ``.cache/hyptree`` in this folder."""
    return Path(os.environ.get("HYPTREE_CACHE") or Path(".cache") / "hyptree") / name


def data_folder() -> Path:
    """Where files lie that everybody has one copy of (WordNet, tasks): HYPTREE_DATA, else ``data`` in this folder."""
    return Path(os.environ.get("HYPTREE_DATA") or "data")


def sync(path: Path) -> None:
    """Bring a file to disk, or renames inside a folder."""
    if os.name == "posix":
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextmanager
def new_folder(folder: Path, what: str = "", advice: str = "name another cache folder") -> Iterator[Path]:
    """An empty folder to fill; afterwards it is ``folder``, with every byte on disk.

    A kill at any moment leaves either no ``folder`` or a whole one. Of two processes that make the same, the first to
    finish wins, and the other's work, which is equal, is removed.

    Args:
        what: what is written, for the message.
        advice: what to do when the disk is full, beside freeing space.

    Raises:
        UserError: it cannot be written, or the disk is full.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.{_HOST}.{os.getpid()}.", dir=folder.parent))
        try:
            yield work
            for path in [*work.iterdir(), work]:
                sync(path)
            work.chmod(0o755)  # mkdtemp makes folders that nobody else may read
            try:
                os.rename(work, folder)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            sync(folder.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        why = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise UserError(f"cannot write {what}{folder}: {why}; free some space, or {advice}") from error


def _remove_leftovers(folder: Path) -> None:
    """What processes of this machine left when they were killed while making this folder."""
    import psutil

    for left in folder.parent.glob(f".{glob.escape(folder.name)}.{_HOST}.*.*"):
        pid = left.name.split(".")[-2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def path_inside(folder: Path | str, name: str, where: str = "") -> Path:
    """``folder / name`` for a name that was read from a file others may have written.

    Args:
        where: that file, and the place in it, for the message.

    Raises:
        UserError: the name leads out of the folder, or is no plain name on every system.
    """
    parts = re.split(r"[/\\]", name)
    if re.match(r"[A-Za-z]:", name) or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise UserError(
            f"{where + ': ' if where else ''}{name!r} is not the name of a file inside a folder; expected one below "
            f"{folder}: mend the name, or do not trust the file that says so"
        )
    return Path(folder, *parts)


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically, UTF-8."""
    write_atomic(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def open_log(path: Path) -> IO[str]:
    """A text file of a run to append to.

    Raises:
        UserError: it is a link. What is renamed into place replaces one; what is appended would follow it.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a link to {path.readlink()}; remove it: a run writes inside its own folder")
    return path.open("a", encoding="utf-8")


def read_log(path: Path, key: str) -> list[dict[str, Any]]:
    """The lines of a log of JSON objects with ``key`` in them; none without a file.

    A last line that a kill cut short is left out.

    Raises:
        UserError: any other line is damaged.
    """
    lines: list[dict[str, Any]] = []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(texts):
                break
            raise UserError(f"{path}: line {number} is not JSON; mend the line or delete it") from error
        if not isinstance(line, dict) or key not in line:
            raise UserError(f"{path}: line {number} has no {key!r}; is this the log of another program?")
        lines.append(line)
    return lines


def cut_log(path: Path, key: str, last: int) -> None:
    """Drop the lines beyond ``last``, which the checkpoint does not have: what they tell of will be run again."""
    if path.is_file():
        write_text(path, "".join(json.dumps(line) + "\n" for line in read_log(path, key) if line[key] <= last))


def save_tensors(
    path: Path | str, tensors: dict[str, Tensor], state: dict[str, Any] | None = None, **metadata: str
) -> None:
    """Write tensors and a JSON-able state into one safetensors file, atomically.

    One file, so that tensors, counters and the digest of both can never come from different moments. Digest and state
    lie in the header under the key ``state``: one key, because safetensors writes several in any order.

    Args:
        metadata: further words of the header, for other programs.
    """
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(state or {})
    metadata["state"] = f"{_digest(plain, text)} {text}"
    write_atomic(path, lambda temporary: save_file(plain, temporary, metadata))


def load_tensors(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`save_tensors` wrote; the state is empty where none was written.

    Raises:
        UserError: no such file, or one whose content is not what was written. A file of another program has no digest
            to compare with.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise UserError(f"cannot read {path}: no such file")
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("state", "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if not text.startswith("{"):  # files of before they had a digest
            expected, _, text = text.partition(" ")
            if (present := _digest(tensors, text)) != expected:
                raise UserError(
                    f"{path} is damaged: its digest was {expected[:16]} when it was written and is {present[:16]} now; "
                    "copy it again from where it is whole, or make it again"
                )
        return tensors, json.loads(text)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def check_weights(path: Path | str) -> None:
    """Raise if weights that another library will read are not what :func:`save_tensors` wrote.

    Args:
        path: a safetensors file, or a folder with some; those of other programs pass unread. Of a name on the Hub what
            was fetched before, if anything was.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).exists():
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # no name of the Hub either
            cached = try_to_load_from_cache(str(path), "config.json")
            path = Path(cached).parent if isinstance(cached, str) else path
    path = Path(path)
    shards = {path / file for index in path.glob("*.index.json") for file in weight_map(index).values()}
    for file in sorted({*path.glob("*.safetensors"), *shards}) if path.is_dir() else [path]:
        try:
            with safe_open(file, "pt") as opened:
                is_ours = "state" in (opened.metadata() or {})
        except (OSError, SafetensorError):  # whoever reads it says so in words of its own
            continue
        if is_ours:
            load_tensors(file)


def weight_map(index: Path) -> dict[str, str]:
    """Name of each tensor to the name of its file, of the index of a checkpoint in several files beside it.

    Raises:
        UserError: no such index, or one that names a file outside its folder.
    """
    names: dict[str, str] = read_json(index, "weight_map")["weight_map"]
    if not isinstance(names, dict):
        raise UserError(f"{index} is damaged: its weight_map names no files")
    for file in {str(name) for name in names.values()}:
        path_inside(index.parent, file, str(index))
    return names


def sign_weights(folder: Path | str) -> None:
    """Write the weights in a folder of ``save_pretrained`` again, with the digest that :func:`check_weights` wants."""
    for path in Path(folder).glob("*.safetensors"):
        save_tensors(path, load_tensors(path)[0], format="pt")


def hash_tensors(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Feed a hash of ``hashlib`` with names, shapes, dtypes and numbers of tensors, by name."""
    import torch

    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _digest(tensors: dict[str, Tensor], state: str) -> str:
    """SHA-256 over everything a file says: half a second a gigabyte."""
    import torch

    digest = hashlib.sha256(state.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


@contextmanager
def full_disk_is_one_line(folder: Path, then: str = "go on with --resume") -> Iterator[None]:
    """Turns "no space left" into a ``UserError``, whoever met it: Python, or safetensors in its own words.

    Args:
        then: what to do once there is space.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        full = isinstance(error, OSError) and error.errno in codes
        if not full and any(f"(os error {code})" in str(error) for code in codes):
            full = type(error).__name__ == "SafetensorError"
        if not full:
            raise
        why = "; ".join(str(error).split("\n")[:1])
        raise UserError(
            f"the disk of {folder} is full or its quota is used up ({why}); what was saved before is whole: "
            f"free some space and {then}"
        ) from error

"""Tables of runs and fits on disk: Parquet where pyarrow is installed, else CSV; read back with their types."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hyptree.errors import UserError, as_called, require
from hyptree.files import open_packed, write_atomic, write_text
from hyptree.lab.sweeps.folder import read_complete_parts
from hyptree.tables import to_csv

COLUMNS: dict[str, type] = {
    "part": str,
    "n": int,
    "m": int,
    "dist": str,
    "alpha": float,
    "gamma": float,
    "density": float,
    "curvature": float,
    "seed": int,
    "steps": int,
    "batch": int,
    "lr": float,
    "warmup": float,
    "bias_init": str,
    "loss_train": float,
    "loss_eval": float,
    "loss_se": float,
    "phi_half": float,
    "phi_one": float,
    "mso_all": float,
    "mso_strong": float,
    "mso_lorentz": float,
    "mso_positive": float,
    "max_overlap": float,
    "welch": float,
    "silent": float,
    "first_silent": float,
    "loss_unlearned": float,
    "regime": str,
    "diverged": bool,
}
"""Of the table of runs, one row per model."""


def write_runs(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the table of runs into a folder, atomically; gives the file."""
    if find_spec("pyarrow") is None:
        write_text(folder / "runs.csv", to_csv(rows))
        return folder / "runs.csv"
    # By kind: a column of whole numbers that are meant as any number must not become one of integers.
    typed = [{name: kind(row[name]) for name, kind in COLUMNS.items() if name in row} for row in rows]
    table = import_module("pyarrow").Table.from_pylist(typed)
    write_atomic(folder / "runs.parquet", lambda path: import_module("pyarrow.parquet").write_table(table, path))
    return folder / "runs.parquet"


def read_runs(path: Path | str, say: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The rows of a table of runs: the file itself, or the folder of a sweep.

    Args:
        say: reads a sweep that is not finished as far as its parts are complete, and is called with a line that names
            the others. Without it such a folder is refused: nobody would hear that models are missing.
    """
    path = Path(path)
    if path.is_dir():
        files = [path / name for name in ("runs.parquet", "runs.csv") if (path / name).is_file()]
        if not files:
            unfinished = (path / "config.json").is_file()
            if unfinished and say is not None:
                parts, line = read_complete_parts(path)
                say(line)
                return parts
            go_on = f"the sweep is not finished; go on with: {as_called('lab', 'sweep', '--resume', '--out', path)}"
            hint = go_on if unfinished else "hyptree lab sweep writes one"
            raise UserError(f"{path} holds no runs.parquet or runs.csv; {hint}")
        path = files[0]
    if path.suffix == ".parquet":
        parquet: Any = require("pyarrow.parquet", "parquet", f"reading {path}")
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        _require_columns(rows[0] if rows else COLUMNS, path)
        return rows
    with open_packed(path, hint="expected a table of runs") as file:
        reader = csv.DictReader(file)
        _require_columns(reader.fieldnames or (), path)
        return [_typed(row, path, number) for number, row in enumerate(reader, 2)]


def _require_columns(names: Collection[str], path: Path) -> None:
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise UserError(f"{path} is not a table of runs: it has no column {missing[0]!r}")


def _typed(row: dict[str, str], path: Path, number: int) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for name, kind in COLUMNS.items():
        text = row[name]
        try:
            typed[name] = {"True": True, "False": False}[text] if kind is bool else kind(text or "")
            if not text:  # of a line that was cut, every column is a text that is not there
                raise ValueError
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: line {number}: {name} must be a {kind.__name__}, got {text!r}") from error
    return typed

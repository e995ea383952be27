"""The folder of a sweep: made, checked before it goes on, and read back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyptree.errors import UserError, as_called
from hyptree.files import full_disk_is_one_line, load_tensors, read_json, write_text
from hyptree.lab.sweeps.grid import Grid

if TYPE_CHECKING:
    from torch import Tensor


def open_folder(out: Path, config: dict[str, Any], resume: bool, overwrite: bool) -> None:
    """Make the folder of a sweep, or check that what is there can go on."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file, expected a folder")
    written = out / "config.json"
    if resume:
        if difference := _difference(read_config(out), config):
            raise UserError(f"cannot resume {out}: {difference}; give the same settings, or choose another --out")
        return
    if written.is_file() or any((out / "parts").glob("*")):
        if not overwrite:
            raise UserError(
                f"{out} already holds a sweep; continue it with --resume, replace it with --overwrite, or choose --out"
            )
        for name in ("checkpoints", "parts", "weights", "figures"):
            if (out / name).exists():  # what cannot be removed would count as done
                shutil.rmtree(out / name)
        for name in ("runs.csv", "runs.parquet", "fits.csv", "index.html"):
            (out / name).unlink(missing_ok=True)
    with full_disk_is_one_line(out):
        for name in ("checkpoints", "parts"):
            (out / name).mkdir(parents=True, exist_ok=True)
        write_text(written, json.dumps(config, indent=1) + "\n")


def stored_parts(out: Path | str) -> list[Grid]:
    """The parts that the sweep in a folder was started with."""
    parts = read_config(Path(out))["parts"].values()
    return [Grid.from_dict(part) for part in parts]


def join_pieces(pieces: Sequence[tuple[dict[str, Tensor], dict[str, Any]]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What is in the file of a part of which every process wrote some models; in the order of the grid."""
    import torch

    places = [place for _, state in pieces for place in state["places"]]
    order = sorted(range(len(places)), key=places.__getitem__)
    rows = [row for _, state in pieces for row in state["rows"]]
    norms = torch.cat([tensors["norms"] for tensors, _ in pieces])
    return {"norms": norms[order]}, {"rows": [rows[i] for i in order], "places": sorted(places)}


def read_part(out: Path, name: str, num_models: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What is in the file of a part; nothing where the part is not complete.

    Several processes leave a file each, and one for all at the end of the sweep: before, theirs are read.
    """
    whole = out / "parts" / f"{name}.safetensors"
    if whole.is_file():
        return load_tensors(whole)
    files = sorted(whole.parent.glob(f"{escape(name)}.[0-9]*-of-[0-9]*.safetensors"))
    pieces = [load_tensors(path) for path in files]
    if sum(len(state["rows"]) for _, state in pieces) != num_models:
        return None
    return join_pieces(pieces)


def read_complete_parts(out: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows of all complete parts of a sweep that is not finished, and a line that says what is missing."""
    parts = {grid.name: read_part(out, grid.name, len(grid.models())) for grid in stored_parts(out)}
    rows = {name: part[1]["rows"] for name, part in parts.items() if part is not None}
    missing = ", ".join(name for name, part in parts.items() if part is None)
    go_on = f"go on with: {as_called('lab', 'sweep', '--resume', '--out', out)}"
    if not rows:
        raise UserError(f"the sweep in {out} is not finished, and no part of it is complete ({missing}); {go_on}")
    shown = ", ".join(f"{name} ({len(part)} models)" for name, part in rows.items())
    line = f"the sweep in {out} is not finished: shown is {shown}, missing is {missing or 'its table of runs'}; {go_on}"
    return [row for part in rows.values() for row in part], line


def read_config(out: Path) -> dict[str, Any]:
    """What the sweep in a folder was asked for."""
    written = out / "config.json"
    if not written.is_file():
        raise UserError(f"nothing to resume in {out}: it has no config.json; start without --resume")
    return read_json(written, "parts")


def _difference(before: Any, now: Any, key: str = "") -> str:
    """The first key in which two configurations differ, with both values; empty if there is none."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            path = f"{key}.{name}" if key else str(name)
            if name not in before or name not in now:
                return f"{path} is {'missing there' if name not in before else 'there, but not asked for now'}"
            if difference := _difference(before[name], now[name], path):
                return difference
        return ""
    return "" if before == now else f"{key} was {json.dumps(before)} and is now {json.dumps(now)}"

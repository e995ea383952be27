"""The folder of a sweep: made, checked before it goes on, and read back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ramify.errors import UserError
from ramify.files import full_disk_is_one_line, write_text
from ramify.lab.grid import Grid


def open_folder(out: Path, config: dict[str, Any], resume: bool, overwrite: bool) -> None:
    """Make the folder of a sweep, or check that what is there can go on."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file, expected a folder")
    written = out / "config.json"
    if resume:
        if difference := _difference(_read_config(out), config):
            raise UserError(f"cannot resume {out}: {difference}; give the same settings, or choose another --out")
        return
    if written.is_file():
        if not overwrite:
            raise UserError(
                f"{out} already holds a sweep; continue it with --resume, replace it with --overwrite, or choose --out"
            )
        for name in ("checkpoints", "parts", "weights", "figures"):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in ("runs.csv", "runs.parquet", "fits.csv"):
            (out / name).unlink(missing_ok=True)
    with full_disk_is_one_line(out):
        for name in ("checkpoints", "parts"):
            (out / name).mkdir(parents=True, exist_ok=True)
        write_text(written, json.dumps(config, indent=1) + "\n")


def stored_parts(out: Path | str) -> list[Grid]:
    """The parts that the sweep in a folder was started with."""
    parts = _read_config(Path(out))["parts"].values()
    return [Grid.from_dict(part) for part in parts]


def _read_config(out: Path) -> dict[str, Any]:
    written = out / "config.json"
    if not written.is_file():
        raise UserError(f"nothing to resume in {out}: it has no config.json; start without --resume")
    try:
        found: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{written} is damaged: {error}") from error
    for part in found["parts"].values():
        part.setdefault("curvature", [0.0])  # folders from before there was any
    return found


def _difference(before: Any, now: Any, key: str = "") -> str:
    """The first key in which two configurations differ, with both values; empty if there is none."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            path = f"{key}.{name}" if key else str(name)
            if name not in before or name not in now:
                return f"{path} is {'missing there' if name not in before else 'there, but not asked for now'}"
            if found := _difference(before[name], now[name], path):
                return found
        return ""
    return "" if before == now else f"{key} was {json.dumps(before)} and is now {json.dumps(now)}"

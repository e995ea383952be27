"""``hyptree runs [FOLDER]``: the runs in a folder, how far they are and what they came to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hyptree.cli.config import AsJson
from hyptree.files import read_json, require_path
from hyptree.runs import LAST, MANIFEST, RunFolder

COLUMNS = {
    "run": "{run}",
    "task": "{task}",
    "model": "{model}",
    "state": "{state}",
    "best": "{best}",
    "time": "{time}",
    "size": "{size}",
}


@dataclass
class RunsConfig(AsJson):
    """``hyptree runs``."""

    folder: Annotated[Path, "[FOLDER]"] = Path("runs")
    """Folder with runs in it, or in folders below it; or a run."""


def run(config: RunsConfig) -> None:
    """List runs: running, finished or stopped, with their best number, time and size, the latest last.

    A run that stopped goes on by hyptree train RUN --resume.
    """
    require_path(config.folder, "folder")
    recipes = sorted(config.folder.rglob("recipe.yaml"), key=lambda path: path.stat().st_mtime)
    rows = [about(RunFolder(path.parent)) for path in recipes]
    if config.json:
        print(json.dumps(rows))
        return
    from hyptree.tables import show

    print("\n".join(show([_in_words(row) for row in rows], COLUMNS)) if rows else f"no runs in {config.folder}")


def about(folder: RunFolder) -> dict[str, Any]:
    """One run in numbers: ``step`` is where it would go on, ``num_steps`` is None before its first checkpoint."""
    recipe, lines, best = folder.settings(), folder.read_metrics(), folder.about_best()
    manifest = folder.checkpoints / LAST / MANIFEST
    saved = read_json(manifest) if manifest.is_file() else {}
    step, num_steps = saved.get("step", 0), saved.get("num_steps")
    state = "running" if folder.is_running() else "finished" if num_steps and step >= num_steps else "stopped"
    return {
        "run": str(folder.path),
        "task": recipe.get("task", "classify"),
        "model": (recipe.get("model") or {}).get("name"),
        "state": state,
        "step": step,
        "num_steps": num_steps,
        "best": {name: value for name, value in best.items() if name != "step"},
        "best_step": best.get("step"),
        "seconds": max((line["time"] for line in lines), default=0.0),
        "bytes": sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file()),
    }


def _in_words(row: Mapping[str, Any]) -> dict[str, str]:
    """A row for people."""
    minutes, seconds = divmod(round(row["seconds"]), 60)
    where = f" at step {row['step']} of {row['num_steps'] or '?'}" if row["state"] != "finished" else ""
    return {
        **{name: str(row[name]) for name in ("run", "task", "model")},
        "state": row["state"] + where,
        "best": "  ".join(f"{name} {value:.4g}" for name, value in row["best"].items()),
        "time": f"{minutes // 60}:{minutes % 60:02}:{seconds:02}",
        "size": f"{row['bytes'] / 1e6:.1f} MB",
    }

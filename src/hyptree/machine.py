"""The machine, the versions and the commit that a measurement belongs to."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("hyptree", "torch", "geoopt", "hypll", "triton")


def header(device: str, packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Machine, versions and commit; nothing that names the user or the host."""
    machine: dict[str, Any] = {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda
    versions = {name: _version(name) for name in packages}
    return {
        "machine": machine,
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "date": _today(),
    }


def _today() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).strftime("%Y-%m-%d")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    if name == "hyptree":
        from hyptree import __version__

        return __version__
    if name == "torch":
        return torch.__version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that this file belongs to, with a + if the package has changes; None outside one."""
    package = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):  # installed below somebody else's checkout
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def machine_lines(head: dict[str, Any]) -> list[str]:
    """Two lines for people."""
    machine, versions = head["machine"], head["versions"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    if "gpu" in machine:
        where = f"{machine['gpu']}, CUDA {machine['cuda']}; {where}"
    named = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    return [
        f"machine   {where}",
        f"versions  python {head['python']}, {named}; commit {head['commit'] or 'unknown'}; {head['date']}",
    ]


def describe(packages: Sequence[str] = ("hyptree", "torch", "timm", "accelerate")) -> list[str]:
    """The machine with its GPU where there is one, and the versions of some packages."""
    return machine_lines(header("cuda" if torch.cuda.is_available() else "cpu", packages))

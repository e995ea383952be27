"""What is built for others: a wheel that is complete and holds the library alone, and its source."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hyptree

ROOT = Path(__file__).resolve().parents[2]
INFO = f"hyptree-{hyptree.__version__}.dist-info"
MOST_LINES = 66_000


def build(target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_wheel_is_the_package_and_nothing_else(wheel: Path, installed: Path) -> None:
    assert wheel.name == f"hyptree-{hyptree.__version__}-py3-none-any.whl"
    assert {path.name for path in installed.iterdir()} == {"hyptree", INFO}
    kept = {f"hyptree/{name}" for name in files(ROOT / "src" / "hyptree") if "__pycache__" not in name}
    kept |= {f"hyptree/recipes/{name}" for name in files(ROOT / "recipes")}
    assert {name for name in files(installed) if not name.startswith(INFO)} == kept
    assert {"hyptree/py.typed", "hyptree/config.py", "hyptree/recipes/demo.yaml"} <= files(installed)
    assert not [name for name in files(installed) if {"benchmarks", "results", "tests"} & set(Path(name).parts)]


def test_wheel_is_not_larger_than_a_reader_can_bear(installed: Path) -> None:
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in installed.rglob("*.py"))
    assert 10_000 < lines <= MOST_LINES


def test_wheel_says_what_it_is(installed: Path) -> None:
    assert "[console_scripts]\nhyptree = hyptree.cli:main" in (installed / INFO / "entry_points.txt").read_text()
    assert (installed / INFO / "licenses" / "LICENSE").is_file()
    metadata = (installed / INFO / "METADATA").read_text("utf-8")
    assert f"Version: {hyptree.__version__}\n" in metadata and "Requires-Python: >=3.11\n" in metadata
    assert re.search(r"^Project-URL: Changelog, https://", metadata, re.MULTILINE)


def test_wheel_runs_from_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "from hyptree.config import find_yaml; print(find_yaml('demo'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(installed / "hyptree" / "recipes" / "demo.yaml")


def test_source_has_what_the_wheel_and_its_tests_are_made_from(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "Makefile", "recipes/demo.yaml"} <= names
    assert {"src/hyptree/__init__.py", "tests/conftest.py", "benchmarks/__init__.py", "docs/CONTRIBUTING.md"} <= names

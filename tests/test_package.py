"""The package as a whole: quick to import, honest names, a wheel that is complete, one version."""

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
from hyptree import errors

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def test_import_is_quick_and_loads_no_torch(run_python):
    code = (
        "import time, sys; start = time.perf_counter(); import hyptree; print(time.perf_counter() - start);"
        "print([m for m in ('torch', 'numpy', 'tyro', 'yaml', 'rich') if m in sys.modules])"
    )
    runs = [run_python(code).splitlines() for _ in range(5)]
    assert min(float(run[0]) for run in runs) < 0.1
    assert all(run[1] == "[]" for run in runs)


def test_parts_load_on_first_use(run_python):
    code = "import sys, hyptree; assert 'hyptree.errors' not in sys.modules; print(hyptree.errors.__name__)"
    assert run_python(code).strip() == "hyptree.errors"


def test_dir_lists_the_parts_that_exist():
    names = dir(hyptree)
    assert {"cli", "errors", "__version__"} <= set(names)
    assert not [name for name in names if name.startswith("_") and name != "__version__"]
    for name in names:
        if name not in ("__version__", *hyptree._SHORTCUTS):
            folder = ROOT / "src" / "hyptree"
            assert (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def test_misspelt_attribute_gets_a_suggestion():
    with pytest.raises(AttributeError, match=r"no attribute 'erors'; did you mean 'errors'\?"):
        hyptree.erors
    with pytest.raises(AttributeError, match=r"no attribute 'zzzzzzzz'$"):
        hyptree.zzzzzzzz
    assert not hasattr(hyptree, "__wrapped__")


def test_shortcut_is_loaded_from_its_module(monkeypatch):
    monkeypatch.setitem(hyptree._SHORTCUTS, "UserError", "hyptree.errors")
    assert hyptree.UserError is errors.UserError
    assert "UserError" in dir(hyptree)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lorenz", "did you mean 'lorentz'?"), ("POINCARE", "did you mean 'Poincare'?"), ("xyz", ""), ("", "")],
)
def test_suggest(name, expected):
    assert errors.suggest(name, ["lorentz", "Poincare", "sphere"]) == expected


def test_require_gives_the_module_or_says_how_to_install_it(tmp_path, monkeypatch):
    import json.decoder

    assert errors.require("json.decoder") is json.decoder
    with pytest.raises(errors.UserError, match=r"this needs nosuchlib: pip install hyptree\[plot\]$"):
        errors.require("nosuchlib.pyplot", "plot")
    with pytest.raises(errors.UserError, match=r"this needs nosuchlib: pip install hyptree$"):
        errors.require("nosuchlib")
    # Installed but broken: the missing thing is another one, and saying "install it" would be a lie.
    (tmp_path / "brokenlib.py").write_text("import nosuchlib\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nosuchlib"):
        errors.require("brokenlib", "plot")


def test_as_user_error_puts_the_place_before_the_message():
    with pytest.raises(errors.UserError, match=r"^edges\.csv: row 3 has a cycle$"), errors.as_user_error("edges.csv"):
        raise ValueError("row 3 has a cycle")
    with pytest.raises(errors.UserError, match=r"^once$"), errors.as_user_error("place"):
        raise errors.UserError("once")
    with pytest.raises(KeyError), errors.as_user_error("place"):
        raise KeyError("not a value error")


def test_version_is_the_newest_of_the_changelog():
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == hyptree.__version__


def test_only_the_command_line_imports_tyro():
    """The library has to run where tyro is not installed."""
    package = ROOT / "src" / "hyptree"
    files = [path for path in package.rglob("*.py") if package / "cli" not in path.parents]
    assert package / "errors.py" in files
    guilty = [path for path in files if re.search(r"^\s*(import|from) tyro\b", path.read_text("utf-8"), re.MULTILINE)]
    assert not guilty


def test_wheel_is_complete(tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=ENV, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"hyptree-{hyptree.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"hyptree-{hyptree.__version__}.dist-info"
        assert "[console_scripts]\nhyptree = hyptree.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
        archive.extractall(tmp_path / "installed")
    assert {"hyptree/py.typed", "hyptree/__init__.py", "hyptree/config.py", f"{info}/licenses/LICENSE"} <= set(names)
    assert not [name for name in names if not name.startswith(("hyptree/", info))]
    for extra in ("lm", "vlm", "plot", "eval", "onnx", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata
    assert re.search(r"Requires-Python: >=3\.11\n", metadata)
    recipes = {f"hyptree/recipes/{path.name}" for path in (ROOT / "recipes").iterdir()}
    assert recipes and recipes <= set(names)
    code = "from hyptree.train.demo import demo_recipe; print(demo_recipe())"
    environment = ENV | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tmp_path / "installed" / "hyptree" / "recipes" / "demo.yaml")


def test_sdist_has_what_the_wheel_is_built_from(tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=ENV, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "recipes/demo.yaml", "src/hyptree/__init__.py"} <= names

"""The package as a whole: quick to import, honest names, errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

import hyptree
from hyptree import errors

ROOT = Path(__file__).resolve().parents[1]


def test_import_is_quick_and_loads_no_torch(run_python):
    code = (
        "import time, sys; start = time.perf_counter(); import hyptree; print(time.perf_counter() - start);"
        "print([m for m in ('torch', 'numpy', 'yaml', 'rich') if m in sys.modules])"
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

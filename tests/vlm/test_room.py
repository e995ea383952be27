"""The room's front door: every name it lists is there, and nothing is imported before it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ramify.vlm


@pytest.mark.parametrize("name", ramify.vlm.__all__)
def test_every_name_is_there(name: str):
    assert getattr(ramify.vlm, name).__name__ == name and name in dir(ramify.vlm)


def test_nothing_is_imported_early():
    code = "import sys, ramify.vlm; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False False\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'atach'"):
        _ = ramify.vlm.atach


def test_arrows_point_to_training_and_not_from_it():
    """The room knows nothing of those that use it; entry points, and runs that are loaded as encoders, excepted."""
    room = Path(ramify.vlm.__file__).parent
    allowed = {"openvocab/__main__.py", "world_clip.py"}
    wrong = []
    for path in sorted(room.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if name.startswith(("ramify.train", "ramify.evaluate", "ramify.explore", "ramify.bench")):
                wrong.append((path.relative_to(room).as_posix(), name))
    assert {path for path, _ in wrong} <= allowed, wrong

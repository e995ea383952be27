"""The house as docs/CONTRIBUTING.md draws it: arrows point one way, and the map names what is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "hyptree"
PAGE = (ROOT / "docs" / "CONTRIBUTING.md").read_text(encoding="utf-8")

ROOM_SIZE = 14
"""Files of one room, beside its own rooms: more, and nobody finds the file by guessing."""


def steps() -> list[list[str]]:
    """The line of arrows in the page: the rooms of each step, the lowest first."""
    (line,) = re.findall(r"^    (errors <- .*(?:\n    .*)*)", PAGE, re.MULTILINE)
    return [re.split(r",\s*", step.strip()) for step in line.split("<-")]


def imported(code: str, package: tuple[str, ...]) -> Iterator[str]:
    """Rooms that a module of ``package`` imports from, at its top or in a function."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "hyptree" and not rest.startswith("__"):
                yield rest.partition(".")[0]


def wrong_arrows(path: str, code: str) -> list[str]:
    """Rooms above or beside its own that the file at ``path`` (within the package) imports from."""
    rank = {room: number for number, step in enumerate(steps()) for room in step}
    parts = ("hyptree", *Path(path).with_suffix("").parts)
    room = parts[1]
    return [
        f"{path} imports from {other}"
        for other in sorted(set(imported(code, parts[:-1])) - {room})
        if rank[other] >= rank[room]
    ]


def files() -> dict[str, str]:
    return {p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8") for p in sorted(PACKAGE.rglob("*.py"))}


def test_arrows_point_one_way():
    whole = {"__init__.py", "__main__.py"}  # the package itself: they hand on to every room
    wrong = [arrow for path, code in files().items() if path not in whole for arrow in wrong_arrows(path, code)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "code", "room"),
    [
        ("geometry/lorentz.py", "from hyptree.nn import linear", "nn"),
        ("geometry/lorentz.py", "from ..ops.backend import choose", "ops"),
        ("ops/merge/triton.py", "def f():\n    from ...nn.precision import x", "nn"),
        ("train/loop.py", "import hyptree.cli.config", "cli"),
        ("lm/loss.py", "from hyptree import vlm", "vlm"),
        ("files.py", "from hyptree import geometry", "geometry"),
    ],
)
def test_a_wrong_arrow_is_seen(path: str, code: str, room: str):
    assert wrong_arrows(path, code) == [f"{path} imports from {room}"]


def test_curvatures_are_learned_in_one_way():
    """One class; and one function for modules whose state dict has its own name for the logarithm of a curvature."""
    classes = {path for path, code in files().items() if re.search(r"class \w*Curvature\w*\(.*Module", code)}
    assert classes == {"geometry/core/curvature.py"}
    own = re.compile(r"self\.(log_c|log_k|curv|log_curvature|kappa)\w* = nn\.Parameter")
    learning = [code for code in files().values() if own.search(code)]
    assert len(learning) == 2 and all("bounded_curvature(" in code for code in learning)


def test_no_room_is_too_full():
    rooms = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    full = {str(room.relative_to(PACKAGE)): len([*room.glob("*.py")]) for room in rooms}
    assert {room: number for room, number in full.items() if number > ROOM_SIZE} == {}


def test_modules_that_strings_name_are_there():
    """Tables such as ``"classify": "hyptree.train.tasks.classify:Classify"``, read when a name is asked for."""
    named = {
        (path, node.value)
        for path, code in files().items()
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"hyptree(\.\w+)+:\w+", node.value)
    }
    assert len(named) > 10
    missing = []
    for path, value in sorted(named):
        module, name = value.split(":")
        place = PACKAGE.parent / module.replace(".", "/")
        place = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        defined = re.compile(rf"^(?:def|class) {name}\b|^{name}\b", re.MULTILINE)
        if not place.is_file() or not defined.search(place.read_text(encoding="utf-8")):
            missing.append(f"{path}: {value}")
    assert not missing, "\n".join(missing)


def test_every_room_has_its_place_in_the_arrows():
    rooms = {path.partition("/")[0].removesuffix(".py") for path in files()} - {"__init__", "__main__"}
    named = [room for step in steps() for room in step]
    assert len(named) == len(set(named))
    assert set(named) == rooms


def test_the_map_names_what_is_there():
    """Every file that the map names is in the room it is listed under, or beside the rooms."""
    (block,) = re.findall(r"^    src/hyptree/\n((?:      .*\n)+)", PAGE, re.MULTILINE)
    entries = re.findall(r"^      (?! )(\S+)((?:.*\n(?:       .*\n)*))", block, re.MULTILINE)
    rooms = {name.rstrip("/"): text for name, text in entries}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {name for name in rooms if not name.endswith(".py")}
    for name, text in rooms.items():
        folder = PACKAGE / name if (PACKAGE / name).is_dir() else PACKAGE
        for file in re.findall(r"(?<![\w/.*])([\w*/]+\.py)\b", text):
            actual = [*folder.rglob(file), *PACKAGE.glob(file)]
            assert actual, f"{name}: {file}"


ALONE = """
import sys
for name in {blocked!r}.split():
    sys.modules[name] = None  # importing it fails
import warnings
warnings.simplefilter("ignore")  # torch says that it found no numpy
import torch
from hyptree import geometry
space = geometry.Lorentz(1.0)
x = space.expmap0(torch.tensor([[0.5, 0.0]])).requires_grad_()
space.dist(x, space.expmap0(torch.tensor([[-0.5, 0.0]]))).sum().backward()
print(space.dist0(x).item(), x.grad.isfinite().all().item())
"""


def test_geometry_needs_torch_alone(run_python):
    """Not even numpy. Only what torch itself imports (sympy, networkx) may be there."""
    blocked = (
        "numpy scipy sklearn skimage matplotlib PIL yaml rich safetensors accelerate torchvision timm "
        "transformers tokenizers open_clip diffusers triton fastcluster pyarrow"
    )
    radius, finite = run_python(ALONE.format(blocked=blocked)).split()
    assert float(radius) == pytest.approx(0.5) and finite == "True"


@pytest.mark.parametrize("room", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_every_exported_name_is_there(room: str):
    module = import_module(f"hyptree.{room}")
    names = list(getattr(module, "__all__", []))
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(module, name) is not None and name in dir(module)

"""The names that others rely on: what DESIGN promises is there, under that name, called that way."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import hyptree

ROOT = Path(__file__).resolve().parents[1]

SPACES = "Lorentz Poincare Euclidean Sphere Product"
QUESTIONS = "expmap0 logmap0 expmap logmap dist dist0 pairwise_dist inner centroid transport random"
HYPERBOLIC = "exterior_angle half_aperture to_ambient from_ambient"
NAMES = {
    "geometry": f"{SPACES} lorentz poincare",
    "optim": "RiemannianSGD RiemannianAdam",
    "tree": "Tree",
    "cluster": "agglomerate",
    "tokens": "patch patched unmerge draw",
    "models": "HiMapper",
    "lm": "HelmConfig HelmForCausalLM presets",
    "vlm": "attach ScaleAdapterConfig LatentHierarchyHead RadialLoss hierarchy_report",
    "lab": "sweep fit overlap",
    "explore": "page",
}


@pytest.mark.parametrize("part", NAMES)
def test_promised_names_are_there_and_listed(part: str) -> None:
    module = getattr(hyptree, part)
    for name in NAMES[part].split():
        assert hasattr(module, name), f"hyptree.{part}.{name}"
        assert name in dir(module), f"dir(hyptree.{part}) hides {name}"


def test_every_space_answers_the_same_questions() -> None:
    geometry = hyptree.geometry
    for space in SPACES.split():
        methods = QUESTIONS + (f" {HYPERBOLIC}" if space in ("Lorentz", "Poincare") else "")
        assert [name for name in methods.split() if not callable(getattr(getattr(geometry, space), name, None))] == []
    assert list(inspect.signature(geometry.Lorentz).parameters)[:2] == ["c", "learnable"]
    assert inspect.signature(geometry.Lorentz.pairwise_dist).parameters["mode"].default == "exact"


@pytest.mark.parametrize("space", ["lorentz", "poincare"])
def test_pure_functions_take_the_curvature_last(space: str) -> None:
    module: ModuleType = import_module(f"hyptree.geometry.{space}")
    for name in ("expmap0", "logmap0", "expmap", "logmap", "dist", "dist0", "pairwise_dist", "centroid", "transport"):
        inputs = inspect.signature(getattr(module, name)).parameters.values()
        positional = [one.name for one in inputs if one.kind is one.POSITIONAL_OR_KEYWORD]
        assert positional[-1] == "c", f"{space}.{name}{positional}"


def test_promised_arguments() -> None:
    agglomerate = inspect.signature(hyptree.cluster.agglomerate).parameters
    assert {"k", "threshold", "linkage", "backend"} < set(agglomerate)
    assert (agglomerate["linkage"].default, agglomerate["backend"].default) == ("average", "auto")
    patch = inspect.signature(hyptree.tokens.patch).parameters
    assert {"method", "keep", "layers", "linkage"} < set(patch) and patch["method"].default == "atc"
    assert list(inspect.signature(hyptree.explain).parameters)[:2] == ["model", "image"]


def test_models_are_registered_with_timm() -> None:
    import timm

    assert hyptree.models
    assert {f"hcformer_{size}" for size in ("nano", "tiny", "small", "medium")} <= set(timm.list_models("hcformer_*"))


SAYS_NOTHING = {
    *["found", "given", "made", "told", "said", "bring", "send", "Kept", "Start", "Held", "Bill", "rooms", "ROOMS"]
}
"""Names that cost every reader a look-up: a value is called what it is, and a thing by its field's word."""


def names_in(code: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def test_names_say_what_a_thing_is() -> None:
    assert names_in("class Kept:\n    def send(self, made):\n        self.told = found = made") == {
        "Kept", "send", "self", "made", "told", "found",
    }  # fmt: skip
    files = [path for folder in ("src", "benchmarks", "results", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    bad = {str(path): names_in(path.read_text(encoding="utf-8")) & SAYS_NOTHING for path in files}
    assert {path: names for path, names in bad.items() if names} == {}

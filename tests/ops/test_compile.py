"""What Triton's interpreter does not see of a kernel: whether it compiles for a GPU, and whether it can start there."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hyptree.ops

pytest.importorskip("triton")

COMPILE = """
import json
import torch
from benchmarks.kernels import resources as kernel_resources
from benchmarks.kernels.cases import Draw, Work, _patch_work
from hyptree.ops import pairwise_lorentz
from hyptree.ops.windows import Cut

def pairs(dim, mode):
    x = torch.empty(2, 70, dim, device="meta")
    run = lambda x, y: (pairwise_lorentz.pairwise_dist(x, y, 0.7, mode=mode, backend="triton"),)
    return Work((x, torch.empty(2, 9, dim, device="meta")), run, run, leaves=(0, 1))

draw = Draw("meta", 0)
cuts = {  # windows that go by in tiles, with fewer centres than a tile has patches, as many, and the widest heads
    "16 centres": Cut(32, 32, 2, 2, 16, 16, 0, 0, 4, 4, 1, 16, 2, 2),
    "21 centres": Cut(20, 24, 2, 2, 10, 12, 0, 0, 3, 7, 1, 8, 1, 2),
    "64 centres": Cut(32, 32, 1, 1, 32, 32, 0, 0, 8, 8, 1, 32, 1, 1),
}
works = {f"{name} {dtype}": _patch_work(draw, cut, 2, dtype)
         for name, cut in cuts.items() for dtype in (torch.float32, torch.bfloat16)}
works["64 centres, heads of 64"] = _patch_work(draw, cuts["64 centres"]._replace(dim=64), 2, torch.bfloat16)
works |= {f"pairs of {dim} {mode}": pairs(dim, mode) for dim in (33, 128, 256) for mode in ("exact", "matmul")}
for name, work in works.items():
    found = [kernel_resources.compiled(one) for one in kernel_resources.launches(work)]
    print(json.dumps({"name": name, "kernels": [one.as_dict() for one in found]}), flush=True)
"""


@pytest.mark.slow
def test_kernels_compile_and_can_start_whatever_the_sizes(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 13
    for line in lines:
        # Exact gradients of pairs have a kernel of their own for close points.
        expected = 2 + line["name"].startswith("pairs") + line["name"].endswith("exact")
        assert len(line["kernels"]) == expected, line["name"]
        for one in line["kernels"]:
            assert one["resident"] >= 1, (line["name"], one)


def test_no_loop_gives_a_throwaway_name_another_shape() -> None:
    """``_`` is a variable like others to Triton: assigned before a loop and inside, it has to keep its shape."""
    faults = []
    for path in sorted(Path(hyptree.ops.__path__[0]).rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in function.decorator_list):
                faults += [f"{path.name} {function.name}"] if is_carried(function) else []
    assert faults == []


def is_carried(function: ast.FunctionDef) -> bool:
    """Whether ``_`` is assigned before a loop of the function and in it."""
    before = False
    for statement in function.body:
        assigns = any(
            isinstance(x, ast.Name) and x.id == "_" and isinstance(x.ctx, ast.Store) for x in ast.walk(statement)
        )
        if isinstance(statement, ast.For | ast.While):
            if before and assigns:
                return True
        else:
            before = before or assigns
    return False


def test_the_check_sees_a_fault() -> None:
    text = "def f():\n    a, _ = g()\n    for i in range(3):\n        b, _ = h()\n"
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef) and is_carried(function)
    (function,) = ast.parse(text.replace("a, _", "a, c")).body
    assert isinstance(function, ast.FunctionDef) and not is_carried(function)

"""What the geometry costs to import: torch and no compiler."""

from __future__ import annotations

import torch

from hyptree.geometry.core.numerics import constant_when_compiled

HEAVY = ("torch._dynamo", "triton", "transformers", "timm", "matplotlib")


def test_the_geometry_loads_torch_alone(run_python):
    code = (
        "import sys, hyptree, hyptree.geometry, hyptree.nn, hyptree.optim, hyptree.cluster, hyptree.ops.agglomerate;"
        f"print('torch' in sys.modules, [m for m in {HEAVY} if m in sys.modules])"
    )
    assert run_python(code) == "True []\n"


def test_our_mark_of_a_constant_is_the_one_of_torch():
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert vars(constant_when_compiled(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}

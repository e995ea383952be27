"""Compiled and exported: one graph, the numbers of eager mode, and no graph that misses a patch or a switch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from hyptree import tokens
from tests.tokens.small_models import LAYERS, NUM_PATCHES, images, small_model


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def assert_same(compiled: Callable[[Tensor], Tensor], model: Callable[[Tensor], Tensor]) -> None:
    x = images()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "prop_attn"), [("vit", "mask"), ("registers_avg", "channel")])
def test_one_graph_that_follows_the_switches(kind: str, prop_attn: str) -> None:
    model = small_model(kind, depth=3)
    handle = tokens.patch(model, keep=0.5, layers=LAYERS, prop_attn=prop_attn)
    graphs = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for _ in range(3):
        assert_same(compiled, model)
    assert graphs.frame_count == 1  # results of a pass do not make a new graph
    handle.keep = 0.7
    assert_same(compiled, model)
    with torch.no_grad():
        compiled(images())
    assert graphs.frame_count == 2
    assert handle.num_tokens == [25, 17]
    assert torch.equal(handle.sizes[-1].sum(1), torch.full((3,), float(NUM_PATCHES)))


def test_a_model_compiled_before_it_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "skip_nnmodule_hook_guards", True)  # as before the first patch
    model = small_model("attention_pool", depth=3)  # nothing but hooks tells that it is patched
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(compiled, model)
    handle = tokens.patch(model, keep=0.5, layers=LAYERS)
    assert_same(compiled, model)
    handle.unpatch()
    assert_same(compiled, model)


def test_blocks_compiled_one_by_one() -> None:
    model: Any = small_model("registers_avg")
    tokens.patch(model, keep=0.5, layers=LAYERS)
    x = images()
    with torch.no_grad():
        eager = model(x)
        for block in model.blocks:
            block.compile(fullgraph=True, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(model(x), eager, atol=1e-5, rtol=1e-5)


def test_training_has_the_gradients_of_eager() -> None:
    gradients = []
    x = images()
    for compiles in (False, True):
        model: Any = small_model(depth=3)
        tokens.patch(model, keep=0.5, layers=LAYERS)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        run(x).square().sum().backward()
        gradients.append(model.patch_embed.proj.weight.grad)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_export_with_fixed_batch() -> None:
    model = small_model("registers", depth=3)
    handle = tokens.patch(model, keep=0.5, layers=LAYERS)
    program = torch.export.export(model, (images(),))
    # Regions without gradient become graphs inside the graph.
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    called = [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
    assert sum("hyptree.agglomerate" in name for name in called) == len(LAYERS)
    assert_same(program.module(), model)
    assert handle.num_tokens == [18, 9]


def test_an_exported_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model = small_model("registers", depth=3)
    tokens.patch(model, keep=0.5, layers=LAYERS)
    x = images()
    with torch.no_grad():  # torch cannot load programs with regions of their own gradient mode
        torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
        assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), model(x))

"""Patched models on CUDA: the labels of the CPU, no waiting for the device, graphs, and NaN found without looking."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hyptree import tokens
from hyptree.errors import UserError
from tests.tokens.small_models import LAYERS, images, small_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("linkage", ["average", "complete", "single"])
@pytest.mark.parametrize("kind", ["vit", "registers_avg", "attention_pool"])
def test_backends_give_the_same_output(kind: str, linkage: str) -> None:
    model = small_model(kind).cuda()
    x = images(16).cuda()
    outputs, sources = [], []
    for backend in ("torch", "triton"):
        with (
            torch.no_grad(),
            tokens.patched(model, keep=0.5, layers=LAYERS, linkage=linkage, backend=backend, trace=True) as handle,
        ):
            outputs.append(model(x))
            sources.append(handle.sources[-1])
    assert torch.equal(*sources)
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prop_attn", ["mask", "channel"])
@pytest.mark.parametrize("method", ["atc", "tome", "kmedoids", "dpcknn", "topk"])
def test_static_mode_never_waits_for_the_device(method: str, prop_attn: str, no_waiting) -> None:
    model = small_model("registers_avg").cuda()
    x = images(8).cuda()
    tokens.patch(model, method, keep=0.5, layers=LAYERS, prop_attn=prop_attn)
    with torch.no_grad():
        model(x)  # compiles kernels, allocates pinned memory
        torch.cuda.synchronize()
        with no_waiting():
            for _ in range(3):
                out = model(x)
    assert out.isfinite().all()


def test_nan_is_reported_with_the_next_pass_or_on_demand() -> None:
    model: Any = small_model().cuda()
    handle = tokens.patch(model, keep=0.5, layers=LAYERS)
    x = images(4).cuda()
    model(x)
    handle.check()
    bad = x.clone()
    bad[2, 0, 3, 3] = float("nan")
    model(bad)
    with pytest.raises(UserError, match=r"layer 1 \(blocks\.1\): NaN or infinity"):
        handle.check()
    model(bad)
    torch.cuda.synchronize()
    with pytest.raises(UserError, match=r"layer 1 \(blocks\.1\)"):
        model(x)
    assert model(x).isfinite().all()


def test_a_cuda_graph_replays_the_reduction() -> None:
    model = small_model("registers_avg").cuda()
    handle = tokens.patch(model, keep=0.5, layers=LAYERS, backend="triton")
    x = images(8).cuda()
    side = torch.cuda.Stream()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        fresh = images(8).cuda()
        x.copy_(fresh)
        graph.replay()
        torch.testing.assert_close(out, model(fresh), atol=1e-4, rtol=1e-4)
    assert handle.num_tokens == [18, 9]


@pytest.mark.parametrize("prop_attn", ["mask", "channel"])
def test_half_precision_training_step(prop_attn: str) -> None:
    model = small_model("dinov2", img_size=24).cuda().train()
    tokens.patch(model, keep=0.5, layers=LAYERS, prop_attn=prop_attn)
    x = images(8).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def test_compiled_in_one_graph() -> None:
    torch.compiler.reset()
    model = small_model("registers_avg", depth=3).cuda()
    tokens.patch(model, keep=0.5, layers=LAYERS)
    compiled = torch.compile(model, fullgraph=True)
    x = images(8).cuda()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.multigpu
def test_data_parallel() -> None:
    model = small_model("registers_avg").cuda()
    tokens.patch(model, keep=0.5, layers=LAYERS)
    x = images(8).cuda()
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
        torch.testing.assert_close(torch.nn.DataParallel(model)(x), expected, atol=1e-4, rtol=1e-4)

"""Kernels as nodes of a graph: the compiler sees one call, values and gradients stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from hyptree.geometry.core.launch import launch
from hyptree.lm.ambient import AmbientLinear
from hyptree.ops.cluster_map.kernels import _ClusterPatch, _ClusterWindow, cluster_patch, cluster_window
from hyptree.ops.map_norm import _MapNorm, map_norm
from hyptree.ops.residual_norm import join, norm_linear
from hyptree.ops.swiglu import swiglu_linear
from hyptree.ops.windows import Cut

pytest.importorskip("triton")

N, HIDDEN = 20, 12


def names(graphs: list[torch.fx.GraphModule]) -> set[str]:
    return {str(node.target) for graph in graphs for node in graph.graph.nodes if "hyptree" in str(node.target)}


def test_graphs_hold_each_kernel_as_one_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    up = AmbientLinear(N, 2 * HIDDEN, row_groups=(2, HIDDEN, HIDDEN + 4)).to(device)
    down = AmbientLinear(HIDDEN, N).to(device)
    gain, raw = torch.rand(N, device=device).requires_grad_(), torch.randn(1, device=device).requires_grad_()
    x, y = (torch.randn(2, 3, N, device=device).requires_grad_() for _ in range(2))

    def block(x: Tensor, y: Tensor) -> Tensor:
        x, both = norm_linear(x, gain, up, residual=(y, raw, 1.0))
        return join(x, swiglu_linear(both, down, HIDDEN), raw)

    def outcome(run: object) -> list[Tensor]:
        out = run(x, y)  # type: ignore[operator]
        return [out, *torch.autograd.grad(out.square().sum(), [x, y, gain, raw, *up.parameters(), *down.parameters()])]

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return make_boxed_func(graph)

    expected = outcome(block)
    actual = outcome(torch.compile(block, backend=aot_autograd(fw_compiler=keep), fullgraph=True))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    kernels = ["residual_norm", "residual_norm_grad", "swiglu_lift", "swiglu_grad", "pack_weight", "unpack_weight"]
    assert names(graphs) == {f"hyptree.{name}.default" for name in kernels}


@pytest.mark.gpu
def test_a_second_launch_is_told_apart_from_the_first() -> None:
    """Unaligned rows, other dtypes, other numbers: what is launched again must not be the form of another input."""
    from hyptree.ops.swiglu import reference, swiglu_lift

    for rows in (16, 1, 7, 32, 1, 7):
        for dtype in (torch.float32, torch.bfloat16):
            for hidden in (30, 29):
                for shift in (0, 1):
                    flat = torch.randn(rows * 64 + shift, device="cuda").to(dtype)
                    both = flat[shift:].view(rows, 64)
                    actual = swiglu_lift(both, hidden, backend="triton")
                    expected = reference.swiglu_lift(both, hidden, 1.0, True)
                    torch.testing.assert_close(
                        actual, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
                    )


def test_launch_finds_what_was_compiled_for_equal_arguments_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Triton counts compilations and sees every argument of later launches in order."""
    from hyptree.geometry.core import launch as module

    monkeypatch.setattr(module, "_COMPILED", {})
    monkeypatch.setattr(module, "_stream_of", lambda: lambda index: ("stream of", index))
    calls: list[tuple[str, tuple[int, ...], tuple[object, ...]]] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, stream: calls.append(("again", grid, (*args, stream)))

    class Kernel:
        device_caches = ()
        arg_names = ("x", "n", "EPS", "BLOCK")

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def first(*args: object, **settings: object) -> Compiled:
                calls.append(("first", grid, (*args, *settings.values())))
                return Compiled()

            return first

    kernel, x = Kernel(), torch.zeros(8)
    settings = {"BLOCK": 8, "EPS": 0.5, "num_warps": 1}
    launch(kernel, (3,), (x,), (32,), settings)
    launch(kernel, (4,), (x,), (48,), settings)
    assert calls[-1] == ("again", (4, 1, 1), (x.data_ptr(), 48, 0.5, 8, ("stream of", None)))
    others = [
        ((x.double(),), (32,), settings), ((x,), (33,), settings), ((x,), (1,), settings),
        ((x,), (-(2**40),), settings),
        ((x,), (32,), {**settings, "EPS": 0.25}), ((x,), (32,), {**settings, "num_warps": 2}),
        ((x[1:],), (32,), settings),
    ]  # fmt: skip
    for tensors, numbers, changed in others:
        launch(kernel, (3,), tensors, numbers, changed)
        assert calls[-1][0] == "first"
    launch(kernel, (3,), (x[1:],), (32,), settings)
    assert calls[-1][0] == "first", "pointers that are not aligned are left to Triton"


def _calls_of_cluster_mixer(device: str) -> dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]]:
    """Operations with a gradient of their own, as functions of tensors, and what they are given."""
    cut = Cut(8, 8, 2, 2, 4, 4, 0, 0, 2, 2, 2, 4, 2, 2)
    bias, of_windows = torch.randn(4, 2, 4, 16, device=device), torch.randn(1, 2, 4, 4, device=device)
    return {
        "map_norm": (
            lambda x: map_norm(x, 1e-5, torch.float32, backend="triton"),
            (torch.randn(2, 5, 8, device=device),),
        ),
        "cluster_patch": (
            lambda x, alpha: cluster_patch(x, alpha, bias, cut),
            (torch.randn(2, 8, 8, 16, device=device), torch.tensor(1.5, device=device)),
        ),
        "cluster_window": (
            lambda x, alpha: cluster_window(x, alpha, of_windows, cut),
            (torch.randn(2, 4, 4, 16, device=device), torch.tensor(1.5, device=device)),
        ),
    }


@pytest.mark.parametrize("name", ["map_norm", "cluster_patch", "cluster_window"])
def test_without_gradients_autograd_is_not_asked(
    name: str, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits either way; whatever will have a gradient goes by autograd."""
    function, inputs = _calls_of_cluster_mixer(device)[name]
    applied: list[int] = []
    owner = {"map_norm": _MapNorm, "cluster_patch": _ClusterPatch, "cluster_window": _ClusterWindow}[name]
    forward = owner.forward
    monkeypatch.setattr(owner, "forward", staticmethod(lambda *args: applied.append(1) or forward(*args)))

    def run(*settings: Tensor) -> list[Tensor]:
        actual = function(*settings)
        return [actual] if isinstance(actual, Tensor) else list(actual)  # type: ignore[call-overload]

    plain = run(*inputs)
    with torch.no_grad():
        inside = run(*(x.clone().requires_grad_() for x in inputs))
    with torch.inference_mode():
        inference = run(*inputs)
    assert not applied
    for place in range(len(inputs)):
        settings = [x.clone().requires_grad_(place == i) for i, x in enumerate(inputs)]
        learned = run(*settings)
        assert len(applied) == place + 1 and learned[0].requires_grad
        for others in (plain, inside, inference):
            assert all(torch.equal(one, other) for one, other in zip(learned, others, strict=True))


@pytest.mark.parametrize("name", ["cluster_patch", "cluster_window"])
def test_transforms_of_functions_are_refused_and_not_wrong(name: str, seed: int, device: str) -> None:
    function, (x, alpha) = _calls_of_cluster_mixer(device)[name]
    with pytest.raises(RuntimeError, match=r"functorch|vmap"):
        torch.func.vmap(lambda row: function(row.unsqueeze(0), alpha))(x)

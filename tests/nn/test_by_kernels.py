"""Layers and optimisers whose rows go through kernels, beside what they give without.

On a GPU, or on the CPU by Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hyptree import nn as hn
from hyptree.geometry import Lorentz, Poincare, mark_manifold
from hyptree.geometry.core import rows
from hyptree.ops import backend
from hyptree.optim import RiemannianAdam, RiemannianSGD

pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of branches that are not taken

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LorentzLinear": lambda: hn.LorentzLinear(12, 20, Lorentz(0.7)),
    "LorentzLinear, no bias": lambda: hn.LorentzLinear(12, 12, Lorentz(0.7, learnable=True), Lorentz(0.4), bias=False),
    "LorentzLinearBounded": lambda: hn.LorentzLinearBounded(12, 9, Lorentz(0.7)),
    "LorentzMLR": lambda: hn.LorentzMLR(12, 7, Lorentz(0.7, learnable=True)),
    "LorentzFC": lambda: hn.LorentzFC(12, 9, Lorentz(0.7, learnable=True), Lorentz(0.4, learnable=True)),
    "PoincareFC": lambda: hn.PoincareFC(12, 9, Poincare(0.7, learnable=True)),
    "PoincareMLR": lambda: hn.PoincareMLR(12, 7, Poincare(0.7)),
    "MobiusLinear": lambda: hn.MobiusLinear(12, 9, Poincare(0.7, learnable=True)),
    "LorentzAttention": lambda: hn.LorentzAttention(12, 3, Lorentz(0.7, learnable=True), learnable_tau=True),
}
LAUNCHES = {"LorentzLinear": (1, 1), "LorentzFC": (2, 2), "PoincareFC": (3, 3), "LorentzAttention": (6, 6)}
"""Of kernels of rows, forward and backward; products and sums come on top."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not backend.interpreted():
        pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
    return str(request.param)


class Switch:
    """Sends rows through kernels, and counts their launches; on a CPU by the interpreter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str):
        from hyptree.geometry.core.row_kernels import _Kernel

        self.monkeypatch, self.device, self.launches = monkeypatch, device, 0
        launch = _Kernel.launch

        def counted(kernel: _Kernel, *args: object) -> None:
            self.launches += 1
            launch(kernel, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(_Kernel, "launch", counted)

    def on(self, by_kernels: bool) -> None:
        self.launches = 0
        for module in [m for name, m in sys.modules.items() if name.startswith("hyptree.") and hasattr(m, "on_gpu")]:
            self.monkeypatch.setattr(
                module, "on_gpu", lambda x: by_kernels and isinstance(x, Tensor) and x.device.type == self.device
            )


def step(layer: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    given = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
        out = layer(given)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(x.device, out.dtype)
    grads = torch.autograd.grad(out, [given, *layer.parameters()], cotangent)
    return [out.detach(), *grads]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_what_they_give_without_kernels(
    name: str, autocast: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = Switch(monkeypatch, device)
    layer = LAYERS[name]().to(device)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    x = (0.1 * torch.randn(3, 5, 12)).to(device)
    switch.on(False)
    plain = step(layer, x, autocast)
    true = step(copy.deepcopy(layer).double(), x.double(), autocast=False)
    assert switch.launches == 0
    switch.on(True)
    made = step(layer, x, autocast)
    assert switch.launches >= sum(LAUNCHES.get(name, (1, 1)))
    for f, p, t in zip(made, plain, true, strict=True):
        assert f.dtype == p.dtype and f.shape == p.shape
        # The gradient of a curvature or a temperature is a sum over all rows, of terms that partly cancel.
        size = true[1].abs().sum() if t.numel() <= 3 else t.abs().max()
        limit = (1e-2 if autocast else 4e-6) * size + 2 * (p - t).abs().max()
        assert (f - t).abs().max() <= limit


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_layer(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fixed curvature: each pass over rows that this adds shows in a training step."""
    switch = Switch(monkeypatch, device)
    space = Poincare(0.7) if name.startswith("Poincare") else Lorentz(0.7)
    layer = hn.LorentzAttention(12, 3, space) if name == "LorentzAttention" else getattr(hn, name)(12, 12, space)
    layer, x = layer.to(device), (0.2 * torch.randn(2, 5, 12)).to(device).requires_grad_()
    switch.on(True)
    out = layer(x)
    assert switch.launches == LAUNCHES[name][0]
    out.square().sum().backward()
    assert switch.launches == sum(LAUNCHES[name])


@pytest.mark.parametrize("name", ["LorentzLinear", "LorentzFC", "LorentzAttention"])
def test_second_derivatives_are_those_without_kernels(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Switch(monkeypatch, device)
    layer = LAYERS[name]().to(device)
    x = (0.2 * torch.randn(2, 4, 12)).to(device).requires_grad_()

    def second() -> list[Tensor]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (grad,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
            return list(torch.autograd.grad(grad.square().sum(), [x, *layer.parameters()], allow_unused=True))

    switch.on(False)
    plain = second()
    switch.on(True)
    for f, p in zip(second(), plain, strict=True):
        assert (f is None) == (p is None)
        if f is not None:
            torch.testing.assert_close(f, p, rtol=1e-3, atol=1e-4 * float(p.abs().max()) + 1e-7)
    assert switch.launches > 0


OPTIONS = [
    {}, {"weight_decay": 0.1}, {"max_step": 0.01}, {"retraction": "first_order"}, {"maximize": True},
    {"amsgrad": True}, {"capturable": True}, {"master_weights": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
@pytest.mark.parametrize("space", [Lorentz(0.7), Poincare(0.7), Lorentz(0.7, learnable=True)], ids=str)
@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_steps_of_points_are_those_without_kernels(
    kind: type, space: Lorentz | Poincare, options: dict[str, object], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch for all points of a group, in place; rows that rest keep their bits."""
    if kind is RiemannianSGD and {"amsgrad", "capturable"} & options.keys():
        pytest.skip("options of Adam")
    switch = Switch(monkeypatch, device)
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    start = [space.expmap0(torch.randn(count, 5)).detach().to(dtype) for count in (7, 1, 3)]
    grads = [[torch.randn_like(x) for x in start] for _ in range(3)]
    for each in grads:
        each[0][2] = 0.0
    after = []
    for by_kernels, wider in ((True, False), (False, False), (False, True)):
        switch.on(by_kernels)
        points = [nn.Parameter(x.clone().to(device, torch.float64 if wider else dtype)) for x in start]
        for p in points:
            mark_manifold(p, space)
        given = {"momentum": 0.9} if kind is RiemannianSGD else {}
        optimizer = kind(points, lr=0.05, **given, **options)
        for each in grads:
            for p, g in zip(points, each, strict=True):
                p.grad = g.to(p)
            versions = [p._version for p in points]
            optimizer.step()
            assert all(p._version > v for p, v in zip(points, versions, strict=True))
        assert switch.launches == (len(grads) if by_kernels else 0)
        moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
        states = [v for p in points for name, v in optimizer.state[p].items() if name in moments]
        after.append([x.detach().double() for x in (*points, *states)])
        if "weight_decay" not in options and dtype == torch.float32 and not wider:
            assert torch.equal(points[0][2].detach().cpu(), start[0][2])
    for f, p, t in zip(*after, strict=True):
        assert (f - t).abs().max() <= 1e-6 * t.abs().max() + 2 * (p - t).abs().max()


def test_what_a_kernel_must_not_write_to(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that writes to a view of a row is not taken for one that writes to nothing."""
    switch = Switch(monkeypatch, device)
    switch.on(True)

    def changed(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.clone()
            y.view(y.shape).mul_(2.0)
            return y

    x = torch.randn(3, 4, device=device)
    assert rows.by_kernels(changed, x) is None
    torch.testing.assert_close(rows.by_kernels(lambda x: x.clone().mul_(2.0), x), 2 * x)

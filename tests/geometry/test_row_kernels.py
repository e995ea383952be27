"""The functions of rows by kernels beside the plain ones, from which the kernels are made.

On a GPU, or on the CPU by Triton's interpreter (``TRITON_INTERPRET=1``). Rows are those of ``test_rows``: near, far,
tiny, coincident, at the origin, beyond the limits, drawn anew in every run; the truth is the plain function in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from hyptree.geometry import lorentz, poincare
from hyptree.geometry.core import rows
from hyptree.geometry.core.numerics import ball_limit, lorentz_limit
from hyptree.geometry.core.registry import FUNCTIONS
from hyptree.ops import backend
from tests.geometry.test_rows import C, Rows, check_rows

pytest.importorskip("triton")

# What a branch does that is not taken, and a row that is not finite, makes the interpreter warn.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMS = sorted(name for name, entry in FUNCTIONS.items() if entry.form is not None)
MORE = [
    "lorentz.time", "lorentz.minkowski", "lorentz.inner", "lorentz.norm", "lorentz.logmap0", "lorentz.dist0",
    "lorentz.sqdist", "lorentz.lorentz_sqdist", "lorentz.transport_from_origin", "lorentz.transport_to_origin",
    "lorentz.boost", "lorentz.egrad2rgrad", "lorentz.midpoint", "lorentz.exterior_angle", "lorentz.half_aperture",
    "lorentz.cone_energy", "poincare.conformal_factor", "poincare.inner", "poincare.norm", "poincare.dist0",
    "poincare.sqdist", "poincare.midpoint", "poincare.gyration", "poincare.transport", "poincare.transport_to_origin",
    "poincare.transport_from_origin", "poincare.egrad2rgrad", "poincare.exterior_angle", "poincare.half_aperture",
    "poincare.cone_energy", "poincare.from_lorentz", "poincare.to_klein", "poincare.from_klein",
]  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU, or the CPU by Triton's interpreter."""
    if request.param == "cpu":
        if not backend.interpreted():
            pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
        monkeypatch.setattr(rows, "on_gpu", lambda x: isinstance(x, Tensor) and not x.is_meta)
    return str(request.param)


def plainly(function: Callable[[], list[Tensor]]) -> list[Tensor]:
    with mock.patch.object(rows, "by_kernels", return_value=None), mock.patch.object(rows, "fits", return_value=False):
        return function()


def used(function: Callable[[], object]) -> bool:
    """Whether a kernel took part."""
    from hyptree.geometry.core.row_kernels import _Kernel

    with mock.patch.object(_Kernel, "launch", autospec=True, side_effect=_Kernel.launch) as launch:
        function()
    return bool(launch.called)


class Draw(Rows):
    """Rows on a device, and the plain function on the CPU."""

    def __init__(self, name: str, device: str, count: int = 300, dim: int = 5):
        super().__init__(name, count if device == "cuda" else min(count, 40), dim)
        self.device = device
        self.letters = [{"u": "v", "g": "v", "p": "y"}.get(letter, letter) for letter in self.letters]

    def kernel(self, args: list[Tensor], c: Tensor) -> list[Tensor]:
        """Value and gradients of the rows and of c, by kernels."""
        moved, c = [a.to(self.device) for a in args], c.to(self.device)
        assert used(lambda: self.entry.fn(*moved, c)), f"{self.name} has no kernel"
        leaves = [a.detach().requires_grad_() for a in (*moved, c)]
        out = self.entry.fn(*leaves)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(self.seed)).to(self.device)
        grads = torch.autograd.grad(out, leaves, cotangent)
        return [x.detach().cpu() for x in (out, *grads)]

    def plain(self, args: list[Tensor], c: Tensor) -> list[Tensor]:
        return plainly(lambda: self.run(args, c))

    def true(self, args: list[Tensor], c: Tensor) -> list[Tensor]:
        return plainly(lambda: self.run(args, c.double(), torch.float64))

    def within_float32(self, args: list[Tensor], c: Tensor) -> list[Tensor]:
        """In float64, with the space ending where it does in float32."""
        ball = mock.Mock(return_value=ball_limit(torch.float32))
        far = mock.Mock(side_effect=lambda s, dtype: lorentz_limit(s, torch.float32))
        with (
            mock.patch.multiple(poincare, ball_limit=ball),
            mock.patch.multiple(lorentz, ball_limit=ball, lorentz_limit=far),
        ):
            return [x.float() for x in self.true(args, c)]


@pytest.mark.parametrize("regime", ["ordinary", "tiny", "near", "far"])
@pytest.mark.parametrize(
    ("name", "dim"), [*((name, dim) for name in FORMS for dim in (1, 2, 64)), *((n, 3) for n in MORE)]
)
def test_values_and_gradients_are_right(name: str, regime: str, dim: int, device: str) -> None:
    """To float32 rounding, or where float64 itself cannot tell, at most as far off as the plain form in float32."""
    draw = Draw(name, device, dim=dim)
    args, c = draw.draw(regime), torch.full((draw.count, 1), C)
    made, plain, true = draw.kernel(args, c), draw.plain(args, c), draw.true(args, c)
    check_rows(draw, f"{name}, {regime}", args, made, plain, true)


@pytest.mark.parametrize("name", FORMS)
def test_special_rows_are_those_of_the_plain_function(name: str, device: str) -> None:
    """Coincident, opposite, zero, at the limit, beyond it, not finite: value and gradient, and others untouched."""
    draw = Draw(name, device, count=40)
    c = torch.full((draw.count, 1), C)
    args = draw.draw("ordinary")
    special = [a.clone() for a in args]
    beyond = 200.0 if draw.model == "lorentz" else 1.2 / C**0.5
    for i, a in enumerate(special):
        a[0] = 0.0
        a[1 + i] = 0.0
        a[4] = args[0][4]
        a[5] = args[0][5] * (-1) ** i
        a[6 + i] *= beyond / a[6 + i].norm()
        a[9] *= beyond / a[9].norm()
        a[10 + i, 0] = float("nan")
        a[13 + i, 1] = float("inf")
        a[16] = 1e-30
        a[17] *= 1e-4
    plain = draw.within_float32(special, c)
    made, harmless = draw.kernel(special, c), draw.kernel(args, c)
    for what, f, p, h in zip(("value", *draw.letters, "c"), made, plain, harmless, strict=True):
        # Of rows that are not finite only this is asked: they are not, and they harm nobody.
        good = torch.isfinite(torch.stack([x.flatten(1).sum(1) if x.dim() > 1 else x for x in (p, f)])).all(0)
        assert good[:10].all() or not torch.isfinite(p[:10]).all()
        torch.testing.assert_close(f[good], p[good], rtol=2e-5, atol=2e-5, msg=lambda m, w=what: f"{w}: {m}")
        assert torch.equal(f[20:], h[20:]), f"{what}: special rows changed others, seed={draw.seed}"
    for i in range(len(args)):
        assert made[0][10 + i].isnan().any() or not torch.isfinite(plain[0][10 + i]).all()
        assert made[0][10 + i].isnan().any() == plain[0][10 + i].isnan().any()


@pytest.mark.parametrize("name", FORMS)
def test_shapes_strides_and_curvatures(name: str, device: str) -> None:
    """Broadcasting, transposed and expanded rows, one row, no rows; c as number, as tensors of several shapes."""
    draw = Draw(name, device, count=12, dim=4)
    args = draw.draw("ordinary")
    per_head = torch.linspace(0.4, 0.7, 3)
    curvature = torch.tensor(C)
    shapes = [
        ([a.reshape(3, 4, 4) for a in args], curvature),
        ([a[:4].mT.contiguous().mT for a in args], curvature),
        ([a.reshape(3, 4, 4)[: 1 if i else 3] for i, a in enumerate(args)], curvature),
        ([a[0] if i == 0 else a for i, a in enumerate(args)], curvature.reshape(1)),
        ([a if i == 0 else a[0] for i, a in enumerate(args)], curvature.reshape(1, 1)),
        ([a.reshape(3, 4, 4) for a in args], per_head.view(3, 1, 1)),
        ([a.reshape(3, 4, 4)[0] for a in args], per_head.view(3, 1, 1)),
        ([a[0] for a in args], curvature.reshape(1, 1)),
        ([a[:0] for a in args], curvature),
        ([a[:1].expand(5, 4) for a in args], curvature),
        ([a.mT[:, i : i + 1].mT if a is args[-1] else a for i, a in enumerate(args)], curvature),
        ([a[:, :2].contiguous().mT[:, : 1 + 11 * (i == 0)].mT for i, a in enumerate(args)], curvature),
        ([a.reshape(-1)[1:9].view(2, 4) for a in args], curvature),  # not where a vector of four could start
    ]  # fmt: skip
    for given, c in shapes:
        for f, t in zip(draw.kernel(given, c), draw.true(given, c), strict=True):
            assert f.shape == t.shape
            torch.testing.assert_close(f.double(), t, rtol=3e-6, atol=3e-6)
    moved = [a.to(device) for a in args]
    for out in (
        draw.entry.fn(*moved, C),
        draw.entry.fn(*moved, c=C),
        draw.entry.fn(**dict(zip(draw.entry.args[:-1], moved, strict=True)), c=C),
    ):
        torch.testing.assert_close(out, draw.entry.fn(*moved, curvature.to(device)), rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        assert torch.equal(draw.entry.fn(*moved), draw.entry.fn(*moved, 1))


@pytest.mark.parametrize(("count", "dim"), [(1, 3), (130, 7), (3, 300), (2, 700), (2, 1500), (3000, 4)])
def test_sizes_of_rows_and_of_blocks(count: int, dim: int, device: str) -> None:
    """Also a learned curvature that all rows share, and a point, whose gradients are sums over programs."""
    generator = torch.Generator().manual_seed(count)
    x, y, w = (torch.randn(m, dim, generator=generator) * dim**-0.5 for m in (count, 1, count))
    c = torch.tensor(C)

    def run(where: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        leaves = [a.to(where, dtype, copy=True).requires_grad_() for a in (x, y, c)]
        out = lorentz.logmap(*leaves)
        return [a.detach().cpu() for a in (out, *torch.autograd.grad(out, leaves, w.to(where, dtype)))]

    assert used(lambda: run(device))
    for f, t in zip(run(device), plainly(lambda: run("cpu", torch.float64)), strict=True):
        torch.testing.assert_close(f.double(), t, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", ["lorentz.dist", "poincare.logmap", "lorentz.transport"])
def test_only_needed_gradients_and_the_same_tensor_twice(name: str, device: str) -> None:
    draw = Draw(name, device)
    args = draw.draw("ordinary")
    expected = draw.kernel(args, torch.tensor(C))
    for i in range(len(args)):
        leaves = [a.clone().to(device).requires_grad_(i == j) for j, a in enumerate(args)]
        out = draw.entry.fn(*leaves, C)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(draw.seed)).to(device)
        (grad,) = torch.autograd.grad(out, leaves[i], cotangent)
        torch.testing.assert_close(grad.cpu(), expected[1 + i], rtol=1e-6, atol=1e-6)
    shared = (args[0] * 0.5).to(device).requires_grad_()
    others = [a.to(device) for a in args[2:]]

    def twice() -> list[Tensor]:
        return [torch.autograd.grad(draw.entry.fn(shared, shared * 1.1, *others, C).square().sum(), shared)[0]]

    torch.testing.assert_close(twice(), plainly(twice), rtol=1e-4, atol=1e-4)
    same = draw.entry.fn(shared, shared, *others, C).square().sum()
    assert torch.isfinite(torch.autograd.grad(same, shared)[0]).all()


@pytest.mark.parametrize("name", ["lorentz.dist", "lorentz.expmap", "poincare.logmap"])
def test_second_derivatives_and_many_gradients_at_once(name: str, device: str) -> None:
    draw = Draw(name, device, count=6, dim=3)
    args = [a.to(device).requires_grad_() for a in draw.draw("ordinary")]
    c = torch.tensor(C, device=device, requires_grad=True)

    def second() -> list[Tensor]:
        out = draw.entry.fn(*args, c)
        first = torch.autograd.grad(out.sin().sum(), (*args, c), create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), (*args, c)))

    assert used(second)
    for f, p in zip(second(), plainly(second), strict=True):
        torch.testing.assert_close(f, p, rtol=1e-3, atol=1e-3 * float(p.abs().max()))

    tiny = tuple(a.to(device) for a in Draw(name, device, count=2, dim=3).draw("tiny"))
    jacobian = functools.partial(torch.autograd.functional.jacobian, lambda *given: draw.entry.fn(*given, C), tiny)
    for one, other in zip(jacobian(vectorize=True), jacobian(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_settings_are_part_of_a_kernel(device: str) -> None:
    x, y = torch.randn(9, 4), torch.randn(9, 4)
    for K in (0.1, 0.3):
        given = x.to(device), y.to(device)
        assert used(lambda given=given, K=K: lorentz.cone_energy(*given, C, K=K, eta=0.5))
        (expected,) = plainly(lambda K=K: [lorentz.cone_energy(x.double(), y.double(), C, K=K, eta=0.5)])
        torch.testing.assert_close(lorentz.cone_energy(*given, C, K=K, eta=0.5).cpu().double(), expected)


def test_weights_of_a_residual(device: str) -> None:
    x, y, a = torch.randn(6, 4), torch.randn(6, 4), torch.rand(6, 1)
    for weight in (0.5, a, a[0]):
        given = [v.to(device).requires_grad_() if isinstance(v, Tensor) else v for v in (x, y, weight)]
        exact = [v.double().requires_grad_() if isinstance(v, Tensor) else v for v in (x, y, weight)]
        assert used(lambda given=given: lorentz.residual(*given, C))
        out, expected = lorentz.residual(*given, C), plainly(lambda exact=exact: [lorentz.residual(*exact, C)])[0]
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-6, atol=1e-6)
        for f, t in zip(*(
            torch.autograd.grad(o.square().sum(), [v for v in vs if isinstance(v, Tensor)])
            for o, vs in ((out, given), (expected, exact))
        ), strict=True):  # fmt: skip
            torch.testing.assert_close(f.cpu().double(), t, rtol=1e-5, atol=1e-5)


def test_the_door_leaves_what_is_not_ordinary_to_the_plain_function(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(3, 4, device=device), torch.randn(3, 4, device=device)
    assert used(lambda: lorentz.dist(x, y, C))
    assert used(lambda: lorentz.dist(x.bfloat16(), y, C))  # computed in float32
    assert not used(lambda: lorentz.dist(x.double(), y.double(), C))
    assert not used(lambda: lorentz.dist(x, y, torch.full((4,), C, device=device)))
    assert not used(lambda: lorentz.dist(torch.randn(2, 5000, device=device), torch.randn(2, 5000, device=device)))
    assert not used(lambda: torch.func.vmap(lorentz.dist)(x, y))
    assert not used(lambda: torch.func.jacrev(lorentz.dist)(x, y))
    assert not used(lambda: torch.func.jvp(poincare.mobius_add, (0.1 * x, 0.1 * y), (y, x)))
    assert not used(lambda: torch.compile(lorentz.dist, backend="eager")(x, y))
    assert not used(lambda: lorentz.gram(x, y))
    assert not used(lambda: lorentz.centroid(x))
    with pytest.raises(ValueError, match="positive"):
        lorentz.dist(x, y, 0.0)
    with pytest.raises(ValueError, match="last axis"):
        lorentz.dist(x, torch.randn(3, 5, device=device))
    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    assert not used(lambda: lorentz.dist(x, y, C))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_call_is_one_launch_each_way_and_waits_for_nothing() -> None:
    """Counted by the profiler; a graph can capture both, and gives the same on new numbers."""
    x, y = (torch.randn(4096, 32, device="cuda").requires_grad_() for _ in range(2))

    def step() -> tuple[Tensor, ...]:
        out = lorentz.logmap(x, y, C)
        return out.detach(), *torch.autograd.grad(out, (x, y), torch.ones_like(out))

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "ogmap" in event.key]
    assert len(kernels) == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert torch.equal(one, other)

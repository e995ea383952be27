"""The functions of rows by few passes beside the plain ones, which are the definition.

Rows are drawn anew in every run, where it is easy and where it is hard: near, far, coincident, opposite, at the origin,
beyond the limits. The truth is the plain function in float64 on the same float32 numbers; where the ball or the dtype
ends, where float64 ends elsewhere, it is the plain function in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from hyptree.geometry import debug, lorentz, poincare
from hyptree.geometry.core import rows
from hyptree.geometry.core.registry import FUNCTIONS

FORMS = sorted(name for name, entry in FUNCTIONS.items() if entry.form is not None)
EPS = torch.finfo(torch.float32).eps
VALUE, GRADIENT = 4 * EPS, 8 * EPS  # of section 12: 5e-7 and 1e-6
C = 0.7


class Rows:
    """Random rows for one function, and functions to compare with."""

    def __init__(self, name: str, count: int = 300, dim: int = 5):
        self.seed = int(torch.randint(2**31 - 1, ()))
        self.generator = torch.Generator().manual_seed(self.seed)
        self.name, self.entry = name, FUNCTIONS[name]
        self.model = name.split(".")[0]
        self.count, self.dim = count, dim
        self.letters = [arg for arg in self.entry.args if arg != "c"]

    def direction(self) -> Tensor:
        v = torch.randn(self.count, self.dim, generator=self.generator, dtype=torch.float64)
        return v / v.norm(dim=-1, keepdim=True)

    def uniform(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self.count, 1, generator=self.generator, dtype=torch.float64)

    def points(self, low: float, high: float) -> Tensor:
        r = self.uniform(low, high)
        return (
            (torch.sinh(r) if self.model == "lorentz" else torch.tanh(r / 2)) / math.sqrt(C) * self.direction()
        ).float()

    def neighbours(self, x: Tensor, smallest: float) -> Tensor:
        step = 10 ** self.uniform(math.log10(smallest), -1) * x.double().norm(dim=-1, keepdim=True)
        y = (x.double() + step * self.direction()).float()
        return -y if self.name == "poincare.mobius_add" else y

    def steps(self, x: Tensor, low: float, high: float) -> Tensor:
        """Tangent vectors of about these lengths, logarithmically."""
        size = 10 ** self.uniform(math.log10(low), math.log10(high))
        if self.model == "poincare":
            size = size * (1 - C * x.double().square().sum(-1, keepdim=True)) / 2
        return (size * self.direction()).float()

    def draw(self, regime: str) -> list[Tensor]:
        low, high = {"tiny": (1e-6, 1e-3), "far": (3.0, 6.0)}.get(regime, (0.0, 3.0))
        x = self.points(low, high)
        y = self.neighbours(x, 1e-7) if regime == "near" else self.points(low, high)
        v = self.steps(x, *{"near": (1e-7, 1e-2), "far": (0.1, 4.0), "tiny": (1e-7, 1e-3)}.get(regime, (1e-2, 3.0)))
        return [{"x": x, "y": y, "v": v}[letter] for letter in self.letters]

    def run(self, args: list[Tensor], c: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Value and gradients of the rows and of c."""
        leaves = [a.detach().to(dtype).requires_grad_() for a in (*args, c)]
        out = self.entry.fn(*leaves)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(self.seed)).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]

    def plain(self, args: list[Tensor], c: Tensor) -> list[Tensor]:
        with mock.patch.object(rows, "fits", return_value=False):
            return self.run(args, c)


def used(function: Callable[[], object]) -> bool:
    """Whether the fast form took part."""
    with mock.patch.object(rows, "_forward", wraps=rows._forward) as forward:
        function()
    return forward.called


def relative(actual: Tensor, true: Tensor) -> Tensor:
    """Error of each row relative to its size."""
    if actual.dim() == 1:
        actual, true = actual.unsqueeze(-1), true.unsqueeze(-1)
    size = true.norm(dim=-1).double()
    error = (actual.double() - true).norm(dim=-1) / torch.where(size > 0, size, 1.0)
    assert torch.isfinite(error).all()
    return error


def check_rows(
    draw: Rows, what: str, args: list[Tensor], fast: list[Tensor], plain: list[Tensor], true: list[Tensor]
) -> None:
    """Value and gradients of the rows and of c to float32 rounding, or at most as far off as the plain form."""
    for part, f, p, t in zip(("value", *draw.letters), fast, plain, true, strict=False):
        over = relative(f, t) > (VALUE if part == "value" else GRADIENT) + 2 * relative(p, t)
        assert not over.any(), (
            f"{what}, {part}: {relative(f, t)[over].max():.3g}, plain {relative(p, t)[over].max():.3g}, "
            f"seed={draw.seed}, row {int(over.nonzero()[0])}"
        )
    # In c the derivative of a row may vanish; what it is a sum of does not.
    size = (
        true[-1].squeeze(-1).abs()
        + sum((a.double() * g).norm(dim=-1) for a, g in zip(args, true[1:], strict=False)) / C
    )
    miss, plain_miss = ((g[-1].double() - true[-1]).squeeze(-1).abs() for g in (fast, plain))
    assert (miss <= 16 * EPS * size + 2 * plain_miss).all(), f"{what}, c, seed={draw.seed}"


@pytest.mark.parametrize("dim", [1, 2, 64])
@pytest.mark.parametrize("regime", ["ordinary", "tiny", "near", "far"])
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_are_right(name: str, regime: str, dim: int) -> None:
    """Against float64; where the plain form in float32 is worse than section 12 asks, at most as far off as it."""
    draw = Rows(name, dim=dim, count=1000 if dim == 64 else 300)  # 1000 rows of 64 are summed in float32 first
    args, c = draw.draw(regime), torch.full((draw.count, 1), C)
    assert used(lambda: draw.entry.fn(*args, c))
    fast, plain, true = draw.run(args, c), draw.plain(args, c), draw.run(args, c.double(), torch.float64)
    # A neighbour on the other side of the limit of the ball, or a vector that is stored as zero, is a case of its own.
    check_rows(draw, f"{name}, {regime}", args, fast, plain, true)


@pytest.mark.parametrize("name", FORMS)
def test_special_rows_are_those_of_the_plain_function(name: str) -> None:
    """Coincident, opposite, zero, at the limit, beyond it, not finite: alone and among others, value and gradient."""
    draw = Rows(name, count=40)
    c = torch.full((draw.count, 1), C)
    args = draw.draw("ordinary")
    special = [a.clone() for a in args]
    beyond = 200.0 if draw.model == "lorentz" else 1.2 / math.sqrt(C)
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
    c[18], c[19] = 1e-20, 1e30
    fast, plain, harmless = draw.run(special, c), draw.plain(special, c), draw.run(args, torch.full_like(c, C))
    for what, f, p, h in zip(("value", *draw.letters, "c"), fast, plain, harmless, strict=True):
        torch.testing.assert_close(f, p, rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}")
        assert torch.equal(f[20:], h[20:]), f"{what}: special rows changed others, seed={draw.seed}"


@pytest.mark.parametrize("name", FORMS)
def test_shapes_strides_and_curvatures(name: str) -> None:
    """Broadcasting, transposed and expanded rows, one row, no rows; c as number, as tensors of several shapes."""
    draw = Rows(name, count=12, dim=4)
    args = draw.draw("ordinary")
    curvature = torch.tensor(C)
    shapes = [
        ([a.reshape(3, 4, 4) for a in args], curvature),
        ([a[:4].mT.contiguous().mT for a in args], curvature),
        (
            [a.reshape(3, 4, 4)[:, :: 1 + i] if i == 0 else a.reshape(3, 4, 4)[:1] for i, a in enumerate(args)],
            curvature,
        ),
        ([a[0] if i == 0 else a for i, a in enumerate(args)], curvature.reshape(1)),
        ([a.reshape(3, 4, 4) for a in args], torch.linspace(0.4, 0.7, 3).view(3, 1, 1)),
        ([a.reshape(3, 4, 4)[0] for a in args], torch.linspace(0.4, 0.7, 3).view(3, 1, 1)),
        ([a[0] for a in args], curvature.reshape(1, 1)),
        ([a[:0] for a in args], curvature),
        ([a[:1].expand(5, 4) for a in args], curvature),
    ]
    for given, c in shapes:
        assert used(lambda given=given, c=c: draw.entry.fn(*given, c))
        for f, p in zip(draw.run(given, c), draw.plain(given, c), strict=True):
            assert f.shape == p.shape
            torch.testing.assert_close(f, p, rtol=3e-5, atol=3e-5)
    by_number = (
        draw.entry.fn(*args, C),
        draw.entry.fn(*args, c=C),
        draw.entry.fn(**dict(zip(draw.letters, args, strict=True)), c=C),
    )
    for out in by_number:
        torch.testing.assert_close(out, draw.entry.fn(*args, curvature), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        unit = draw.entry.fn(*args), draw.entry.fn(*args, 1.0)
    assert torch.equal(*unit)


@pytest.mark.parametrize("name", FORMS)
def test_pieces_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come out the same whatever piece they are in, and a long row is a piece of its own."""
    draw = Rows(name, count=600, dim=64)
    args, c = draw.draw("near"), torch.full((600, 1), C)
    whole = draw.run(args, c)
    monkeypatch.setattr(rows, "_PIECE", 64 * 100)
    monkeypatch.setattr(rows, "_scratch", rows._Scratch())
    for one, many in zip(whole, draw.run(args, c), strict=True):
        assert torch.equal(one, many)
    monkeypatch.setattr(rows, "_PIECE", 50)
    monkeypatch.setattr(rows, "_scratch", rows._Scratch())
    for one, many in zip(whole, draw.run(args, c), strict=True):
        assert torch.equal(one, many)


@pytest.mark.parametrize("name", FORMS)
def test_only_needed_gradients_and_the_same_tensor_twice(name: str) -> None:
    draw = Rows(name)
    args = draw.draw("ordinary")
    expected = draw.run(args, torch.tensor(C))
    for i in range(len(args)):
        leaves = [a.clone().requires_grad_(i == j) for j, a in enumerate(args)]
        out = draw.entry.fn(*leaves, C)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(draw.seed))
        (grad,) = torch.autograd.grad(out, leaves[i], cotangent)
        torch.testing.assert_close(grad, expected[1 + i], rtol=1e-5, atol=1e-5)
    if len(args) > 1:
        shared = (args[0] * 0.5).requires_grad_()
        others = args[2:]
        twice = draw.entry.fn(shared, shared * 1.1, *others, C).square().sum()
        with mock.patch.object(rows, "fits", return_value=False):
            plain = draw.entry.fn(shared, shared * 1.1, *others, C).square().sum()
        one, two = (torch.autograd.grad(t, shared)[0] for t in (twice, plain))
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
        same = draw.entry.fn(shared, shared, *others, C).square().sum()
        assert torch.isfinite(torch.autograd.grad(same, shared)[0]).all()


@pytest.mark.parametrize("name", FORMS)
def test_second_derivatives_are_those_of_the_plain_function(name: str) -> None:
    draw = Rows(name, count=6)
    args = [a.requires_grad_() for a in draw.draw("ordinary")]
    c = torch.tensor(C, requires_grad=True)

    def second() -> tuple[Tensor, ...]:
        out = draw.entry.fn(*args, c)
        first = torch.autograd.grad(out.sin().sum(), (*args, c), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (*args, c))

    assert used(second)
    fast = second()
    with mock.patch.object(rows, "fits", return_value=False):
        plain = second()
    for f, p in zip(fast, plain, strict=True):
        torch.testing.assert_close(f, p, rtol=1e-3, atol=1e-3 * float(p.abs().max()))


@pytest.mark.parametrize("name", FORMS)
def test_many_gradients_at_once(name: str) -> None:
    """Vectorised jacobians run the backward pass inside a transform."""
    draw = Rows(name, count=2, dim=3)
    args = tuple(draw.draw("tiny"))  # where the plain function keeps all digits of a derivative

    def function(*given: Tensor) -> Tensor:
        return draw.entry.fn(*given, C)

    assert used(lambda: torch.autograd.functional.jacobian(function, args, vectorize=True))
    at_once = torch.autograd.functional.jacobian(function, args, vectorize=True)
    for one, other in zip(at_once, torch.autograd.functional.jacobian(function, args), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_door_leaves_what_is_not_ordinary_to_the_plain_function() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert used(lambda: lorentz.dist(x, y, C))
    assert used(lambda: lorentz.dist(x.bfloat16(), y, C))  # computed in float32
    assert used(lambda: lorentz.dist(x, y, torch.tensor(C, dtype=torch.float64)))
    assert not used(lambda: lorentz.dist(x.double(), y.double(), C))
    assert not used(lambda: lorentz.dist(x, y, torch.full((4,), C)))
    assert not used(lambda: lorentz.dist(x, y, torch.tensor(-1.0)))
    assert not used(lambda: torch.func.vmap(lorentz.dist)(x, y))
    assert not used(lambda: torch.func.jvp(poincare.mobius_add, (0.1 * x, 0.1 * y), (y, x)))
    assert not used(lambda: torch.func.jacrev(lorentz.dist)(x, y))
    assert not used(lambda: torch.compile(lorentz.dist, backend="eager")(x, y))
    assert not used(lambda: lorentz.dist(x.to("meta"), y.to("meta")))
    with debug():
        assert not used(lambda: lorentz.dist(x, y, C))
    with forward_ad.dual_level():
        dual = poincare.mobius_add(forward_ad.make_dual(0.1 * x, y), 0.1 * y)
        assert forward_ad.unpack_dual(dual).tangent is not None
    conjugate = torch.complex(x, y).conj()
    torch.testing.assert_close(lorentz.dist(conjugate.imag, x), lorentz.dist(-y, x))


def test_transport_has_its_gradient_at_the_origin() -> None:
    """Seen from the origin the radial frame has no direction, and so no gradient, but the transport has one."""
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    y, v = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a: lorentz.transport(a, y, v, C), x)


def test_a_row_changed_in_place_before_backward_is_an_error() -> None:
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    distance = poincare.mobius_add(x * 0.1, y * 0.1)
    other = y * 0.1
    result = lorentz.transport(x, other, y)
    other.zero_()
    distance.sum().backward()
    with pytest.raises(RuntimeError, match="inplace"):
        result.sum().backward()


def test_wrong_arguments_still_get_one_clear_line() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="last axis"):
        lorentz.dist(x, torch.randn(3, 5))
    with pytest.raises(ValueError, match="positive"):
        lorentz.dist(x, x, 0.0)
    with pytest.raises(TypeError, match="curvature"):
        lorentz.dist(x, x, curvature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        lorentz.logmap(x)  # type: ignore[call-arg]

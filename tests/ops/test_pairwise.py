"""All pairs of points: the kernels against float64, values and gradients, in both models and their tangent spaces."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from hyptree.geometry import lorentz, poincare
from hyptree.ops import pairwise_lorentz, pairwise_poincare

pytest.importorskip("triton")

C = 0.7
OPS = [pairwise_lorentz, pairwise_poincare]
ops = pytest.mark.parametrize("op", OPS, ids=["lorentz", "poincare"])
charts = pytest.mark.parametrize("tangent", [False, True], ids=["points", "tangents"])


def draw(op: ModuleType, *shape: int, device: str, tangent: bool = False, radius: float = 3.0) -> Tensor:
    """Points within a hyperbolic radius, random in direction and radius: float64 numbers that float32 holds."""
    v = torch.randn(*shape, dtype=torch.float64)
    v *= radius * torch.rand(*shape[:-1], 1, dtype=torch.float64) / v.norm(dim=-1, keepdim=True) / C**0.5
    if op is pairwise_poincare:
        v /= 2  # the literature's exponential map takes v to distance 2 |v|
    if not tangent:
        v = (lorentz if op is pairwise_lorentz else poincare).expmap0(v, C)
    return v.float().to(device)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors are full of NaN, so that a place nobody wrote shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        return x.fill_(torch.nan if x.is_floating_point() else -(2**31)) if not x.is_meta else x

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fill(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: fill(empty_like(*args, **kwargs)))


def outcome(run: object, x: Tensor, y: Tensor, weight: Tensor) -> list[Tensor]:
    """What ``run`` gives, and the gradients of its weighted sum."""
    a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
    out = run(a, b)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), (a, b))]


def assert_equal(actual: list[Tensor], expected: list[Tensor], value: float, gradient: float) -> None:
    """The largest error of values, and the error of each gradient beside its own length."""
    assert (actual[0].double() - expected[0]).abs().max().item() <= value if actual[0].numel() else True
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert (one.double() - other).norm() <= gradient * other.norm()


@ops
@charts
@pytest.mark.parametrize("mode", ["exact", "matmul"])
def test_distances(op: ModuleType, tangent: bool, mode: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (
        [(2, 17, 7, 5), (1, 1, 3, 1)] if device == "cpu" else [(3, 130, 70, 33), (2, 196, 196, 64), (1, 7, 600, 250)]
    )
    for b, n, m, d in shapes:
        x, y = (draw(op, b, size, d, device=device, tangent=tangent) for size in (n, m))
        weight = torch.randn(b, n, m, device=device)
        expected = outcome(lambda x, y: op.pairwise_dist(x, y, C, tangent=tangent), x.double(), y.double(), weight)
        with monkeypatch.context() as patch:
            poison(patch)
            actual = outcome(
                lambda x, y: op.pairwise_dist(x, y, C, mode=mode, tangent=tangent, backend="triton"), x, y, weight
            )
        assert actual[0].dtype == torch.float32 and actual[0].shape == (b, n, m)
        # Close points are what "matmul" is poor at: in few dimensions there are some.
        loose = mode == "matmul" and d < 16
        assert_equal(actual, expected, 1e-4 if loose else 5e-6, 1e-4 if mode == "matmul" else 1e-5)


def assert_softmax(
    op: ModuleType, shape: tuple[int, ...], tangent: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax of random sets of B, N, M, n, and its gradients, against float64."""
    b, n, m, d = shape
    settings = {"temperature": 0.3, "tangent": tangent}
    x, y = (draw(op, b, size, d, device=device, tangent=tangent) for size in (n, m))
    weight = torch.randn(b, n, m, device=device)
    expected = outcome(lambda x, y: op.distance_softmax(x, y, C, **settings), x.double(), y.double(), weight)
    with monkeypatch.context() as patch:
        poison(patch)
        actual = outcome(lambda x, y: op.distance_softmax(x, y, C, backend="triton", **settings), x, y, weight)
    torch.testing.assert_close(actual[0].sum(-1), torch.ones(b, n, device=device), rtol=1e-5, atol=0)
    assert_equal(actual, expected, 2e-5, 1e-4)


@ops
@charts
def test_softmax(op: ModuleType, tangent: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tiles that fill sets and rows go without masks, one tile alone takes one turn, and a size of 1 is a constant.
    shapes = [(1, 17, 65, 6), (1, 32, 128, 16), (2, 17, 9, 6), (1, 16, 64, 16), (1, 1, 1, 3)]
    if device != "cpu":
        shapes += [(3, 130, 70, 33), (2, 196, 700, 64), (2, 256, 512, 128)]
    for shape in shapes:
        assert_softmax(op, shape, tangent, device, monkeypatch)


@pytest.mark.parametrize("temperature", [0.02, 1.0, 7.0])
@pytest.mark.parametrize("radius", [1e-4, 20.0, 39.0])
def test_softmax_of_any_radius(radius: float, temperature: float, device: str) -> None:
    """Distances from nothing to 78, beyond which float32 does not hold what they are computed from."""
    v, w = (torch.nn.functional.normalize(torch.randn(1, size, 16, device=device), dim=-1) for size in (7, 70))
    x = v * radius / C**0.5
    y = w * radius * (1 - 0.1 * torch.rand(1, 70, 1, device=device)) / C**0.5
    y[0, 5] = -x[0, 3]
    expected = pairwise_lorentz.distance_softmax(x.double(), y.double(), C, temperature=temperature, tangent=True)
    actual = pairwise_lorentz.distance_softmax(x, y, C, temperature=temperature, tangent=True, backend="triton")
    # the roundings of float32, 2e-6 of the distance, and the 22 bits that a logarithm has of a long one
    share = 1e-6 + (2e-6 + 2.0**-22 * radius) / temperature
    assert ((actual - expected).abs() <= share * expected + 1e-30).all()


def test_softmax_of_equal_and_close_points(device: str) -> None:
    """A product knows the distance of equal points to about 1e-3 of their radius: probabilities stay near the true."""
    x = draw(pairwise_lorentz, 1, 32, 16, device=device)
    close = x * (1 + 1e-4 * torch.randn(1, 32, 16, device=device))
    y = torch.cat([x, close, draw(pairwise_lorentz, 1, 64, 16, device=device)], 1)
    expected = pairwise_lorentz.distance_softmax(x.double(), y.double(), C)
    actual = pairwise_lorentz.distance_softmax(x, y, C, backend="triton")
    assert actual.isfinite().all() and ((actual - expected).abs() <= 1e-2 * expected).all()


@ops
@charts
def test_nearest(op: ModuleType, tangent: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, m, d in [(17, 65, 4)] if device == "cpu" else [(300, 70, 33), (1000, 1000, 64)]:
        x, y = (draw(op, 1, size, d, device=device, tangent=tangent) for size in (n, m))
        every = op.pairwise_dist(x.double(), y.double(), C, tangent=tangent)
        with monkeypatch.context() as patch:
            poison(patch)
            index, distance = op.nearest(x, y, C, tangent=tangent, backend="triton")
        assert index.dtype == torch.int64 and index.shape == (1, n)
        # Of two points that float32 cannot tell apart either may be meant.
        assert (every.gather(-1, index.unsqueeze(-1)).squeeze(-1) - every.amin(-1)).abs().max() < 5e-6
        assert (distance - every.amin(-1)).abs().max() < 5e-6


@ops
def test_nearest_of_close_points(op: ModuleType, device: str) -> None:
    """Rows of which some, all or none of the points are close, and one set, in which every point is its own nearest."""
    x, y = draw(op, 1, 20, 3, device=device), draw(op, 1, 150, 3, device=device)
    y[0, 80:] = 0.3 * x[0, 0] * (1 + 1e-2 * torch.randn(70, 3, device=device))
    y[0, 33], y[0, 77] = x[0, 5], x[0, 5]
    every = op.pairwise_dist(x.double(), y.double(), C)
    index, distance = op.nearest(x, y, C, backend="triton")
    assert index[0, 5] == 33 and distance[0, 5] == 0  # the first of two
    assert (every.gather(-1, index.unsqueeze(-1)).squeeze(-1) - every.amin(-1)).abs().max() < 5e-6
    assert (distance - every.amin(-1)).abs().max() < 5e-6
    index, distance = op.nearest(x, x, C, backend="triton")
    assert torch.equal(index[0], torch.arange(20, device=device)) and not distance.any()


@pytest.mark.parametrize("dim", [2, 5, 16])
def test_exact_distances_far_out_and_close_together(dim: int, device: str) -> None:
    """The line of the accuracy table for all pairs, at s r <= 20, and neighbours in every last digit."""
    radius = 20 * torch.rand(24, 1, dtype=torch.float64)
    direction = torch.nn.functional.normalize(torch.randn(24, dim, dtype=torch.float64), dim=-1)
    x = (torch.sinh(radius) * direction / C**0.5).float().to(device)
    y = x.roll(1, 0) * (1 + 1e-6 * torch.randn(24, dim, device=device))
    expected = lorentz.pairwise_dist(x.double(), y.double(), C)
    actual = pairwise_lorentz.pairwise_dist(x, y, C, backend="triton")
    assert C**0.5 * (actual - expected).abs().max() < 5e-6
    y = (torch.sinh(radius.flip(0)) * direction.roll(5, -1) / C**0.5).float().to(device)
    weight = torch.rand(24, 24, device=device)
    expected = outcome(lambda x, y: lorentz.pairwise_dist(x, y, C), x.double(), y.double(), weight)
    actual = outcome(lambda x, y: pairwise_lorentz.pairwise_dist(x, y, C, backend="triton"), x, y, weight)
    assert C**0.5 * (actual[0] - expected[0]).abs().max() < 5e-6
    for one, other in zip(actual[1:], expected[1:], strict=True):  # row by row: far rows have short gradients
        assert ((one - other).norm(dim=-1) <= 1e-5 * other.norm(dim=-1)).all()


@ops
@pytest.mark.parametrize("mode", ["exact", "matmul"])
def test_one_set_has_a_zero_diagonal_and_one_gradient(op: ModuleType, mode: str, device: str) -> None:
    x = draw(op, 2, 21, 6, device=device)
    weight = torch.rand(2, 21, 21, device=device)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    d = op.pairwise_dist(leaf, leaf, C, mode=mode, backend="triton")
    assert not d.diagonal(dim1=-2, dim2=-1).any()
    (actual,) = torch.autograd.grad((d * weight).sum(), leaf)
    (expected,) = torch.autograd.grad((op.pairwise_dist(exact, exact, C) * weight).sum(), exact)
    assert (actual - expected).norm() <= 1e-5 * expected.norm()
    (actual,) = torch.autograd.grad((op.distance_softmax(leaf, leaf, C, backend="triton") * weight).sum(), leaf)
    (expected,) = torch.autograd.grad((op.distance_softmax(exact, exact, C) * weight).sum(), exact)
    assert (actual - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces what the interpreter runs")
def test_a_point_has_no_slope_to_itself_whatever_differences_round_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's compiler contracts ``a b - a b`` to a number that need not be 0; the slope of such a distance is 1."""
    from hyptree.ops.pairwise_lorentz import grad

    plain = grad.across_by_differences

    def contracted(*args: object) -> object:
        q, over_x, over_y = plain(*args)
        return q + 2.0**-106, over_x, over_y * (1 + 2.0**-52)

    x = draw(pairwise_lorentz, 1, 9, 4, device="cpu")
    x[0, 5] = x[0, 2] * 1.01  # the tile has close points
    weight = torch.rand(1, 9, 9)
    actual = []
    for run in (plain, contracted):
        monkeypatch.setattr(grad, "across_by_differences", run)
        leaf = x.clone().requires_grad_()
        d = pairwise_lorentz.pairwise_dist(leaf, leaf, C, backend="triton")
        actual.append(torch.autograd.grad((d * weight).sum(), leaf)[0])
    assert (actual[0] - actual[1]).norm() <= 1e-6 * actual[0].norm()


@ops
def test_many_distances_leave_close_points_to_a_second_kernel(
    op: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyptree.ops.pairwise_lorentz import triton

    monkeypatch.setattr(triton, "_FEW", 0)
    x, y = draw(op, 2, 70, 9, device=device), draw(op, 2, 130, 9, device=device)
    y[1, 128] = x[1, 66] * (1 + 1e-3 * torch.randn(9, device=device))
    y[0, 3] = x[0, 1]
    for end in (y, x):
        expected = op.pairwise_dist(x.double(), x.double() if end is x else y.double(), C)
        with monkeypatch.context() as patch:
            poison(patch)
            actual = op.pairwise_dist(x, end, C, backend="triton")
        assert (actual - expected).abs().max() < 5e-6
        assert (actual.diagonal(dim1=1, dim2=2) == 0).all() if end is x else actual[0, 1, 3] == 0


@pytest.mark.parametrize(
    ("shape", "programs"),
    [((2, 70, 250, 9), 1), ((1, 70, 450, 9), 4), ((1, 64, 256, 32), 1), ((1, 20, 230, 200), 1)],
    ids=["all tiles", "some tiles", "even tiles", "long rows"],
)
def test_many_distances_walk_over_tiles(
    shape: tuple[int, ...], programs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyptree.ops.pairwise_lorentz import triton

    monkeypatch.setattr(triton, "_PROGRAMS", programs)
    b, n, m, d = shape
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (draw(pairwise_lorentz, b, size, d, device=device) for size in (n, m))
        y[0, 200] = x[0, 7] * (1 + 1e-3 * torch.randn(d, device=device))
        x, y = x.to(dtype), y.to(dtype)
        y[0, 100] = x[0, 3]
        expected = pairwise_lorentz.pairwise_dist(x.double(), y.double(), C)
        for mode in ("exact", "matmul"):
            with monkeypatch.context() as patch:
                poison(patch)
                actual = pairwise_lorentz.pairwise_dist(x, y, C, mode=mode, backend="triton")
            assert actual.dtype == torch.float32 and actual.isfinite().all()
            error = (actual - expected).abs()
            if mode == "exact":
                assert error.max() < 5e-6 and actual[0, 3, 100] == 0
            else:  # a product is poor at close points: those that are not are as good
                assert error[expected > 1].max() < 1e-4
    with monkeypatch.context() as patch:
        poison(patch)
        actual = pairwise_lorentz.pairwise_dist(y, y, C, backend="triton")
    assert (actual - pairwise_lorentz.pairwise_dist(y.double(), y.double(), C)).abs().max() < 5e-6
    assert not actual.diagonal(dim1=1, dim2=2).any()


def test_close_points_far_along_the_other_set(device: str) -> None:
    """Tiles that a row has close points in are left to a second kernel, which finds them by marks, 64 at a time."""
    x, y = draw(pairwise_lorentz, 1, 5, 16, device=device), draw(pairwise_lorentz, 1, 2085, 16, device=device)
    for place, other in ((3, 2080), (3, 5), (4, 1030)):
        y[0, other] = x[0, place] * (1 + 0.05 * torch.randn(16, device=device))
    weight = torch.randn(1, 5, 2085, device=device)
    grads = []
    for leaf, end, backend in ((x.clone(), y, "triton"), (x.double(), y.double(), "torch")):
        leaf.requires_grad_()
        d = pairwise_lorentz.pairwise_dist(leaf, end, C, backend=backend)
        grads.append(torch.autograd.grad((d * weight).sum(), leaf)[0].double())
    assert ((grads[0] - grads[1]).norm(dim=-1) <= 1e-5 * grads[1].norm(dim=-1)).all()


def test_gradients_of_many_columns_do_not_drift(device: str) -> None:
    """Matrix units cut off what they add: sums over all columns in one of them lost 6e-6 at 2048 columns."""
    b, n, m, d = (1, 16, 130, 16) if device == "cpu" else (1, 70, 4000, 64)
    x, y = (draw(pairwise_lorentz, b, size, d, device=device) for size in (n, m))
    weight = torch.rand(b, n, m, device=device)
    expected = outcome(lambda x, y: lorentz.pairwise_dist(x, y, C), x.double(), y.double(), weight)
    actual = outcome(lambda x, y: pairwise_lorentz.pairwise_dist(x, y, C, backend="triton"), x, y, weight)
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()


@ops
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_right_for_the_numbers_it_holds(op: ModuleType, dtype: torch.dtype, device: str) -> None:
    x, y = (draw(op, 1, size, 20, device=device, radius=2.0).to(dtype) for size in (18, 9))
    weight = torch.randn(1, 18, 9, device=device)
    for run in (op.pairwise_dist, op.distance_softmax):
        expected = outcome(lambda x, y, run=run: run(x, y, C), x.double(), y.double(), weight)
        actual = outcome(lambda x, y, run=run: run(x, y, C, backend="triton"), x, y, weight)
        assert actual[0].dtype == torch.float32 and actual[1].dtype == dtype
        assert_equal(actual, expected, 5e-6, 8e-3)


@ops
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e20])
@pytest.mark.parametrize("mode", ["exact", "matmul"])
def test_gradients_that_come_in_may_have_any_size(op: ModuleType, mode: str, scale: float, device: str) -> None:
    """Also of very different size: row by row, as a large row would hide what a small one lost."""
    x, y = (draw(op, 1, size, 20, device=device) for size in (19, 70))
    weight = torch.randn(1, 19, 70, device=device) * 10.0 ** (torch.rand(1, 19, 70, device=device) * 12 - 6)
    weight *= scale * 10.0 ** (torch.rand(1, 19, 1, device=device) * 8 - 4)
    expected = outcome(lambda x, y: op.pairwise_dist(x, y, C), x.double(), y.double(), weight.double())
    actual = outcome(lambda x, y: op.pairwise_dist(x, y, C, mode=mode, backend="triton"), x, y, weight)
    # The columns' own sizes differ less: their sums run over rows of all sizes.
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert ((one.double() - other).norm(dim=-1) <= 2e-5 * other.norm(dim=-1)).all()


@pytest.mark.parametrize("width", [130, 250])
def test_wide_rows(width: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (draw(pairwise_lorentz, 1, size, width, device=device) for size in (5, 18))
    weight = torch.randn(1, 5, 18, device=device)
    for run, kind in (("pairwise_dist", 5e-6), ("distance_softmax", 2e-5)):
        expected = outcome(
            lambda x, y, run=run: getattr(pairwise_lorentz, run)(x, y, C), x.double(), y.double(), weight
        )
        with monkeypatch.context() as patch:
            poison(patch)
            actual = outcome(
                lambda x, y, run=run: getattr(pairwise_lorentz, run)(x, y, C, backend="triton"), x, y, weight
            )  # fmt: skip
        assert_equal(actual, expected, kind, 1e-5)
    every = lorentz.pairwise_dist(x.double(), y.double(), C)
    assert torch.equal(pairwise_lorentz.nearest(x, y, C, backend="triton")[0], every.argmin(-1))


def test_one_of_two_gradients(device: str) -> None:
    x, y = (draw(pairwise_lorentz, 2, size, 6, device=device) for size in (17, 5))
    weight = torch.randn(2, 17, 5, device=device)
    for run in (pairwise_lorentz.pairwise_dist, pairwise_lorentz.distance_softmax):
        both = outcome(lambda x, y, run=run: run(x, y, C, backend="triton"), x, y, weight)
        for place in range(2):
            pair = [x.clone(), y.clone()]
            leaf = pair[place].requires_grad_()
            (alone,) = torch.autograd.grad((run(*pair, C, backend="triton") * weight).sum(), leaf)
            assert torch.equal(alone, both[1 + place])


@pytest.mark.parametrize("n", [1, 7, 33])
def test_parts_of_rows_are_unit_vectors(n: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of float16 hold 22 bits of every component that counts, at any length of the row; then zeros."""
    from hyptree.ops.pairwise_lorentz import rows

    x = torch.randn(2, 9, n, device=device) * 10.0 ** (torch.rand(2, 9, 1, device=device) * 30 - 15)
    x[0, 4] = 0
    with monkeypatch.context() as patch:
        poison(patch)
        *_, parts, none = rows.row_stats(x, None, rows.LORENTZ, C)
    assert parts.shape == (2, 18, 16 * -(-n // 16)) and none.numel() == 0
    actual = parts.double().sum(0) / 256
    unit = torch.nn.functional.normalize(x.double(), dim=-1, eps=1e-300).view(18, n)
    assert not actual[:, n:].any()
    assert ((actual[:, :n] - unit).abs() <= 2.0**-22 * unit.abs() + 2.0**-33).all()


def test_batch_axes_broadcast_and_any_layout_will_do(device: str) -> None:
    def check(x: Tensor, y: Tensor) -> None:
        shape = (*torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2])
        weight = torch.randn(shape, device=device)
        expected = outcome(lambda x, y: pairwise_lorentz.pairwise_dist(x, y, C), x.double(), y.double(), weight)
        actual = outcome(lambda x, y: pairwise_lorentz.pairwise_dist(x, y, C, backend="triton"), x, y, weight)
        assert_equal(actual, expected, 5e-6, 1e-5)

    points = draw(pairwise_lorentz, 2, 1, 5, 3, device=device)
    check(points, draw(pairwise_lorentz, 4, 3, device=device))
    check(points, draw(pairwise_lorentz, 2, 4, 3, device=device))
    check(draw(pairwise_lorentz, 4, 3, device=device), points)
    check(points.transpose(0, 2)[:2], points[:1, :1, ::2].mT.contiguous().mT)
    check(points[..., 1:], points[..., :-1].flip(0))


def test_empty_sets(device: str) -> None:
    x, y = draw(pairwise_lorentz, 4, 3, device=device), draw(pairwise_lorentz, 0, 3, device=device)
    for run in (pairwise_lorentz.pairwise_dist, pairwise_lorentz.distance_softmax):
        assert run(x, y, C, backend="triton").shape == (4, 0)
        actual = outcome(lambda x, y, run=run: run(x, y, C, backend="triton"), y, x, torch.zeros(0, 4, device=device))
        assert actual[0].shape == (0, 4) and not actual[2].any()
        assert run(x.expand(0, 4, 3), x, C, backend="triton").shape == (0, 4, 4)
    with pytest.raises(ValueError, match="at least one point in y"):
        pairwise_lorentz.nearest(x, y)


@ops
@charts
def test_the_origin_and_coincident_points(op: ModuleType, tangent: bool, device: str) -> None:
    """The gradient at the origin is the unit vector away from the other point; none where two points coincide."""
    x = draw(op, 5, 4, device=device, tangent=tangent)
    x[1] = 0
    y = torch.stack([x[0], torch.zeros_like(x[0]), x[3]])
    weight = torch.rand(5, 3, device=device)
    for mode in ("exact", "matmul"):
        actual = outcome(
            lambda x, y, mode=mode: op.pairwise_dist(x, y, C, mode=mode, tangent=tangent, backend="triton"),
            x,
            y,
            weight,
        )
        expected = outcome(lambda x, y: op.pairwise_dist(x, y, C, tangent=tangent), x.double(), y.double(), weight)
        if mode == "exact":
            assert actual[0][0, 0] == 0 and actual[0][1, 1] == 0 and actual[0][3, 2] == 0
            assert_equal(actual, expected, 5e-6, 1e-5)
        assert actual[1].isfinite().all() and actual[2].isfinite().all()
        torch.testing.assert_close(actual[1][1].double(), expected[1][1], rtol=1e-5, atol=1e-5)


@ops
def test_a_bad_row_stays_alone(op: ModuleType, device: str) -> None:
    x, y = draw(op, 20, 5, device=device), draw(op, 7, 5, device=device)
    x[3, 2], y[4, 0] = torch.nan, torch.nan
    bad = torch.zeros(20, 7, dtype=torch.bool, device=device)
    bad[3] = bad[:, 4] = True
    for mode in ("exact", "matmul"):
        assert torch.equal(op.pairwise_dist(x, y, C, mode=mode, backend="triton").isnan(), bad)
    y[4] = 0
    for run in (op.pairwise_dist, op.distance_softmax):
        actual = outcome(lambda x, y, run=run: run(x, y, C, backend="triton"), x, y, torch.rand(20, 7, device=device))
        good = torch.arange(20, device=device) != 3
        assert actual[0][3].isnan().all() and actual[0][good].isfinite().all()
        assert actual[1][3].isnan().all() and actual[1][good].isfinite().all()
    y[2] = torch.nan
    index, distance = op.nearest(x, y, C, backend="triton")
    assert distance[3].isnan() and distance[good].isfinite().all() and not (index[good] == 2).any()


def test_rows_at_the_limit_are_capped_as_in_the_geometry(device: str) -> None:
    v = torch.randn(6, 4, device=device)
    y = draw(pairwise_lorentz, 5, 4, device=device, tangent=True)
    actual = pairwise_lorentz.pairwise_dist(100 * v, y, C, tangent=True, backend="triton")
    expected = pairwise_lorentz.pairwise_dist(100 * v, y, C, tangent=True, backend="torch")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    x, y = 10 * v, draw(pairwise_poincare, 5, 4, device=device)
    actual = pairwise_poincare.pairwise_dist(x, y, C, backend="triton")
    expected = pairwise_poincare.pairwise_dist(
        x.double() * ((1 - 4 * 2.0**-23) / C**0.5 / x.double().norm(dim=-1, keepdim=True)), y.double(), C
    )
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@ops
def test_a_number_as_curvature_costs_no_pass_over_all_distances(op: ModuleType, device: str) -> None:
    x, y = (draw(op, 2, size, 4, device=device).requires_grad_() for size in (5, 7))
    step = op.pairwise_dist(x, y, C, backend="triton").grad_fn
    steps = [step.name(), step.next_functions[0][0].name()]
    assert steps == ["ViewBackward0", "_DistancesBackward"]


@ops
def test_learned_curvature(op: ModuleType, device: str) -> None:
    x, y = draw(op, 3, 9, 6, device=device), draw(op, 3, 8, 6, device=device)
    weight = torch.rand(3, 9, 8, device=device)
    c = torch.tensor([0.4, 0.7, 0.6], device=device).view(3, 1, 1).requires_grad_()
    exact = c.detach().double().requires_grad_()
    actual = torch.autograd.grad((op.pairwise_dist(x, y, c, backend="triton") * weight).sum(), c)[0]
    expected = torch.autograd.grad((op.pairwise_dist(x.double(), y.double(), exact) * weight).sum(), exact)[0]
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_graphs_hold_each_kernel_as_one_call(device: str) -> None:
    x, y = (draw(pairwise_lorentz, 1, size, 3, device=device) for size in (5, 4))
    weight = torch.randn(1, 5, 4, device=device)

    def both(x: Tensor, y: Tensor) -> Tensor:
        return pairwise_lorentz.pairwise_dist(x, y, C, backend="triton") + pairwise_lorentz.distance_softmax(
            x, y, C, backend="triton"
        )

    targets: set[str] = set()

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        targets.update(str(node.target) for node in graph.graph.nodes if "hyptree" in str(node.target))
        return make_boxed_func(graph)

    actual = outcome(torch.compile(both, backend=aot_autograd(fw_compiler=keep), fullgraph=True), x, y, weight)
    for one, other in zip(actual, outcome(both, x, y, weight), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert targets == {
        f"hyptree.{name}.default" for name in ("pairwise_dist", "distance_softmax", "row_means", "pairs_grad")
    }


@ops
@charts
def test_second_derivatives_are_those_of_the_definition(op: ModuleType, tangent: bool, device: str) -> None:
    x, y = (draw(op, size, 3, device=device, tangent=tangent) for size in (3, 2))

    def penalty(x: Tensor, y: Tensor, name: str, backend: str) -> list[Tensor]:
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        out = getattr(op, name)(x, y, C, tangent=tangent, backend=backend)
        grads = torch.autograd.grad(out[:, 0].sum(), (x, y), create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in grads), (x, y)))

    for name in ("pairwise_dist", "distance_softmax"):
        actual = penalty(x, y, name, "triton")
        for one, other in zip(actual, penalty(x.double(), y.double(), name, "torch"), strict=True):
            assert other.norm() > 1e-3
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


def test_transforms_of_functions_take_the_definition(device: str) -> None:
    x, y = draw(pairwise_lorentz, 3, 4, 2, device=device), draw(pairwise_lorentz, 5, 2, device=device)
    with pytest.raises(ValueError, match=r"transformed by torch\.func"):
        torch.func.vmap(lambda x: pairwise_lorentz.pairwise_dist(x, y, C, backend="triton"))(x)
    actual = torch.func.vmap(lambda x: pairwise_lorentz.pairwise_dist(x, y, C))(x)
    torch.testing.assert_close(actual, pairwise_lorentz.pairwise_dist(x, y, C, backend="triton"), rtol=1e-5, atol=1e-5)


def test_input_that_does_not_fit() -> None:
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="x has 2 and y 3 components"):
        pairwise_lorentz.pairwise_dist(x, torch.zeros(3, 3))
    with pytest.raises(ValueError, match="mode must be 'exact' or 'matmul', got 'fast'"):
        pairwise_lorentz.pairwise_dist(x, x, mode="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="temperature must be a positive number, got 0"):
        pairwise_lorentz.distance_softmax(x, x, temperature=0)
    with pytest.raises(ValueError, match=r"one c per pair of sets"):
        pairwise_poincare.pairwise_dist(x, x, torch.ones(3, 1))
    with pytest.raises(ValueError, match="points of 300 components, the kernel takes 1 to 256"):
        pairwise_lorentz.pairwise_dist(torch.zeros(3, 300), torch.zeros(3, 300), backend="triton")


@pytest.mark.parametrize(("shared", "stages"), [(232_448, 2), (166_912, 2), (101_376, 1)], ids=["H100", "A100", "4090"])
def test_rows_come_ahead_where_there_is_room_for_two_tiles(shared: int, stages: int) -> None:
    from hyptree.ops.pairwise_lorentz import tiles

    assert tiles.strip_sizes(2048, 2048, 128, False, shared)["num_stages"] == stages

"""What every public geometry function must survive: compile, export, vmap, jacrev, gradcheck, gradgradcheck, autocast.

Driven by the registry: a new function is tested the moment it is written. Sample arguments follow from their names.
"""

import pytest
import torch
from torch import Tensor

from hyptree.geometry import lorentz, poincare
from hyptree.geometry.core.registry import FUNCTIONS, GeometryFunction

C = 0.7
NUM_ROWS, DIM = 3, 4
SETS = {"pairwise_dist", "gram", "centroid"}  # these take (..., N, n)
BALLS = {"poincare", "klein"}


def make_points(space: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(*shape, dtype=dtype)
    if space == "sphere":
        return x / (x.norm(dim=-1, keepdim=True) * C**0.5)
    if space in BALLS:
        return x / (1 + x.norm(dim=-1, keepdim=True)) / C**0.5
    return x


def make_args(f: GeometryFunction, dtype: torch.dtype = torch.float64, rows: int = NUM_ROWS) -> list:
    """Random arguments for ``f``, leading with ``rows`` independent rows (or sets)."""
    space, name = f.name.split(".")
    set_shape = (rows, 5, DIM) if name in SETS else (rows, DIM)
    args: list = []
    for arg in f.args:
        if arg in ("x", "y", "p"):
            origin = "poincare" if name == "from_poincare" else "klein" if name == "from_klein" else space
            origin = "lorentz" if name == "from_lorentz" else origin
            args.append(make_points(origin, set_shape, dtype))
        elif arg in ("v", "u", "g"):
            args.append(torch.randn(set_shape, dtype=dtype))
        elif arg == "weights":
            args.append(torch.rand(rows, 5, dtype=dtype) + 0.1)
        elif arg == "M":
            args.append(torch.randn(2, DIM, dtype=dtype))
        elif arg in ("tau", "a", "r"):
            args.append(torch.rand(rows, 1, dtype=dtype) + 0.2)
        elif arg == "c":
            args.append(torch.tensor(C, dtype=dtype))
        else:
            raise AssertionError(f"{f.name}: no sample for the argument {arg!r}; add one here")
    return args


def smooth(f: GeometryFunction) -> bool:
    """False for piecewise constant functions, whose derivative says nothing."""
    return not f.name.endswith("saturation")


ALL = [pytest.param(f, id=f.name) for f in FUNCTIONS.values()]
SMOOTH = [pytest.param(f, id=f.name) for f in FUNCTIONS.values() if smooth(f)]


def test_registry_holds_every_public_function():
    """A function of a geometry module without the decorator would escape all tests of this file."""
    import inspect

    from hyptree.geometry import euclidean, klein, lorentz, poincare, sphere

    for module in (euclidean, klein, lorentz, poincare, sphere):
        public = {
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        }
        registered = {
            name.split(".")[1] for name in FUNCTIONS if name.startswith(module.__name__.rsplit(".", 1)[1] + ".")
        }
        assert public == registered


@pytest.mark.parametrize("f", SMOOTH)
def test_gradcheck_and_gradgradcheck(f):
    args = [a.requires_grad_() for a in make_args(f, rows=2)]
    assert torch.autograd.gradcheck(f.fn, args)
    assert torch.autograd.gradgradcheck(f.fn, args)


@pytest.mark.parametrize("f", SMOOTH)
def test_vmap_and_jacrev_agree_with_loops(f):
    args = make_args(f)
    per_row = [i for i, name in enumerate(f.args) if name not in ("M", "c")]
    in_dims = tuple(0 if i in per_row else None for i in range(len(args)))
    rows = [f.fn(*[a[r] if i in per_row else a for i, a in enumerate(args)]) for r in range(NUM_ROWS)]
    torch.testing.assert_close(torch.func.vmap(f.fn, in_dims)(*args), torch.stack(rows))

    first = [a[0] if i in per_row else a for i, a in enumerate(args)]
    wrt = per_row[0]
    jacobian = torch.func.jacrev(f.fn, argnums=wrt)(*first)
    expected = torch.autograd.functional.jacobian(lambda x: f.fn(*first[:wrt], x, *first[wrt + 1 :]), first[wrt])
    torch.testing.assert_close(jacobian, expected)


@pytest.mark.parametrize("f", ALL)
def test_compiles_without_a_graph_break(f):
    """Values and gradients of the traced graph equal eager ones; aot_eager traces all of it and is quick to build."""
    args = [a.requires_grad_() for a in make_args(f, torch.float32)]
    torch._dynamo.reset()
    compiled = torch.compile(f.fn, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*args), f.fn(*args)
    torch.testing.assert_close(out, expected)
    if smooth(f):
        torch.testing.assert_close(gradients(out, args), gradients(expected, args))


def gradients(out: Tensor, args: list[Tensor]) -> tuple:
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    grads = torch.autograd.grad((out * weights).sum(), args, allow_unused=True)
    return tuple(torch.zeros_like(a) if g is None else g for g, a in zip(grads, args, strict=True))


@pytest.mark.parametrize("space", ["lorentz", "poincare", "sphere"])
def test_matmul_mode_keeps_the_contract(space):
    """The other mode of the distance matrix: both derivatives, vmap, jacrev, export and NaN."""
    f = FUNCTIONS[f"{space}.pairwise_dist"]

    def pairs(x, y, c):
        return f.fn(x, y, c, mode="matmul")

    x, y, c = make_args(f, rows=2)
    args = [a.requires_grad_() for a in (x, y, c)]
    assert torch.autograd.gradcheck(pairs, args)
    assert torch.autograd.gradgradcheck(pairs, args)
    x, y, c = (a.detach() for a in args)
    torch.testing.assert_close(torch.func.vmap(pairs, (0, 0, None))(x, y, c), pairs(x, y, c))
    jacobian = torch.func.jacrev(pairs)(x[0], y[0], c)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(lambda a: pairs(a, y[0], c), x[0]))
    program = torch.export.export(_Wrapper(pairs), (x, y, c))
    torch.testing.assert_close(program.module()(x, y, c), pairs(x, y, c))
    x[0, 1] = float("nan")
    out = pairs(x, y, c)
    assert torch.isnan(out[0, 1]).all() and torch.isfinite(out[1]).all() and torch.isfinite(out[0, 2:]).all()


class _Wrapper(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args: Tensor) -> Tensor:
        return self.fn(*args)


@pytest.mark.parametrize("f", ALL)
def test_exports(f):
    args = tuple(make_args(f, torch.float32))
    program = torch.export.export(_Wrapper(f.fn), args)
    torch.testing.assert_close(program.module()(*args), f.fn(*args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("f", ALL)
def test_half_precision_is_computed_in_float32(f, dtype):
    """Points return in the dtype they came in, scalars in float32, as float32 gives them; also in autocast."""
    args = [a if name == "c" else a.to(dtype) for name, a in zip(f.args, make_args(f, torch.float32), strict=True)]
    expected = f.fn(*[a.float() for a in args])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, full = f.fn(*args), f.fn(*[a.float() for a in args])
    assert out.dtype == (torch.float32 if f.returns == "scalar" else dtype)
    torch.testing.assert_close(full, expected, rtol=0, atol=0)
    tolerance = 0 if f.returns == "scalar" else torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("f", ALL)
def test_empty_batch_keeps_its_shape(f):
    full, empty = make_args(f, torch.float32), make_args(f, torch.float32, rows=0)
    expected = f.fn(*full).shape
    out = f.fn(*empty)
    if f.name.endswith("saturation"):
        assert out.shape == ()
    else:
        assert out.shape == (0, *expected[1:])


@pytest.mark.parametrize("f", [p for p in ALL if "c" in p.values[0].args])
def test_curvature_per_row_equals_one_curvature_at_a_time(f):
    """c with a trailing 1 broadcasts against the batch."""
    args = make_args(f)
    where = f.args.index("c")
    name = f.name.split(".")[1]
    curvatures = torch.tensor([0.5, 0.7, 0.9], dtype=torch.float64)
    if f.name.startswith("sphere") or name == "saturation":
        curvatures = torch.full((3,), C, dtype=torch.float64)
    args[where] = curvatures.view(3, 1, 1) if name in SETS else curvatures.view(3, 1)
    out = f.fn(*args)
    for r in range(NUM_ROWS):
        row = [a[r] if n not in ("M", "c") else a for n, a in zip(f.args, args, strict=True)]
        row[where] = curvatures[r]
        expected = f.fn(*row)
        if name != "saturation":
            torch.testing.assert_close(out[r], expected)


@pytest.mark.parametrize("f", SMOOTH)
def test_nan_in_is_nan_out_and_stays_in_its_row(f):
    """A NaN is never taken for a zero row, and never spreads."""
    for i, name in enumerate(f.args):
        if name in ("M", "c"):
            continue
        args = make_args(f)
        clean = f.fn(*args)
        args[i][1] = float("nan")
        out = f.fn(*args)
        assert torch.isnan(out[1]).all(), name
        assert torch.equal(out[[0, 2]], clean[[0, 2]]), name


@pytest.mark.parametrize("mode", ["exact", "matmul"])
@pytest.mark.parametrize("space", [lorentz, poincare], ids=lambda space: space.__name__.rpartition(".")[2])
def test_distances_within_one_set_compile(space, mode):
    """The same tensor given twice is one input of a graph."""
    x = (0.3 * torch.randn(5, 4)).requires_grad_()

    def total(x):
        return space.pairwise_dist(x, x, mode=mode).square().sum()

    (expected,) = torch.autograd.grad(total(x), x)
    (actual,) = torch.autograd.grad(torch.compile(total, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(actual, expected)


def test_shapes_alone_go_through_products():
    x = torch.empty(5, 4, device="meta", requires_grad=True)
    distance = lorentz.pairwise_dist(x, x, mode="matmul")
    assert distance.shape == (5, 5) and distance.is_meta
    assert torch.autograd.grad(distance.sum(), x)[0].shape == x.shape

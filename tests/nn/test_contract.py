"""What every layer of hyptree.nn owes its users, checked over the registry so that a new layer cannot be forgotten."""

import inspect
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from hyptree import nn as rn
from tests.nn.examples import LAYERS as EXAMPLES

LAYERS = pytest.mark.parametrize("name", list(EXAMPLES))


def unfused():
    """Fused attention has no second derivative and no batching rule in torch: those checks use its unfused twin."""
    return sdpa_kernel(SDPBackend.MATH)


def example(name: str, dtype: torch.dtype = torch.float64, batch: int = 3) -> tuple[nn.Module, tuple[Tensor, ...]]:
    layer, inputs = EXAMPLES[name](dtype, batch)
    return layer.to(dtype), inputs


def as_function(layer: nn.Module, inputs: tuple[Tensor, ...]):
    """The layer as a function of its parameters and floating inputs, and a point at which to call it."""
    names, values = zip(*[(n, p.detach().clone()) for n, p in layer.named_parameters()], strict=True)
    floating = [x for x in inputs if x.is_floating_point()]

    def call(*tensors: Tensor) -> Tensor:
        parameters = dict(zip(names, tensors[: len(names)], strict=True))
        rest = iter(tensors[len(names) :])
        settings = tuple(next(rest) if x.is_floating_point() else x for x in inputs)
        return functional_call(layer, parameters, settings)

    return call, tuple(t.clone().requires_grad_() for t in (*values, *floating))


def results(layer: nn.Module, inputs: tuple[Tensor, ...], cotangent: Tensor | None = None) -> list[Tensor]:
    """Output and gradients of floating inputs and parameters."""
    inputs = tuple(x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    out = layer(*inputs)
    expected = [x for x in inputs if x.requires_grad] + list(layer.parameters())
    grads = torch.autograd.grad(out, expected, torch.ones_like(out) if cotangent is None else cotangent)
    return [out.detach(), *grads]


def test_every_layer_is_registered():
    public = {n for n in rn.__all__ if inspect.isclass(getattr(rn, n)) and issubclass(getattr(rn, n), nn.Module)}
    assert len(public) >= 12
    assert public == {name.split(".")[0] for name in EXAMPLES}
    for name in EXAMPLES:
        assert type(example(name)[0]).__name__ == name.split(".")[0]


# Inductor takes many seconds per layer on one core. What can break in our code is the tracing (a graph without breaks,
# forward and backward), and "aot_eager" checks that for every layer; inductor itself runs for the layer with the most
# telling kernel, a matrix product with a transcendental epilogue, and for all of them under `-m slow`.
BACKENDS = [pytest.param(name, "aot_eager", id=name) for name in EXAMPLES]
BACKENDS += [
    pytest.param(name, "inductor", id=f"{name}-inductor", marks=[] if name == "LorentzMLR" else pytest.mark.slow)
    for name in EXAMPLES
]


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_compile_fullgraph_equals_eager(name, backend):
    torch.compiler.reset()
    layer, inputs = example(name)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    cotangent = torch.randn_like(layer(*inputs))
    for got, expected in zip(results(compiled, inputs, cotangent), results(layer, inputs, cotangent), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@LAYERS
def test_export_equals_eager(name):
    layer, inputs = example(name, torch.float32)
    program = torch.export.export(layer, inputs)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(*inputs), layer(*inputs))


@LAYERS
def test_vmap_over_the_batch_equals_the_batch(name):
    layer, inputs = example(name)
    with unfused():
        torch.testing.assert_close(vmap(lambda *rows: layer(*rows))(*inputs), layer(*inputs))


@LAYERS
def test_jacrev_equals_autograd(name):
    layer, inputs = example(name, batch=2)
    call, at = as_function(layer, inputs)
    with unfused():
        jacobians = jacrev(call, argnums=tuple(range(len(at))))(*at)
        expected = torch.autograd.functional.jacobian(call, at)
    for got, value in zip(jacobians, expected, strict=True):
        torch.testing.assert_close(got, value)


@LAYERS
def test_gradcheck(name):
    call, at = as_function(*example(name))
    assert gradcheck(call, at, check_batched_grad=False)


@LAYERS
def test_gradgradcheck(name):
    call, at = as_function(*example(name, batch=2))
    with unfused():
        assert gradgradcheck(call, at, fast_mode=True)  # random projections: the full matrix takes 20 s for attention


@LAYERS
def test_autocast_is_close_and_finite(name):
    """Errors are relative to the sizes of what is summed: a sum over the batch may cancel, its rounding does not."""
    layer, inputs = example(name, torch.float32, batch=32)
    expected = layer(*inputs)
    cotangent = torch.randn_like(expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(*inputs)
        low = results(layer, inputs, cotangent.to(got.dtype))
    full = results(layer, inputs, cotangent)
    rows = [results(layer, tuple(x[i : i + 1] for x in inputs), cotangent[i : i + 1]) for i in range(32)]
    for g, e, parts in zip(low, full, zip(*rows, strict=True), strict=True):
        assert torch.isfinite(g).all()
        scale = torch.stack([part.norm() for part in parts]).norm()
        tolerance = 0.01 if e is full[0] else 0.05
        assert (g.float() - e).norm() < tolerance * scale, f"a tensor of shape {tuple(e.shape)}"


@LAYERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_of_the_output(name, dtype):
    layer, inputs = example(name, dtype)
    out = layer(*inputs)
    assert out.dtype == (torch.float32 if "MLR" in name else dtype)
    assert torch.isfinite(out).all()


@LAYERS
def test_empty_batch(name):
    layer, inputs = example(name, torch.float32, batch=0)
    full_layer, full_inputs = example(name, torch.float32, batch=2)
    out, *grads = results(layer, inputs)
    assert out.shape == (0, *full_layer(*full_inputs).shape[1:])
    assert all((g == 0).all() for g in grads)


@LAYERS
def test_inputs_are_not_written_to(name):
    layer, inputs = example(name, torch.float32)
    before = [x.clone() for x in inputs]
    layer(*inputs).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@LAYERS
def test_reset_parameters_keeps_the_parameter_objects(name):
    layer, _ = example(name, torch.float32)
    if not hasattr(layer, "reset_parameters"):
        pytest.skip("nothing to reset")
    before = {n: id(p) for n, p in layer.named_parameters()}
    layer.reset_parameters()
    assert before == {n: id(p) for n, p in layer.named_parameters()}


@LAYERS
def test_no_warning_on_the_way(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer, inputs = example(name, torch.float32)
        layer(*inputs).sum().backward()


@LAYERS
def test_repr_names_the_layer(name):
    layer, _ = example(name, torch.float32)
    with torch.no_grad():
        assert repr(layer).startswith(name.split(".")[0] + "(")

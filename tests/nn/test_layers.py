"""Modules as users meet them: bad rows, low precision, copies and checkpoints, sharing, masks, memory, mistakes."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyptree import nn as rn
from hyptree.geometry import Euclidean, Lorentz, Poincare, Sphere, lorentz, manifold_of
from tests.nn.examples import LAYERS as EXAMPLES

LAYERS = pytest.mark.parametrize("name", [n for n in EXAMPLES if n != "ManifoldEmbedding"])
RADIUS = 38.0  # hyperbolic, close to the limit of float32


def bad_rows(name: str, good: torch.Tensor) -> torch.Tensor:
    """One zero row and two rows as far out as the model can hold."""
    direction = nn.functional.normalize(torch.randn_like(good[:1]), dim=-1)
    if name.startswith(("Poincare", "Mobius")):
        far = [direction * (1 - 1e-6) / 0.7**0.5, direction]
    else:
        far = [lorentz.expmap0(direction * RADIUS, 0.7), 200.0 * direction]
    return torch.cat([torch.zeros_like(direction), *far])


@LAYERS
def test_bad_rows_have_finite_gradients_and_leave_others_alone(name):
    layer, inputs = EXAMPLES[name](torch.float32, 6)
    good = [x.clone().requires_grad_() for x in inputs]
    mixed = [torch.cat([bad_rows(name, x), x]).requires_grad_() for x in inputs]
    out_good, out_mixed = layer(*good), layer(*mixed)
    assert torch.isfinite(out_mixed).all()
    torch.testing.assert_close(out_mixed[3:], out_good)
    cotangent = torch.randn_like(out_good)
    padded = torch.cat([torch.ones_like(out_mixed[:3]), cotangent])
    grads_good = torch.autograd.grad(out_good, good, cotangent)
    grads_mixed = torch.autograd.grad(out_mixed, [*mixed, *layer.parameters()], padded)
    for mine, alone in zip(grads_mixed, grads_good, strict=False):
        torch.testing.assert_close(mine[3:], alone, rtol=1e-4, atol=1e-6)
    assert all(torch.isfinite(g).all() for g in grads_mixed)


@LAYERS
def test_bad_rows_without_a_say_leave_shared_gradients_alone(name):
    """With a zero cotangent on the bad rows the parameters' gradients are those of the good rows alone."""
    layer, inputs = EXAMPLES[name](torch.float32, 6)
    mixed = [torch.cat([bad_rows(name, x), x]) for x in inputs]
    out_good, out_mixed = layer(*inputs), layer(*mixed)
    cotangent = torch.randn_like(out_good)
    padded = torch.cat([torch.zeros_like(out_mixed[:3]), cotangent])
    parameters = list(layer.parameters())
    if not parameters:
        pytest.skip("nothing shared")
    expected = torch.autograd.grad(out_good, parameters, cotangent)
    got = torch.autograd.grad(out_mixed, parameters, padded)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["LorentzFC", "PoincareFC", "MobiusLinear", "LorentzLinear", "LorentzLinearBounded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_outputs_are_points(name, dtype):
    """Even with huge weights every output can be stored, squared and, in the ball, lies inside it."""
    layer, inputs = EXAMPLES[name](dtype, 64)
    layer = layer.to(dtype)
    with torch.no_grad():
        layer.weight.mul_(30)
    out = layer(*[torch.cat([bad_rows(name, x), x]) for x in inputs])
    assert torch.isfinite(out).all() and torch.isfinite(out.float().square().sum(-1)).all()
    layer.manifold_out.check(out.float())


def test_layer_with_zero_hyperplane_is_finite():
    layer = rn.LorentzMLR(5, 3, Lorentz(learnable=True))
    with torch.no_grad():
        layer.weight[1].zero_()
    logits = layer(torch.randn(4, 5))
    assert (logits[:, 1] == 0).all() and (logits[:, 0] != 0).all()
    logits.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_mlr_gradient_at_the_origin_is_the_normal():
    layer = rn.LorentzMLR(5, 3, Lorentz(2.0))
    x = torch.zeros(1, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x)[0, 1], x)
    torch.testing.assert_close(grad[0], layer.weight[1].detach())


def test_autocast_linear_is_exact_in_the_rounded_inputs():
    """The time belongs to the rounded point and is added in float32: only the product and the result are rounded."""
    layer = rn.LorentzLinear(64, 32, Lorentz(0.5))
    x = torch.randn(128, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    low, weight, bias = x.bfloat16().double(), layer.weight.bfloat16().double(), layer.bias.bfloat16().double()
    product = low @ weight.T + bias
    time_term = torch.sqrt(2 + (low * low).sum(-1, keepdim=True)) * layer.weight_time.double()
    bound = 2**-8 * (product.abs() + (product + time_term).abs()) + 1e-5
    assert ((out.double() - product - time_term).abs() <= bound).all()


def test_autocast_keeps_ball_points_in_their_dtype():
    layer, inputs = EXAMPLES["MobiusLinear"](torch.float32, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(*inputs).dtype == torch.float32
        logits = rn.LorentzMLR(5, 3, Lorentz())(torch.randn(4, 5))
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("name", list(EXAMPLES))
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_copies_compute_the_same(name, how):
    layer, inputs = EXAMPLES[name](torch.float32, 4)
    if how == "deepcopy":
        twin = copy.deepcopy(layer)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(layer))
    else:
        twin, _ = EXAMPLES[name](torch.float32, 4)
        twin.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(twin(*inputs), layer(*inputs))
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in layer.parameters()}


def test_layers_share_one_learned_curvature():
    shared = Lorentz(1.0, learnable=True)
    model = nn.Sequential(
        rn.LorentzLinear(5, 6, shared), nn.GELU(), rn.LorentzFC(6, 4, shared), rn.LorentzMLR(4, 3, shared)
    )
    curvatures = [p for n, p in model.named_parameters() if n.endswith("raw")]
    assert len(curvatures) == 1
    model(torch.randn(2, 5)).sum().backward()
    assert curvatures[0].grad.abs() > 0
    twin = copy.deepcopy(model)
    assert twin[0].manifold is twin[3].manifold


def test_layers_share_one_constructor():
    """Sizes, spaces and the missing bias read the same on every layer that maps points."""
    for kind, manifold in [(rn.LorentzLinear, Lorentz(0.5)), (rn.LorentzLinearBounded, Lorentz(0.5)),
                           (rn.LorentzFC, Lorentz(0.5)), (rn.MobiusLinear, Poincare(0.5)),
                           (rn.PoincareFC, Poincare(0.5)), (rn.LorentzMLR, Lorentz(0.5)),
                           (rn.PoincareMLR, Poincare(0.5))]:  # fmt: skip
        layer = kind(5, 3, manifold, bias=False, device="meta", dtype=torch.bfloat16)
        assert (layer.in_features, layer.out_features, layer.has_bias) == (5, 3, False)
        assert layer.manifold is manifold and layer.manifold_out is None and layer.c_out is None
        assert layer.weight.device.type == "meta" and layer.weight.dtype == torch.bfloat16
        assert not {"bias", "offset"} & {n for n, _ in layer.named_parameters()}
        size = "num_classes" if kind in (rn.LorentzMLR, rn.PoincareMLR) else "out_features"
        assert repr(layer).startswith(f"{kind.__name__}(\n  in_features=5, {size}=3, bias=False")


def test_linear_without_bias_and_fused_outputs():
    manifold = Lorentz(0.5)
    layer = rn.LorentzLinear(5, 9, manifold, bias=False)
    assert layer.bias is None and "bias" not in layer.state_dict()
    x = torch.randn(2, 7, 5)
    q, k, v = rn.split(layer(x), 3)
    single = rn.lorentz_linear(x, layer.weight[3:6], layer.weight_time[3:6], None, 0.5)
    torch.testing.assert_close(k, single)
    assert q.shape == v.shape == (2, 7, 3)


def test_bounded_linear_keeps_its_radius():
    layer = rn.LorentzLinearBounded(5, 7, Lorentz(0.5), Lorentz(2.0), lam=3.0, eps_t=0.1)
    y = layer(1000 * torch.randn(500, 5))
    excess = lorentz.time(y, 2.0) - 1 / math.sqrt(2)
    assert excess.min() > 0.0999 and excess.max() < 3.1001


def test_on_space_applies_the_module_and_changes_the_curvature():
    x = torch.randn(4, 8)
    norm = nn.RMSNorm(8)
    torch.testing.assert_close(rn.OnSpace(norm, Lorentz(0.5))(x), norm(x))
    torch.testing.assert_close(rn.OnSpace(norm, Lorentz(0.5), Lorentz(2.0))(x), norm(x) / 2)
    assert torch.isfinite(rn.OnSpace(norm, Lorentz(0.5))(torch.zeros(1, 8))).all()


def test_batch_norm_reads_the_last_axis():
    layer = rn.LorentzBatchNorm(5)
    y = layer(3 + 2 * torch.randn(4, 50, 5))
    torch.testing.assert_close(y.mean((0, 1)), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var((0, 1), unbiased=False), torch.ones(5), atol=1e-3, rtol=0)
    assert (layer.running_mean - 0.3).abs().max() < 0.2  # momentum 0.1 of a mean of 3


# ----------------------------------------------------------------------------------------------------------- attention


def test_attention_is_permutation_equivariant():
    layer = rn.LorentzAttention(12, 3, Lorentz(0.5)).double()
    x, order = torch.randn(2, 9, 12, dtype=torch.float64), torch.randperm(9)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order])


def test_causal_attention_does_not_look_ahead():
    layer = rn.LorentzAttention(12, 3, Lorentz(0.5)).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    changed = torch.cat([x[:, :5], torch.randn_like(x[:, 5:])], 1)
    before, after = layer(x, is_causal=True), layer(changed, is_causal=True)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amin(-1).min() > 0
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(before, layer(x, bias=mask))


def test_cross_attention_uses_the_rows_of_the_fused_projection():
    heads = Lorentz(torch.tensor([0.5, 1.0, 2.0]).reshape(3, 1, 1), learnable=True)
    layer = rn.LorentzAttention(12, 3, Lorentz(0.7, learnable=True), heads, learnable_tau=True).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x, context=x), layer(x))
    context = torch.randn(2, 4, 12, dtype=torch.float64)
    out = layer(x, context)
    assert out.shape == x.shape
    out.sum().backward()
    assert all((p.grad.abs() > 0).any() for p in layer.parameters())


def test_attention_prefers_the_nearest_key_and_a_single_value_comes_back():
    q, v = torch.randn(1, 5, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    k = torch.cat([q + 0.01, torch.randn(2, 5, dtype=torch.float64) + 2])
    torch.testing.assert_close(rn.lorentz_attention(q, k, v, 1.0, tau=1e-3)[0], v[0])
    torch.testing.assert_close(rn.lorentz_attention(q, k[:1], v[:1], 1.0), v[:1])


def test_query_without_keys_gets_the_origin():
    q, k, v = (torch.randn(1, 2, 4, 5) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    out = rn.lorentz_attention(q, k, v, bias=mask)
    assert torch.isfinite(out).all() and (out[:, :, 2] == 0).all() and (out[:, :, 1] != 0).any()


def test_attention_in_low_precision_stays_close():
    q, k, v = (torch.randn(2, 4, 100, 32) / 4 for _ in range(3))
    expected = rn.lorentz_attention(q, k, v, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = rn.lorentz_attention(q, k, v, 0.5)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() / expected.norm() < 0.01


def test_far_and_zero_tokens_among_others_keep_every_gradient_finite():
    layer = rn.LorentzAttention(12, 3, Lorentz(0.7, learnable=True), learnable_tau=True)
    x = torch.randn(2, 9, 12)
    x[0, 3], x[1, 5] = 0.0, lorentz.expmap0(x[1, 5] * (RADIUS / x[1, 5].norm()), 0.7)
    x.requires_grad_()
    out = layer(x)
    assert torch.isfinite(out).all()
    grads = torch.autograd.grad(out.square().mean().log(), [x, *layer.parameters()])
    assert all(torch.isfinite(g).all() for g in grads)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_makes_no_tensor_of_n_by_n(is_causal):
    N = 2048
    layer = rn.LorentzAttention(32, 2, Lorentz(torch.tensor(0.5), learnable=True), learnable_tau=True)
    x = torch.randn(1, N, 32, requires_grad=True)
    with LargestTensor() as mode:
        layer(x, is_causal=is_causal).sum().backward()
    assert N * 96 <= mode.numel < N * N / 8  # the fused projection was seen, nothing quadratic was
    with LargestTensor() as mode, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        layer(x, is_causal=is_causal)
    assert mode.numel >= N * N  # the detector does detect


# ----------------------------------------------------------------------------------------------------------- embedding


@pytest.mark.parametrize(
    "manifold", [Lorentz(0.5), Poincare(0.5), Euclidean(), Sphere(0.5)], ids=lambda m: type(m).__name__
)
def test_embedding_holds_marked_points(manifold):
    table = rn.ManifoldEmbedding(500, 4, manifold, std=0.1)
    assert manifold_of(table.weight) is manifold
    manifold.check(table.weight)
    for twin in (copy.deepcopy(table), pickle.loads(pickle.dumps(table)), copy.deepcopy(table).double()):
        assert manifold_of(twin.weight) is twin.manifold
    if not isinstance(manifold, Sphere):
        radius = manifold.dist0(table.weight.detach())
        assert 0.9 < (radius.square().mean() / (4 * 0.1**2)).item() < 1.1


def test_sparse_embedding_gives_the_same_gradient():
    index = torch.randint(0, 50, (3, 7))
    dense = rn.ManifoldEmbedding(50, 4, Lorentz())
    sparse = rn.ManifoldEmbedding(50, 4, Lorentz(), sparse=True)
    sparse.load_state_dict(dense.state_dict(), strict=True)
    for table in (dense, sparse):
        lorentz.dist0(table(index)).sum().backward()
    assert sparse.weight.grad.is_sparse
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)


def test_padding_row_is_the_origin_without_gradient():
    table = rn.ManifoldEmbedding(5, 3, Poincare(), padding_idx=-1)
    table(torch.tensor([0, 4, 4])).sum().backward()
    assert (table.weight[4] == 0).all() and (table.weight.grad[4] == 0).all() and (table.weight.grad[0] == 1).all()


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n not in ("ManifoldEmbedding", "OnSpace", "LorentzResidual")])
def test_wrong_last_axis_is_one_clear_line(name):
    layer, inputs = EXAMPLES[name](torch.float32, 4)
    n = inputs[0].shape[-1]
    axes = "B, H, W" if name.startswith("ClusterMixer") else r"\.\.\."  # maps have their axes named
    with pytest.raises(ValueError, match=rf"expected x of shape \({axes}, {n}\),.* got \(2, {n + 1}\)") as caught:
        layer(torch.randn(2, n + 1))
    assert type(layer).__name__ in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rn.LorentzLinear(3, 3, Poincare()), "LorentzLinear: expected a Lorentz manifold, got Poincare"),
        (lambda: rn.PoincareMLR(3, 3, Lorentz()), "PoincareMLR: expected a Poincare manifold, got Lorentz"),
        (lambda: rn.LorentzFC(3, 3, 1.0), "LorentzFC: expected a Lorentz manifold, got float"),
        (lambda: rn.LorentzResidual(Lorentz(), weight=0.0), "weight must be positive, got 0.0"),
        (lambda: rn.LorentzLinearBounded(3, 3, Lorentz(), lam=-1.0), "lam and eps_t must be positive"),
        (lambda: rn.LorentzAttention(10, 3, Lorentz()), "multiple of num_heads, got dim=10, num_heads=3"),
        (lambda: rn.LorentzAttention(9, 3, Lorentz(), tau=0.0), "tau must be positive, got 0.0"),
        (lambda: rn.ManifoldEmbedding(9, 3, 1.0), "expected a manifold"),
        (lambda: rn.ManifoldEmbedding(9, 3, Lorentz(), padding_idx=9), "padding_idx must be below 9 rows, got 9"),
        (
            lambda: rn.ManifoldEmbedding(9, 3, Lorentz())(torch.ones(2)),
            "expected integer indices, got dtype torch.float32",
        ),
        (lambda: rn.split(torch.ones(2, 7), [3, 3]), r"last axis has 7 components, got sizes \[3, 3\]"),
        (lambda: rn.split(torch.ones(2, 7), 3), "last axis has 7 components, got sizes 3"),
        (lambda: rn.lorentz_attention(torch.ones(3), torch.ones(3), torch.ones(3)), r"expected q, k, v of shape"),
        (
            lambda: rn.lorentz_attention(torch.ones(4, 3), torch.ones(4, 2), torch.ones(4, 3)),
            r"same last axis.*q \(4, 3\), k \(4, 2\)",
        ),
        (
            lambda: rn.lorentz_attention(*[torch.ones(4, 3)] * 3, bias=torch.ones(4, 4), is_causal=True),
            "both bias and is_causal",
        ),
        (
            lambda: rn.lorentz_mlr(torch.ones(4, 3), torch.ones(2, 3), torch.ones(2), torch.ones(4, 1)),
            r"one curvature for all points, got c of shape \(4, 1\)",
        ),
    ],
)
def test_mistakes_are_one_clear_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)

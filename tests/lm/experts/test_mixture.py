"""MICE beside its definition in plain torch, in float64."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from hyptree.geometry import lorentz
from hyptree.lm import plain
from hyptree.lm.ambient import constant_weights
from hyptree.lm.blocks import DenseFFN
from hyptree.lm.config import HelmConfig
from hyptree.lm.experts.mixture import CURVATURE_BOUNDS, ExpertStack, Mice
from hyptree.ops.merge_points.reference import merge
from hyptree.ops.residual_norm.reference import rms_norm
from hyptree.train.optimizer.build import param_groups
from hyptree.train.run.recipe import OptimSettings

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def config(**changes: Any) -> HelmConfig:
    sizes: dict[str, Any] = {"hidden_size": 13, "moe_intermediate_size": 10, "num_attention_heads": 2, "vocab_size": 11}
    return HelmConfig(variant="mice", **{**sizes, "intermediate_size": 9, "n_routed_experts": 4, **changes})


def stir(module: nn.Module) -> nn.Module:
    """Values other than the initial ones, so that no zero bias hides a mistake."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


def make(dtype: torch.dtype = torch.float64, **changes: Any) -> Mice:
    return stir(Mice(config(**changes)).to(dtype))  # type: ignore[return-value]


def points(c: float, *shape: int, dtype: torch.dtype = torch.float64, n: int = 13) -> Tensor:
    return rms_norm(torch.randn(*shape, n, dtype=dtype), torch.ones(n, dtype=dtype)) / math.sqrt(c)


def mice_by_definition(mice: Mice, settings: HelmConfig, space: Tensor) -> Tensor:
    """What plain torch gives for the same weights: (B, N, n) -> (B, N, n)."""
    tensors = {**dict(mice.named_parameters()), **dict(mice.named_buffers())}
    return torch.func.functional_call(plain.Mice(settings), tensors, (space,))[0]


CASES: list[dict[str, Any]] = [
    {},
    *({"num_experts_per_tok": k, "n_shared_experts": (k + 1) % 4} for k in range(1, 5)),
    *({"n_shared_experts": s, "gate": "softmax", "route_scale": 2.5} for s in range(4)),
    {"gate": "softmax_raw", "n_shared_experts": 0},
    {"curvature": 0.1, "shared_curvature": True, "n_shared_experts": 2},
    {"curvature": 2.0, "expert_curvature": "const"},
    {"curvature": 2.0, "expert_curvature": "const", "shared_curvature": True},
    {"expert_norm": True, "n_shared_experts": 2, "shared_curvature": True},
    {"expert_norm": True, "curvature": 0.5},
    {"ffn_bias": False, "hidden_size": 15},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_grouped_mice_is_its_definition(changes: dict[str, Any]) -> None:
    """T8, T9: values and all gradients."""
    mice = make(**changes).eval()
    mice.gate.balance_bias.copy_(0.1 * torch.randn(4))
    n, c = mice.sizes.features, mice.sizes.c
    space = points(c, 2, 5, n=n).requires_grad_()
    actual, aux = mice(space)
    expected = mice_by_definition(mice, config(**changes), space)
    assert aux is None and actual.shape == space.shape
    torch.testing.assert_close(actual, expected, **EXACT)
    grad, inputs = torch.randn_like(actual), [space, *mice.parameters()]
    one = torch.autograd.grad(actual, inputs, grad, allow_unused=True)
    other = torch.autograd.grad(expected, inputs, grad, allow_unused=True)
    for a, b, p in zip(one, other, inputs, strict=True):
        torch.testing.assert_close(
            torch.zeros_like(p) if a is None else a, torch.zeros_like(p) if b is None else b, **EXACT
        )


def test_float32_is_near_float64() -> None:
    mice = make(torch.float32).eval()
    space = points(1.0, 3, 6, dtype=torch.float32)
    actual = mice(space)[0]
    exact = copy.deepcopy(mice).double()
    torch.testing.assert_close(actual.double(), exact(space.double())[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [0.1, 1.0, 2.0])
def test_curvature_is_a_temperature_of_the_gate(k: float) -> None:
    """T8: the identity of 6.5, and the way to another curvature and back."""
    stack = stir(ExpertStack(1, 13, 10, c=0.7, curvature=[k]).double())
    assert isinstance(stack, ExpertStack)
    with torch.no_grad():
        stack.log_curvature.fill_(math.log(k))
    x = points(0.7, 6)
    actual = stack(x, torch.tensor([6], dtype=torch.int32))
    definition = plain.Experts(config(curvature=0.7), 1, None)
    expected = torch.func.functional_call(definition, dict(stack.named_parameters()), (x[None],))[0, :, 0]
    torch.testing.assert_close(actual, expected, **EXACT)
    torch.testing.assert_close(stack(x)[0], expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_sizes_fit_the_grouped_kernel(dtype: torch.dtype) -> None:
    """Whatever n and the hidden size are, all operands have the layout that ``grouped_mm`` demands, also backwards."""
    stack = stir(ExpertStack(3, 13, 10, curvature=[0.5, 1.0, 2.0]))
    rows, ends = points(1.0, 9).float(), torch.tensor([4, 4, 9], dtype=torch.int32)
    grad, results = torch.randn(9, 13), []
    for kind in (dtype, torch.float64):
        own, x = copy.deepcopy(stack).to(dtype).to(kind), rows.to(dtype).to(kind).requires_grad_()
        out = own(x, ends)
        results.append([out.detach(), *torch.autograd.grad(out, [x, *own.parameters()], grad.to(kind))])
    bound = 1e-5 if dtype == torch.float32 else 5e-2
    for one, other in zip(*results, strict=True):
        assert (one.double() - other).norm() <= bound * max(float(other.norm()), 1e-3)


def test_order_of_experts_does_not_matter() -> None:
    """T9: experts and gate rows in another order, the same output."""
    mice = make(n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=2).eval()
    mice.gate.balance_bias.copy_(0.2 * torch.randn(6))
    other, order, turn = copy.deepcopy(mice), torch.randperm(6), torch.tensor([1, 0])
    with torch.no_grad():
        for stack, new in ((other.routed, order), (other.shared, turn)):
            for p in stack.parameters():
                p.copy_(p[new].clone())
        other.gate.weight.copy_(mice.gate.weight[order])
        other.gate.balance_bias.copy_(mice.gate.balance_bias[order])
    space = points(1.0, 2, 9)
    torch.testing.assert_close(other(space)[0], mice(space)[0], **EXACT)


def test_one_expert_of_the_models_curvature_is_the_dense_network() -> None:
    """T9: c_i = c and gate weight 1."""
    mice = make(n_routed_experts=1, num_experts_per_tok=1, n_shared_experts=0)
    stack, space = mice.routed, points(1.0, 2, 5)
    with torch.no_grad():
        stack.log_curvature.zero_()
    dense = DenseFFN(config(intermediate_size=10)).double()
    with torch.no_grad():
        for layer, (weight, time, bias) in (
            (dense.gate_up_proj, (stack.weight_in, stack.time_in, stack.bias_in)),
            (dense.down_proj, (stack.weight_out, stack.time_out, stack.bias_out)),
        ):
            layer.weight.copy_(weight.reshape(layer.weight.shape))
            layer.weight_time.copy_(time.reshape(-1))
            layer.bias.copy_(bias.reshape(-1))
    torch.testing.assert_close(mice(space)[0], dense(dense.gate_up_proj(space))[0], **EXACT)


def test_merge_is_the_centroid_and_keeps_its_bound() -> None:
    shared, routed = (
        [torch.randn(7, 5, dtype=torch.float64) for _ in range(2)],
        torch.randn(7, 3, 5, dtype=torch.float64),
    )
    weight = torch.rand(7, 3, dtype=torch.float64)
    together = torch.cat([torch.stack(shared, 1), routed], 1)
    masses = torch.cat([torch.ones(7, 2, dtype=torch.float64), weight], 1)
    torch.testing.assert_close(merge(shared, routed, weight, 0.6), lorentz.centroid(together, masses, 0.6), **EXACT)
    far = 1e4 * torch.randn(50, 1, 5)  # t^2 - |s|^2 is lost in float32, the bound is not
    alone = merge([], far, torch.rand(50, 1) + 0.1)
    assert (alone.norm(dim=-1) <= far[:, 0].norm(dim=-1) * (1 + 1e-5)).all() and alone.isfinite().all()


def test_gate_and_curvatures_are_trained() -> None:
    """T9: gradients of the gate and of every curvature, by differences too; none of the bias."""
    mice = make(hidden_size=4, moe_intermediate_size=3, n_routed_experts=3, shared_curvature=True)
    space = points(1.0, 1, 6, n=4)
    names = ["gate.weight", "routed.log_curvature", "shared.log_curvature", "routed.bias_out", "shared.weight_out"]
    values = [mice.get_parameter(name) for name in names]

    def run(*tensors: Tensor) -> Tensor:
        return torch.func.functional_call(mice, dict(zip(names, tensors, strict=True)), (space,))[0]

    assert gradcheck(run, tuple(v.detach().clone().requires_grad_() for v in values))
    mice(space)[0].pow(2).sum().backward()
    for name, value in zip(names, values, strict=True):
        assert value.grad is not None and value.grad.abs().max() > 1e-6, name
    assert (mice.routed.log_curvature.grad != 0).sum() >= 2 and mice.gate.balance_bias.grad is None


def test_balance_loss_reaches_the_gate_alone() -> None:
    mice = make().train()
    space = points(1.0, 2, 6)
    aux = mice(space)[1]
    assert aux is not None and aux.dim() == 0
    aux.backward()
    assert [name for name, p in mice.named_parameters() if p.grad is not None] == ["gate.weight"]
    assert make(balance_loss=0.0).train()(space)[1] is None


def test_curvatures_begin_spread_and_stay_within_bounds() -> None:
    mice = Mice(config(n_routed_experts=5))
    torch.testing.assert_close(mice.routed.curvature(), torch.linspace(0.1, 2.0, 5))
    with torch.no_grad():
        mice.routed.log_curvature.copy_(torch.tensor([-99.0, 99.0, 0.0, math.log(3.0), -1.0]))
    expected = torch.tensor([CURVATURE_BOUNDS[0], CURVATURE_BOUNDS[1], 1.0, 3.0, math.exp(-1)])
    torch.testing.assert_close(mice.routed.curvature(), expected)
    assert Mice(config(expert_curvature="const")).routed.curvature() == 1.0
    assert Mice(config(curvature=3.0)).shared.curvature() == 3.0


def test_optimisers_are_told_what_not_to_decay() -> None:
    mice = Mice(config(shared_curvature=True))
    copies = [mice, copy.deepcopy(mice), pickle.loads(pickle.dumps(mice)), Mice(config(shared_curvature=True)).double()]
    empty = Mice(config(shared_curvature=True), device="meta")
    copies.append(empty.to_empty(device="cpu"))
    loaded = Mice(config(shared_curvature=True))
    loaded.routed.log_curvature = nn.Parameter(torch.zeros(4))  # as loading does
    for module in (*copies, loaded):
        groups = param_groups(module, OptimSettings(lr=1.0, weight_decay=0.1))
        text = {id(p): (g["weight_decay"], g["lr_scale"]) for g in groups for p in g["params"]}
        for name, p in module.named_parameters():
            expected = (0.0, 0.1) if "curvature" in name else (0.0, 1.0) if "bias" in name else (0.1, 1.0)
            assert text[id(p)] == expected, name


def test_number_of_parameters() -> None:
    """Every map counts its time column; biases and one number per learned curvature; the gate's bias is a buffer."""
    mice = Mice(config(n_shared_experts=1), device="meta")
    expert = 2 * (10 * 14 + 10) + (13 * 11 + 13)
    assert sum(p.numel() for p in mice.parameters()) == 4 * expert + expert + 4 * 13 + 4
    assert all(p.is_meta for p in mice.parameters())


def test_matrices_are_made_once_where_weights_are_constant() -> None:
    mice = make().eval()
    space = points(1.0, 1, 4)
    with torch.no_grad():
        first = mice(space)[0]
        with constant_weights(mice):
            assert torch.equal(mice(space)[0], first)
            kept = mice.routed.stacked(torch.float64, 16).first
            assert mice.routed.stacked(torch.float64, 16).first is kept
        mice.routed.weight_in.data.mul_(1.5)
        second = mice(space)[0]
        with constant_weights(mice):
            torch.testing.assert_close(mice(space)[0], second, **EXACT)
    assert (second - first).abs().max() > 1e-3


def test_training_and_evaluation_agree_and_runs_repeat() -> None:
    mice = make(torch.float32).train()
    space = points(1.0, 2, 8, dtype=torch.float32)
    actual = mice(space)[0]
    assert torch.equal(mice(space)[0], actual) and torch.equal(mice.eval()(space)[0], actual)


def test_bfloat16_is_near_float32() -> None:
    mice = make(torch.float32, hidden_size=64, moe_intermediate_size=96)
    with torch.no_grad():
        for p in mice.parameters():
            p.mul_(0.3)
    space = points(1.0, 4, 16, dtype=torch.float32, n=64)
    exact = mice(space)[0]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = mice(space)[0]
    low = copy.deepcopy(mice).bfloat16()
    pure = low(space.bfloat16())[0]
    for actual in (mixed, pure):
        assert actual.dtype == torch.bfloat16
        close = ((actual - exact).norm(dim=-1) / exact.norm(dim=-1)).median()  # a token may choose other experts
        assert close < 0.02
    mixed.float().pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in mice.parameters())


@pytest.mark.parametrize("norm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiles_whole(norm: bool) -> None:
    """T15: not even routing breaks the graph; forward and gradients as without."""
    mice = make(torch.float32, expert_norm=norm, n_shared_experts=2).train()
    space = points(1.0, 2, 6, dtype=torch.float32)
    compiled = torch.compile(mice, fullgraph=True, backend="aot_eager")
    results = []
    for run in (mice, compiled):
        mice.zero_grad()
        mice.gate.counts.zero_()
        out, aux = run(space)
        (out.pow(2).sum() + aux).backward()
        results.append([out, aux, mice.gate.counts.clone(), *(p.grad for p in mice.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_inductor_agrees_in_bfloat16() -> None:
    mice = make(torch.float32, hidden_size=64, moe_intermediate_size=54).train()
    space = points(1.0, 2, 32, dtype=torch.float32, n=64)

    def step(space: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mice(space)[0]

    actual, expected = torch.compile(step, fullgraph=True)(space), step(space)
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02 * float(expected.detach().abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_gpu_waits_for_nothing_and_repeats(is_compiled: bool) -> None:
    """bfloat16 on a GPU: no host sync in forward and backward, the same bits twice, near the loop in float32."""
    mice = make(torch.float32, hidden_size=72, moe_intermediate_size=100, n_routed_experts=6, n_shared_experts=2).cuda()
    with torch.no_grad():
        for p in mice.parameters():
            p.mul_(0.3)
    space = points(1.0, 4, 50, dtype=torch.float32, n=72).cuda()
    exact = mice(space)[0]
    mice.gate.counts.zero_()

    def step(space: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            return mice(space)

    run = torch.compile(step, fullgraph=True) if is_compiled else step
    results = []
    for turn in range(3):
        mice.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")  # the first turn may compile and tune
        try:
            out, aux = run(space)
            (out.float().pow(2).sum() + aux).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([out, *(p.grad for p in mice.parameters())])
    for one, other in zip(results[1], results[2], strict=True):
        assert torch.equal(one, other)
    assert ((results[0][0] - exact).norm(dim=-1) / exact.norm(dim=-1)).median() < 0.02
    assert int(mice.gate.counts.sum()) == 3 * 200 * 2
    mice.gate.update_bias()
    assert mice.gate.balance_bias.abs().max() > 0

"""The gate, its balance, sorting by expert, and the grouped product, each beside a loop that says what it means."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from hyptree.lm.experts.routing import Gate, balance_loss, balance_step, gates_of, update_biases
from hyptree.ops.experts import grouped
from hyptree.ops.experts.grouped import dispatch, grouped_linear, sort_by_expert, unpermute
from tests.processes import forkserver

SIZES = ((5, 0, 9, 2), (0, 0, 0, 16), (1, 1, 1, 1), (7, 3, 0, 0))


def ends_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def by_loop(x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(list(sizes)), weight, strict=True)])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recorded", [False, True], ids=["", "in-a-graph"])
def test_grouped_product_is_the_loop_over_groups(
    sizes: tuple[int, ...], dtype: torch.dtype, recorded: bool, monkeypatch
) -> None:
    if recorded:
        monkeypatch.setattr(grouped, "_way", lambda *_: "all")
    x = torch.randn(sum(sizes), 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(sizes), 24, 16, dtype=dtype, requires_grad=True)
    actual, expected = grouped_linear(x, weight, ends_of(sizes)), by_loop(x, weight, sizes)
    grad = torch.randn_like(actual)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
    torch.testing.assert_close(actual, expected, **tolerance)
    for one, other in zip(
        torch.autograd.grad(actual, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES, (123, 1, 0, 877), (0, 300, 129, 64)])
def test_gpu_kernel_is_the_loop_over_groups(sizes: tuple[int, ...], no_waiting) -> None:
    x = torch.randn(sum(sizes), 72, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(len(sizes), 104, 72, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends, grad = ends_of(sizes).cuda(), torch.randn(sum(sizes), 104, device="cuda", dtype=torch.bfloat16)
    with no_waiting():
        actual = grouped_linear(x, weight, ends)
        grads = torch.autograd.grad(actual, (x, weight), grad)
    expected = by_loop(x, weight, sizes)
    torch.testing.assert_close(actual, expected)
    for one, other in zip(grads, torch.autograd.grad(expected, (x, weight), grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1.6e-2, atol=1e-2 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_product_takes_any_layout(dtype: torch.dtype) -> None:
    sizes = (3, 0, 6)
    wide = torch.randn(9, 33, dtype=dtype)
    x = wide[:, 1:17].requires_grad_()  # rows that begin anywhere
    weight = torch.randn(3, 16, 8, dtype=dtype).mT.requires_grad_()  # columns that are contiguous
    actual = grouped_linear(x, weight, ends_of(sizes))
    expected = by_loop(x, weight, sizes)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn(8, 9, dtype=dtype).t()
    for one, other in zip(
        torch.autograd.grad(actual, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_grouped_product_without_rows_and_wrong_input() -> None:
    weight = torch.randn(2, 8, 8, requires_grad=True)
    out = grouped_linear(torch.empty(0, 8), weight, torch.zeros(2, dtype=torch.int32))
    out.sum().backward()
    assert out.shape == (0, 8) and weight.grad is not None and not weight.grad.any()
    x, ends = torch.randn(4, 8), torch.tensor([1, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expected x \(S, K\), weight \(E, M, K\).*\(4, 7\)"):
        grouped_linear(x[:, :7], weight, ends)
    with pytest.raises(ValueError, match="cast one of them"):
        grouped_linear(x.double(), weight, ends)


def test_grouped_product_has_all_derivatives() -> None:
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    ends = ends_of((2, 0, 4))
    assert gradcheck(lambda a, b: grouped_linear(a, b, ends), (x, weight))
    assert gradgradcheck(lambda a, b: grouped_linear(a, b, ends), (x, weight))


def test_dispatched_rows_come_back() -> None:
    num_tokens, top_k, num_experts = 11, 3, 5
    chosen = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    plan = sort_by_expert(chosen, counts)
    assert plan.ends.dtype == torch.int32 and plan.ends.tolist() == counts.cumsum(0).tolist()
    x = torch.randn(num_tokens, 4, dtype=torch.float64, requires_grad=True)
    dispatched = dispatch(x, plan.order, plan.inverse, top_k)
    place = 0
    for expert in range(num_experts):  # experts in their order, the tokens of each in theirs
        for token in range(num_tokens):
            if expert in chosen[token]:
                assert torch.equal(dispatched[place], x[token])
                place += 1
    assert place == num_tokens * top_k
    back = unpermute(dispatched, plan.order, plan.inverse).unflatten(0, (num_tokens, top_k))
    assert torch.equal(back, x[:, None].expand_as(back))
    assert gradcheck(lambda a: dispatch(a, plan.order, plan.inverse, top_k), (x,))
    rows = torch.randn(num_tokens * top_k, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a: unpermute(a, plan.order, plan.inverse), (rows,))


@pytest.mark.parametrize("kind", ["sigmoid", "softmax", "softmax_raw"])
def test_gate_is_its_definition(kind: str) -> None:
    gate = Gate(6, 5, 2, kind, route_scale=2.5).double().train()
    gate.balance_bias.copy_(torch.randn(5) * 0.3)
    space = torch.randn(3, 7, 6, dtype=torch.float64)
    route = gate(space)
    loss, seen = 0.0, torch.zeros(5, dtype=torch.int64)
    for b in range(3):
        counts, share = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.float64)
        for i in range(7):
            logits = gate.weight.detach() @ space[b, i]
            score = logits.sigmoid() if kind == "sigmoid" else logits.softmax(0)
            best = (score + gate.balance_bias).argsort(descending=True)[:2]
            weight = score[best] if kind == "softmax_raw" else score[best] / score[best].sum()
            assert route.experts[b, i].tolist() == best.tolist()
            torch.testing.assert_close(route.weight[b, i], 2.5 * weight, rtol=1e-12, atol=0)
            counts[best] += 1
            share += score / score.sum() / 7
        assert route.counts[b].tolist() == counts.tolist()
        loss += float((5 / (2 * 7) * counts.double() * share).sum()) / 3
        seen += counts
    assert route.aux_loss is not None and float(route.aux_loss.detach()) == pytest.approx(1e-4 * loss, rel=1e-12)
    assert gate.counts.tolist() == seen.tolist()
    gate.eval()
    assert gate(space).aux_loss is None and gate.counts.tolist() == seen.tolist()


def test_balance_loss_of_an_equal_load_is_one() -> None:
    counts = torch.full((2, 4), 3)
    assert float(balance_loss(torch.zeros(2, 6, 4), counts, 2)) == pytest.approx(1.0)
    skewed = torch.tensor([[12, 0, 0, 0]] * 2)
    scores = torch.tensor([4.0, 1.0, 1.0, 1.0]).log().expand(2, 6, 4)
    assert float(balance_loss(scores, skewed, 2)) == pytest.approx(4.0 * 4 / 7)


def test_gate_stays_finite_where_all_scores_vanish() -> None:
    gate = Gate(4, 3, 2)
    nn.init.constant_(gate.weight, -100.0)
    with torch.no_grad():
        gate.weight[1] += 0.5
    space = torch.ones(1, 2, 4, requires_grad=True)  # sigmoid(-400) is 0 in float32
    route = gate(space)
    route.weight[..., 0].sum().backward()
    assert float(route.weight.detach().sum(-1)[0, 0]) == pytest.approx(1.0)
    assert space.grad is not None and space.grad.isfinite().all() and gate.weight.grad.isfinite().all()


def test_gate_is_float32_in_autocast_and_in_half_precision() -> None:
    gate = Gate(16, 8, 2)
    space = torch.randn(2, 5, 16)
    exact = gate(space)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate(space).weight, exact.weight)
        assert gate(space.bfloat16()).weight.dtype == torch.float32
    gate.balance_bias.fill_(1.0 + 2**-20)
    half = copy.deepcopy(gate).bfloat16()
    assert half.weight.dtype == torch.bfloat16 and half.balance_bias.dtype == torch.float32
    assert float(half.balance_bias[0]) == 1.0 + 2**-20  # not rounded on the way
    assert half(space.bfloat16()).weight.dtype == torch.float32


def test_bias_is_no_parameter_and_chooses_without_weighing() -> None:
    gate = Gate(6, 4, 2)
    assert [name for name, _ in gate.named_parameters()] == ["weight"]
    assert [name for name, _ in gate.named_buffers()] == ["balance_bias"] and "counts" not in gate.state_dict()
    space = torch.randn(2, 9, 6)
    first = gate(space)
    gate.balance_bias[3] = 5.0
    second = gate(space)
    second.weight.pow(2).sum().backward()
    assert gate.weight.grad is not None and gate.weight.grad.abs().max() > 0 and gate.balance_bias.grad is None
    assert (second.experts[..., 0] == 3).all() and not (first.experts == 3).any(-1).all()
    score = (space @ gate.weight.T).sigmoid().gather(-1, second.experts)
    torch.testing.assert_close(second.weight, score / score.sum(-1, keepdim=True))
    same = (first.experts.sort(-1).values == second.experts.sort(-1).values).all(-1)
    assert same.any()
    torch.testing.assert_close(first.weight[same].sort(-1).values, second.weight[same].sort(-1).values)


def variation(counts: Tensor) -> float:
    return float(counts.double().std(correction=0) / counts.double().mean())


@pytest.mark.parametrize(("rule", "rate", "bound"), [("sign", 1e-3, 0.05), ("proportional", 5e-3, 0.15)])
def test_balance_makes_loads_equal(rule: str, rate: float, bound: float) -> None:
    """T10: sigmoid of N(0, 1) plus offsets linspace(0.6, -0.6, 8), k = 2."""
    gate = Gate(9, 8, 2, rate=rate, rule=rule)
    with torch.no_grad():
        gate.weight[:, :8] = torch.eye(8)
        gate.weight[:, 8] = torch.linspace(0.6, -0.6, 8)

    def tokens(number: int) -> Tensor:
        return torch.cat([torch.randn(1, number, 8), torch.ones(1, number, 1)], -1)

    asked = tokens(20_000)
    before = gate(asked)
    assert variation(before.counts) > 0.4
    gate.counts.zero_()
    weight = gate.weight.detach().clone()
    for _ in range(500):
        gate(tokens(2048))
        gate.update_bias()
        assert not gate.counts.any()
    after = gate(asked)
    assert variation(after.counts) < bound
    assert torch.equal(gate.weight, weight)
    score = (asked @ weight.T).sigmoid().gather(-1, after.experts)
    torch.testing.assert_close(after.weight, score / score.sum(-1, keepdim=True))


def test_balance_step_by_hand() -> None:
    counts = torch.tensor([6, 2, 4, 0])
    assert balance_step(counts, "sign").tolist() == [-1.0, 1.0, -1.0, 1.0]
    torch.testing.assert_close(balance_step(counts, "proportional"), torch.tensor([-0.25, 1 / 12, -1 / 12, 0.25]))
    for rule in ("sign", "proportional"):
        assert not balance_step(torch.zeros(3, dtype=torch.int64), rule).any()
    assert not balance_step(torch.tensor([5, 5]), "sign").any()


def test_micro_batches_are_counted_together_and_layers_apart() -> None:
    model = nn.ModuleList([Gate(4, 3, 1, rate=0.5), Gate(4, 5, 2, rate=0.25)])
    space = torch.randn(2, 6, 4)
    total = [torch.zeros(3, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)]
    for part in (space[:1], space[1:]):
        for gate, own in zip(gates_of(model), total, strict=True):
            own += gate(part).counts.sum(0)
    update_biases(gates_of(model))
    for gate, own in zip(gates_of(model), total, strict=True):
        torch.testing.assert_close(gate.balance_bias, gate.rate * balance_step(own))
        assert gate.balance_bias.any() and not gate.counts.any()
    update_biases([])


def test_wrong_gates_are_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of sigmoid, softmax, softmax_raw, got 'relu'"):
        Gate(4, 3, 2, "relu")
    with pytest.raises(ValueError, match="top_k must be between 1 and the 3 experts, got 4"):
        Gate(4, 3, 4)
    with pytest.raises(ValueError, match="rule must be one of sign, proportional, got 'signs'"):
        Gate(4, 3, 2, rule="signs")


def _bias_of_rank(rank: int, path: str, space: Tensor, state: dict[str, Tensor], actual: Tensor) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=240)
    )
    try:
        torch.set_num_threads(1)
        gate = Gate(5, 4, 2, rate=0.125, rule="proportional")
        gate.load_state_dict(state)
        wrapped = nn.parallel.DistributedDataParallel(gate)
        for part in space[rank].chunk(2):  # two micro-batches; the wrapper broadcasts buffers before each
            wrapped(part)
        gate.update_bias()
        actual[rank] = gate.balance_bias
    finally:
        dist.destroy_process_group()


def test_counts_are_summed_over_processes(tmp_path: Path) -> None:
    gate = Gate(5, 4, 2, rate=0.125, rule="proportional")
    space = torch.randn(2, 4, 6, 5) + torch.tensor([1.0, -1.0])[:, None, None, None]  # unlike from rank to rank
    counts = gate(space.flatten(0, 1)).counts.sum(0)
    expected = 0.125 * balance_step(counts, "proportional")
    assert expected.abs().max() > 0
    actual = torch.full((2, 4), float("nan")).share_memory_()
    common = (str(tmp_path / "meet"), space, gate.state_dict(), actual)
    other = forkserver().Process(target=_bias_of_rank, args=(1, *common))
    other.start()  # the second process; the first is this one
    try:
        _bias_of_rank(0, *common)
    finally:
        other.join(60)
        if other.is_alive():
            other.terminate()
    torch.testing.assert_close(actual, expected.expand(2, 4))

"""The head's loss in chunks: the values and gradients of F.cross_entropy, any dtype, compiled, with no logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.lm import loss as module
from hyptree.lm.loss import linear_cross_entropy
from hyptree.ops import backend as backends
from hyptree.ops.cross_entropy import cross_entropy_
from hyptree.ops.cross_entropy.reference import cross_entropy_ as plain_cross_entropy_


def problem(
    tokens: tuple[int, ...] = (3, 7), width: int = 12, vocabulary: int = 50, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden, weight and labels, about a third of them ignored."""
    hidden = torch.randn(*tokens, width).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width) * 0.7).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, tokens)
    labels[torch.rand(tokens) < 0.3] = -100
    labels.view(-1)[0] = 1
    return hidden, weight, labels


def definition(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).reshape(-1, weight.shape[0]), labels.reshape(-1))


@pytest.mark.parametrize("chunk", [None, 1, 4, 7, 21, 1000])
@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_values_and_gradients_are_those_of_cross_entropy(chunk: int | None, factor: float) -> None:
    hidden, weight, labels = problem()
    expected = definition(hidden, weight, labels)
    expected_grads = torch.autograd.grad(factor * expected, (hidden, weight))
    actual = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    grads = torch.autograd.grad(factor * actual, (hidden, weight))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, labels = problem(dtype=torch.float32)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    actual = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(actual, definition(hidden, weight, labels))
    grad = torch.autograd.grad(actual, hidden)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(definition(hidden, weight, labels), hidden)[0])


def test_only_what_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[tuple[int, int]] = []
    mm, addmm = torch.mm, torch.addmm
    monkeypatch.setattr(torch, "mm", lambda a, b, **k: (products.append((a.shape[0], b.shape[1])), mm(a, b, **k))[1])
    monkeypatch.setattr(
        torch, "addmm", lambda t, a, b, **k: (products.append((a.shape[0], b.shape[1])), addmm(t, a, b, **k))[1]
    )
    hidden, weight, labels = problem(tokens=(8,))
    expected = definition(hidden, weight, labels).item()

    def shapes(h: Tensor, w: Tensor) -> list[tuple[int, int]]:
        products.clear()
        loss = linear_cross_entropy(h, w, labels, chunk=4)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        if loss.requires_grad:
            loss.backward()
        return sorted(products)

    with torch.no_grad():
        assert shapes(hidden, weight) == [(4, 50)] * 2
    assert shapes(hidden, weight.detach()) == [(4, 12)] * 2 + [(4, 50)] * 2
    assert shapes(hidden.detach(), weight) == [(4, 50)] * 2 + [(50, 12)] * 2
    assert shapes(hidden, weight) == [(4, 12)] * 2 + [(4, 50)] * 2 + [(50, 12)] * 2  # three products, nothing twice
    assert hidden.grad is not None and weight.grad is not None


def test_all_labels_ignored_is_zero_with_zero_gradients() -> None:
    hidden, weight, labels = problem()
    for ignored, tokens in ((labels.fill_(-100), hidden), (labels[:0], hidden[:0])):
        loss = linear_cross_entropy(tokens, weight, ignored)
        assert loss.item() == 0
        grads = torch.autograd.grad(loss, (hidden, weight))
        assert all(grad.eq(0).all() for grad in grads)


def test_another_label_can_be_the_ignored_one() -> None:
    hidden, weight, labels = problem()
    labels = labels.clamp_min(0)
    actual = linear_cross_entropy(hidden, weight, labels, ignore_index=0)
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), ignore_index=0)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_num_items_replaces_the_count() -> None:
    hidden, weight, labels = problem()
    count = int((labels != -100).sum())
    mean = linear_cross_entropy(hidden, weight, labels)
    for num_items in (3 * count, torch.tensor(3 * count)):
        actual = linear_cross_entropy(hidden, weight, labels, num_items=num_items)
        torch.testing.assert_close(actual * 3, mean, rtol=1e-12, atol=0)
        grad, expected = (torch.autograd.grad(x, weight, retain_graph=True)[0] for x in (actual * 3, mean))
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-15)


def test_used_twice_and_backward_twice() -> None:
    hidden, weight, labels = problem()
    other = labels.flip(0)
    expected = torch.autograd.grad(definition(hidden, weight, labels) + 2 * definition(hidden, weight, other), weight)[
        0
    ]
    both = linear_cross_entropy(hidden, weight, labels) + 2 * linear_cross_entropy(hidden, weight, other)
    for _ in range(2):
        grad = torch.autograd.grad(both, weight, retain_graph=True)[0]
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_second_derivatives_are_refused() -> None:
    hidden, weight, labels = problem()
    with pytest.raises(RuntimeError, match=r"no second derivatives; use F\.cross_entropy"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden, create_graph=True)


@pytest.mark.parametrize("autocast", [False, True], ids=["pure", "autocast"])
def test_bfloat16_is_near_float32(autocast: bool) -> None:
    hidden, weight, labels = problem((4, 64), 64, 1000, torch.float32)
    with torch.no_grad():
        weight.mul_(64**-0.5)
        hidden.copy_(hidden.bfloat16())
        weight.copy_(weight.bfloat16())
    expected = definition(hidden, weight, labels)
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    dtype = torch.float32 if autocast else torch.bfloat16
    leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        actual = linear_cross_entropy(*leaves, labels, chunk=32)
    assert actual.dtype == torch.float32
    # Logits are rounded to 8 bits; single losses are off by up to 2^-9 of a logit, their mean by far less.
    assert abs(actual.item() - expected.item()) < 1e-3 * expected.item()
    for grad, leaf, exact in zip(torch.autograd.grad(actual, leaves), leaves, expected_grads, strict=True):
        assert grad.dtype == leaf.dtype
        assert (grad.float() - exact).norm() < 4e-3 * exact.norm()


def test_float32_weight_gradient_is_summed_in_float32() -> None:
    """Many chunks of equal tokens: their sum in bfloat16 would stall at 2^8 times the share of one chunk."""
    hidden = torch.ones(2048, 8, dtype=torch.bfloat16)
    weight = torch.zeros(16, 8, requires_grad=True)
    labels = torch.zeros(2048, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk=1)
    (grad,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(grad[1:], torch.full((15, 8), 1 / 16), rtol=1e-6, atol=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_compiled_as_one_graph(autocast: bool) -> None:
    def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return linear_cross_entropy(torch.tanh(hidden) * 2, weight, labels, chunk=5)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in ((3, 7), (2, 11)):  # the second one makes the shape dynamic
        hidden, weight, labels = problem(tokens, dtype=torch.float32)
        expected, actual = step(hidden, weight, labels), compiled(hidden, weight, labels)
        assert torch.equal(actual, expected)
        for grad, exact in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (actual, expected)), strict=True):
            torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        assert torch.equal(compiled(hidden, weight, labels), expected)


class Head(torch.nn.Module):
    """One linear map, and the head whose loss it is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(12, 12), torch.nn.Linear(12, 50, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(self.body(x), self.head.weight, labels, chunk=4)


def test_gradients_arrive_in_distributed_data_parallel(tmp_path) -> None:
    model, (x, _, labels) = Head(), problem(dtype=torch.float32)
    expected = torch.autograd.grad(definition(model.body(x), model.head.weight, labels), list(model.parameters()))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(model)(x, labels).backward()
    finally:
        torch.distributed.destroy_process_group()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-7)


def test_operator_is_sound() -> None:
    hidden, weight, labels = (x.detach() for x in problem(dtype=torch.float32))
    arguments = (hidden.flatten(0, 1), weight, labels.flatten(), -100, 4, torch.float32, True, True)
    torch.library.opcheck(module._operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("tokens", "most", "rows"),
    [
        (8192, 1046, 1024),
        (8192, 10**6, 8192),
        (5, 2, 2),
        (2048, 1700, 1024),
        (1000, 300, 256),
        (0, 9, 1),
        (100, 99, 99),
    ],
)
def test_chunks_are_even_and_aligned(tokens: int, most: int, rows: int) -> None:
    assert module._rows(tokens, most) == rows


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, w, y: (h[..., 1:], w, y), "must share w"),
        (lambda h, w, y: (h, w, y[:1]), r"needs labels of shape \(3, 7\), got \(1, 7\)"),
        (lambda h, w, y: (h, w, y.clamp_min(0) + 49), "does the tokenizer belong to the model"),
        (lambda h, w, y: (h, w, y.clamp_max(-7)), "got -7"),
    ],
)
def test_mistakes_are_one_clear_line(change, words: str) -> None:
    hidden, weight, labels = problem()
    labels.clamp_min_(1)
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(*change(hidden, weight, labels))
    with pytest.raises(ValueError, match="chunk must be 1 token or more, got 0"):
        linear_cross_entropy(hidden, weight, labels, chunk=0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("triton")
    if request.param == "cpu" and not backends.interpreted():
        pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("vocabulary", [7, 1000, 8193])
def test_kernel_is_the_definition(vocabulary: int, dtype: torch.dtype, kernel_device: str) -> None:
    rows = 5 if kernel_device == "cpu" else 300
    logits = (torch.randn(rows, vocabulary, device=kernel_device) * 5).to(dtype)
    labels = torch.randint(vocabulary, (rows,), device=kernel_device)
    labels[1] = -100
    labels[2] = vocabulary - 1
    by_kernel, untouched = logits.clone(), logits.clone()
    losses = cross_entropy_(by_kernel, labels, backend="triton")
    exact = logits.double()
    expected = plain_cross_entropy_(exact, labels, -100, True)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    # exp(x - log_sum) carries the roundings of log_sum and of the difference, then a few of its own.
    eps, log_sum = torch.finfo(torch.float32).eps, logits.double().logsumexp(1, keepdim=True)
    argument = (logits.double() - log_sum).abs()
    bound = eps * ((4 + log_sum.abs() + argument) * argument.neg().exp() + 1)
    if dtype == torch.bfloat16:
        bound = bound + 2**-7 * exact.abs()  # neighbours: the interpreter rounds towards zero
    assert ((by_kernel.double() - exact).abs() <= bound).all()
    assert torch.equal(cross_entropy_(untouched, labels, with_gradient=False, backend="triton"), losses)
    assert torch.equal(untouched, logits)
    labels[3] = vocabulary
    assert cross_entropy_(logits, labels, backend="triton")[3].isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["pure", "autocast"])
def test_large_vocabulary_on_the_gpu(autocast: bool) -> None:
    hidden, weight, labels = (x.detach().cuda() for x in problem((4, 512), 384, 128256, torch.float32))
    weight *= 384**-0.5
    dtype = torch.float32 if autocast else torch.bfloat16
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().float().bfloat16().float().requires_grad_() for x in leaves]
    expected = definition(*exact, labels)
    expected_grads = torch.autograd.grad(expected, exact)
    del expected
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        actual = linear_cross_entropy(*leaves, labels, chunk=512)
    peak = torch.cuda.max_memory_allocated() - before
    grads = torch.autograd.grad(actual, leaves)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert (grad.float() - expected_grad).norm() < 4e-3 * expected_grad.norm()
    logits = 512 * 128256 * 2
    gradients = 128256 * 384 * (4 + 2 * autocast) + hidden.numel() * 4
    assert peak < 1.05 * (logits + gradients)

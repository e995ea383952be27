"""Merging tokens: the weighted mean, what it conserves, its gradient, half precision, and the way back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hyptree.errors import UserError
from hyptree.geometry import Lorentz
from hyptree.ops.merge.reference import segment_sum, spread
from hyptree.tokens.merge import MERGING, compose, matcher, merge_weighted, unmerge


def random_labels(batch: int, n: int, k: int) -> Tensor:
    """Labels (B, N) that use each of 0..k-1."""
    rows = [torch.cat([torch.arange(k), torch.randint(k, (n - k,))])[torch.randperm(n)] for _ in range(batch)]
    return torch.stack(rows)


def merge_loop(x: Tensor, size: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The definition, token by token, in float64."""
    batch, n, channels = x.shape
    total, mean = torch.zeros(batch, k, dtype=torch.float64), torch.zeros(batch, k, channels, dtype=torch.float64)
    for b in range(batch):
        for i in range(n):
            total[b, labels[b, i]] += size[b, i].double()
            mean[b, labels[b, i]] += size[b, i].double() * x[b, i].double()
    return mean / total.unsqueeze(-1), total


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
)
def test_merge_is_its_definition(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(3, 30, 7).to(dtype)
    size, labels = torch.randint(1, 9, (3, 30)).float(), random_labels(3, 30, 11)
    merged, sizes = merge_weighted(x, size, labels, 11)
    expected, expected_sizes = merge_loop(x, size, labels, 11)
    assert merged.dtype == dtype and sizes.dtype == torch.float32
    torch.testing.assert_close(merged.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(sizes.double(), expected_sizes)


def test_merge_conserves_mass_over_three_layers() -> None:
    x, size = torch.randn(2, 196, 16), torch.ones(2, 196)
    mass = x.double().sum(1)
    for n, k in ((196, 98), (98, 49), (49, 24)):
        x, size = merge_weighted(x, size, random_labels(2, n, k), k)
        assert torch.equal(size.sum(1), torch.full((2,), 196.0))
        now = (x.double() * size.double().unsqueeze(-1)).sum(1)
        assert float((now - mass).norm() / mass.norm()) < 1e-5


def test_as_many_clusters_as_tokens_is_the_identity_and_one_cluster_the_mean() -> None:
    x = torch.randn(2, 13, 5)
    for n in (1, 2, 13):
        merged, size = merge_weighted(x[:, :n], None, torch.arange(n).expand(2, n), n)
        assert torch.equal(merged, x[:, :n]) and torch.equal(size, torch.ones(2, n))
    merged, size = merge_weighted(x, None, torch.zeros(2, 13, dtype=torch.int64), 1)
    torch.testing.assert_close(merged, x.mean(1, keepdim=True), rtol=1e-6, atol=1e-6)
    assert torch.equal(size, torch.full((2, 1), 13.0))


def test_padding_and_empty_clusters_are_zero_not_nan() -> None:
    x, size, labels = torch.randn(1, 4, 3), torch.tensor([[1.0, 2.0, 0.0, 0.0]]), torch.tensor([[0, 0, 2, 2]])
    x.requires_grad_()
    merged, sizes = merge_weighted(x, size, labels, 4)  # cluster 1 has no member, 2 only padding, 3 none
    assert torch.equal(sizes, torch.tensor([[3.0, 0.0, 0.0, 0.0]]))
    assert torch.equal(merged[0, 1:], torch.zeros(3, 3))
    (gradient,) = torch.autograd.grad(merged.sum(), x)
    torch.testing.assert_close(gradient[0, :, 0], torch.tensor([1 / 3, 2 / 3, 0.0, 0.0]))


def test_gradients_of_merge_and_unmerge() -> None:
    x = torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    size, labels = torch.randint(1, 5, (2, 9)).double(), random_labels(2, 9, 4)
    assert torch.autograd.gradcheck(lambda x: merge_weighted(x, size, labels, 4)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: merge_weighted(x, size, labels, 4)[0].square(), x)
    y = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: unmerge(y, labels), y)


def test_sum_and_spread_are_each_others_transpose() -> None:
    x, y, labels = torch.randn(2, 20, 6).double(), torch.randn(2, 8, 6).double(), random_labels(2, 20, 8)
    torch.testing.assert_close((segment_sum(x, labels, 8) * y).sum(), (x * spread(y, labels)).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    x = torch.randn(2, 40, 8).to(dtype).requires_grad_()
    size, labels = torch.randint(1, 5, (2, 40)).float(), random_labels(2, 40, 10)
    plain, _ = merge_weighted(x, size, labels, 10)
    (plain_gradient,) = torch.autograd.grad(unmerge(plain, labels).float().square().sum(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        merged, sizes = merge_weighted(x, size, labels, 10)
        back = unmerge(merged, labels)
    (gradient,) = torch.autograd.grad(back.float().square().sum(), x)
    assert merged.dtype == dtype and sizes.dtype == torch.float32 and gradient.dtype == dtype
    assert torch.equal(merged, plain) and torch.equal(gradient, plain_gradient)


def test_the_indicator_product_of_other_devices_is_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs where there is no cheap ordered addition: asked for here by tensors that say they are elsewhere."""
    from hyptree.ops.merge import reference

    x, labels = torch.randint(-9, 9, (3, 25, 4)).float(), random_labels(3, 25, 6)  # whole numbers: no rounding
    expected = segment_sum(x, labels, 6)
    calls = []

    def strict_matmul(a: Tensor, b: Tensor) -> Tensor:
        calls.append((tuple(a.shape), tuple(b.shape)))
        return a @ b

    monkeypatch.setattr(reference, "strict_matmul", strict_matmul)
    monkeypatch.setattr(reference, "_ORDERED", frozenset())
    assert torch.equal(segment_sum(x, labels, 6), expected)
    assert calls == [((3, 6, 25), (3, 25, 4))]


def test_unmerge_gives_each_token_its_cluster_for_any_number_of_channels() -> None:
    x, labels = torch.randn(2, 20, 6), random_labels(2, 20, 7)
    merged, _ = merge_weighted(x, None, labels, 7)
    back = unmerge(merged, labels)
    for b in range(2):
        for i in range(20):
            members = x[b, labels[b] == labels[b, i]].double().mean(0)
            torch.testing.assert_close(back[b, i].double(), members, rtol=1e-6, atol=1e-6)
    for channels in (1, 6, 50):
        y = torch.randn(2, 7, channels)
        assert torch.equal(unmerge(y, labels), torch.stack([y[b, labels[b]] for b in range(2)]))


def test_composed_labels_are_unmerging_step_by_step() -> None:
    first, second, third = random_labels(3, 40, 20), random_labels(3, 20, 9), random_labels(3, 9, 4)
    y = torch.randn(3, 4, 5)
    step_by_step = unmerge(unmerge(unmerge(y, third), second), first)
    assert torch.equal(unmerge(y, compose(compose(first, second), third)), step_by_step)


def test_merging_twice_is_merging_by_the_composed_labels() -> None:
    x, first, second = torch.randn(2, 30, 4).double(), random_labels(2, 30, 12), random_labels(2, 12, 5)
    once = merge_weighted(x, None, compose(first, second), 5)
    twice = merge_weighted(*merge_weighted(x, None, first, 12), second, 5)
    torch.testing.assert_close(once[0], twice[0])
    assert torch.equal(once[1], twice[1])


def test_bad_input_is_one_line() -> None:
    x, labels = torch.randn(2, 6, 3), random_labels(2, 6, 4)
    with pytest.raises(ValueError, match=r"merge_weighted: labels must lie in 0\.\.2, found 0\.\.3$"):
        merge_weighted(x, None, labels, 3)
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.3, found -1\.\.2"):
        merge_weighted(x, None, labels - 1, 4)
    with pytest.raises(ValueError, match=r"the number of clusters must be at least 1, got 0"):
        merge_weighted(x, None, labels, 0)
    with pytest.raises(ValueError, match=r"labels \(2, 5\) do not match tokens \(2, 6, 3\)"):
        merge_weighted(x, None, labels[:, :5], 4)
    with pytest.raises(ValueError, match=r"size \(2, 5\) does not match labels \(2, 6\)"):
        merge_weighted(x, torch.ones(2, 5), labels, 4)
    with pytest.raises(ValueError, match=r"labels must be int64, got int32"):
        merge_weighted(x, None, labels.int(), 4)
    with pytest.raises(ValueError, match=r"unmerge: expected clusters \(B, K, C\), got shape \(2, 6\)"):
        unmerge(x[..., 0], labels)
    with pytest.raises(ValueError, match=r"unmerge: labels must lie in 0\.\.2"):
        unmerge(x[:, :3], labels)
    with pytest.raises(ValueError, match=r"compose: expected labels .* got \(2, 6\) and \(1, 4\)"):
        compose(labels, torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("method", MERGING)
@pytest.mark.parametrize("protected", [0, 1, 5])
def test_matcher_leaves_protected_tokens_alone_and_merges_the_rest(method: str, protected: int) -> None:
    features = torch.randn(3, protected + 24, 8)
    merge, back = matcher(features, 10, method, protected=protected)
    tokens = torch.arange(24.0).repeat(3, 1).unsqueeze(-1)
    number = torch.cat([torch.full((3, protected, 1), -1.0), tokens], 1)
    last_first = merge(23 - number, "amax")  # 23 less the smallest member of each cluster
    first = 23 - last_first[:, protected:, 0]
    assert len(set(first[0].tolist())) == 10
    assert method == "tome" or torch.equal(first, first.sort().values)  # tome has the order of its paper

    x = torch.randn(3, protected + 24, 5)
    same = back(last_first).squeeze(-1)[:, protected:]  # equal within a cluster only
    for mode in ("sum", "mean", "amax"):
        merged = merge(x, mode)  # type: ignore[arg-type]
        full = back(merged)
        assert merged.shape == (3, protected + 10, 5) and full.shape == x.shape
        front = x[:, :protected]
        assert torch.equal(merged[:, :protected], front) and torch.equal(full[:, :protected], front)
        for b in range(3):
            for i in range(24):
                members = x[b, protected:][same[b] == same[b, i]].double()
                expected = members.amax(0) if mode == "amax" else getattr(members, mode)(0)
                torch.testing.assert_close(full[b, protected + i].double(), expected, rtol=1e-5, atol=1e-6)
    sizes = merge(torch.ones(3, protected + 24, 1), "sum")[:, protected:]
    assert torch.equal(sizes.sum((1, 2)), torch.full((3,), 24.0)) and float(sizes.min()) >= 1


def test_matcher_of_all_tokens_is_the_identity_and_of_one_the_mean() -> None:
    features, x = torch.randn(2, 9, 4), torch.randn(2, 9, 3)
    for k in (8, 50):
        merge, back = matcher(features, k)
        assert all(torch.equal(merge(x, mode), x) for mode in ("sum", "mean", "amax"))  # type: ignore[arg-type]
        assert torch.equal(back(x), x)
    merge, back = matcher(features, 1)
    torch.testing.assert_close(merge(x)[:, 1:], x[:, 1:].mean(1, keepdim=True))


@pytest.mark.parametrize("mode", ["sum", "mean", "amax"])
def test_gradients_of_the_matcher(mode: str) -> None:
    features = torch.randn(2, 9, 4, requires_grad=True)
    merge, back = matcher(features, 3, "tome", protected=2)
    x = torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: back(merge(x, mode)), x)  # type: ignore[arg-type]
    half = x.detach().to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert merge(half, mode).dtype == torch.bfloat16  # type: ignore[arg-type]


def test_matcher_explains_bad_input_in_one_line() -> None:
    features = torch.randn(1, 6, 3)
    with pytest.raises(
        UserError, match=r"^matcher needs a method that gives clusters, not 'topk'; expected one of atc, tome, .*$"
    ):
        matcher(features, 2, "topk")
    for method in ("tome", "kmeans"):  # they compare by the angle, whatever is asked for
        with pytest.raises(UserError, match=rf"'{method}' cannot compare on it"):
            matcher(features, 2, method, metric=Lorentz())
    with pytest.raises(UserError, match=r"not 'tone'; did you mean 'tome'\?"):
        matcher(features, 2, "tone")
    with pytest.raises(ValueError, match=r"more than protected = 6 tokens, got \(1, 6, 3\)"):
        matcher(features, 2, protected=6)
    with pytest.raises(ValueError, match=r"matcher: k must be at least 1, got 0"):
        matcher(features, 0)
    merge, back = matcher(features, 2, "tome")
    with pytest.raises(ValueError, match=r"merge: expected tokens \(B, 6, C\), got \(1, 5, 3\)"):
        merge(features[:, :5])
    with pytest.raises(ValueError, match=r"unmerge: expected tokens \(B, 3, C\), got \(1, 6, 3\)"):
        back(features)
    with pytest.raises(ValueError, match=r"mode must be 'sum', 'mean' or 'amax', got 'max'"):
        merge(features, "max")  # type: ignore[arg-type]


def test_merge_and_unmerge_compile_without_a_break() -> None:
    x, labels = torch.randn(2, 12, 4, requires_grad=True), random_labels(2, 12, 5)

    def there_and_back(x: Tensor) -> Tensor:
        return unmerge(merge_weighted(x, None, labels, 5)[0], labels).square().sum()

    torch.compiler.reset()
    value = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x)
    expected = there_and_back(x)
    assert torch.equal(value, expected)
    assert torch.equal(*(torch.autograd.grad(result, x)[0] for result in (value, expected)))


@pytest.mark.gpu
def test_merge_on_a_gpu_repeats_bit_for_bit_and_does_not_wait(no_waiting) -> None:
    x = torch.randn(16, 196, 384, device="cuda", requires_grad=True)
    size, labels = torch.randint(1, 5, (16, 196), device="cuda").float(), random_labels(16, 196, 24).cuda()
    up = torch.randn(16, 196, 384, device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        merged, _ = merge_weighted(x, size, labels, 24)
        return merged, torch.autograd.grad(unmerge(merged, labels), x, up)[0]

    first = run()
    with no_waiting():
        others = [run() for _ in range(20)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    expected, _ = merge_loop(x.detach().cpu()[:2], size.cpu()[:2], labels.cpu()[:2], 24)
    torch.testing.assert_close(first[0][:2].double().cpu(), expected, rtol=2e-6, atol=2e-6)

"""The Triton kernels against their definitions: on a GPU, or by Triton's interpreter on small input."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops import backend as backends
from hyptree.ops.agglomerate import _choose, agglomerate, reference
from hyptree.ops.cosine import cosine_distance
from hyptree.ops.cosine.reference import cosine_distance as plain_distance
from hyptree.ops.merge import merge_mean

pytest.importorskip("triton")

LINKAGES = ("average", "complete", "single")


def features(num_images: int, num_tokens: int, dim: int, kind: str, device: str) -> Tensor:
    """Random features: "noise", or "smooth" with neighbours that resemble each other."""
    x = torch.randn(num_images, dim, num_tokens)
    if kind == "smooth":
        coarse = torch.randn(num_images, dim, max(2, num_tokens // 6))
        x = 0.2 * x + F.interpolate(coarse, size=num_tokens, mode="linear", align_corners=True)
    return x.mT.contiguous().to(device)


def distances(num_images: int, num_tokens: int, kind: str, device: str) -> Tensor:
    """Distances to be clustered; "ties" has few different values, "equal" one."""
    if kind == "equal":
        D = torch.full((num_images, num_tokens, num_tokens), 0.5)
    elif kind == "ties":
        D = torch.randint(1, 5, (num_images, num_tokens, num_tokens)) / 128
    else:
        D = plain_distance(features(num_images, num_tokens, 8, kind, "cpu"))
    D = torch.minimum(D, D.mT)
    D.diagonal(dim1=1, dim2=2).zero_()
    return D.to(device)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", ["smooth", "noise", "ties", "equal"])
def test_labels_are_those_of_the_definition(kind: str, linkage: str, device: str) -> None:
    # The interpreter takes seconds for what a GPU does in microseconds.
    for num_tokens in (2, 9) if device == "cpu" else (1, 2, 7, 63, 196, 256, 577, 1000):
        D = distances(1 if device == "cpu" else 3, num_tokens, kind, device)
        forest = reference.build_forest(D.cpu(), linkage)
        counts = {1, num_tokens, *(max(1, int(num_tokens * keep)) for keep in (0.9, 0.5, 0.25))}
        for k in sorted(counts if device == "cuda" else {max(1, num_tokens // 3)}):
            actual = agglomerate(D, k, linkage=linkage, backend="triton", check=False)
            assert actual.dtype == torch.int64 and actual.device == D.device
            assert torch.equal(actual.cpu(), reference.cut(forest, k)), (num_tokens, k)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", ["smooth", "ties"])
def test_rounds_may_be_spread_over_the_device(
    kind: str, linkage: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyptree.ops.agglomerate import triton

    monkeypatch.setattr(triton, "WHOLE", 4)
    for num_tokens in (9,) if device == "cpu" else (14, 576, 2500):
        D = distances(2, num_tokens, kind, device)
        k = num_tokens // 3
        monkeypatch.setattr(triton, "_BYTES", 1 if kind == "smooth" else 2**32)  # image by image, or all at once
        expected = reference.cut(reference.build_forest(D.cpu(), linkage, num_tokens - k), k)
        assert torch.equal(triton.labels(D, k, linkage).cpu(), expected)


@pytest.mark.parametrize("linkage", LINKAGES)
def test_links_of_equal_height_go_by_their_ends(linkage: str, device: str) -> None:
    D = torch.ones(1, 5, 5)
    D[:, :3, :3] = D[:, 3:, 3:] = (
        0.25  # three mutually near tokens and two more: the pairs (0, 1) and (3, 4) merge first
    )
    assert agglomerate(D.to(device), 3, linkage=linkage, backend="triton", check=False).tolist() == [[0, 0, 0, 1, 2]]
    D = torch.ones(1, 5, 5)
    for i, j in ((0, 4), (1, 2)):  # the smaller end decides, not which token is taken in
        D[:, i, j] = D[:, j, i] = 0.25
    assert agglomerate(D.to(device), 4, linkage=linkage, backend="triton", check=False).tolist() == [[0, 1, 2, 3, 0]]
    assert agglomerate(D.to(device), 3, linkage=linkage, backend="triton", check=False).tolist() == [[0, 1, 1, 2, 0]]


@pytest.mark.parametrize("linkage", LINKAGES)
def test_nan_among_the_distances_ends(linkage: str, device: str) -> None:
    D = distances(2, 6, "noise", device)
    D[0, 2] = D[0, :, 2] = torch.nan
    actual = agglomerate(D, 1, linkage=linkage, backend="triton", check=False)
    assert ((actual >= 0) & (actual < 6)).all()
    assert actual[1].eq(0).all()
    D.fill_(torch.nan)
    assert (agglomerate(D, 2, linkage=linkage, backend="triton", check=False) >= 0).all()


@pytest.mark.gpu
def test_labels_do_not_depend_on_the_other_images() -> None:
    D = distances(64, 30, "ties", "cuda")
    together = agglomerate(D, 11, linkage="average", backend="triton", check=False)
    alone = torch.cat(
        [agglomerate(D[i : i + 1], 11, linkage="average", backend="triton", check=False) for i in range(len(D))]
    )
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", ["smooth", "noise"])
def test_distances_are_those_of_the_definition(kind: str, device: str) -> None:
    for num_tokens, dim in (
        ((1, 3), (5, 16), (70, 20)) if device == "cpu" else ((1, 3), (63, 33), (196, 64), (300, 384))
    ):
        x = features(2, num_tokens, dim, kind, device)
        D = cosine_distance(x, backend="triton")
        unit = F.normalize(x.double(), dim=-1)
        assert (D - (1 - unit @ unit.mT).clamp_min(0)).abs().max() < 1e-6
        assert torch.equal(D, D.mT) and (D >= 0).all() and D.diagonal(dim1=1, dim2=2).eq(0).all()
        assert torch.equal(D.double() * 2**24, (D.double() * 2**24).round())  # what makes sums of them exact


def test_distances_of_half_precision_and_zero_features(device: str) -> None:
    x = features(2, 20, 16, "smooth", device).half()
    x[0, 3] = 0
    D = cosine_distance(x, backend="triton")
    assert D.dtype == torch.float32
    assert (D - plain_distance(x.float())).abs().max() < 1e-6
    assert D[0, 3].sum() == 19


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_prefix", [0, 2])
def test_merging_is_that_of_the_definition(num_prefix: int, dtype: torch.dtype, device: str) -> None:
    for num_tokens, dim, k in ((9, 5, 4), (21, 40, 20)) if device == "cpu" else ((196, 384, 98), (577, 1030, 60)):
        x = torch.randn(2, num_prefix + num_tokens, dim, device=device, dtype=dtype)
        size = torch.randint(1, 9, (2, num_prefix + num_tokens), device=device).float()
        assignment = torch.randint(0, k, (2, num_tokens), device=device)
        assignment[assignment == 1] = 0  # one cluster stays empty
        results = []
        for backend in ("torch", "triton"):
            leaf = x.clone().requires_grad_()
            merged, merged_size = merge_mean(leaf, size, assignment, k, num_prefix=num_prefix, backend=backend)
            weights = torch.linspace(-1, 2, merged.numel(), device=device).view_as(merged).to(dtype)
            (grad,) = torch.autograd.grad((merged * weights).sum(), leaf)
            results.append((merged, merged_size, grad))
        (plain, plain_size, plain_grad), (merged, merged_size, grad) = results
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(merged, plain, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grad, plain_grad, rtol=tolerance, atol=tolerance)
        assert torch.equal(merged_size, plain_size)
        assert torch.equal(merged[:, :num_prefix], x[:, :num_prefix])
        assert merged[:, num_prefix + 1].eq(0).all() and merged_size[:, num_prefix + 1].eq(0).all()


def test_merging_takes_tokens_that_are_not_contiguous(device: str) -> None:
    x = torch.randn(2, 6, 12, device=device).mT  # (2, 12, 6)
    wide = torch.randn(2, 12, 10, device=device)[:, :, :6]
    assignment = torch.randint(0, 4, (2, 12), device=device)
    size = torch.ones(2, 12, device=device)
    for tokens in (x, wide):
        merged, _ = merge_mean(tokens, size, assignment, 4, backend="triton")
        plain, _ = merge_mean(tokens, size, assignment, 4, backend="torch")
        torch.testing.assert_close(merged, plain)


@pytest.mark.parametrize(("num_tokens", "k"), [(3, 11), (0, 2), (0, 0)])
def test_merging_into_more_clusters_than_there_are_tokens(
    num_tokens: int, k: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters that nobody is in are zero: no place is left as it was found in memory, nor read from there."""
    x, size = torch.randn(2, 1 + num_tokens, 5, device=device), torch.ones(2, 1 + num_tokens, device=device)
    assignment = torch.randint(0, max(k, 1), (2, num_tokens), device=device)
    plain = merge_mean(x, size, assignment, k, num_prefix=1, backend="torch")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(1))
    merged = merge_mean(x, size, assignment, k, num_prefix=1, backend="triton")
    torch.testing.assert_close(merged, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("linkage", LINKAGES)
def test_nothing_waits_for_the_device_and_a_graph_replays_it(linkage: str, no_waiting) -> None:
    static = features(4, 196, 64, "smooth", "cuda")
    tokens = torch.randn(4, 197, 32, device="cuda")
    size = torch.ones(4, 197, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        actual = agglomerate(cosine_distance(static), 50, linkage=linkage, check=False)
        return actual, merge_mean(tokens, size, actual, 50, num_prefix=1)[0]

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with no_waiting():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual, merged = step()
    fresh = features(4, 196, 64, "noise", "cuda")
    static.copy_(fresh)
    actual.fill_(-1)
    merged.fill_(float("nan"))
    graph.replay()
    expected = step()
    assert torch.equal(actual, expected[0]) and torch.equal(merged, expected[1])


@pytest.mark.gpu
def test_compiled_and_repeated_runs_give_the_same_bits() -> None:
    x = features(8, 196, 64, "smooth", "cuda")
    tokens = torch.randn(8, 197, 64, device="cuda", requires_grad=True)
    size = torch.ones(8, 197, device="cuda")

    def step(x: Tensor, tokens: Tensor) -> Tensor:
        return merge_mean(tokens, size, agglomerate(cosine_distance(x), 98, check=False), 98, num_prefix=1)[0]

    first, second = step(x, tokens), step(x, tokens)
    compiled = torch.compile(step, fullgraph=True)(x, tokens)
    assert torch.equal(first, second) and torch.equal(first, compiled)
    gradients = [torch.autograd.grad(y.square().sum(), tokens)[0] for y in (first, compiled)]
    assert torch.equal(*gradients)


@pytest.mark.gpu
def test_more_tokens_than_the_kernel_takes_go_through_torch() -> None:
    D = distances(1, 4100, "smooth", "cuda")
    assert torch.equal(
        agglomerate(D, 2050, check=False).cpu(), reference.cut(reference.build_forest(D.cpu(), "average", 2050), 2050)
    )


def test_auto_takes_the_kernel_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPTREE_BACKEND", raising=False)
    device = torch.device("cuda")
    on_gpu = SimpleNamespace(is_cuda=True, device=device)
    for num_tokens, dtype, linkage, chosen in (
        (4096, torch.float32, "average", "triton"),
        (4096, torch.float32, "single", "triton"),
        (4097, torch.float32, "average", "torch"),
        (196, torch.float64, "average", "torch"),
        (196, torch.float32, "ward", "torch"),
    ):
        D = SimpleNamespace(is_cuda=True, device=device, dtype=dtype, shape=(1, num_tokens, num_tokens))
        assert _choose(D, linkage, "auto", False, False) == chosen, (num_tokens, dtype, linkage)  # type: ignore[arg-type]
    assert backends.choose("auto", torch.empty(1), None) == "torch"
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    assert backends.choose("auto", on_gpu, None) == "torch"  # type: ignore[arg-type]


def test_a_kernel_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    D = torch.rand(1, 4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="distances are float64, the kernel needs float32; use backend='auto'"):
        agglomerate(D, 2, backend="triton", check=False)
    with pytest.raises(ValueError, match="4097 tokens, the kernel takes up to 4096"):
        agglomerate(torch.zeros(1, 4097, 4097), 2, backend="triton", check=False)
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'tritn'; did you mean 'triton'"):
        agglomerate(D, 2, backend="tritn", check=False)
    monkeypatch.setenv("HYPTREE_BACKEND", "cuda")
    with pytest.raises(ValueError, match="HYPTREE_BACKEND must be one of auto, torch, triton, got 'cuda'"):
        agglomerate(D, 2, check=False)
    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    assert agglomerate(D, 2, check=False).shape == (1, 4)

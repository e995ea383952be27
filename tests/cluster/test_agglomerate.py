"""Agglomerative clustering against scipy, scikit-learn and the definition, where the hierarchy is unique."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from sklearn.cluster import AgglomerativeClustering

from hyptree.cluster import agglomerate, cosine_distance
from hyptree.errors import UserError
from hyptree.ops.agglomerate import _choose, libraries, reference
from hyptree.ops.agglomerate.reference import LINKAGES
from tests.cluster import naive
from tests.cluster.make import distances, features

KEEPS = (0.9, 0.7, 0.5, 0.25)
OWN = ("average", "complete", "single")


def scipy_labels(D: torch.Tensor, method: str, k: int) -> list[int]:
    condensed = D.double().numpy()[np.triu_indices(len(D), 1)]
    merges = linkage(np.sqrt(condensed) if method == "ward" else condensed, method)
    return naive.renumbered(fcluster(merges, k, "maxclust"))


# ---------------------------------------------------------------------- against others
@pytest.mark.parametrize("kind", ["smooth", "noise"])
@pytest.mark.parametrize("num_tokens", [5, 49, 196, 256])
@pytest.mark.parametrize("method", LINKAGES)
def test_labels_are_those_of_scipy(method: str, num_tokens: int, kind: str, seed: int) -> None:
    D = distances(kind, 3, num_tokens, seed)  # three images are three seeds
    for keep in KEEPS:
        k = max(1, int(keep * num_tokens))
        labels = agglomerate(D, k, linkage=method, backend="torch")
        assert labels.tolist() == [scipy_labels(image, method, k) for image in D]


@pytest.mark.parametrize("kind", ["smooth", "noise"])
@pytest.mark.parametrize("num_tokens", [5, 49, 196, 256])
@pytest.mark.parametrize("method", OWN)
def test_labels_are_those_of_scikit_learn(method: str, num_tokens: int, kind: str, seed: int) -> None:
    D = distances(kind, 3, num_tokens, seed)
    for keep in KEEPS:
        k = max(1, int(keep * num_tokens))
        other = AgglomerativeClustering(k, metric="precomputed", linkage=method)
        labels = agglomerate(D, k, linkage=method, backend="torch")
        assert labels.tolist() == [naive.renumbered(other.fit_predict(image.numpy())) for image in D]


@pytest.mark.parametrize("backend", ["scipy", "fastcluster", "auto"])
@pytest.mark.parametrize("method", LINKAGES)
def test_backends_agree(method: str, backend: str, seed: int) -> None:
    pytest.importorskip("fastcluster" if backend == "fastcluster" else "scipy")
    D = distances("smooth", 4, 60, seed)
    for k in (1, 2, 13, 30, 59, 60):
        expected = agglomerate(D, k, linkage=method, backend="torch")
        assert torch.equal(agglomerate(D, k, linkage=method, backend=backend), expected)
    threshold = D.median().item()
    expected, expected_k = agglomerate(D, threshold=threshold, linkage=method, backend="torch")
    labels, k = agglomerate(D, threshold=threshold, linkage=method, backend=backend)
    assert torch.equal(labels, expected) and torch.equal(k, expected_k)


@pytest.mark.parametrize(
    ("method", "num_tokens", "packages", "chosen"),
    [
        ("single", 9, ("fastcluster", "scipy"), "fastcluster"),
        ("single", 9, ("scipy",), "scipy"),
        ("single", 9, (), "torch"),
        ("average", 257, ("fastcluster", "scipy"), "fastcluster"),
        ("average", 257, ("scipy",), "torch"),
        ("average", 256, ("fastcluster", "scipy"), "torch"),
        ("complete", 257, ("fastcluster", "scipy"), "torch"),
    ],
)
def test_what_auto_chooses(
    method: str, num_tokens: int, packages: tuple, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYPTREE_BACKEND", raising=False)
    monkeypatch.setattr(libraries, "installed", lambda: next(iter(packages), None))
    D = torch.zeros(1, num_tokens, num_tokens)
    for needs_forest in (False, True):
        assert _choose(D, method, "auto", False, needs_forest) == chosen
        assert _choose(D, method, "auto", True, needs_forest) == "torch"
    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    assert _choose(D, method, "auto", False, needs_forest=False) == "torch"


def test_fastcluster_in_threads(seed: int) -> None:
    pytest.importorskip("fastcluster")
    D = distances("noise", 5, 40, seed)
    one = agglomerate(D, 9, backend="fastcluster")
    torch.set_num_threads(2)
    assert torch.equal(agglomerate(D, 9, backend="fastcluster"), one)
    assert torch.equal(agglomerate(D, 9, backend="torch"), one)


@pytest.mark.parametrize("method", LINKAGES)
def test_float64_distances(method: str, seed: int) -> None:
    D = cosine_distance(features("noise", 2, 40, seed).double())
    assert D.dtype == torch.float64
    labels = agglomerate(D, 11, linkage=method, backend="torch")
    assert labels.tolist() == [scipy_labels(image, method, 11) for image in D]


@pytest.mark.parametrize("method", ["average", "ward"])
def test_rounds_and_greedy_steps_have_the_same_heights_to_the_bit(method: str, seed: int) -> None:
    """Sums are exact and divided once, so each height is the correctly rounded value of the exact one."""
    D = distances("smooth", 2, 24, seed)
    forest = reference.build_forest(D, method)
    for image, heights in zip(D.tolist(), forest.height, strict=True):
        assert heights.sort().values[:-1].tolist() == [float(height) for height, _, _ in naive.greedy(image, method)]


def test_bf16_features_cluster_as_their_float32_copies(seed: int) -> None:
    x = features("smooth", 3, 49, seed).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        labels = agglomerate(cosine_distance(x), 20, backend="torch")
    assert torch.equal(labels, agglomerate(cosine_distance(x.float()), 20, backend="torch"))
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    exact = (1 - unit @ unit.mT).clamp_min(0)
    assert torch.equal(labels, agglomerate(torch.minimum(exact, exact.mT), 20, backend="torch"))


# ---------------------------------------------------------------------- small and extreme cases
@pytest.mark.parametrize("method", LINKAGES)
def test_extreme_numbers_of_clusters(method: str, seed: int) -> None:
    D = distances("noise", 2, 9, seed)
    identity = torch.arange(9).repeat(2, 1)
    assert torch.equal(agglomerate(D, 9, linkage=method), identity)
    assert torch.equal(agglomerate(D, 1000, linkage=method), identity)  # clipped
    assert torch.equal(agglomerate(D, 1, linkage=method), torch.zeros(2, 9, dtype=torch.int64))


@pytest.mark.parametrize("backend", ["torch", "scipy", "auto"])
@pytest.mark.parametrize("method", LINKAGES)
def test_one_and_two_tokens(method: str, backend: str) -> None:
    one = torch.zeros(3, 1, 1)
    assert agglomerate(one, 1, linkage=method, backend=backend).tolist() == [[0], [0], [0]]
    labels, k = agglomerate(one, threshold=1.0, linkage=method, backend=backend)
    assert labels.tolist() == [[0], [0], [0]] and k.tolist() == [1, 1, 1]
    two = torch.tensor([[0.0, 0.25], [0.25, 0.0]])
    assert agglomerate(two, 2, linkage=method, backend=backend).tolist() == [0, 1]
    assert agglomerate(two, 1, linkage=method, backend=backend).tolist() == [0, 0]
    labels, k = agglomerate(two, threshold=0.25, linkage=method, backend=backend)
    assert labels.tolist() == [0, 0] and k.item() == 1 and k.ndim == 0
    labels, k = agglomerate(two, threshold=0.2499, linkage=method, backend=backend)
    assert labels.tolist() == [0, 1] and k.item() == 2


def test_no_images() -> None:
    assert agglomerate(torch.zeros(0, 7, 7), 3).shape == (0, 7)
    labels, k = agglomerate(torch.zeros(0, 7, 7), threshold=0.1)
    assert labels.shape == (0, 7) and k.shape == (0,)


def test_one_matrix_is_a_batch_of_one(seed: int) -> None:
    D = distances("noise", 1, 30, seed)
    assert torch.equal(agglomerate(D[0], 8), agglomerate(D, 8)[0])


def test_the_given_distances_stay_as_they_are(seed: int) -> None:
    D = distances("noise", 2, 20, seed).requires_grad_()
    before = D.detach().clone()
    for method in LINKAGES:
        labels = agglomerate(D, 5, linkage=method, backend="torch")
        assert not labels.requires_grad
    assert torch.equal(D, before)


@pytest.mark.parametrize("method", LINKAGES)
def test_strides_and_diagonal_do_not_matter(method: str, seed: int) -> None:
    D = distances("noise", 3, 20, seed)
    expected = agglomerate(D, 6, linkage=method, backend="torch")
    apart = torch.stack([D, D], dim=-1)[..., 0]
    assert not apart.is_contiguous()
    assert torch.equal(agglomerate(apart, 6, linkage=method, backend="torch"), expected)
    marked = D.clone()
    marked.diagonal(dim1=1, dim2=2).fill_(-7.0)
    assert torch.equal(agglomerate(marked, 6, linkage=method, backend="torch"), expected)


# ---------------------------------------------------------------------- thresholds
@pytest.mark.parametrize("method", OWN)
def test_thresholds(method: str, seed: int) -> None:
    D = distances("smooth", 3, 40, seed)
    off_diagonal = D[:, ~torch.eye(40, dtype=torch.bool)]
    below = torch.nextafter(off_diagonal.min(), torch.tensor(0.0)).item()
    labels, k = agglomerate(D, threshold=below, linkage=method)
    assert torch.equal(labels, torch.arange(40).repeat(3, 1)) and k.tolist() == [40] * 3
    labels, k = agglomerate(D, threshold=2.0, linkage=method)
    assert not labels.any() and k.tolist() == [1] * 3
    for threshold in (0.1, 0.3, 0.6, off_diagonal.min().item()):
        labels, k = agglomerate(D, threshold=threshold, linkage=method, backend="torch")
        for i, image in enumerate(D):
            merges = linkage(image.double().numpy()[np.triu_indices(40, 1)], method)
            assert labels[i].tolist() == naive.renumbered(fcluster(merges, threshold * (1 + 1e-7), "distance"))
            assert k[i] == labels[i].max() + 1
            alone, alone_k = agglomerate(image, threshold=threshold, linkage=method, backend="torch")
            assert torch.equal(alone, labels[i]) and alone_k == k[i]


def test_a_threshold_reaches_the_float32_distance_of_the_same_name() -> None:
    D = torch.full((4, 4), 0.2)
    for method in OWN:
        assert agglomerate(D, threshold=0.2, linkage=method)[1] == 1
    assert agglomerate(D.double(), threshold=0.2, linkage="average")[1] == 4  # float32 lies a little above 0.2


# ---------------------------------------------------------------------- properties
@st.composite
def unique_distances(draw: st.DrawFn) -> torch.Tensor:
    """(N, N) distances that all differ and whose partial means differ too (with near certainty)."""
    n = draw(st.integers(1, 12))
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    upper = (torch.rand(n, n, generator=numbers) * 2**24).floor().div(2**23).triu(1)
    return upper + upper.mT


@given(unique_distances(), st.sampled_from(LINKAGES), st.data())
def test_properties_of_labels(D: torch.Tensor, method: str, data: st.DataObject) -> None:
    n = len(D)
    cuts = {k: agglomerate(D, k, linkage=method, backend="torch").tolist() for k in range(1, n + 1)}
    assert cuts == {k: naive.labels(D.tolist(), method, k) for k in range(1, n + 1)}
    for k, labels in cuts.items():
        assert set(labels) == set(range(k))
        assert labels == naive.renumbered(labels)
        if k > 1:  # a coarser cut joins clusters, it never splits one
            assert len(set(zip(labels, cuts[k - 1], strict=True))) == k
    order = torch.tensor(data.draw(st.permutations(range(n))))
    k = data.draw(st.integers(1, n))
    permuted = agglomerate(D[order][:, order], k, linkage=method, backend="torch")
    assert permuted.tolist() == naive.renumbered(torch.tensor(cuts[k])[order].tolist())


@pytest.mark.parametrize("method", LINKAGES)
def test_images_do_not_depend_on_their_batch(method: str, seed: int) -> None:
    smooth, noise = distances("smooth", 16, 36, seed), distances("noise", 16, 36, seed)
    D = torch.cat([smooth, noise, torch.full((1, 36, 36), 0.5)])
    together = agglomerate(D, 10, linkage=method, backend="torch")
    assert torch.equal(together, torch.cat([agglomerate(d[None], 10, linkage=method, backend="torch") for d in D]))
    forest = reference.build_forest(D, method, 26)
    for i in (0, 20, 32):
        alone = reference.build_forest(D[i : i + 1], method, 26)
        assert all(a is None or torch.equal(a[0], b[i]) for a, b in zip(alone, forest, strict=True))


def test_large_images_go_in_slices(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    D = distances("noise", 5, 30, seed)
    for method in LINKAGES:
        expected = reference.build_forest(D, method)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_SLICE_BYTES", 1)
            sliced = reference.build_forest(D, method)
        assert all(a is b or torch.equal(a, b) for a, b in zip(sliced, expected, strict=True))


# ---------------------------------------------------------------------- compiled
@pytest.mark.parametrize("method", ["average", "single"])
def test_a_compiled_model_holds_it_as_one_node(method: str, seed: int) -> None:
    torch.compiler.reset()
    D = distances("noise", 2, 20, seed)
    compiled = torch.compile(lambda D: agglomerate(D, 7, linkage=method) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(D) - 1, agglomerate(D, 7, linkage=method, backend="torch"))


# ---------------------------------------------------------------------- mistakes
D3 = torch.rand(3, 3)
D3 = D3 + D3.mT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either k or threshold"),
        ({"k": 2, "threshold": 0.1}, "either k or threshold"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"k": 2.0}, r"k must be a whole number, got 2\.0"),
        ({"k": True}, "k must be a whole number, got True"),
        ({"threshold": float("nan")}, "threshold is NaN"),
        ({"k": 2, "linkage": "averge"}, "did you mean 'average'"),
        ({"k": 2, "linkage": "centroid"}, "must be one of average, complete, single, ward"),
        ({"k": 2, "backend": "sciy"}, "did you mean 'scipy'"),
        ({"k": 2, "backend": "cuda"}, "must be one of auto, torch, triton"),
        ({"k": 2, "backend": "scipy", "deterministic": True}, "ties in scipy are its own"),
        ({"threshold": 0.1, "backend": "triton"}, "use backend='auto' or 'torch'"),
    ],
)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agglomerate(D3, **arguments)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 3, 4), (1, 2, 3, 3), (0, 0)])
def test_wrong_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"expected \(N, N\) or \(B, N, N\)"):
        agglomerate(torch.zeros(shape), 2)
    with pytest.raises(UserError, match=r"D is ndarray, not a tensor, expected \(N, N\)"):
        agglomerate(np.zeros(shape), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_distances_in_half_precision_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match="expected float32 or float64"):
        agglomerate(D3.to(dtype), 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_first_bad_distance_is_named(bad: float) -> None:
    D = D3.repeat(4, 1, 1)
    D[2, 0, 1] = D[2, 1, 0] = bad
    with pytest.raises(UserError, match=rf"^D\[2, 0, 1\] is {bad}, expected finite"):
        agglomerate(D, 2)
    assert agglomerate(D, 2, check=False, backend="torch").shape == (4, 3)  # ends, whatever comes out


def test_asymmetric_distances_are_refused() -> None:
    D = D3.repeat(2, 1, 1)
    D[1, 2, 0] += 1
    with pytest.raises(UserError, match=r"not symmetric: D\[1, 0, 2\]"):
        agglomerate(D, 2)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastcluster", None)
    with pytest.raises(UserError, match=r"pip install hyptree\[tokens\]"):
        agglomerate(D3, 2, backend="fastcluster")


def test_torch_is_all_that_is_needed(run_python) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['scipy', 'sklearn', 'fastcluster', 'timm']));"
        "import torch; from hyptree.cluster import agglomerate, dendrogram;"
        "D = torch.rand(2, 9, 9); D = D + D.mT;"
        "print(agglomerate(D, 3, linkage='single').max().item(), dendrogram(D).linkage(1).shape)"
    )
    assert run_python(code) == "2 (8, 4)\n"

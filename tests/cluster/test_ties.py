"""Equal distances: always exactly k clusters, always the same ones, and always a run of the greedy definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyptree.cluster import agglomerate, dendrogram
from hyptree.ops.agglomerate import reference
from hyptree.ops.agglomerate.reference import LINKAGES
from tests.cluster import naive
from tests.cluster.make import TIES, tied


@st.composite
def tied_distances(draw: st.DrawFn) -> torch.Tensor:
    """(N, N) distances from very few values."""
    n = draw(st.integers(2, 10))
    levels = draw(st.integers(1, 6))
    values = draw(st.lists(st.integers(0, levels), min_size=n * n, max_size=n * n))
    upper = torch.tensor(values).view(n, n).triu(1) / 128
    return upper + upper.mT


@given(tied_distances(), st.sampled_from(LINKAGES))
def test_ties_follow_the_order_of_the_definition(D: torch.Tensor, linkage: str) -> None:
    for k in range(1, len(D) + 1):
        assert agglomerate(D, k, linkage=linkage, deterministic=True).tolist() == naive.labels(D.tolist(), linkage, k)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", TIES)
def test_any_cut_is_passed_by_a_greedy_run(kind: str, linkage: str, seed: int) -> None:
    D = tied(kind, 2, 7, seed)
    for k in range(1, 8):
        for image, labels in zip(D.tolist(), agglomerate(D, k, linkage=linkage, deterministic=True), strict=True):
            assert naive.is_valid_partition(image, linkage, labels.tolist())


def test_the_check_of_greedy_runs_can_fail() -> None:
    D = [[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]
    assert naive.is_valid_partition(D, "complete", [0, 0, 1])
    assert naive.is_valid_partition(D, "complete", [0, 1, 1])
    assert not naive.is_valid_partition(D, "complete", [0, 1, 0])


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", TIES)
def test_heights_are_those_of_the_greedy_run(kind: str, linkage: str, seed: int) -> None:
    D = tied(kind, 2, 12, seed)
    links = dendrogram(D, linkage, deterministic=True)
    for i, image in enumerate(D.tolist()):
        expected = naive.spanning_tree(image) if linkage == "single" else naive.greedy(image, linkage)
        low, high, height = links.merges(i)
        assert list(zip(height.tolist(), low.tolist(), high.tolist(), strict=True)) == [
            (float(h), a, b) for h, a, b in expected
        ]


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", TIES)
def test_exactly_k_clusters_for_any_batch_and_threads(kind: str, linkage: str, seed: int) -> None:
    D = tied(kind, 32, 49, seed)
    for k in (36, 5):
        labels = agglomerate(D, k, linkage=linkage, deterministic=True)
        assert [len(set(image)) for image in labels.tolist()] == [k] * 32
        assert torch.equal(agglomerate(D[5:6], k, linkage=linkage, deterministic=True), labels[5:6])
        torch.set_num_threads(2)
        assert torch.equal(agglomerate(D, k, linkage=linkage, deterministic=True), labels)
        torch.set_num_threads(1)


@pytest.mark.parametrize("backend", ["scipy", "fastcluster"])
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", TIES)
def test_libraries_give_exactly_k_clusters_too(kind: str, linkage: str, backend: str, seed: int) -> None:
    pytest.importorskip(backend)
    D = tied(kind, 2, 7, seed)
    for k in range(1, 8):
        for image, labels in zip(D.tolist(), agglomerate(D, k, linkage=linkage, backend=backend), strict=True):
            assert len(set(labels.tolist())) == k
            if linkage in ("single", "complete"):  # the others' recurrences round, so equal heights come apart
                assert naive.is_valid_partition(image, linkage, labels.tolist())


@pytest.mark.parametrize("linkage", LINKAGES)
def test_an_early_stop_changes_nothing(linkage: str, seed: int) -> None:
    D = tied("coarse", 8, 30, seed)
    whole = reference.build_forest(D, linkage)
    for k in range(1, 31):
        assert torch.equal(reference.cut(reference.build_forest(D, linkage, 30 - k), k), reference.cut(whole, k))
    for threshold in (0.0, 0.25, 0.75, 1.0, 1.125):
        early = reference.cut_at(reference.build_forest(D, linkage, threshold=threshold), threshold)
        late = reference.cut_at(whole, threshold)
        assert torch.equal(early[0], late[0]) and torch.equal(early[1], late[1])


def test_a_later_link_of_equal_height_may_come_first() -> None:
    """0, 1, 2 and 3, 4 are groups at one height; (0, 1) and (3, 4) are found first, but (0, 2) goes before (3, 4)."""
    D = torch.ones(5, 5)
    D[:3, :3] = 0.25
    D[3:, 3:] = 0.25
    for linkage in LINKAGES:
        assert agglomerate(D, 3, linkage=linkage, deterministic=True).tolist() == [0, 0, 0, 1, 2]


def test_paths_of_single_linkage_are_followed_to_their_ends(seed: int) -> None:
    """Tokens on a line, in any order: one component however long its path and however its names alternate."""
    generator = torch.Generator().manual_seed(seed)
    zigzag = torch.stack([torch.arange(100), 199 - torch.arange(100)], 1).flatten()
    bits = torch.tensor([int(f"{i:08b}"[::-1], 2) for i in range(256)])
    orders = [torch.arange(200), zigzag, torch.randperm(200, generator=generator), bits[bits < 200]]
    for order in orders:
        place = order.argsort()  # place[i]: where token i stands on the line
        D = (place[:, None] - place[None, :]).abs().float()
        D += 0.5 * ((place[:, None] // 50) != (place[None, :] // 50))  # four pieces
        labels = agglomerate(D, 4, linkage="single", backend="torch")
        assert labels.tolist() == naive.renumbered((place // 50).tolist())
        assert not agglomerate(D, 1, linkage="single", backend="torch").any()


@pytest.mark.gpu
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", TIES)
def test_the_same_forest_on_the_gpu(kind: str, linkage: str, seed: int) -> None:
    D = tied(kind, 8, 60, seed)
    on_gpu = reference.build_forest(D.cuda(), linkage)
    for here, there in zip(reference.build_forest(D, linkage), on_gpu, strict=True):
        assert here is there or torch.equal(here, there.cpu())
    for k in (48, 30, 7):
        assert torch.equal(reference.cut(on_gpu, k).cpu(), agglomerate(D, k, linkage=linkage, backend="torch"))
        assert torch.equal(agglomerate(D.cuda(), k, linkage=linkage).cpu(), reference.cut(on_gpu, k).cpu())

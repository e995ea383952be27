"""Whole hierarchies: scipy's linkage matrices, Trees, cuts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import cophenet, is_monotonic, is_valid_linkage, linkage

from hyptree.cluster import Dendrogram, agglomerate, dendrogram
from hyptree.ops.agglomerate.reference import LINKAGES
from hyptree.tree import Tree
from tests.cluster.make import TIES, distances, tied


@pytest.mark.parametrize("backend", ["torch", "scipy", "fastcluster"])
@pytest.mark.parametrize("method", LINKAGES)
def test_linkage_matrices_are_those_of_scipy(method: str, backend: str, seed: int) -> None:
    pytest.importorskip("fastcluster" if backend == "fastcluster" else "scipy")
    D = distances("smooth", 3, 40, seed)
    links = dendrogram(D, method, backend=backend)
    assert len(links) == 3 and links.num_tokens == 40
    for i, image in enumerate(D.double().numpy()):
        condensed = image[np.triu_indices(40, 1)]
        expected = linkage(np.sqrt(condensed) if method == "ward" else condensed, method)
        if method == "ward":
            expected[:, 2] **= 2
        Z = links.linkage(i)
        assert is_valid_linkage(Z) and is_monotonic(Z)
        np.testing.assert_array_equal(Z[:, [0, 1, 3]], expected[:, [0, 1, 3]])
        np.testing.assert_allclose(Z[:, 2], expected[:, 2], rtol=1e-12)


@pytest.mark.parametrize("method", LINKAGES)
@pytest.mark.parametrize("kind", TIES)
def test_ties_give_valid_linkages(kind: str, method: str, seed: int) -> None:
    links = dendrogram(tied(kind, 2, 15, seed), method, deterministic=True)
    for i in range(2):
        assert is_valid_linkage(links.linkage(i)) and is_monotonic(links.linkage(i))


def test_single_linkage_keeps_the_minimax_distances(seed: int) -> None:
    """Independent of any library: the height at which two tokens meet is the smallest possible largest step."""
    D = distances("noise", 1, 25, seed)[0]
    steps = D.double().numpy().copy()
    for via in range(25):
        steps = np.minimum(steps, np.maximum(steps[:, via, None], steps[None, via, :]))
    met = cophenet(dendrogram(D, "single", backend="torch").linkage())
    np.testing.assert_array_equal(met, steps[np.triu_indices(25, 1)])


@pytest.mark.parametrize("method", LINKAGES)
def test_trees_go_there_and_back(method: str, seed: int) -> None:
    D = distances("noise", 2, 18, seed)
    links = dendrogram(D, method, deterministic=True)
    names = [f"patch {i}" for i in range(18)]
    for i in range(2):
        tree = links.tree(i, names)
        assert isinstance(tree, Tree) and tree.num_nodes == 35 and tree.num_leaves == 18
        assert tree.label is not None and tree.label[:18] == names
        np.testing.assert_array_equal(tree.to_linkage(), links.linkage(i))
        for k in (1, 2, 7, 18):
            assert torch.equal(links.cut(k), agglomerate(D, k, linkage=method, deterministic=True))
            of_tree = tree.cut(k)
            pairs = set(zip(of_tree.tolist(), links.cut(k)[i].tolist(), strict=True))
            assert len(pairs) == k


@pytest.mark.parametrize("backend", ["torch", "scipy"])
def test_cuts_at_a_distance(backend: str, seed: int) -> None:
    D = distances("smooth", 3, 30, seed)
    links = dendrogram(D, "average", backend=backend)
    for threshold in (0.0, 0.2, 0.5, 2.0):
        labels, k = links.cut_at(threshold)
        expected, expected_k = agglomerate(D, threshold=threshold, backend=backend)
        assert torch.equal(labels, expected) and torch.equal(k, expected_k)


def test_one_matrix_and_one_token() -> None:
    D = torch.tensor([[0.0, 0.5, 0.125], [0.5, 0.0, 0.25], [0.125, 0.25, 0.0]])
    links = dendrogram(D, "complete")
    assert links.linkage().tolist() == [[0, 2, 0.125, 2], [1, 3, 0.5, 3]]
    assert links.cut(2).tolist() == [0, 1, 0]
    labels, k = links.cut_at(0.125)
    assert labels.tolist() == [0, 1, 0] and k.item() == 2
    assert links.up.tolist() == [[0, 0, 0]] and links.height.tolist() == [[float("inf"), 0.5, 0.125]]
    alone = dendrogram(torch.zeros(1, 1))
    assert alone.linkage().shape == (0, 4) and alone.cut(1).tolist() == [0] and alone.tree().num_nodes == 1
    assert repr(links) == "Dendrogram(1 images, 3 tokens)" and isinstance(links, Dendrogram)


def test_mistakes() -> None:
    links = dendrogram(torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match="no image 2 in a dendrogram of 2 images"):
        links.linkage(2)
    with pytest.raises(ValueError, match="at least 1"):
        links.cut(0)
    with pytest.raises(ValueError, match="did you mean 'single'"):
        dendrogram(torch.zeros(3, 3), "singel")
    with pytest.raises(ValueError, match="triton"):
        dendrogram(torch.zeros(3, 3), backend="triton")

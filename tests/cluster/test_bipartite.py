"""Bipartite matching against a loop over its description, its limits, ties and numerics; quality against ATC."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hyptree.cluster.bipartite import bipartite_match, bipartite_rounds, propose
from hyptree.cluster.centres import kmeans, kmedoids
from hyptree.cluster.density import density_peaks
from hyptree.cluster.distance import cosine_distance
from hyptree.cluster.labels import best_member, number_by_first_member
from hyptree.cluster.select import top_k
from hyptree.ops.cosine.reference import unit_features
from hyptree.tokens.merge import merge_weighted, unmerge
from tests.cluster import loops


@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 1), (7, 5), (20, 10), (21, 11), (30, 8), (31, 2), (24, 24)])
def test_labels_are_those_of_the_loop(n: int, k: int) -> None:
    features = torch.randn(4, n, 8) + torch.randn(8)
    labels = bipartite_match(features, k)
    assert labels.tolist() == [loops.bipartite(image, k) for image in features]
    assert all(len(set(row)) == k for row in labels.tolist())


def test_rounds_halve_at_most() -> None:
    assert bipartite_rounds(196, 24) == [98, 49, 25, 24]
    assert bipartite_rounds(196, 98) == [98] and bipartite_rounds(196, 97) == [98, 97]
    assert bipartite_rounds(7, 1) == [4, 2, 1] and bipartite_rounds(5, 5) == [] and bipartite_rounds(5, 9) == []


def test_more_clusters_than_tokens_is_the_identity_and_one_cluster_holds_all() -> None:
    features = torch.randn(2, 9, 4)
    for k in (9, 12):
        assert torch.equal(bipartite_match(features, k), torch.arange(9).expand(2, 9))
    assert torch.equal(bipartite_match(features, 1), torch.zeros(2, 9, dtype=torch.int64))
    assert torch.equal(bipartite_match(features[:, :1], 1), torch.zeros(2, 1, dtype=torch.int64))


def test_proposals_come_best_first_and_go_from_even_to_odd() -> None:
    features = torch.randn(3, 17, 6)
    gone, into = propose(features, 6)
    D = cosine_distance(features)
    for b in range(3):
        assert all(i % 2 == 0 for i in gone[b].tolist()) and all(j % 2 == 1 for j in into[b].tolist())
        accepted = D[b, gone[b], into[b]]
        assert torch.equal(accepted, D[b, gone[b]][:, 1::2].amin(-1)) and bool((accepted.diff() >= 0).all())
        rest = [i for i in range(0, 17, 2) if i not in gone[b].tolist()]
        assert float(D[b, rest][:, 1::2].amin(-1).min()) >= float(accepted[-1])


def test_ties_go_to_the_smallest_index() -> None:
    features = torch.ones(2, 10, 4)  # all alike: even tokens 0, 2, 4 propose first, all to token 1
    assert bipartite_match(features, 7).tolist() == [[2, 2, 2, 3, 2, 4, 0, 5, 1, 6]] * 2  # 6 and 8 are left
    gone, into = propose(features, 3)
    assert gone.tolist() == [[0, 2, 4]] * 2 and into.tolist() == [[1, 1, 1]] * 2


def test_labels_do_not_depend_on_batch_precision_settings_or_gradients() -> None:
    features = torch.randn(16, 50, 12).to(torch.bfloat16)
    labels = bipartite_match(features.float(), 18)
    for i in range(0, 16, 5):
        assert torch.equal(bipartite_match(features[i : i + 1].float(), 18)[0], labels[i])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = bipartite_match(features.float().requires_grad_(), 18)
    assert torch.equal(under_autocast, labels) and not under_autocast.requires_grad
    assert torch.equal(bipartite_match(features, 18), labels)


def test_zero_features_are_tokens_like_others() -> None:
    features = torch.randn(1, 12, 5)
    features[0, 3:6] = 0
    labels = bipartite_match(features, 4)
    assert sorted(set(labels[0].tolist())) == [0, 1, 2, 3]


def test_bad_input_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^bipartite_match: k must be at least 1, got 0; k = 6 keeps every token$"):
        bipartite_match(torch.randn(1, 6, 3), 0)
    with pytest.raises(ValueError, match=r"expected features \(B, N, D\) with at least one token, got \(6, 3\)"):
        bipartite_match(torch.randn(6, 3), 2)
    with pytest.raises(ValueError, match=r"got \(2, 0, 3\)"):
        bipartite_match(torch.randn(2, 0, 3), 2)


def test_numbers_follow_first_members_and_skip_empty_groups() -> None:
    groups = torch.tensor([[5, 5, 0, 3, 0, 3], [2, 1, 0, 1, 2, 0]])
    assert number_by_first_member(groups, 6).tolist() == [[0, 0, 1, 2, 1, 2], [0, 1, 2, 1, 0, 2]]
    groups = torch.randint(40, (5, 60))
    assert number_by_first_member(groups, 40).tolist() == [loops.numbered(row) for row in groups.tolist()]


def test_best_member_is_the_first_of_least_cost() -> None:
    groups = torch.tensor([[0, 1, 0, 1, 1, 2]])
    assert best_member(torch.tensor([[2.0, 3.0, 2.0, 1.0, 1.0, 9.0]]), groups, 3).tolist() == [[0, 3, 5]]


def all_labels(features: Tensor, k: int) -> dict[str, Tensor]:
    """What every rival makes of these features."""
    D, scores = cosine_distance(features), features[..., 0]
    return {
        "tome": bipartite_match(features, k),
        "kmeans": kmeans(features, k, start=scores),
        "kmedoids": kmedoids(D, k, start=scores),
        "dpcknn": density_peaks(D, k),
        "topk": top_k(scores, k),
    }


def test_every_rival_compiles_without_a_break() -> None:
    features = torch.randn(2, 20, 6)
    torch.compiler.reset()
    compiled = torch.compile(all_labels, fullgraph=True, backend="aot_eager")(features, 6)
    for name, labels in all_labels(features, 6).items():
        assert torch.equal(compiled[name], labels), name


def test_labels_do_not_depend_on_the_number_of_threads() -> None:
    features = torch.randn(6, 150, 16)
    one_thread = all_labels(features, 30)
    torch.set_num_threads(3)
    for name, labels in all_labels(features, 30).items():
        assert torch.equal(one_thread[name], labels), name


@pytest.mark.gpu
def test_no_rival_waits_for_the_gpu_and_labels_are_those_of_the_cpu(no_waiting) -> None:
    features = torch.randn(4, 64, 16, dtype=torch.float64)  # products differ far below any decision
    on_gpu = features.cuda()
    all_labels(on_gpu, 20)
    with no_waiting():
        actual = all_labels(on_gpu, 20)
    scored = torch.randn(4, 64).cuda()
    assert torch.equal(top_k(scored, 9).cpu(), top_k(scored.cpu(), 9))
    for name, labels in all_labels(features, 20).items():
        assert torch.equal(actual[name].cpu(), labels), name


def patches_of_pictures(shared_data: Path, num_pictures: int) -> Tensor:
    """Raw 8 x 8 patches of real pictures of 128 px: 256 tokens of 192 values each."""
    import numpy as np

    from hyptree.data.pictures.decoding import decode_image

    path = shared_data / "oxford-pets" / "oxford_pets_128.npz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    with np.load(path) as archive:
        data, offset = archive["test_jpeg"], archive["test_jpeg_offsets"]
    chosen = np.linspace(0, len(offset) - 2, num_pictures).astype(int)
    images = [decode_image(data[offset[i] : offset[i + 1]].tobytes(), f"test {i}") for i in chosen]
    pixels = torch.stack(images).float() / 255  # (B, 3, 128, 128)
    return pixels.view(-1, 3, 16, 8, 16, 8).permute(0, 2, 4, 1, 3, 5).reshape(-1, 256, 192)


def reconstruction_error(x: Tensor, labels: Tensor, k: int) -> float:
    merged, _ = merge_weighted(x, None, labels, k)
    return float((x - unmerge(merged, labels)).square().sum())


@pytest.mark.parametrize("keep", [0.9, 0.7, 0.5, 0.25])
def test_agglomerative_clusters_lose_less_of_real_pictures_than_matching(keep: float, shared_data: Path) -> None:
    """Below one half, matching is repeated on means, and average linkage wins on directions, not on raw pixels."""
    from hyptree.cluster import agglomerate

    x = patches_of_pictures(shared_data, 32)
    directions, D, k = unit_features(x), cosine_distance(x), int(256 * keep)
    matched = bipartite_match(x, k)
    for linkage in ("average", "complete"):
        labels = agglomerate(D, k, linkage=linkage)
        assert reconstruction_error(directions, labels, k) < 0.75 * reconstruction_error(directions, matched, k)
        if keep >= 0.5 or linkage == "complete":
            assert reconstruction_error(x, labels, k) < 0.9 * reconstruction_error(x, matched, k)

"""Measures of superpixels against loops that follow the definitions, and against cases done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hyptree.evaluate.pictures import superpixels as sp

IGNORE = 255


def random_maps(seed: int, ignore: bool) -> tuple[np.ndarray, np.ndarray]:
    """Blocky maps, so that clusters and regions overlap in pieces, with odd sizes and gaps in the numbering."""
    rng = np.random.default_rng(seed)
    h, w = int(rng.integers(5, 17)), int(rng.integers(5, 17))
    clusters = 3 * np.kron(rng.integers(0, 9, (6, 6)), np.ones((3, 3), int))[:h, :w]
    regions = np.kron(rng.integers(0, 4, (4, 4)), np.ones((5, 5), int))[:h, :w]
    if ignore:
        regions[rng.random((h, w)) < 0.2] = IGNORE
    return clusters, regions


def naive(clusters: np.ndarray, regions: np.ndarray, tolerance: int) -> dict[str, float]:
    """The definitions, one pixel and one set at a time."""
    h, w = clusters.shape
    places = [(y, x) for y in range(h) for x in range(w) if regions[y, x] != IGNORE]
    groups = {k: {p for p in places if clusters[p] == k} for k in {clusters[p] for p in places}}
    truth = {c: {p for p in places if regions[p] == c} for c in {regions[p] for p in places}}
    best = {k: max(len(group & region) for region in truth.values()) for k, group in groups.items()}
    leak = 0
    for region in truth.values():
        for group in groups.values():
            if group & region:
                leak += min(len(group & region), len(group - region))

    def edge(labels: np.ndarray, y: int, x: int, ignore: bool) -> bool:
        for ny, nx in ((y, x + 1), (y + 1, x)):
            if ny < h and nx < w and labels[y, x] != labels[ny, nx]:
                if ignore and IGNORE in (labels[y, x], labels[ny, nx]):
                    continue
                return True
        return False

    expected = [(y, x) for y in range(h) for x in range(w) if edge(regions, y, x, True)]
    hits = 0
    for y, x in expected:
        around = [
            (v, u)
            for v in range(max(0, y - tolerance), min(h, y + tolerance + 1))
            for u in range(max(0, x - tolerance), min(w, x + tolerance + 1))
        ]
        hits += any(edge(clusters, v, u, False) for v, u in around)
    return {
        "num_clusters": len(groups),
        "asa": sum(best.values()) / len(places),
        "boundary_recall": hits / len(expected) if expected else math.nan,
        "undersegmentation": leak / len(places),
        "purity": sum(best[k] / len(group) for k, group in groups.items()) / len(groups),
    }


@pytest.mark.parametrize("tolerance", [0, 1, 3])
@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("repeat", range(4))
def test_scores_equal_the_definitions(tolerance: int, ignore: bool, repeat: int, seed: int) -> None:
    clusters, regions = random_maps(seed, ignore)
    expected = naive(clusters, regions, tolerance)
    actual = sp.superpixel_scores(clusters, regions, tolerance)
    for name, value in expected.items():
        assert getattr(actual, name) == pytest.approx(value, rel=1e-12, nan_ok=True), name


def test_clusters_that_are_the_regions_are_perfect(seed: int) -> None:
    _, regions = random_maps(seed, ignore=False)
    actual = sp.superpixel_scores(regions * 7 + 1, regions, 0)
    assert (actual.asa, actual.boundary_recall, actual.undersegmentation, actual.purity) == (1, 1, 0, 1)


def test_one_cluster_over_two_halves() -> None:
    regions = np.repeat([[0] * 3 + [1] * 5], 4, axis=0)  # 12 and 20 pixels
    actual = sp.superpixel_scores(np.zeros((4, 8), int), regions)
    assert actual.num_clusters == 1
    assert actual.asa == actual.purity == 20 / 32
    assert actual.boundary_recall == 0
    assert actual.undersegmentation == (12 + 12) / 32  # min(12, 20) in both regions


def test_boundary_is_found_within_the_tolerance_only() -> None:
    regions = np.repeat([[0] * 5 + [1] * 5], 6, axis=0)
    shifted = np.repeat([[0] * 8 + [1] * 2], 6, axis=0)  # 3 pixels away
    assert [sp.boundary_recall(shifted, regions, t) for t in (2, 3)] == [0, 1]


def test_ignored_pixels_count_nowhere() -> None:
    regions = np.full((4, 6), IGNORE)
    regions[:, 2:4] = 1
    clusters = np.arange(24).reshape(4, 6)
    actual = sp.superpixel_scores(clusters, regions)
    assert actual.num_clusters == 8 and actual.asa == 1 and math.isnan(actual.boundary_recall)
    with pytest.raises(ValueError, match="every pixel of the regions is 255"):
        sp.contingency(clusters, np.full((4, 6), IGNORE))


def test_contingency_counts_every_pixel(seed: int) -> None:
    clusters, regions = random_maps(seed, ignore=False)
    table = sp.contingency(clusters, regions)
    assert table.sum() == clusters.size
    assert table.shape == (len(np.unique(clusters)), len(np.unique(regions)))
    k, c = np.unique(clusters)[-1], np.unique(regions)[0]
    assert table[-1, 0] == ((clusters == k) & (regions == c)).sum()


def test_mean_leaves_out_pictures_without_boundaries() -> None:
    a = sp.SuperpixelScores(4, 0.5, math.nan, 0.2, 0.7)
    b = sp.SuperpixelScores(6, 0.7, 0.8, 0.4, 0.9)
    mean = sp.mean_scores([a, b])
    assert (mean.num_clusters, mean.boundary_recall) == (5, 0.8)
    assert mean.asa == pytest.approx(0.6) and mean.undersegmentation == pytest.approx(0.3)
    assert math.isnan(sp.mean_scores([a]).boundary_recall)
    with pytest.raises(ValueError, match="no scores"):
        sp.mean_scores([])


@pytest.mark.parametrize(
    ("clusters", "regions", "message"),
    [
        (np.zeros((4, 4), int), np.zeros((4, 5), int), r"clusters are \(4, 4\), regions are \(4, 5\)"),
        (np.zeros((4, 4)), np.zeros((4, 4), int), "clusters must be an .H, W. map of integers"),
        (np.zeros((4, 4), int), np.zeros((1, 4, 4), int), "regions must be an .H, W. map"),
    ],
)
def test_wrong_maps_are_refused(clusters: np.ndarray, regions: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sp.superpixel_scores(clusters, regions)


# ---- rivals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(64, 64), (30, 90), (7, 5)])
@pytest.mark.parametrize("expected", [1, 4, 16, 30])
def test_grid_has_about_as_many_equal_rectangles(height: int, width: int, expected: int) -> None:
    actual = sp.grid_clusters(height, width, expected)
    sizes = np.bincount(actual.ravel())
    assert actual.shape == (height, width) and (sizes > 0).all()
    assert abs(len(sizes) - expected) <= max(1, 0.15 * expected)
    for k in range(len(sizes)):  # a rectangle fills its bounding box
        y, x = np.nonzero(actual == k)
        assert (np.ptp(y) + 1) * (np.ptp(x) + 1) == sizes[k]


def test_grid_of_sixteen_is_four_by_four() -> None:
    assert (sp.grid_clusters(8, 8, 16) == np.kron(np.arange(16).reshape(4, 4), np.ones((2, 2), int))).all()


def test_enlarge_gives_each_place_its_square() -> None:
    small = np.arange(6).reshape(2, 3)
    assert (sp.enlarge(small, 4, 9) == np.kron(small, np.ones((2, 3), int))).all()
    assert sp.enlarge(small, 5, 7).shape == (5, 7) and set(sp.enlarge(small, 5, 7).ravel()) == set(range(6))


def test_slic_and_kmeans_find_flat_regions(seed: int) -> None:
    pytest.importorskip("skimage")
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(seed)
    regions = np.kron(np.array([[0, 1], [2, 3]]), np.ones((16, 16), int))
    colors = np.array([[250, 20, 20], [20, 250, 20], [20, 20, 250], [240, 240, 240]])
    image = (colors[regions] + rng.integers(-5, 6, (32, 32, 3))).clip(0, 255).astype(np.uint8)
    assert sp.superpixel_scores(sp.slic_clusters(image, 16), regions).asa > 0.97
    features = image[2::4, 2::4].transpose(2, 0, 1)
    actual = sp.kmeans_clusters(features, 4, 32, 32, seed=seed % 1000)
    scores = sp.superpixel_scores(actual, regions)
    assert scores.asa == 1 and scores.num_clusters == 4
    assert (actual == sp.kmeans_clusters(features, 4, 32, 32, seed=seed % 1000)).all()


def test_kmeans_of_fewer_points_than_clusters() -> None:
    pytest.importorskip("sklearn")
    features = np.array([[[0.0, 0.0], [1.0, 1.0]]])  # two different points
    assert len(np.unique(sp.kmeans_clusters(features, 5, 4, 4))) == 2

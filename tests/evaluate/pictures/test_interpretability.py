"""Tables of clusters against masks: the model's own maps, rivals at the same number, heads and their mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from hyptree.data.pictures.single import model_input
from hyptree.data.sample import IGNORE, Sample
from hyptree.errors import UserError
from hyptree.evaluate.pictures import superpixels as sp
from hyptree.evaluate.pictures.interpretability import cluster_maps, interpretability_table, print_table
from tests.explore.fake import tiny


@dataclass
class Blocks:
    """Pictures of 32 px whose regions are blocks; one sample without a mask in between."""

    seed: int
    count: int = 4
    semantic_classes: tuple[str, ...] = ("a", "b", "c")

    def __len__(self) -> int:
        return self.count + 1

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng((self.seed, index))
        image = torch.from_numpy(rng.integers(0, 256, (3, 32, 32), dtype=np.uint8))
        if index == 1:
            return Sample(image, "blind", semantic=torch.full((32, 32), IGNORE, dtype=torch.uint8))
        mask = np.kron(rng.integers(0, 3, (4, 4)), np.ones((8, 8), int)).astype(np.uint8)
        return Sample(image, str(index), semantic=torch.from_numpy(mask))


def test_maps_are_the_models_assignments(seed: int) -> None:
    model, data = tiny(), Blocks(seed)
    images = [np.ascontiguousarray(data[k].image.permute(1, 2, 0).numpy()) for k in (0, 2)]
    actual = {(m.stage, m.block, m.head, m.level): m.maps for m in cluster_maps(model, images)}
    with torch.no_grad():
        inputs = model.assignments(model_input(model, images))
    places = [(1, 1), (1, 2), (2, 1)]
    assert len(actual) == 3 * 2 + 3 * 2 + 2  # heads, two levels in the first stage
    for (stage, block), one in zip(places, inputs, strict=True):
        for head in range(one.patch.shape[1]):
            expected = (
                one.labels()[:, head].numpy().repeat(32 // one.patch.shape[2], 1).repeat(32 // one.patch.shape[3], 2)
            )
            assert (actual[stage, block, head, "patch"] == expected).all()
            if stage == 1:
                assert one.window is not None
                group = one.window[:, head].argmax(-1).numpy().repeat(8, 1).repeat(8, 2)
                assert (actual[stage, block, head, "window"] == group).all()


def test_rows_are_means_over_pictures_and_heads(seed: int) -> None:
    pytest.importorskip("skimage")
    model, data = tiny(), Blocks(seed)
    rows = interpretability_table(model, data, num_images=3)
    kept = [0, 2, 3]
    images = [np.ascontiguousarray(data[k].image.permute(1, 2, 0).numpy()) for k in kept]
    regions = [data[k].semantic.numpy().astype(int) for k in kept]
    maps = [m for m in cluster_maps(model, images) if (m.stage, m.block, m.level) == (1, 2, "patch")]
    scores = sp.mean_scores([sp.superpixel_scores(m.maps[k], regions[k]) for m in maps for k in range(3)])
    (row,) = [r for r in rows if (r["stage"], r["block"], r["level"], r["rival"]) == (1, 2, "patch", False)]
    for name in ("num_clusters", "asa", "boundary_recall", "undersegmentation", "purity"):
        assert row[name] == pytest.approx(getattr(scores, name)), name
    assert row["head"] is None and row["method"] == "stage 1, block 2, clusters"


def test_rivals_have_the_same_number_of_clusters(seed: int) -> None:
    pytest.importorskip("skimage")
    pytest.importorskip("sklearn")
    import timm

    rival = timm.create_model("resnet10t", num_classes=0)
    rows = interpretability_table(tiny(), Blocks(seed), num_images=2, rival=rival, rival_name="resnet10t", by_head=True)
    own = [k for k, row in enumerate(rows) if not row["rival"]]
    assert len(own) == 14 and {rows[k]["head"] for k in own} == {0, 1, 2}
    for k in own:
        assert [row["method"] for row in rows[k + 1 : k + 4]] == ["grid", "SLIC", "k-means of resnet10t"]
        expected = round(rows[k]["num_clusters"])
        grid = sp.mean_scores(
            [sp.superpixel_scores(sp.grid_clusters(32, 32, expected), Blocks(seed)[i].semantic.numpy()) for i in (0, 2)]
        )
        assert rows[k + 1]["asa"] == pytest.approx(grid.asa)
        assert rows[k + 3]["num_clusters"] <= expected
    lines = print_table(rows).splitlines()
    assert len(lines) == len(rows) + 1 and len({len(line) for line in lines}) == 1
    assert lines[1].startswith("stage 1, block 1, clusters, head 0") and lines[2].startswith("  grid")


def test_slic_comes_near_the_number_it_is_asked_for(seed: int) -> None:
    pytest.importorskip("skimage")
    import skimage.segmentation

    y, x = np.indices((64, 64))
    phase = np.random.default_rng(seed).uniform(0, 6, 3)
    waves = np.sin(x[..., None] / 9 + phase) * np.cos(y[..., None] / 7 + phase)
    picture = (127 + 120 * waves).astype(np.uint8)
    misses = []
    for expected in (16, 30, 64):
        first = len(np.unique(skimage.segmentation.slic(picture, n_segments=expected, compactness=10.0, start_label=0)))
        actual = len(np.unique(sp.slic_clusters(picture, expected)))
        assert abs(actual - expected) <= abs(first - expected)
        misses.append(abs(actual - expected) / expected)
    assert np.mean(misses) < 0.2


def test_what_cannot_be_measured_is_said(seed: int) -> None:
    with pytest.raises(UserError, match="Linear does not cluster"):
        cluster_maps(nn.Linear(1, 1), [np.zeros((32, 32, 3), np.uint8)])
    with pytest.raises(UserError, match="no picture of Blocks has parts masks"):
        interpretability_table(tiny(), Blocks(seed), target="parts")
    with pytest.raises(ValueError, match="num_images must be 1 or more"):
        interpretability_table(tiny(), Blocks(seed), num_images=0)

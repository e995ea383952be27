"""``hyptree.explain``: supports that add up, the model's own assignments at the leaves, points where they belong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hyptree
from hyptree.data.pictures.single import data_url, fit, model_input, read_picture
from hyptree.errors import UserError
from hyptree.explore.explanation import block_tree, choose_block, choose_head, nested_tree, stages_tree
from hyptree.geometry import Lorentz
from hyptree.models.clusters import read_clusters
from hyptree.tree import Tree
from tests.explore.fake import MEAN, STD, tiny


def random_picture(seed: int, height: int = 32, width: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def assert_supports_add_up(tree: Tree) -> None:
    assert tree.support is not None
    assert np.allclose(tree.support[tree.roots], 1, atol=1e-5)
    for node in np.flatnonzero(~tree.is_leaf):
        total = tree.support[tree.children(int(node))].sum(0)
        assert np.allclose(total, tree.support[node], atol=1e-5)


@pytest.mark.parametrize("stage", [None, 1, 2, "all"])
@pytest.mark.parametrize("size", [32, 40, 27])  # 40 and 27: maps that their windows do not divide
def test_children_add_up_to_their_parent(stage: int | str | None, size: int, seed: int) -> None:
    tree = hyptree.explain(tiny(), random_picture(seed), stage=stage, size=size)
    assert tree.support is not None and tree.support.shape[1:] == (size, size)
    assert len(tree.roots) == 1 and tree.label is not None and tree.label[0] == "picture"
    assert tree.is_monotone and (tree.support >= 0).all() and (tree.support[tree.is_leaf].sum((1, 2)) > 0).all()
    assert_supports_add_up(tree)


def test_leaves_are_the_models_own_assignments(seed: int) -> None:
    model, picture = tiny(), random_picture(seed)
    tree = hyptree.explain(model, picture, stage=1, block=2, head=1)
    with torch.no_grad():
        inputs = model.assignments(model_input(model, [picture]))[1].patch[0, 1].numpy()  # (8, 8, 4)
    assert tree.num_leaves == 16 * 4 and tree.support is not None and tree.label is not None
    for leaf in tree.leaves():
        window, centre = (int(n) for n in tree.label[leaf].removeprefix("patches ").split("."))
        y, x = divmod(window, 4)
        expected = np.zeros((8, 8))
        inside = np.s_[2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
        expected[inside] = inputs[inside][..., centre]
        assert np.allclose(tree.support[leaf], np.kron(expected, np.ones((4, 4))), atol=1e-6)


def test_a_window_hangs_under_the_group_it_belongs_to_most(seed: int) -> None:
    model, picture = tiny(), random_picture(seed)
    (clusters,) = read_clusters(model, model_input(model, [picture]))
    for head in range(3):
        tree = block_tree(clusters[0], head)
        with torch.no_grad():
            window = model.assignments(model_input(model, [picture]))[0].window[0, head].reshape(16, 4)
        assert tree.label is not None
        for leaf in tree.leaves():
            own = int(tree.label[leaf].removeprefix("patches ").split(".")[0])
            assert tree.label[tree.parent[leaf]] == f"group {int(window[own].argmax())}"


def test_points_are_those_of_the_window_level(seed: int) -> None:
    model, picture = tiny(curvature=0.5), random_picture(seed)
    tree = hyptree.explain(model, picture, stage=1, block=1, head=2)
    assert isinstance(tree.manifold, Lorentz) and float(tree.manifold.c) == 0.5 and tree.embedding is not None
    with torch.no_grad():
        seen = model.assignments(model_input(model, [picture]))[0]
    centres, tangent = seen.lorentz_centres()[0, 2], seen.patch_centres[0, 2].reshape(64, 6)
    assert tree.label is not None and (tree.embedding[0] == 0).all()
    for node in range(1, tree.num_nodes):
        kind, _, number = tree.label[node].partition(" ")
        if kind == "group":
            assert np.allclose(tree.embedding[node], centres[int(number)], atol=1e-6)
        else:
            window, centre = (int(n) for n in number.split("."))
            v = tangent[4 * window + centre]
            expected = tree.manifold.expmap0(v / max(1.0, float(v.norm())))
            assert np.allclose(tree.embedding[node], expected, atol=1e-5)
    tree.manifold.check(torch.as_tensor(np.array(tree.embedding)))


def test_euclidean_windows_and_flat_stages_are_laid_out(seed: int) -> None:
    flat = hyptree.explain(tiny(window_geometry="euclidean"), random_picture(seed), stage=1)
    assert flat.manifold == "poincare" and flat.depth.max() == 2
    one = hyptree.explain(tiny(), random_picture(seed), stage=2)
    assert one.manifold == "poincare" and one.depth.max() == 1 and one.num_leaves == 4
    for tree in (flat, one):
        assert tree.embedding is not None and np.allclose(tree.embedding, tree.sarkar(1.0))


def test_hard_assignments_give_hard_leaves(seed: int) -> None:
    picture = random_picture(seed)
    picture[:16, :16] = 90  # one window whose patches are all the same
    tree = hyptree.explain(tiny(assignment="hard", fold=2), picture, stage=1, block=1)
    assert tree.support is not None and set(np.unique(tree.support)) <= {0.0, 1.0}
    assert tree.num_leaves < 4 * 4  # clusters that nothing belongs to have no node
    assert_supports_add_up(tree)


def test_all_stages_are_nested_from_last_to_first(seed: int) -> None:
    model, picture = tiny(), random_picture(seed)
    (clusters,) = read_clusters(model, model_input(model, [picture]))
    tree = stages_tree(clusters)
    assert tree.depth.max() == 2 and tree.label is not None
    assert all(tree.label[k].startswith("stage 2") for k in np.flatnonzero(tree.depth == 1))
    assert all(tree.label[k].startswith("stage 1") for k in tree.leaves())


def test_nested_tree_by_hand() -> None:
    fine = np.zeros((4, 1, 4))
    fine[0, 0, :2] = [1, 0.75]
    fine[1, 0, 1] = 0.25
    fine[3, 0, 2:] = 1  # mask 2 is empty
    coarse = np.array([[[0.9, 0.6, 0, 0]], [[0, 0, 0, 0]], [[0.1, 0.4, 1, 1]]])
    tree, origin = nested_tree([coarse, fine], [["a", "b", "c"], ["p", "q", "r", "s"]])
    assert tree.label == ["picture", "a", "c", "p", "q", "s"]  # b has nothing below it, r is empty
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1, 2] and origin.tolist() == [0, 0, 2, 0, 1, 3]
    assert tree.height.tolist() == [2, 1, 1, 0, 0, 0]
    assert tree.support is not None and tree.support[1].tolist() == [[1, 1, 0, 0]]


def test_default_block_gathers_windows_and_default_head_is_decided(seed: int) -> None:
    (clusters,) = read_clusters(tiny(), model_input(tiny(), [random_picture(seed)]))
    block = choose_block(clusters, None, None)
    assert (block.stage, block.block) == (1, 2)
    entropy = [float(-(p * np.log(np.maximum(p, 1e-12))).sum(-1).mean()) for p in block.patch]
    assert choose_head(block, None) == int(np.argmin(entropy))


def test_pictures_of_every_kind_give_the_same_tree(tmp_path: Path, seed: int) -> None:
    model, picture = tiny(), random_picture(seed)
    Image.fromarray(picture).save(tmp_path / "a.png")
    expected = hyptree.explain(model, picture)
    others = [
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        Image.fromarray(picture),
        torch.from_numpy(picture),
        torch.from_numpy(picture).permute(2, 0, 1),
    ]
    for other in others:
        assert hyptree.explain(model, other) == expected


def test_model_gets_back_its_mode(seed: int) -> None:
    model = tiny()
    model.train()
    hyptree.explain(model, random_picture(seed))
    assert model.training and all(module.training for module in model.modules())


def test_input_is_normalised_as_the_model_says(seed: int) -> None:
    picture = random_picture(seed)
    actual = model_input(tiny(), [picture])[0].permute(1, 2, 0).numpy()
    assert np.allclose(actual, (picture / 255 - np.array(MEAN)) / np.array(STD), atol=1e-5)
    other = model_input(tiny(), [picture], (0, 0, 0), (1, 1, 1))[0].permute(1, 2, 0).numpy()
    assert np.allclose(other, picture / 255, atol=1e-6)


@pytest.mark.parametrize(("height", "width", "size"), [(48, 96, 32), (100, 30, 24), (16, 16, 32)])
def test_fit_keeps_the_middle(height: int, width: int, size: int) -> None:
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:, : width // 2] = 200
    actual = fit(picture, size)
    assert actual.shape == (size, size, 3)
    assert (actual[:, : size // 2 - 3] > 190).all() and (actual[:, size // 2 + 3 :] < 10).all()


def test_data_url_holds_the_picture(seed: int) -> None:
    import base64
    import io

    flat = np.full((20, 30, 3), (10, 200, 30), np.uint8)
    head, _, text = data_url(flat).partition(",")
    assert head == "data:image/png;base64"
    assert (np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) == flat).all()
    assert data_url(random_picture(seed, 64, 64)).startswith("data:image/jpeg")


class Other(nn.Module):
    """Says itself what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Size, dict[str, int]]] = []

    def explain_tree(self, x: torch.Tensor, **options: int) -> Tree:
        self.seen.append((x.shape, options))
        return Tree([-1, 0])


def test_other_models_answer_by_a_hook(seed: int) -> None:
    model = Other()
    assert hyptree.explain(model, random_picture(seed), head=2, size=48) == Tree([-1, 0])
    assert model.seen == [(torch.Size([1, 3, 48, 48]), {"head": 2})]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 3}, 'stage must be from 1 to 2, or "all", got 3'),
        ({"stage": 1, "block": 3}, "block must be from 1 to 2 in stage 1, got 3"),
        ({"head": 3}, "head must be from 0 to 2, got 3"),
        ({"stage": "all", "head": 3}, "head must be from 0 to 2, got 3"),
        ({"stage": "all", "block": 1}, "takes the last block of every stage, leave block=1 out"),
    ],
)
def test_places_that_do_not_exist(options: dict[str, int], message: str, seed: int) -> None:
    with pytest.raises(UserError, match=message):
        hyptree.explain(tiny(), random_picture(seed), **options)


def test_models_and_pictures_that_will_not_do(tmp_path: Path, seed: int) -> None:
    with pytest.raises(UserError, match=r"^Linear cannot be explained: .*hcformer_nano$"):
        hyptree.explain(nn.Linear(2, 2), random_picture(seed))
    (tmp_path / "broken.png").write_text("no picture")
    with pytest.raises(UserError, match=r"broken\.png: not a picture"):
        read_picture(tmp_path / "broken.png")
    with pytest.raises(UserError, match=r"absent\.png: no such picture"):
        read_picture(tmp_path / "absent.png")
    with pytest.raises(ValueError, match=r"got \(4, 4\) of uint8"):
        read_picture(np.zeros((4, 4), np.uint8))
    with pytest.raises(ValueError, match="of float64"):
        read_picture(np.zeros((4, 4, 3)))

"""Pictures in folders: ImageFolder and Tiny-ImageNet, made here and real."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hyptree.data import build_dataset, build_loader, eval_transform
from hyptree.data.pictures.folders import FolderPictures
from hyptree.data.pictures.tiny_imagenet import TinyImageNet
from hyptree.data.sample import BadSample
from hyptree.data.settings import DataSettings
from hyptree.errors import UserError
from tests.data.make import pixels, stack, truncate, write_picture


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def fill(folder, rng, counts, suffix=".jpg"):
    """Writes so many pictures into each class folder; gives the pixels by path relative to ``folder``."""
    return {
        f"{name}/{i}{suffix}": write_picture(folder / name / f"{i}{suffix}", pixels(rng, 20, 24))
        for name, count in counts.items()
        for i in range(count)
    }


def test_one_folder_per_class(tmp_path, rng):
    written = fill(tmp_path / "train", rng, {"dog": 3, "ant": 2, "cat": 4})
    fill(tmp_path / "val", rng, {"dog": 1, "cat": 2}, ".PNG")
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no picture")
    (tmp_path / "train" / "dog" / "._0.jpg").write_bytes(b"left behind by a Mac")
    train, val = (FolderPictures(tmp_path, split) for split in ("train", "val"))
    assert train.classes == val.classes == ("ant", "cat", "dog") and train.tree is None
    assert len(train) == 9 and len(val) == 3
    assert [val[i].label for i in range(3)] == [1, 1, 2]
    for i in range(9):
        sample = train[i]
        path = sample.id.removeprefix("train/")
        assert sample.image.shape == (3, 20, 24) and sample.image.dtype == torch.uint8
        assert np.abs(sample.image.permute(1, 2, 0).numpy().astype(int) - written[path]).mean() < 4  # JPEG is lossy
        assert train.classes[sample.label] == path.split("/")[0]
    assert train[1].id == "train/ant/1.jpg"


def test_png_is_read_exactly_and_every_kind_becomes_rgb(tmp_path, rng):
    colour = rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)
    grey = rng.integers(0, 256, (9, 7), dtype=np.uint8)
    write_picture(tmp_path / "train" / "a" / "0.png", colour)
    write_picture(tmp_path / "train" / "a" / "1.png", grey)
    write_picture(tmp_path / "train" / "a" / "2.png", np.dstack([colour, np.full((9, 7), 255, np.uint8)]))
    write_picture(tmp_path / "train" / "a" / "3.jpg", grey)
    dataset = FolderPictures(tmp_path)
    for i in (0, 2):
        assert np.array_equal(dataset[i].image.permute(1, 2, 0).numpy(), colour)
    assert np.array_equal(dataset[1].image.numpy(), np.stack([grey] * 3))
    assert dataset[3].image.shape == (3, 9, 7)
    assert torch.equal(dataset[3].image[0], dataset[3].image[2])


def test_nesting_makes_a_tree(tmp_path, rng):
    fill(tmp_path / "train", rng, {"animal/dog": 1, "animal/cat": 1, "vehicle/car": 1, "animal": 1})
    dataset = FolderPictures(tmp_path)
    assert dataset.classes == ("animal", "animal/cat", "animal/dog", "vehicle/car")
    tree = dataset.tree
    assert tree.num_nodes == 6 and tree.label[:4] == ["animal", "cat", "dog", "car"]
    assert tree.label[tree.lca(1, 2)] == "animal" and tree.label[tree.lca(2, 3)] == "all"
    assert tree.parent[1] == 0  # a class may have classes below it


def test_a_split_may_have_another_name(tmp_path, rng):
    fill(tmp_path / "training", rng, {"a": 1, "b": 1})
    fill(tmp_path / "test", rng, {"b": 1})
    assert FolderPictures(tmp_path, "train").classes == ("a", "b")
    assert FolderPictures(tmp_path, "val")[0].id == "test/b/0.jpg"


def test_the_limit_draws_by_seed_and_keeps_the_order(tmp_path, rng):
    fill(tmp_path / "train", rng, {"a": 20, "b": 20})

    def names(**options):
        dataset = build_dataset(DataSettings(name="folder", root=tmp_path, **options), "train")
        return [dataset[i].id for i in range(len(dataset))]

    some = names(num_train=10)
    assert len(some) == 10 and sorted(some, key=names().index) == some and some == names(num_train=10)
    assert {name.split("/")[1] for name in some} == {"a", "b"} and some != names(num_train=10, seed=1)
    assert len(names(num_train=99)) == 40


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "missing"])
def test_damaged_pictures_are_named(tmp_path, rng, damage):
    fill(tmp_path / "train", rng, {"a": 4})
    bad = tmp_path / "train" / "a" / "2.jpg"
    dataset = FolderPictures(tmp_path)
    if damage == "truncated":
        truncate(bad)
    elif damage == "missing":
        bad.unlink()
    else:
        bad.write_bytes(b"" if damage == "empty" else b"<html>404</html>")
    with pytest.raises(BadSample) as caught:
        dataset[2]
    assert caught.value.id == "train/a/2.jpg"
    why = {"truncated": "truncated", "text": "not a picture", "empty": "empty file", "missing": "no such file"}
    assert why[damage] in caught.value.why
    loader = build_loader(
        dataset, stack, batch_size=2, seed=0, train=True, transform=eval_transform(16), workers=int(damage == "text")
    )
    batches = list(loader)
    assert list(loader.skipped) == ["train/a/2.jpg"]
    assert [len(names) for _, _, names in batches] == [2, 2]
    assert "train/a/2.jpg" not in {name for _, _, names in batches for name in names}
    loader.close()


@pytest.mark.parametrize("suffix", [".png", ".gif", ".bmp", ".webp", ".tif"])
def test_any_cut_of_any_kind_is_a_bad_sample_or_a_picture(tmp_path, rng, suffix):
    path = tmp_path / "train" / "a" / f"0{suffix}"
    write_picture(path, rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    dataset, whole, refused = FolderPictures(tmp_path), path.read_bytes(), 0
    for length in range(0, len(whole), max(1, len(whole) // 25)):
        path.write_bytes(whole[:length])
        try:
            assert dataset[0].image.shape == (3, 16, 16)
        except BadSample as error:
            refused += "\n" not in error.why
    assert refused >= 10


def test_wrong_folders_are_one_clear_line(tmp_path, rng):
    with pytest.raises(UserError, match=r"there is no folder .*nowhere; expected one with train/CLASS/"):
        FolderPictures(tmp_path / "nowhere")
    fill(tmp_path / "one", rng, {"dog": 1, "cat": 1})
    with pytest.raises(UserError, match=r"expected train or .*, found cat, dog"):
        FolderPictures(tmp_path / "one")
    (tmp_path / "two" / "train" / "dog").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no pictures in it; expected train/CLASS/picture.jpg"):
        FolderPictures(tmp_path / "two")
    fill(tmp_path / "three" / "train", rng, {"dog": 1, "cat": 1})
    with pytest.raises(UserError, match=r"expected val or .*, found train"):
        FolderPictures(tmp_path / "three", "val")
    fill(tmp_path / "three" / "val", rng, {"dog": 1, "cow": 1})
    with pytest.raises(UserError, match=r"has the class cow, which .*train has not; both must hold the same 2 classes"):
        FolderPictures(tmp_path / "three", "val")


def test_a_wrong_number_of_classes_is_one_clear_line(tmp_path, rng):
    fill(tmp_path / "train", rng, {"dog": 1, "cat": 1})
    with pytest.raises(UserError, match="has 2 classes, but num_classes is 10; leave num_classes out"):
        build_dataset(DataSettings(name="folder", root=tmp_path, num_classes=10), "train")
    assert len(build_dataset(DataSettings(name="folder", root=tmp_path, num_classes=2), "train")) == 2


# ------------------------------------------------------------------------------------------------------ Tiny-ImageNet

WNIDS = ["n02", "n01", "n03"]


@pytest.fixture
def tiny(tmp_path, rng):
    root = tmp_path / "tiny-imagenet-200"
    for wnid in WNIDS:
        for i in range(2):
            write_picture(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", pixels(rng, 64, 64))
    for i in range(4):
        write_picture(root / "val" / "images" / f"val_{i}.JPEG", pixels(rng, 64, 64))
    lines = [f"val_{i}.JPEG\t{WNIDS[i % 3]}\t0\t0\t62\t62" for i in range(4)]
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (root / "words.txt").write_text("n00\tentity\nn01\tgoldfish, Carassius\nn02\tfrog\nn03\tcar\nn10\tanimal\n")
    return root


@pytest.mark.parametrize("inside", [True, False])
def test_tiny_imagenet_as_published(tiny, inside):
    root = tiny if inside else tiny.parent
    train, val = TinyImageNet(root, "train"), TinyImageNet(root, "val")
    assert train.classes == val.classes == ("frog", "goldfish", "car") and train.tree is None
    assert [train[i].label for i in range(6)] == [0, 0, 1, 1, 2, 2]
    assert train[2].id == "train/n01/images/n01_0.JPEG"
    assert [val[i].label for i in range(4)] == [0, 1, 2, 0] and val[3].id == "val/images/val_3.JPEG"


def test_tiny_imagenet_finds_the_tree_beside_it(tiny):
    (tiny / "wordnet.is_a.txt").write_text("n10 n01\nn10 n02\nn00 n10\nn00 n03\nn03 n01\n")
    tree = TinyImageNet(tiny).tree
    assert tree.label[:3] == ["frog", "goldfish", "car"] and tree.num_nodes == 5
    assert tree.label[tree.lca(0, 1)] == "animal" and tree.label[tree.lca(0, 2)] == "entity"
    entries = [
        {"wnid": wnid, "name": name, "path_names": ["entity.n.01", *above, name]}
        for wnid, name, above in (("n01", "fish.n.01", ["animal.n.01"]), ("n02", "frog.n.01", ["animal.n.01"]))
    ]
    (tiny / "classes.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match=r"classes.json: expected a list of .*'n03'"):
        TinyImageNet(tiny)
    entries.append({"wnid": "n03", "name": "car.n.01", "path_names": ["entity.n.01", "car.n.01"]})
    (tiny / "classes.json").write_text(json.dumps(entries))
    dataset = TinyImageNet(tiny)
    assert dataset.classes == ("frog.n.01", "fish.n.01", "car.n.01")
    assert dataset.tree.label[dataset.tree.lca(0, 1)] == "animal.n.01"


def test_tiny_imagenet_sorted_into_folders(tiny, rng):
    (tiny / "val" / "val_annotations.txt").unlink()
    for wnid in WNIDS:
        write_picture(tiny / "val" / wnid / "x.JPEG", pixels(rng, 64, 64))
    assert [TinyImageNet(tiny, "val")[i].label for i in range(3)] == [0, 1, 2]


def test_wrong_tiny_imagenet_is_one_clear_line(tiny, tmp_path):
    with pytest.raises(UserError, match=r"there is no .*nowhere; expected the folder tiny-imagenet-200"):
        TinyImageNet(tmp_path / "nowhere")
    (tiny / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn77\n")
    with pytest.raises(UserError, match="line 1: expected a file and one of the 3 wnids"):
        TinyImageNet(tiny, "val")
    (tiny / "wnids.txt").write_text((tiny / "wnids.txt").read_text() + f"\n{WNIDS[0]}\n")
    with pytest.raises(UserError, match=r"wnids\.txt: a class is listed twice"):
        TinyImageNet(tiny)
    (tiny / "wnids.txt").write_text("\n".join(WNIDS))
    (tiny / "wordnet.is_a.txt").write_text("n10 n01\nn01 n10\n")
    with pytest.raises(UserError, match="there is a cycle above n01"):
        TinyImageNet(tiny)
    (tiny / "wnids.txt").unlink()
    with pytest.raises(UserError, match=r"expected the folder tiny-imagenet-200 .*, found train, val"):
        TinyImageNet(tiny)


@pytest.mark.parametrize("split", ["train", "val"])
def test_names_in_the_lists_of_tiny_imagenet_stay_inside(tiny, rng, split):
    write_picture(tiny / "outside" / "images" / "x.JPEG", pixels(rng, 64, 64))
    if split == "train":
        (tiny / "wnids.txt").write_text("../outside\n")
    else:
        (tiny / "val" / "val_annotations.txt").write_text(f"../../outside/images/x.JPEG\t{WNIDS[0]}\n")
    with pytest.raises(UserError, match=r"(wnids.txt|line 1): '.*outside.*' is not the name of a file inside a folder"):
        TinyImageNet(tiny, split)


def test_real_tiny_imagenet(shared_data):
    root = shared_data / "tiny-imagenet-wordnet"
    if not root.is_dir():
        pytest.skip(f"no {root}")
    settings = DataSettings(name="tiny-imagenet", root=root, num_classes=200)
    train, val = build_dataset(settings, "train"), build_dataset(settings, "val")
    assert len(train) == 22_000 and len(val) == 5_000
    assert train.classes[0] == "goldfish.n.01"
    assert np.bincount(train.labels(), minlength=200).tolist() == [110] * 200
    assert np.bincount(val.labels(), minlength=200).tolist() == [25] * 200
    tree = train.tree
    assert int(tree.depth.max()) >= 12 and tree.label[int(tree.roots[0])] == "entity.n.01" and len(tree.roots) == 1
    below = [tree.label.index("animal.n.01") in tree.ancestors(k) for k in range(200)]
    assert sum(below) == 59  # as the source of the file counts
    sample = val[17]
    assert sample.image.shape == (3, 64, 64) and sample.label == val.labels()[17] and sample.id.endswith("/val/17")

"""Pictures with a class per pixel: CamVid, Oxford Pets and ADE20K, made here and real."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from hyptree.data import build_dataset, build_loader, eval_transform
from hyptree.data.pictures.segmentation import ADE20K, CAMVID_CLASSES, CamVid, Pets
from hyptree.data.sample import IGNORE, BadSample
from hyptree.data.settings import DataSettings
from hyptree.errors import UserError
from tests.data.make import pixels, write_picture


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def packed(arrays, format):
    """Files one after the other, and where each starts."""
    files = []
    for values in arrays:
        file = io.BytesIO()
        Image.fromarray(values).save(file, format)
        files.append(file.getvalue())
    return np.frombuffer(b"".join(files), np.uint8), np.concatenate([[0], np.cumsum([len(file) for file in files])])


def label_map(rng, high, shape=(12, 16)):
    return rng.integers(0, high, shape, dtype=np.uint8)


# ------------------------------------------------------------------------------------------------------------- CamVid


LAYOUTS = {
    "tutorial": ("{split}", "{split}annot"),
    "by split": ("{split}/images", "{split}/labels"),
    "by kind": ("images/{split}", "labels/{split}"),
}


def write_camvid(root, rng, layout="tutorial", split="train", count=3, suffix=".png"):
    images, labels = (folder.format(split=split) for folder in LAYOUTS[layout])
    maps = {}
    for i in range(count):
        write_picture(root / images / f"f{i}{suffix}", pixels(rng, 12, 16))
        maps[f"{images}/f{i}{suffix}"] = write_picture(root / labels / f"f{i}.png", label_map(rng, 12))
    return maps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_camvid_in_folders(tmp_path, rng, layout):
    maps = write_camvid(tmp_path, rng, layout)
    write_camvid(tmp_path, rng, layout, "val", 2, ".jpg")
    train, val = CamVid(tmp_path, "train"), CamVid(tmp_path, "val")
    assert len(train) == 3 and len(val) == 2 and train.semantic_classes == CAMVID_CLASSES and train.classes == ()
    for i in range(3):
        sample = train[i]
        stored = maps[sample.id]
        assert sample.semantic.dtype == torch.uint8 and sample.image.shape == (3, 12, 16) and sample.label is None
        assert np.array_equal(sample.semantic.numpy(), np.where(stored == 11, IGNORE, stored))


def test_camvid_packed(tmp_path, rng):
    images, maps = [pixels(rng, 12, 16) for _ in range(3)], [label_map(rng, 12) for _ in range(3)]
    (jpeg, jpeg_offsets), (png, png_offsets) = packed(images, "JPEG"), packed(maps, "PNG")
    np.savez(
        tmp_path / "camvid.npz", train_jpeg=jpeg, train_jpeg_offsets=jpeg_offsets, train_png=png,
        train_png_offsets=png_offsets, train_name=np.array(["a", "b", "c"]),
        class_names=np.array([*map(str.title, CAMVID_CLASSES), "Unlabelled"]),
    )  # fmt: skip
    dataset = build_dataset(DataSettings(name="camvid", root=tmp_path, num_classes=11), "train")
    assert dataset.semantic_classes == CAMVID_CLASSES and dataset[1].id == "train/b"
    assert np.array_equal(dataset[1].semantic.numpy(), np.where(maps[1] == 11, IGNORE, maps[1]))


@pytest.mark.parametrize("last", ["", "Unlabelled\n", "void\n"])
def test_other_classes_are_named_by_a_file(tmp_path, rng, last):
    write_picture(tmp_path / "train" / "x.png", pixels(rng, 12, 16))
    stored = write_picture(tmp_path / "trainannot" / "x.png", label_map(rng, 3))
    (tmp_path / "classes.txt").write_text("road\n\nwall\n" + last)
    dataset = CamVid(tmp_path)
    assert dataset.semantic_classes == ("road", "wall")
    assert np.array_equal(dataset[0].semantic.numpy(), np.where(stored == 2, IGNORE, stored))


def test_wrong_label_maps_are_bad_samples(tmp_path, rng):
    write_camvid(tmp_path, rng, count=6)
    maps = tmp_path / "trainannot"
    wrong = label_map(rng, 11)
    wrong[3, 4] = 77
    write_picture(maps / "f1.png", wrong)
    write_picture(maps / "f2.png", label_map(rng, 11, (11, 16)))
    write_picture(maps / "f3.png", pixels(rng, 12, 16))
    (maps / "f4.png").write_bytes((maps / "f4.png").read_bytes()[:-30])
    dataset = CamVid(tmp_path)
    expected = {
        1: "its label map holds 77, not one of 11 classes",
        2: "picture of 16x12 pixels with a label map of 16x11",
        3: "a label map has one number from 0 to 255 per pixel",
        4: "truncated",
    }
    for i, why in expected.items():
        with pytest.raises(BadSample, match=why):
            dataset[i]
    loader = build_loader(
        dataset, len, batch_size=2, seed=0, train=False, transform=eval_transform(16, "segment"), workers=0
    )
    with pytest.raises(UserError, match="4 of the first 6 pictures cannot be read"):
        list(loader)


def test_a_palette_is_not_taken_for_colours(tmp_path, rng):
    write_camvid(tmp_path, rng, count=1)
    stored = label_map(rng, 11)
    image = Image.fromarray(stored, mode=None)
    image = image.convert("P")
    image.putpalette(rng.integers(0, 256, 768).astype(np.uint8).tobytes())
    image.putdata(stored.flatten().tolist())
    image.save(tmp_path / "trainannot" / "f0.png")
    assert np.array_equal(CamVid(tmp_path)[0].semantic.numpy(), stored)


def test_wrong_folders_are_one_clear_line(tmp_path, rng):
    with pytest.raises(UserError, match=r"there is no .*nowhere"):
        CamVid(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"expected train or .*, found nothing"):
        CamVid(tmp_path)
    write_camvid(tmp_path, rng)
    (tmp_path / "trainannot" / "f1.bmp").write_bytes((tmp_path / "trainannot" / "f1.png").read_bytes())
    with pytest.raises(UserError, match=r"trainannot: beside f1\.bmp lies another label map of the same name"):
        CamVid(tmp_path)
    (tmp_path / "trainannot" / "f1.bmp").unlink()
    (tmp_path / "trainannot" / "f1.png").unlink()
    with pytest.raises(UserError, match=r"trainannot: no label map for f1\.png"):
        CamVid(tmp_path)
    for path in (tmp_path / "trainannot").iterdir():
        path.unlink()
    (tmp_path / "trainannot").rmdir()
    with pytest.raises(UserError, match=r"there is no folder .*train/images; expected images/train with labels/train"):
        CamVid(tmp_path)


def test_real_camvid(shared_data):
    root = shared_data / "camvid"
    if not root.is_dir():
        pytest.skip(f"no {root}")
    counts = {split: len(CamVid(root, split)) for split in ("train", "val", "test")}
    assert counts == {"train": 367, "val": 101, "test": 233}
    dataset = CamVid(root, "train")
    assert dataset.semantic_classes == CAMVID_CLASSES  # so that a folder and the packed file have the same names
    top, bottom = np.zeros(256), np.zeros(256)
    for i in range(0, 60, 6):
        sample = dataset[i]
        assert sample.image.shape == (3, 180, 240) and sample.semantic.shape == (180, 240)
        top += np.bincount(sample.semantic[:20].flatten(), minlength=256)
        bottom += np.bincount(sample.semantic[-20:].flatten(), minlength=256)
    road = dataset.semantic_classes.index("road")
    assert top[road] == 0 and bottom[road] > 0.5 * bottom[:11].sum() and top[0] > 20 * bottom[0]


# --------------------------------------------------------------------------------------------------------------- Pets

PETS = [("Siamese_3", 2, 1), ("beagle_1", 3, 2), ("Abyssinian_12", 1, 1), ("beagle_2", 3, 2)]


@pytest.fixture
def pets(tmp_path, rng):
    maps = {}
    for name, _, _ in PETS:
        write_picture(tmp_path / "images" / f"{name}.jpg", pixels(rng, 12, 16))
        trimap = tmp_path / "annotations" / "trimaps" / f"{name}.png"
        maps[name] = write_picture(trimap, rng.integers(1, 4, (12, 16), dtype=np.uint8))
    lines = ["#Image CLASS-ID SPECIES BREED ID", *(f"{name} {breed} {kind} 1" for name, breed, kind in PETS)]
    (tmp_path / "annotations" / "trainval.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "annotations" / "test.txt").write_text("beagle_2 3 2 1\n")
    return tmp_path, maps


def test_pets_as_published(pets):
    root, maps = pets
    train, val = Pets(root, "train"), Pets(root, "val")
    assert train.classes == val.classes == ("Abyssinian", "Siamese", "beagle")
    assert train.semantic_classes == ("background", "cat", "dog")
    assert [train[i].label for i in range(4)] == [1, 2, 0, 2] and len(val) == 1 and val[0].label == 2
    for i, (name, _, kind) in enumerate(PETS):
        expected = np.array([99, kind, 0, IGNORE])[maps[name]]
        assert np.array_equal(train[i].semantic.numpy(), expected) and train[i].id == name
    for tree in (train.tree, val.tree):
        assert tree.label[tree.lca(0, 1)] == "cat" and tree.label[tree.parent[2]] == "dog" and len(tree.roots) == 1


def test_wrong_pets_are_one_clear_line(pets):
    root, _ = pets
    (root / "annotations" / "test.txt").write_text("../../beagle_2 3 2 1\n")
    with pytest.raises(UserError, match=r"'\.\./\.\./beagle_2\.jpg' is not the name of a file inside a folder"):
        Pets(root, "val")
    (root / "annotations" / "test.txt").write_text("beagle_2 3 dog\n")
    with pytest.raises(UserError, match=r"test\.txt, line 1: expected a name, the breed from 1 and the species 1 or 2"):
        Pets(root, "val")
    (root / "annotations" / "test.txt").write_text("pug_2 4 2 1\n")
    with pytest.raises(UserError, match=r"breeds go from 3 to 3, expected 0 to 2 for the 3 classes"):
        Pets(root, "val")
    (root / "annotations" / "test.txt").unlink()
    with pytest.raises(UserError, match=r"there is no .*test\.txt; expected images/"):
        Pets(root, "test")


def test_real_pets(shared_data):
    root = shared_data / "oxford-pets"
    if not root.is_dir():
        pytest.skip(f"no {root}")
    settings = DataSettings(name="pets", root=root, num_classes=37)
    train, val = build_dataset(settings, "train"), build_dataset(settings, "val")
    assert len(train) == 3680 and len(val) == 3669
    tree = train.tree
    assert tree.num_nodes == 40 and int(tree.depth.max()) == 2
    parents = [tree.label[tree.parent[k]] for k in range(37)]
    assert parents.count("cat") == 12 and parents.count("dog") == 25
    for i in (0, 1, 2):
        sample = val[i]
        breed = train.classes[sample.label]
        assert sample.id.startswith(f"test/{breed}_")
        kind = train.semantic_classes.index(parents[sample.label])
        assert set(sample.semantic.unique().tolist()) == {0, kind, IGNORE}


# ------------------------------------------------------------------------------------------------------------- ADE20K


def write_ade(root, rng, names=True):
    stored = {}
    for split in ("training", "validation"):
        for i in range(2):
            write_picture(root / "images" / split / f"ADE_{i}.jpg", pixels(rng, 12, 16))
            path = root / "annotations" / split / f"ADE_{i}.png"
            stored[f"images/{split}/ADE_{i}.jpg"] = write_picture(path, label_map(rng, 151))
    if names:
        rows = [f"{i}\t0.1\t10\t2\tthing {i}, other name" for i in range(1, 151)]
        (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *rows]))
    return stored


@pytest.mark.parametrize("inside", [True, False])
def test_ade20k(tmp_path, rng, inside):
    root = tmp_path if inside else tmp_path / "ADEChallengeData2016"
    stored = write_ade(root, rng)
    for split in ("train", "val"):
        dataset = build_dataset(DataSettings(name="ade20k", root=tmp_path, num_classes=150), split)
        assert len(dataset) == 2 and dataset.semantic_classes[:2] == ("thing 1", "thing 2")
        for i in range(2):
            sample = dataset[i]
            values = stored[sample.id].astype(int)
            assert np.array_equal(sample.semantic.numpy(), np.where(values == 0, IGNORE, values - 1))


def test_ade20k_without_names_and_with_wrong_ones(tmp_path, rng):
    write_ade(tmp_path, rng, names=False)
    assert ADE20K(tmp_path).semantic_classes[149] == "class 150"
    (tmp_path / "objectInfo150.txt").write_text("wall building sky\n")
    with pytest.raises(UserError, match=r"objectInfo150\.txt: expected a line of number.*, found 0"):
        ADE20K(tmp_path)

"""Pictures in .npz files: pixels or packed JPEG files; CIFAR-10 when it is there."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from hyptree.data import build_dataset, build_loader, eval_transform
from hyptree.data.loader import ArrayLoader, SampleLoader
from hyptree.data.pictures.arrays import ArrayPictures
from hyptree.data.pictures.decoding import decode_image as decode
from hyptree.data.sample import BadSample
from hyptree.data.settings import DataSettings
from hyptree.errors import UserError
from tests.data.make import pixels, stack


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def plain(rng, count=12, shape=(8, 10, 3), classes=3):
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % classes


def pack(pictures, format="JPEG"):
    """Files one after the other, and where each starts."""
    files = []
    for picture in pictures:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, format, quality=95)
        files.append(file.getvalue())
    offsets = np.concatenate([[0], np.cumsum([len(file) for file in files])])
    return np.frombuffer(b"".join(files), np.uint8), offsets


@pytest.mark.parametrize("layout", ["last", "first", "grey", "one"])
def test_every_layout_of_pixels(tmp_path, rng, layout):
    images, labels = plain(rng)
    if layout in ("grey", "one"):
        images = images[..., :1]
    stored = {"last": images, "first": images.transpose(0, 3, 1, 2), "grey": images[..., 0], "one": images}[layout]
    path = save(tmp_path / "x.npz", train_images=stored, train_labels=labels)
    dataset = ArrayPictures(path)
    assert len(dataset) == 12 and dataset.classes == ("0", "1", "2") and dataset.tree is None
    expected = np.broadcast_to(images, (12, 8, 10, 3)).transpose(0, 3, 1, 2)
    assert np.array_equal(dataset.images(), expected) and np.array_equal(dataset.labels(), labels)
    assert np.array_equal(dataset[5].image.numpy(), expected[5])
    assert dataset[5].label == 2 and dataset[5].id == "x/train/5"


def test_splits_and_names(tmp_path, rng):
    (images, labels), (more, others) = plain(rng), plain(rng, 4)
    names = np.array(["red", "green", "blue"])
    save(
        tmp_path / "x.npz", train_images=images, train_labels=labels, test_images=more, test_labels=others,
        class_names=names, class_paths=np.array(["warm/red", "cold/green", "cold/blue"]),
    )  # fmt: skip
    val = build_dataset(DataSettings(name="arrays", root=tmp_path, num_val=3), "val")  # the only file of the folder
    assert len(val) == 3 and val.classes == ("red", "green", "blue") and val[0].id.startswith("x/test/")
    assert val.images().shape == (3, 3, 8, 10) and len(val.labels()) == 3
    assert [int(val.labels()[i]) for i in range(3)] == [val[i].label for i in range(3)]
    assert val.tree.label[val.tree.lca(1, 2)] == "cold" and val.tree.label[val.tree.lca(0, 2)] == "all"


def test_packed_files(tmp_path, rng):
    pictures = [pixels(rng, 16, 16) for _ in range(6)]
    data, offsets = pack(pictures)
    path = save(tmp_path / "x.npz", train_jpeg=data, train_offsets=offsets, train_label=np.array([0, 1, 0, 1, 2, 2]))
    dataset = ArrayPictures(path)
    assert np.array_equal(dataset.images()[3], dataset[3].image.numpy())
    assert np.abs(dataset.images().transpose(0, 2, 3, 1).astype(int) - np.stack(pictures)).mean() < 4
    loader = build_loader(
        dataset, stack, batch_size=3, seed=0, train=False, transform=eval_transform(16), pack=lambda x, y: (x, y)
    )
    assert isinstance(loader, ArrayLoader) and [len(y) for _, y in loader] == [3, 3]


def test_a_damaged_file_in_the_pack_is_skipped(tmp_path, rng):
    data, offsets = pack([pixels(rng, 16, 16) for _ in range(6)])
    data = data.copy()
    data[offsets[4] + 2 : offsets[5]] = 0
    path = save(tmp_path / "x.npz", train_jpeg=data, train_offsets=offsets, train_label=np.zeros(6, np.int8))
    dataset = ArrayPictures(path)
    with pytest.raises(BadSample, match="x/train/4"):
        dataset.images()
    loader = build_loader(
        dataset, stack, batch_size=3, seed=0, train=True, transform=eval_transform(16), pack=lambda x, y: (x, y)
    )
    assert isinstance(loader, SampleLoader) and [len(x) for x, _, _ in loader] == [3, 3]
    assert list(loader.skipped) == ["x/train/4"]


def test_pictures_of_different_sizes_are_not_stacked(tmp_path, rng):
    data, offsets = pack([pixels(rng, 16, 16), pixels(rng, 16, 18)])
    path = save(tmp_path / "x.npz", train_jpeg=data, train_offsets=offsets, train_label=np.zeros(2, np.int8))
    dataset = ArrayPictures(path)
    assert dataset.images() is None and dataset[1].image.shape == (3, 16, 18)


def test_decoded_pictures_are_kept_for_the_next_run(tmp_path, rng, monkeypatch):
    data, offsets = pack([pixels(rng, 16, 16) for _ in range(7)])
    arrays = {"train_offsets": offsets, "train_label": np.arange(7) % 3}
    path = save(tmp_path / "x.npz", train_jpeg=data, **arrays)
    settings = DataSettings(name="arrays", root=path, num_train=5, cache=tmp_path / "kept")
    expected = build_dataset(DataSettings(name="arrays", root=path, num_train=5), "train").images()
    first = build_dataset(settings, "train").images()
    assert np.array_equal(first, expected)
    decoded = []
    monkeypatch.setattr(
        "hyptree.data.pictures.decoding.decode_image", lambda data, id: decoded.append(id) or decode(data, id)
    )
    again = build_dataset(settings, "train")
    assert [path.name[:3] for path in (tmp_path / "kept").iterdir()] == ["v2-"]  # of an older decoder nothing is taken
    assert np.array_equal(again.images(), expected) and again.images().flags.writeable
    assert len(decoded) == 1  # the first one, for its size
    other = build_dataset(DataSettings(name="arrays", root=path, num_train=5, seed=1, cache=tmp_path / "kept"), "train")
    assert not np.array_equal(other.images(), expected)  # other pictures of the same file
    assert np.array_equal(other.images()[2], other[2].image.numpy())


def test_pictures_that_cannot_be_stacked_are_not_kept(tmp_path, rng):
    data, offsets = pack([pixels(rng, 16, 16), pixels(rng, 16, 18)])
    save(tmp_path / "x.npz", train_jpeg=data, train_offsets=offsets, train_label=np.zeros(2, np.int8))
    kept = tmp_path / "kept"
    assert build_dataset(DataSettings(name="arrays", root=tmp_path / "x.npz", cache=kept), "train").images() is None
    data, offsets = pack([pixels(rng, 16, 16) for _ in range(3)])
    data = data.copy()
    data[offsets[1] + 2 : offsets[2]] = 0
    save(tmp_path / "y.npz", train_jpeg=data, train_offsets=offsets, train_label=np.zeros(3, np.int8))
    damaged = build_dataset(DataSettings(name="arrays", root=tmp_path / "y.npz", cache=kept), "train")
    with pytest.raises(BadSample, match="y/train/1"):
        damaged.images()
    assert list(kept.iterdir()) == []


def test_cifar10_is_known_by_its_names(tmp_path, rng):
    names = np.array(["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"])
    images, labels = plain(rng, 20, classes=10)
    tree = ArrayPictures(save(tmp_path / "x.npz", train_images=images, train_labels=labels, class_names=names)).tree
    assert tree.label[:10] == names.tolist() and tree.num_nodes == 13 and int(tree.depth.max()) == 2
    assert tree.label[tree.lca(3, 5)] == "animal" and tree.label[tree.lca(0, 9)] == "vehicle"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_images": np.zeros((12, 8, 8, 3), np.float32)}, "train_images must be uint8, 0 to 255, got float32"),
        ({"train_images": np.zeros((12, 8, 8, 4), np.uint8)}, r"must have the shape .*, got \(12, 8, 8, 4\)"),
        ({"train_labels": np.arange(11)}, "expected as many of each, found 12 pictures, 11 labels"),
        ({"train_labels": np.zeros((12, 3))}, "must be whole numbers, one per picture"),
        ({"class_names": np.array(["a", "b"])}, "train_labels go from 0 to 2, expected 0 to 1 for the 2 classes"),
        ({"train_labels": np.full(12, -1), "class_names": np.array(["a"])}, "go from -1 to -1, expected 0 to 0"),
        ({"train_labels": None}, "no array 'train_labels' in it, found train_images"),
        ({"train_images": None}, "expected train_images and train_labels, or train_jpeg"),
        ({"class_paths": np.array(["a"])}, "found 1 class_paths, 3 classes"),
    ],
)
def test_wrong_arrays_are_one_clear_line(tmp_path, rng, change, message):
    images, labels = plain(rng)
    arrays = {"train_images": images, "train_labels": labels} | change
    path = save(tmp_path / "x.npz", **{key: value for key, value in arrays.items() if value is not None})
    with pytest.raises(UserError, match=message) as caught:
        ArrayPictures(path)
    assert "\n" not in str(caught.value) and "x.npz" in str(caught.value)


def test_wrong_files_are_one_clear_line(tmp_path, rng):
    with pytest.raises(UserError, match=r"there is no .*gone\.npz"):
        ArrayPictures(tmp_path / "gone.npz")
    with pytest.raises(UserError, match=r"holds no \.npz file"):
        ArrayPictures(tmp_path)
    (tmp_path / "x.npz").write_bytes(b"PK no archive")
    with pytest.raises(UserError, match="cannot read"):
        ArrayPictures(tmp_path)
    images, labels = plain(rng)
    save(tmp_path / "x.npz", train_images=images, train_labels=labels)
    with pytest.raises(UserError, match=r"expected val or .*, found train"):
        ArrayPictures(tmp_path, "val")
    with pytest.raises(ValueError, match="split must be train, val or test, got 'dev'"):
        ArrayPictures(tmp_path, "dev")
    save(tmp_path / "y.npz", train_images=images, train_labels=labels)
    with pytest.raises(UserError, match=r"holds 2 \.npz files \(x\.npz, y\.npz\); name one"):
        ArrayPictures(tmp_path)
    data = (tmp_path / "y.npz").read_bytes()
    (tmp_path / "y.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="cannot read"):
        ArrayPictures(tmp_path / "y.npz")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="a file of another kind"):
        ArrayPictures(tmp_path / "notes.txt")


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float32])
@pytest.mark.parametrize("offsets", [[0, 50, 20, 60], [0, 10, 20, 9_999_999], [-20, 10, 20, 30]])
def test_wrong_offsets_are_one_clear_line(tmp_path, offsets, dtype):
    path = save(
        tmp_path / "x.npz",
        train_jpeg=np.zeros(60, np.uint8),
        train_offsets=np.array(offsets).astype(dtype),
        train_label=np.zeros(3, int),
    )
    with pytest.raises(UserError, match="train_offsets: the offsets must rise from 0 to at most 60"):
        ArrayPictures(path)


def test_real_cifar10(shared_data):
    root = shared_data / "cifar10"
    if not root.is_dir():
        pytest.skip(f"no {root}")
    settings = DataSettings(name="arrays", root=root, num_train=500, num_classes=10)
    train, val = build_dataset(settings, "train"), build_dataset(settings, "val")
    assert len(train) == 500 and len(val) == 10_000
    assert np.bincount(val.labels()).tolist() == [1000] * 10
    assert (
        int(train.tree.depth.max()) == 2 and train.tree.label[train.tree.parent[val.classes.index("frog")]] == "animal"
    )
    images, labels = train.images().astype(float), train.labels()
    # A check of the labels by the pictures: ships and airplanes are bluer than frogs and deer.
    blue = images[:, 2].mean((1, 2)) - images[:, 0].mean((1, 2))
    sky = np.isin(labels, [train.classes.index(name) for name in ("airplane", "ship")])
    wood = np.isin(labels, [train.classes.index(name) for name in ("frog", "deer")])
    assert blue[sky].mean() > blue[wood].mean() + 10

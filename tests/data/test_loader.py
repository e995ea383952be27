"""Batches: the same whoever makes them, from wherever they are resumed; bad pictures are skipped and counted."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch

from hyptree.data.build import build_dataset
from hyptree.data.loader import ArrayLoader, SampleLoader, build_loader
from hyptree.data.pictures.transforms import eval_transform, train_transform
from hyptree.data.seeding import mix_bits, seeded, uniforms
from hyptree.data.settings import AugmentSettings, DataSettings
from hyptree.errors import UserError
from tests.data.make import InArrays, InMemory, stack, untouched_generators

CHANCE = AugmentSettings(crop_scale=(0.3, 1.0), colour_jitter=0.4, erasing=0.5)
SIMPLE = AugmentSettings(translate=2, erasing=0.5)


def build(dataset, *, train=True, batch_size=8, seed=3, transform=None, **options):
    if transform is None:
        transform = train_transform(CHANCE, 8) if train else eval_transform(8)
    return build_loader(dataset, stack, batch_size=batch_size, seed=seed, train=train, transform=transform, **options)


def arrays(dataset, *, augment=SIMPLE, train=True, **options):
    transform = train_transform(augment, 8) if train else eval_transform(8)
    loader = build(dataset, train=train, transform=transform, pack=lambda x, y: (x, y), **options)
    assert isinstance(loader, ArrayLoader)
    return loader


def assert_equal(one, other):
    one, other = list(one), list(other)
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_batches_from_arrays_are_pinned_when_asked(seed, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.shape) or self)  # needs no GPU
    dataset = InArrays(20, seed=seed)
    plain = list(arrays(dataset))
    assert pinned == []
    assert_equal(plain, arrays(dataset, pin_memory=True))
    assert pinned == [(8, 3, 8, 8)] * 2


def test_workers_do_not_change_anything(seed):
    dataset = InMemory(40, seed=seed)
    alone, shared = build(dataset, seed=seed % 1000), build(dataset, seed=seed % 1000, workers=2)
    for epoch in (0, 1):
        alone.set_epoch(epoch)
        shared.set_epoch(epoch)
        assert_equal(alone, shared)
    shared.close()
    assert_equal(alone, shared)  # new workers
    shared.close()


def test_epochs_differ_and_cover_the_set_once():
    loader = build(InMemory(43))
    epochs = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        batches = list(loader)
        assert [len(names) for _, _, names in batches] == [8] * 5 and len(loader) == 5
        epochs.append([name for _, _, names in batches for name in names])
        assert len(set(epochs[-1])) == 40
    assert epochs[0] != epochs[1]
    loader.set_epoch(0)
    assert [name for _, _, names in loader for name in names] == epochs[0]


def test_labels_stay_with_their_pictures():
    dataset = InMemory(32)
    loader = build(dataset, transform=train_transform(AugmentSettings(flip=0), 8))
    for images, labels, names in loader:
        index = [int(name.removeprefix("picture-")) for name in names]
        assert labels.tolist() == dataset.numbers[index].tolist()
        assert torch.equal(images, eval_transform(8).normalise(torch.from_numpy(dataset.pixels[index])))


@pytest.mark.parametrize("make", [build, arrays])
def test_resuming_gives_the_rest_of_the_epoch(make, seed):
    dataset = InArrays(40, seed=seed)
    whole, resumed = make(dataset), make(dataset, epoch=2, start_batch=3)
    whole.set_epoch(2)
    batches = list(whole)
    dataset.asked.clear()
    assert_equal(batches[3:], resumed)
    assert make is arrays or len(dataset.asked) == 16  # the three batches before were not read


def test_resuming_with_workers_gives_the_rest_of_the_epoch():
    dataset = InMemory(40)
    loader = build(dataset, workers=1)
    batches = list(loader)
    first = list(itertools.islice(loader, 2))  # stopped in the middle of an epoch
    loader.set_epoch(0, 2)
    assert_equal(batches, first + list(loader))
    loader.close()


def test_workers_end_with_the_loader():
    loader = build(InMemory(16), workers=1)
    list(loader)
    workers = multiprocessing.active_children()
    assert len(workers) == 1
    loader.close()
    assert not workers[0].is_alive()


@pytest.mark.parametrize("make", [build, arrays])
@pytest.mark.parametrize("train", [True, False])
def test_processes_share_the_batches_of_one(make, train, seed):
    dataset = InArrays(45, seed=seed)
    whole = make(dataset, train=train)
    parts = [make(dataset, train=train, rank=rank, world_size=2) for rank in range(2)]
    for batch, *shares in itertools.zip_longest(whole, *parts):
        assert all(len(share[0]) in (len(batch[0]) // 2, -(-len(batch[0]) // 2)) for share in shares)
        for whole, first, second in zip(batch[:2], *(share[:2] for share in shares), strict=True):
            ends = first.tensor_split(2) if train else (first, first[:0])  # training shares lie at both ends, alike
            assert torch.equal(whole, torch.cat([ends[0], second, ends[1]]))


def test_a_last_batch_smaller_than_the_processes_is_shared_by_some():
    dataset = InMemory(9)
    names = [
        [name for batch in build(dataset, train=False, rank=rank, world_size=4) for name in batch[2]]
        for rank in range(4)
    ]
    assert [len(n) for n in names] == [3, 2, 2, 2]
    assert sorted(itertools.chain(*names)) == [f"picture-{i}" for i in range(9)]


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    dataset = InMemory(24)

    def pictures(**options):
        batches = list(build(dataset, **options))
        return {name: image for images, _, names in batches for image, name in zip(images, names, strict=True)}

    base = pictures(batch_size=4)
    for name, image in pictures(batch_size=24).items():
        assert torch.equal(image, base[name])
    for options in ({"seed": 4}, {"epoch": 1}):
        assert not any(torch.equal(image, base[name]) for name, image in pictures(batch_size=4, **options).items())


@pytest.mark.parametrize("make", [build, arrays])
def test_equal_pictures_are_augmented_differently(make, seed):
    dataset = InArrays(16, seed=seed)
    dataset.pixels[:] = dataset.pixels[0]
    images = next(iter(make(dataset, batch_size=16)))[0]
    assert len({image.numpy().tobytes() for image in images}) > 8


def test_evaluation_keeps_the_order_and_the_last_batch():
    loader = build(InMemory(21), train=False)
    assert [name for _, _, names in loader for name in names] == [f"picture-{i}" for i in range(21)]
    assert len(loader) == 3


@pytest.mark.parametrize("make", [build, arrays])
def test_the_global_generators_do_not_notice(make):
    loader = make(InArrays(16))
    with untouched_generators():
        assert len(list(loader)) == 2


# ------------------------------------------------------------------------------------------------- arrays in memory


def test_arrays_follow_their_definition(seed):
    """Pixel by pixel: output (y, x) shows input (y - dy, x - dx), mirrored before if flipped, else the mean colour."""
    dataset, augment = InArrays(30, seed=seed), AugmentSettings(translate=2, flip=0.5)
    loader = arrays(dataset, augment=augment, batch_size=30, epoch=5)
    images, labels = next(iter(loader))
    order = np.random.default_rng([3, 5]).permutation(30)
    chance = uniforms(3, 5, order, 3)
    fill = torch.tensor(loader.transform.fill, dtype=torch.uint8)
    seen = set()
    for image, label, index, (flip, down, right) in zip(images, labels, order, chance, strict=True):
        source = torch.from_numpy(dataset.pixels[index])
        dy, dx = int(down * 5) - 2, int(right * 5) - 2
        seen |= {dy, dx}
        expected = torch.empty_like(source)
        for y, x in itertools.product(range(8), range(8)):
            inside = 0 <= y - dy < 8 and 0 <= x - dx < 8
            column = 7 - (x - dx) if flip < 0.5 else x - dx
            expected[:, y, x] = source[:, y - dy, column] if inside else fill
        assert torch.equal(image, loader.transform.normalise(expected))
        assert label == dataset.numbers[index]
    assert seen == {-2, -1, 0, 1, 2}


def test_arrays_are_erased_as_often_as_told():
    dataset = InArrays(400)
    plain = arrays(dataset, augment=AugmentSettings(), batch_size=400)
    erased = arrays(dataset, augment=AugmentSettings(erasing=0.25), batch_size=400)
    changed = (next(iter(plain))[0] != next(iter(erased))[0]).flatten(1)
    assert 70 <= changed.any(1).sum() <= 130
    assert changed[changed.any(1)].float().mean() < 0.4


def test_arrays_without_augmentation_are_what_the_other_loader_gives():
    dataset = InArrays(21)
    for (x, y), (images, labels, _) in zip(arrays(dataset, train=False), build(dataset, train=False), strict=True):
        assert torch.equal(x, images) and torch.equal(y, labels)


@pytest.mark.parametrize(
    ("augment", "size"),
    [(AugmentSettings(crop_scale=(0.5, 1)), 8), (AugmentSettings(colour_jitter=0.1), 8), (SIMPLE, 9)],
)
def test_arrays_are_not_used_where_they_cannot_do_it(augment, size):
    loader = build(InArrays(16), transform=train_transform(augment, size), pack=lambda x, y: (x, y))
    assert isinstance(loader, SampleLoader)
    assert next(iter(loader))[0].shape == (8, 3, size, size)


def test_a_bad_picture_in_arrays_is_skipped_by_the_other_loader():
    loader = build(InArrays(16, bad=frozenset([3])), transform=train_transform(SIMPLE, 8), pack=lambda x, y: (x, y))
    list(loader)
    assert loader.skipped == {"picture-3": "truncated"}


def test_uniforms_are_uniform_and_belong_to_their_index():
    index = np.arange(20_000)
    values = uniforms(1, 2, index, 4)
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, 20, (0, 1))[0]
    assert ((counts - 4000) ** 2 / 4000).sum() < 50  # chi-square with 19 degrees of freedom: 50 has p = 1e-4
    assert abs(np.corrcoef(values.T) - np.eye(4)).max() < 0.03
    assert abs(np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1]) < 0.03
    assert np.array_equal(uniforms(1, 2, index[[7, 3]], 4), values[[7, 3]])
    assert not np.isclose(uniforms(1, 3, index[:9], 4), values[:9]).any()


def test_mixed_bits_differ_for_neighbours():
    words = list(itertools.product(range(12), range(12), range(12)))
    bits = [mix_bits(*word) for word in words]
    assert len(set(bits)) == len(bits)
    ones = np.mean([(bits[i] ^ bits[i + 1]).bit_count() for i in range(len(bits) - 1)])
    assert 31 < ones < 33


# ------------------------------------------------------------------------------------------------------ bad pictures


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_pictures_are_replaced_and_counted(workers):
    bad = frozenset([2, 11, 30])
    dataset, skipped = InMemory(40, bad=bad), {}
    loader = build(dataset, workers=workers, skipped=skipped)
    batches = list(loader)
    assert [len(names) for _, _, names in batches] == [8] * 5
    assert skipped == {f"picture-{i}": "truncated" for i in bad}
    assert loader.skipped is skipped
    good = [name for name in (f"picture-{i}" for i in range(40)) if name not in skipped]
    assert set(good) <= {name for _, _, names in batches for name in names}
    assert_equal(batches, build(dataset))
    loader.close()


def test_bad_pictures_are_left_out_of_an_evaluation():
    bad = frozenset(range(8, 16)) | {1}  # the second batch is gone altogether
    loader = build(InMemory(40, bad=bad), train=False)
    names = [name for _, _, names in loader for name in names]
    assert names == [f"picture-{i}" for i in range(40) if i not in bad]
    assert len(loader.skipped) == 9


@pytest.mark.parametrize("workers", [0, 1])
def test_strict_stops_at_the_first(workers):
    loader = build(InMemory(40, bad=frozenset([5])), strict=True, workers=workers)
    with pytest.raises(UserError, match=r"^cannot read picture picture-5: truncated; .*strict") as caught:
        list(loader)
    assert "\n" not in str(caught.value)
    loader.close()


@pytest.mark.parametrize("train", [True, False])
def test_mostly_bad_pictures_stop_the_run(train):
    loader = build(InMemory(64, bad=frozenset(range(48))), train=train)
    with pytest.raises(UserError, match=r"pictures cannot be read, e\.g\. picture-\d+: truncated; check the data$"):
        list(loader)


def test_nothing_but_bad_pictures_stops_at_once():
    dataset = InMemory(64, bad=frozenset(range(64)))
    with pytest.raises(UserError, match="32 pictures in a row cannot be read"):
        list(build(dataset))
    assert len(dataset.asked) == 32


def test_a_defect_of_the_code_is_not_a_bad_picture():
    def broken(sample):
        raise KeyError("a defect")

    with pytest.raises(KeyError, match="a defect"):
        list(build(InMemory(16), transform=broken))


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (0, {}, "the training set is empty"),
        (0, {"train": False}, "the validation set is empty"),
        (7, {}, "batch_size 8 is larger than the training set of 7 pictures"),
        (40, {"world_size": 3}, "batch_size 8 cannot be shared evenly by 3 processes"),
        (40, {"world_size": 9, "train": False}, "cannot be shared"),
        (40, {"start_batch": 6}, "start_batch must be from 0 to 5"),
    ],
)
def test_impossible_batches_are_refused(count, options, message):
    with pytest.raises(ValueError, match=message):
        build(InMemory(count), **options)


def test_seeded_gives_the_generators_back_also_after_an_error():
    with untouched_generators():
        with seeded(1, 2, 3):
            first = torch.rand(3), np.random.rand(3)  # noqa: NPY002
        with seeded(1, 2, 3):
            assert torch.equal(torch.rand(3), first[0]) and np.array_equal(np.random.rand(3), first[1])  # noqa: NPY002
        with pytest.raises(ValueError, match="empty range"), seeded(1, 2, 3):
            random.choice(range(random.randrange(5), random.randrange(0)))


def test_the_built_in_world_feeds_both_loaders(tmp_path):
    settings = DataSettings(size=32, num_train=24, num_val=16, seed=5, cache=tmp_path)
    world = build_dataset(settings, "train")
    assert len(world) == 24 and len(build_dataset(settings, "val")) == 16
    transform = train_transform(AugmentSettings(flip=0), 32)
    fast = build(world, transform=transform, pack=lambda x, y: (x, y))
    assert isinstance(fast, ArrayLoader)
    for (x, y), (images, labels, _) in zip(fast, build(world, transform=transform), strict=True):
        assert torch.equal(x, images) and torch.equal(y, labels)


class _Deadly(InMemory):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_clear_line():
    loader = build(_Deadly(16), workers=1)
    with pytest.raises(UserError, match=r"^a process that reads pictures was killed, .*; use fewer workers$"):
        list(loader)
    loader.close()


class _Interrupted(InMemory):
    def __getitem__(self, index):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return super().__getitem__(index)


def test_workers_leave_signals_to_their_parent():
    loader = build(_Interrupted(16), workers=1)
    assert len(list(loader)) == 2
    loader.close()


def _num_threads(samples):
    return torch.get_num_threads(), threading.active_count()


def test_a_worker_computes_on_one_thread():
    loader = build_loader(InMemory(8), _num_threads, batch_size=8, seed=0, train=True, workers=1)
    assert next(iter(loader))[0] == 1
    loader.close()

"""Pictures on the device: the same crops, the same order, the same numbers as the loaders that read one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from hyptree.config import load
from hyptree.data import DataSettings, build_dataset, build_loader
from hyptree.data.pictures import resident
from hyptree.data.pictures.resample import ShareTable, resample, resize_shares
from hyptree.data.pictures.resident import ResidentLoader, ResidentPictures, centre_window, draw_windows, load_resident
from hyptree.data.pictures.transforms import eval_transform, train_transform
from hyptree.data.sample import Sample
from hyptree.data.seeding import uniforms
from hyptree.data.settings import AugmentSettings
from hyptree.errors import UserError
from hyptree.runs import RunFolder
from hyptree.train.loop import fit
from hyptree.train.run.recipe import Recipe
from tests.data.make import InMemory, pixels, write_picture

CPU = torch.device("cpu")
CROPS = AugmentSettings(crop_scale=(0.4, 1.0), flip=0.5)


def pack(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return images, labels


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    return torch.stack([s.image for s in samples]), torch.tensor([-1 if s.label is None else s.label for s in samples])


def loader_of(dataset, transform, *, device=CPU, train=True, batch_size=8, **options):
    return build_loader(
        dataset,
        collate,
        batch_size=batch_size,
        seed=3,
        train=train,
        transform=transform,
        pack=pack,
        resident=device,
        **options,
    )


def levels(images: Tensor, transform) -> Tensor:
    """Colours 0 to 255 of normalised pictures."""
    return (images - transform.shift) / transform.scale


class Rectangles(InMemory):
    """Noise of another shape than a square, in no array: every picture is asked for."""

    def __init__(self, count: int, height: int, width: int, seed: int = 0):
        super().__init__(count, 2, seed=seed)
        self.pixels = np.random.default_rng(seed).integers(0, 256, (count, 3, height, width), dtype=np.uint8)


def assert_nearly_equal(actual: Tensor, expected: Tensor) -> None:
    """In levels of 255, to torch: it rounds the shares to 16 bits, so 1 value of 150 is another one; see the loop."""
    wrong = (actual - expected).abs()
    assert wrong.max() <= 2.01
    assert (wrong > 0.01).float().mean() < 0.01 and (wrong > 1.01).float().mean() < 1e-4


# ------------------------------------------------------------------------------------------------------- resampling


def reference_shares(source: int, size: int, start: int, length: int) -> np.ndarray:
    """(size, source) in float64, by a loop over the definition: Keys' cubic kernel, a = -0.5."""

    def kernel(x: float) -> float:
        x = abs(x)
        if x < 1:
            return 1.5 * x**3 - 2.5 * x**2 + 1
        return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0

    shares = np.zeros((size, source))
    scale = length / size
    for i in range(size):
        for j in range(length):
            shares[i, start + j] = kernel((j + 0.5 - (i + 0.5) * scale) / max(scale, 1.0))
        shares[i] /= shares[i].sum()
    return shares


@pytest.mark.parametrize(("source", "size", "start", "length"), [(17, 23, 2, 11), (40, 13, 3, 35), (9, 9, 0, 9)])
def test_shares_are_those_of_the_definition(source, size, start, length):
    numbers = [torch.tensor([value]) for value in (start, length, size)]
    actual = resize_shares(source, torch.arange(size)[None], *numbers)
    np.testing.assert_allclose(actual[0].double(), reference_shares(source, size, start, length), atol=3e-6)
    if length == size:
        assert torch.equal(actual[0], torch.eye(size))


@pytest.mark.parametrize(("height", "width", "size"), [(128, 128, 160), (64, 64, 128), (61, 90, 40), (90, 33, 47)])
def test_given_the_same_part_and_flip_both_ways_agree(height, width, size):
    generator = torch.Generator().manual_seed(height)
    images = torch.randint(0, 256, (24, 3, height, width), dtype=torch.uint8, generator=generator)
    windows = draw_windows(CROPS, (height, width), size, uniforms(0, 1, np.arange(24), 22))
    flip = torch.rand(24, generator=generator) < 0.5
    place = torch.where(flip[:, None], size - 1 - torch.arange(size), torch.arange(size))
    there = torch.from_numpy(windows)
    down = resize_shares(height, torch.arange(size)[None], *there[:, :3].unbind(1))
    across = resize_shares(width, place, *there[:, 4:7].unbind(1))
    actual = resample(images.transpose(1, 2).contiguous(), down, across).transpose(1, 2)
    expected, exact = torch.empty_like(actual), torch.full_like(actual, torch.nan)
    for i, (top, tall, _, _, left, wide, _, _) in enumerate(windows.tolist()):
        part = F.resize(images[i, :, top : top + tall, left : left + wide], [size, size], InterpolationMode.BICUBIC)
        lines = images[i].double() @ torch.from_numpy(reference_shares(width, size, left, wide)).T
        lines = (lines + 0.5).floor().clamp(0, 255)
        lines = torch.from_numpy(reference_shares(height, size, top, tall)) @ lines
        for values, truth in ((expected, part), (exact, (lines + 0.5).floor().clamp(0, 255))):
            values[i] = truth.flip(-1) if flip[i] else truth
    assert_nearly_equal(actual, expected)
    assert (actual - exact).abs().max() <= 1  # at ties
    assert (actual != exact).float().mean() < 1e-3


@pytest.mark.parametrize(("source", "size"), [(17, 23), (40, 13), (9, 9)])
def test_tables_hold_the_shares_of_every_part(source, size):
    rng = np.random.default_rng(source)
    length = torch.from_numpy(rng.integers(1, source + 1, 50))
    start = torch.from_numpy(np.floor(rng.random(50) * (source - length.numpy() + 1)).astype(np.int64))
    flipped = torch.from_numpy(rng.integers(0, 2, 50))
    place = torch.where(flipped[:, None] > 0, size - 1 - torch.arange(size), torch.arange(size))
    expected = resize_shares(source, place, start, length, torch.full_like(start, size))
    actual = ShareTable(source, size, CPU)(start, length, flipped)
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6)
    pixel = torch.arange(source)
    outside = (pixel < start[:, None]) | (pixel >= (start + length)[:, None])
    assert not actual.mT[outside].any()


def test_crops_from_tables_are_those_that_are_computed(monkeypatch):
    dataset, transform = Rectangles(16, 20, 24), train_transform(CROPS, 26)
    with_tables = loader_of(dataset, transform, batch_size=16)
    monkeypatch.setattr(resident, "_MAX_TABLE", 0)
    without = loader_of(dataset, transform, batch_size=16)
    assert with_tables._tables and not without._tables
    ((images, labels),), ((expected, numbers),) = with_tables, without
    assert torch.equal(labels, numbers)
    wrong = (levels(images, transform) - levels(expected, transform)).abs()
    assert wrong.max() < 1.01 and (wrong > 0.01).float().mean() < 2e-3  # ties


def test_autocast_does_not_touch_the_pictures():
    images = torch.randint(0, 256, (2, 40, 3, 40), dtype=torch.uint8)
    shares = resize_shares(40, torch.arange(52)[None], *(torch.tensor([v]) for v in (0, 40, 52)))
    plain = resample(images, shares, shares)
    with torch.autocast("cpu", torch.bfloat16):
        cast = resample(images, shares, shares)
    assert cast.dtype == torch.float32 and torch.equal(cast, plain)


# ------------------------------------------------------------------------------------------------------------ chance


def test_parts_are_drawn_as_torchvision_draws_them():
    count = 4000
    for shape, scale in (((64, 64), (0.4, 1.0)), ((40, 90), (0.08, 1.0)), ((30, 200), (0.9, 1.0))):
        windows = draw_windows(AugmentSettings(crop_scale=scale), shape, 32, uniforms(5, 0, np.arange(count), 22))
        ours = windows[:, [0, 4, 1, 5]]  # top, left, height, width
        choice = v2.RandomResizedCrop(32, scale)
        torch.manual_seed(1)
        params = [choice.make_params([torch.empty(3, *shape)]) for _ in range(count)]
        theirs = np.array([[p[name] for name in ("top", "left", "height", "width")] for p in params])
        assert (ours[:, :2] >= 0).all() and (ours[:, :2] + ours[:, 2:] <= shape).all()
        for column in range(4):
            a, b = ours[:, column].astype(float), theirs[:, column].astype(float)
            error = np.sqrt((a.var() + b.var()) / count)
            assert abs(a.mean() - b.mean()) <= 4.5 * error + 1e-9
            for share in (0.1, 0.5, 0.9):
                assert abs(np.quantile(a, share) - np.quantile(b, share)) <= 0.04 * max(shape)


def test_no_part_that_fits_gives_the_largest_central_one():
    windows = draw_windows(AugmentSettings(crop_scale=(1.0, 1.0)), (20, 100), 16, uniforms(0, 0, np.arange(5), 22))
    assert windows.tolist() == [[0, 20, 16, 0, 36, 27, 16, 0]] * 5


# ----------------------------------------------------------------------------------------------------------- batches


def test_pictures_of_the_right_size_give_the_bits_of_the_array_loader():
    augment = AugmentSettings(flip=0.5, translate=3)
    dataset = InMemory(40, size=16)
    transform = train_transform(augment, 16)
    dataset.images, dataset.labels = (lambda: dataset.pixels), (lambda: dataset.numbers)
    plain = build_loader(dataset, collate, batch_size=8, seed=3, train=True, transform=transform, pack=pack)
    assert type(plain).__name__ == "ArrayLoader"
    ours = loader_of(dataset, transform)
    for epoch in (0, 1):
        plain.set_epoch(epoch), ours.set_epoch(epoch)
        for (images, labels), (expected, numbers) in zip(ours, plain, strict=True):
            assert torch.equal(labels, numbers)
            torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "size", "crop_pct"), [((24, 24), 30, 1.0), ((24, 37), 20, 0.875), ((33, 20), 24, 0.9)]
)
def test_evaluation_is_that_of_the_plain_loader(shape, size, crop_pct):
    dataset = Rectangles(11, *shape)
    transform = eval_transform(size, crop_pct=crop_pct)
    plain = build_loader(dataset, collate, batch_size=4, seed=0, train=False, transform=transform)
    ours = loader_of(dataset, transform, train=False, batch_size=4)
    count = 0
    for (images, labels), (expected, numbers) in zip(ours, plain, strict=True):
        assert torch.equal(labels, numbers) and images.shape == expected.shape
        assert_nearly_equal(levels(images, transform), levels(expected, transform))
        count += len(labels)
    assert count == 11


def test_a_square_of_a_longer_picture_is_drawn_without_a_crop_scale():
    dataset = Rectangles(6, 20, 50)
    transform = train_transform(AugmentSettings(flip=0.0), 20)
    starts = set()
    for epoch in range(4):
        loader = loader_of(dataset, transform, batch_size=6)
        loader.set_epoch(epoch)
        ((images, _),) = loader
        for image, index in zip(levels(images, transform), loader.plan.order(epoch), strict=True):
            actual = [
                start
                for start in range(31)
                if torch.allclose(
                    image, torch.from_numpy(dataset.pixels[index][:, :, start : start + 20]).float(), atol=0.01
                )
            ]
            assert len(actual) == 1
            starts.add(actual[0])
    assert len(starts) > 8


def test_batches_follow_from_seed_epoch_and_step_alone():
    dataset, transform = Rectangles(32, 20, 24), train_transform(AugmentSettings((0.3, 1.0), translate=2), 16)
    loader = loader_of(dataset, transform)
    loader.set_epoch(2)
    whole = [(images.clone(), labels) for images, labels in loader]
    torch.manual_seed(99)
    again = loader_of(dataset, transform)
    again.set_epoch(2, 2)  # resumed
    rest = list(again)
    assert len(rest) == 2
    for (images, labels), (expected, numbers) in zip(rest, whole[2:], strict=True):
        assert torch.equal(images, expected) and torch.equal(labels, numbers)
    again.set_epoch(3)
    assert not torch.equal(next(iter(again))[0], whole[0][0])
    shares = [loader_of(dataset, transform, rank=rank, world_size=2) for rank in range(2)]
    for share in shares:
        share.set_epoch(2)
    for first, second, (expected, numbers) in zip(*shares, whole, strict=True):
        images, labels = (
            torch.cat([a[: len(a) // 2], b, a[len(a) // 2 :]]) for a, b in zip(first, second, strict=True)
        )
        torch.testing.assert_close(images, expected, rtol=0, atol=0.04)  # a level, at ties
        assert torch.equal(labels, numbers)


def test_the_global_generators_go_on_as_if_nothing_had_happened():
    loader = loader_of(Rectangles(16, 20, 24), train_transform(CROPS, 16))
    before = torch.get_rng_state()
    assert len(list(loader)) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_channels_last():
    loader = loader_of(Rectangles(8, 20, 20), train_transform(CROPS, 16), channels_last=True)
    ((images, _),) = loader
    assert images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    ((same, _),) = loader_of(Rectangles(8, 20, 20), train_transform(CROPS, 16))
    assert same.is_contiguous() and torch.equal(same, images)


@pytest.mark.gpu
@pytest.mark.parametrize("train", [True, False])
def test_a_gpu_sees_what_a_cpu_sees(train):
    dataset = Rectangles(64, 128, 128)
    transform = train_transform(CROPS, 160) if train else eval_transform(160)
    here, there = (
        loader_of(dataset, transform, device=torch.device(d), train=train, batch_size=32) for d in ("cpu", "cuda")
    )
    count = 0
    with torch.autocast("cuda", torch.bfloat16):
        for (images, labels), (expected, numbers) in zip(there, here, strict=True):
            assert images.is_cuda and labels.is_cuda and torch.equal(labels.cpu(), numbers)
            wrong = (levels(images.cpu(), transform) - levels(expected, transform)).abs()
            assert wrong.max() < 1.01 and (wrong > 0.01).float().mean() < 2e-3  # ties
            count += 1
    assert count == 2


# -------------------------------------------------------------------------------------------------- bad and refused


def test_bad_pictures_are_skipped_as_by_the_plain_loader():
    dataset = InMemory(24, size=16, bad=frozenset([1, 5, 6, 20]))
    for train in (True, False):
        transform = train_transform(AugmentSettings(flip=0.0), 16) if train else eval_transform(16)
        plain = build_loader(dataset, collate, batch_size=8, seed=3, train=train, transform=transform)
        ours = loader_of(dataset, transform, train=train)
        for (images, labels), (expected, numbers) in zip(ours, plain, strict=True):
            assert torch.equal(labels, numbers)
            torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)
        assert ours.skipped == plain.skipped and len(ours.skipped) == 4
    with pytest.raises(UserError, match="cannot read picture picture-1: truncated; repair it"):
        load_resident(dataset, CPU, strict=True)
    with pytest.raises(UserError, match="9 of 16 pictures cannot be read"):
        load_resident(InMemory(16, bad=frozenset(range(9))), CPU)


def test_pictures_of_several_sizes_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    for i, width in enumerate((20, 20, 24)):
        write_picture(tmp_path / "train" / "a" / f"{i}.png", pixels(rng, 20, width))
    dataset = build_dataset(DataSettings(name="folder", root=tmp_path), "train")
    with pytest.raises(UserError, match=r"one size: train/a/2\.png has 24x20 pixels, train/a/0\.png 20x20; leave"):
        load_resident(dataset, CPU)


def test_pictures_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(resident, "free_bytes", lambda device: 1000)
    with pytest.raises(UserError, match="10 pictures of 8x8 pixels need 1,920 bytes, cpu has 1,000 free"):
        load_resident(InMemory(10), CPU)
    monkeypatch.undo()
    assert resident.free_bytes(CPU) > 2**20


@pytest.mark.parametrize("key", ["rand_augment=rand-m9", "colour_jitter=0.3", "erasing=0.2"])
def test_other_augmentation_is_refused_by_name(key):
    name, value = key.split("=")
    augment = AugmentSettings(**{name: value if name == "rand_augment" else float(value)})
    with pytest.raises(UserError, match=f"data.augment.{name} is not done on the device"):
        loader_of(InMemory(16), train_transform(augment, 8))


def test_other_tasks_are_refused():
    with pytest.raises(UserError, match=r"data\.resident is for the task classify, the task is segment"):
        load(Recipe, None, ["task=segment", "data.resident=true"])
    held = ResidentPictures(torch.zeros(16, 8, 3, 8, dtype=torch.uint8), torch.zeros(16).long(), {})
    plan = loader_of(InMemory(16), eval_transform(8)).plan
    with pytest.raises(UserError, match="not to detect"):
        ResidentLoader(plan, held, eval_transform(8, "detect"), pack)


# --------------------------------------------------------------------------------------------------------- whole runs

TINY = (
    *("data.resident=true", "data.size=32", "data.num_train=32", "data.num_val=20", "data.batch_size=8"),
    *("data.augment.crop_scale=[0.4, 1.0]", "model.name=test_resnet", "schedule.epochs=2", "run.device=cpu"),
    *("run.tensorboard=false", "run.log_steps=2", "run.channels_last=true"),
)


def test_a_run_that_dies_ends_with_the_same_bits(tmp_path):
    from tests.train.test_resume import assert_same_run, dying_before_step

    recipe = load(Recipe, None, [*TINY, "run.save_steps=1", "data.augment.mixup=0.2"])
    fit(recipe, tmp_path / "whole", quiet=True)
    with dying_before_step(6):
        fit(recipe, tmp_path / "cut", quiet=True)
    fit(recipe, tmp_path / "cut", resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


VIT = ("model.name=test_vit", "model.args.img_size=32", "model.args.patch_size=8", "run.log_steps=1")


def _be_one_of_two(rank: int, port: int, log: str, out: str) -> None:
    from tests.train.test_distributed import _be_rank

    _be_rank(rank, port)
    fit(load(Recipe, None, [*TINY, *VIT]), out, quiet=True)
    Path(f"{log}.{rank}").write_text("null")


def test_two_processes_see_the_pictures_of_one(tmp_path):
    from tests.train.test_distributed import in_two

    fit(load(Recipe, None, [*TINY, *VIT]), tmp_path / "one", quiet=True)
    in_two(tmp_path, _be_one_of_two, str(tmp_path / "two"))
    one, two = (RunFolder(tmp_path / name).read_metrics() for name in ("one", "two"))
    assert len(one) == len(two) == 10  # eight steps, two evaluations
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)  # a level of 255 at ties


@pytest.mark.parametrize(
    ("name", "root", "size"),
    [
        ("pets", "oxford-pets/oxford_pets_128.npz", 160),
        ("tiny-imagenet", "tiny-imagenet-wordnet/tiny_imagenet_64.npz", 128),
    ],
)
def test_real_pictures_look_the_same(shared_data: Path, name, root, size):
    if not (shared_data / root).exists():
        pytest.skip(f"no {root} in {shared_data}")
    dataset = build_dataset(DataSettings(name=name, root=shared_data / root, num_val=24), "val")
    transform = eval_transform(size)
    plain = build_loader(dataset, collate, batch_size=24, seed=0, train=False, transform=transform)
    ((images, labels),) = loader_of(dataset, transform, train=False, batch_size=24)
    ((expected, numbers),) = plain
    assert torch.equal(labels, numbers)
    assert_nearly_equal(levels(images, transform), levels(expected, transform))


def test_centre_windows_are_whole_numbers_in_the_middle():
    assert centre_window((128, 128), 160, 1.0) == [[0, 128, 160, 0, 0, 128, 160, 0]]
    assert centre_window((20, 33), 16, 0.8) == [[0, 20, 20, 2, 0, 33, 33, 8]]

"""Augmentation: the parts of a sample move together, values are normalised as told, chance is repeatable."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from hyptree import config
from hyptree.data.pictures.transforms import Mixer, eval_transform, train_transform
from hyptree.data.sample import IGNORE, Sample
from hyptree.data.seeding import seeded
from hyptree.data.settings import IMAGENET_MEAN, IMAGENET_STD, AugmentSettings, DataSettings
from hyptree.errors import UserError
from tests.data.make import untouched_generators

MEAN, STD = (0.2, 0.5, 0.9), (0.1, 0.2, 0.4)


def scene(rng: np.random.Generator, height: int = 40, width: int = 52, count: int = 3) -> Sample:
    """Bright rectangles on black; label map, boxes and masks say where they are. The first ones lie below."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    semantic = torch.zeros(height, width, dtype=torch.uint8)
    masks = torch.zeros(count, height, width, dtype=torch.bool)
    boxes = torch.zeros(count, 4)
    for k in range(count):
        x1, y1 = int(rng.integers(0, width - 12)), int(rng.integers(0, height - 12))
        x2, y2 = x1 + int(rng.integers(8, 13)), y1 + int(rng.integers(8, 13))
        image[:, y1:y2, x1:x2] = 255
        semantic[y1:y2, x1:x2] = k + 1
        masks[k, y1:y2, x1:x2] = True
        boxes[k] = torch.tensor([x1, y1, x2, y2])
    return Sample(
        image,
        "scene",
        label=1,
        semantic=semantic,
        parts=(semantic > 0).to(torch.uint8),
        boxes=boxes,
        box_labels=torch.arange(1, count + 1),
        masks=masks,
        crowd=torch.arange(count) == 1,
        captions=("a scene",),
    )


def plain(augment: AugmentSettings, size: int, task: str = "classify"):
    """A transform without normalisation, so that 0 stays 0 and 255 becomes 1."""
    return train_transform(augment, size, task, mean=(0, 0, 0), std=(1, 1, 1))


# ------------------------------------------------------------------------------------------------------------- values


def test_values_are_normalised(seed):
    pixels = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (3, 16, 16), dtype=np.uint8))
    out = eval_transform(16, mean=MEAN, std=STD)(Sample(pixels, "x", label=2))
    expected = (pixels.double() / 255 - torch.tensor(MEAN).double()[:, None, None]) / torch.tensor(STD)[:, None, None]
    assert out.image.dtype == torch.float32 and out.label == 2
    torch.testing.assert_close(out.image.double(), expected, rtol=1e-5, atol=1e-5)
    assert pixels.dtype == torch.uint8  # the input is left alone


def test_the_default_is_imagenet():
    out = eval_transform(8)(Sample(torch.full((3, 8, 8), 255, dtype=torch.uint8), "x")).image
    expected = [(1 - m) / s for m, s in zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)]
    torch.testing.assert_close(out[:, 3, 3], torch.tensor(expected))


@pytest.mark.parametrize(("height", "width"), [(40, 60), (60, 40), (8, 8), (33, 35)])
def test_classification_takes_the_centre(height, width):
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    image[:, height // 2 :] = 255
    sample = Sample(image, "x", semantic=torch.zeros(height, width, dtype=torch.uint8))
    out = eval_transform(32, mean=(0, 0, 0), std=(1, 1, 1), crop_pct=0.9)(sample)
    assert out.image.shape == (3, 32, 32) and out.semantic is None
    assert out.image[:, :12].max() < 0.1 and out.image[:, 20:].min() > 0.9


def test_segmentation_fits_the_whole_picture_in(seed):
    sample = scene(np.random.default_rng(seed))
    out = eval_transform(64, "segment", mean=MEAN, std=STD)(sample)
    height = round(40 * 64 / 52)
    assert out.image.shape == (3, 64, 64) and out.semantic.shape == out.parts.shape == (64, 64)
    assert (out.semantic[height:] == IGNORE).all() and (out.parts[height:] == IGNORE).all()
    assert out.image[:, height:].abs().max() < 0.02  # the mean colour, rounded to a byte
    assert set(out.semantic[:height].unique().tolist()) == set(sample.semantic.unique().tolist())
    assert out.boxes is None and out.masks is None and out.captions == ("a scene",)


def test_detection_scales_boxes_and_keeps_all_of_them_in_evaluation(seed):
    sample = scene(np.random.default_rng(seed))
    sample.boxes[0] = torch.tensor([1.0, 1.0, 1.5, 1.5])  # too small to train on, but part of the truth
    out = eval_transform(104, "detect")(sample)
    assert out.image.shape == (3, 80, 104) and out.masks.shape == (3, 80, 104) and out.masks.dtype == torch.bool
    torch.testing.assert_close(out.boxes, sample.boxes * 2)
    assert out.box_labels.tolist() == [1, 2, 3] and out.crowd.tolist() == [False, True, False]
    assert type(out.boxes) is torch.Tensor and type(out.image) is torch.Tensor and out.semantic is None


# --------------------------------------------------------------------------------------------------- moving together


def test_flips_and_shifts_move_everything_by_the_same_pixels(seed):
    sample, moves = scene(np.random.default_rng(seed), 48, 48), set()
    for i in range(30):
        augment = AugmentSettings(flip=0.5, translate=5)
        with seeded(seed, i):
            out = plain(augment, 48, "segment")(sample)
        with seeded(seed, i):
            boxed = plain(augment, 48, "detect")(sample)
        known = out.semantic != IGNORE
        bright = out.image[0] == 1
        assert torch.equal(bright[known], out.semantic[known] > 0)
        assert torch.equal(out.parts == 1, bright)
        assert torch.equal(boxed.masks.any(0), bright)
        assert len(boxed.boxes) == len(boxed.box_labels) == len(boxed.masks) == len(boxed.crowd)
        for box, mask, label in zip(boxed.boxes.int().tolist(), boxed.masks, boxed.box_labels, strict=True):
            x1, y1, x2, y2 = box
            assert mask[y1:y2, x1:x2].all() and mask.sum() == (x2 - x1) * (y2 - y1)
            assert (boxed.crowd[boxed.box_labels == label] == (label == 2)).all()
        moves.add(tuple(boxed.boxes.flatten().tolist()))
    assert len(moves) > 20


@pytest.mark.parametrize(
    "augment",
    [AugmentSettings(scale_jitter=(0.5, 2.0)), AugmentSettings(crop_scale=(0.3, 1.0)), AugmentSettings(translate=4)],
)
@pytest.mark.parametrize("shape", [(40, 52), (52, 40)])
def test_zooms_and_crops_move_everything_together(augment, shape, seed):
    """Pixels that are surely white (or black) after the resampling are where the label map and the masks say."""
    for i in range(12):
        sample = scene(np.random.default_rng([seed, i]), *shape)
        with seeded(seed, i):
            out = plain(augment, 64, "segment")(sample)
        with seeded(seed, i):
            boxed = plain(augment, 64, "detect")(sample)
        assert out.image.shape == (3, 64, 64) and out.semantic.shape == (64, 64)
        known = out.semantic != IGNORE
        white, black = out.image[0] > 0.95, out.image[0] < 0.05
        assert (white | black)[known].float().mean() > 0.6
        assert (out.semantic[white & known] > 0).all()
        assert (out.semantic[black & known] == 0).float().mean() > 0.99
        for box, mask in zip(boxed.boxes, boxed.masks, strict=True):
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        white = boxed.image[0] > 0.95
        # An instance of less than a pixel is gone, so a handful of white pixels may belong to nobody.
        assert boxed.masks.any(0)[white].float().mean() > 0.97 or white.sum() < 20


def test_what_leaves_the_picture_is_dropped():
    sample = scene(np.random.default_rng(0), 40, 40, count=2)
    masks = torch.zeros(2, 40, 40, dtype=torch.bool)
    masks[0, :2, :2] = True  # leaves when everything moves up and left
    masks[1, 10:20, 10:20] = True
    sample.masks, sample.boxes = masks, torch.tensor([[0.0, 0, 2, 2], [10, 10, 20, 20]])
    transform, dropped = plain(AugmentSettings(flip=0, translate=6), 40, "detect"), 0
    for i in range(40):
        with seeded(i):
            out = transform(sample)
        assert len(out.boxes) == len(out.box_labels) == len(out.masks) == len(out.crowd) in (1, 2)
        assert out.box_labels[-1] == 2 and out.crowd[-1]
        dropped += len(out.boxes) == 1
    assert 10 < dropped < 40


def test_boxes_without_masks_are_cut_to_the_picture():
    sample = Sample(torch.zeros(3, 40, 40, dtype=torch.uint8), "x", boxes=torch.tensor([[0.0, 0, 40, 40]]))
    sample.box_labels = torch.tensor([3])
    for i in range(10):
        with seeded(i):
            out = plain(AugmentSettings(translate=9), 40, "detect")(sample)
        assert out.masks is None and out.crowd is None and out.box_labels.tolist() == [3]
        assert out.boxes.min() >= 0 and out.boxes.max() <= 40


@pytest.mark.parametrize("augment", [AugmentSettings(scale_jitter=(0.5, 2.0)), AugmentSettings(translate=3), None])
def test_a_picture_without_instances_is_fine(augment):
    sample = scene(np.random.default_rng(0), count=0)
    transform = eval_transform(32, "detect") if augment is None else plain(augment, 32, "detect")
    out = transform(sample)
    assert out.boxes.shape == (0, 4) and out.masks.shape == (0, *out.image.shape[1:]) and len(out.box_labels) == 0


# ------------------------------------------------------------------------------------------------------------- chance


def test_strong_augmentation_repeats_under_the_same_seed_only(seed):
    image = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (3, 40, 40), dtype=np.uint8))
    augment = AugmentSettings(
        crop_scale=(0.2, 1.0), rand_augment="rand-m9-mstd0.5-inc1", colour_jitter=0.4, erasing=0.5
    )
    transform = train_transform(augment, 32)
    copied = pickle.loads(pickle.dumps(transform))
    seen = []
    for i in range(20):
        with untouched_generators(), seeded(i, seed):
            one = transform(Sample(image, "x")).image
        with seeded(i, seed):
            assert torch.equal(copied(Sample(image, "x")).image, one)
        assert one.shape == (3, 32, 32) and one.isfinite().all()
        seen.append(one)
    assert not any(torch.equal(seen[0], other) for other in seen[1:])


def test_the_strongest_posterising_works():
    transform = train_transform(AugmentSettings(rand_augment="rand-m10-n4-inc1"), 16)
    image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
    for i in range(60):
        with seeded(i):
            assert transform(Sample(image, "x")).image.isfinite().all()


def test_flips_happen_as_often_as_told():
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    image[:, :, :4] = 255
    transform = plain(AugmentSettings(flip=0.3), 8)
    flipped = 0
    for i in range(1000):
        with seeded(7, i):
            flipped += transform(Sample(image, "x")).image[0, 0, 0] == 0
    assert 240 < flipped < 360


@pytest.mark.parametrize("task", ["segment", "detect"])
def test_rand_augment_is_refused_where_masks_would_stay_behind(task):
    with pytest.raises(UserError, match=f"cannot be used to {task}"):
        train_transform(AugmentSettings(rand_augment="rand-m9"), 32, task)


def test_an_unknown_rand_augment_is_one_line():
    with pytest.raises(UserError, match=r"rand_augment 'rand-q7' is not one that timm understands") as caught:
        train_transform(AugmentSettings(rand_augment="rand-q7"), 32)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- mixing


def test_mixing_depends_on_seed_and_step_alone(seed):
    images, labels = torch.rand(8, 3, 12, 12), torch.arange(8) % 5
    mixer = Mixer(AugmentSettings(mixup=0.8, cutmix=1.0), 5, smoothing=0.1, seed=seed % 1000)
    with untouched_generators():
        one, target = mixer(images.clone(), labels, step=4)
    again, same_target = mixer(images.clone(), labels, step=4)
    other, other_target = mixer(images.clone(), labels, step=5)
    assert torch.equal(one, again) and torch.equal(target, same_target)
    assert not torch.equal(one, other) and not torch.equal(target, other_target)
    assert target.shape == (8, 5)
    torch.testing.assert_close(target.sum(1), torch.ones(8))
    assert target.min() >= 0.1 / 5 - 1e-6


def test_mixup_is_the_weighted_sum_its_target_says():
    images, labels = torch.rand(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 4, 5])
    mixed, target = Mixer(AugmentSettings(mixup=1.0), 6)(images.clone(), labels, step=1)
    share = target[0, 0]
    assert 0 < share < 1
    torch.testing.assert_close(mixed, share * images + (1 - share) * images.flip(0))


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["size=4"], "size must be from 8 to 8192 pixels, got 4"),
        (["batch_size=0"], "batch_size must be at least 1, got 0"),
        (["name=folder"], "name folder needs root"),
        (["name=imagefolder"], "name must be one of world, folder"),
        (["workers=-1"], "workers must be at least 0"),
        (["mean=[124, 116, 104]"], "mean is given for colours from 0 to 1"),
        (["std=[0, 1, 1]"], "std must be positive"),
        (["augment.flip=2"], "flip is a probability from 0 to 1, got 2"),
        (["augment.crop_scale=[1.0, 0.3]"], "the smaller one first"),
        (["augment.crop_scale=[0.3, 2.0]"], "share of the area, at most 1"),
        (["augment.rand_augment=strong"], "rand_augment must look like rand-m9-mstd0.5-inc1, got 'strong'"),
        (["augment.mixup=0.8", "batch_size=33"], "even batch_size, got 33"),
        (["augment.mixup=-1"], "mixup must be 0"),
        (["crop_pct=0.1"], "crop_pct must be from 0.5 to 1"),
        (["num_train=0"], "num_train must be at least 1"),
        (["augment.translate=-2"], "translate must be at least 0, got -2"),
        (["augment.translate=64"], "augment.translate must be less than size 64, got 64"),
    ],
)
def test_impossible_settings_are_one_clear_line(overrides, message):
    with pytest.raises(UserError) as caught:
        config.load(DataSettings, None, overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_settings_go_through_yaml(tmp_path):
    settings = DataSettings(
        name="folder", root=tmp_path, augment=AugmentSettings(crop_scale=(0.1, 0.9), rand_augment="rand-m7")
    )
    (tmp_path / "x.yaml").write_text(config.to_yaml(settings))
    assert config.load(DataSettings, tmp_path / "x.yaml") == settings
    assert settings.eval_batch_size == settings.batch_size

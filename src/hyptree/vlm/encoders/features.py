"""Features of pictures and texts, computed once and kept on disk: safetensors, named by encoder and data."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyptree.data.sample import BadSample, PictureDataset
from hyptree.errors import UserError
from hyptree.files import hash_tensors, load_tensors, save_tensors
from hyptree.progress import progress_bar
from hyptree.vlm.adapters.container import adapter_state
from hyptree.vlm.encoders.encoder import Encoder

PART = 1024
"""Pictures per file while features are being made: what a stop can lose."""
_PROBES = 16  # pictures that stand for the content of a dataset in its fingerprint

Change = Callable[[Tensor], Tensor]
"""A (3, H, W) uint8 picture to another one."""


@dataclass
class FeatureSet:
    """Pictures of labelled classes, as vectors."""

    features: Tensor
    """(n, D) as the image encoder gives them, not normalised."""
    labels: Tensor
    """(n,) places in ``classes``."""
    classes: tuple[str, ...]
    bad: Mapping[str, str] = field(default_factory=dict)
    """Pictures that could not be read and are left out, and why."""

    def __post_init__(self) -> None:
        if len(self.features) != len(self.labels):
            raise ValueError(f"expected a label for each of {len(self.features)} pictures, got {len(self.labels)}")

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, index: Tensor) -> Tensor:
        """(n, D) what the host's ``image_features`` takes."""
        return self.features[index.to(self.features.device)]


class PixelSet:
    """As ``FeatureSet``, for a host whose image tower learns: the pictures are read and prepared when asked for."""

    def __init__(self, encoder: Encoder, dataset: PictureDataset, change: Change | None = None):
        self.encoder, self.dataset, self.change = encoder, dataset, change or (lambda image: image)
        self.labels, self.classes, self.bad = labels_of(dataset), tuple(dataset.classes), dict[str, str]()

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, index: Tensor) -> Tensor:
        """(n, 3, size, size) prepared pictures, on the encoder's device."""
        try:
            pictures = [self.change(self.dataset[int(i)].image) for i in index]
        except BadSample as bad:
            raise UserError(f"cannot read picture {bad}; take it out, its features are made in every step") from bad
        return self.encoder.preprocess(pictures).to(self.encoder.device)


def labels_of(dataset: PictureDataset) -> Tensor:
    """(n,) int64 labels of all pictures; without decoding them where the dataset can tell."""
    known = getattr(dataset, "labels", None)
    if known is not None:
        return torch.as_tensor(known()).long()
    return torch.tensor([_label(dataset[i]) for i in range(len(dataset))], dtype=torch.int64)


# --------------------------------------------------------------------------------------------------------- fingerprints


def encoder_fingerprint(encoder: Encoder) -> str:
    """A name that stands for the weights of an encoder and for how it prepares pictures."""
    content = hashlib.sha256(repr((encoder.width, encoder.pixels, adapter_state(encoder.model))).encode())
    hash_tensors(content, encoder.model.state_dict())
    return content.hexdigest()[:24]


def data_fingerprint(dataset: PictureDataset) -> str:
    """A name that stands for a dataset: how many pictures, which classes, and some pictures with their labels."""
    count = len(dataset)
    content = hashlib.sha256(repr((count, tuple(dataset.classes))).encode())
    for i in sorted({i * max(0, count - 1) // (_PROBES - 1) for i in range(_PROBES)} if count else ()):
        try:
            sample = dataset[i]
        except BadSample as bad:
            content.update(str(bad).encode())
        else:
            content.update(repr((i, sample.label, tuple(sample.image.shape))).encode())
            content.update(sample.image.contiguous().numpy().tobytes())
    return content.hexdigest()[:24]


# ------------------------------------------------------------------------------------------------------------- pictures


def picture_features(
    encoder: Encoder,
    dataset: PictureDataset,
    cache: Path | None = None,
    *,
    change: Change | None = None,
    change_name: str = "",
    batch_size: int = 64,
    shown_as: str = "",
    fingerprint: str | None = None,
) -> FeatureSet:
    """Features of all pictures of a dataset, read from ``cache`` where they are there, else made and kept.

    The file's name is made of the fingerprints of encoder and data, so another one is never mistaken for it. While they
    are made, every 1024 pictures are a file of their own: a stop loses no more than that.

    Args:
        change: what happens to every picture first (a shift of domain), with the name that tells it from others.
        shown_as: what the progress is called while features are made; nothing is shown without it.
        fingerprint: of the encoder, where it is known already.
    """
    name = f"{fingerprint or encoder_fingerprint(encoder)}-{data_fingerprint(dataset)}"
    name += f"-{change_name}" if change_name else ""
    if cache is None:
        return _make_features(encoder, dataset, change, batch_size, shown_as, None)
    whole, folder = cache / f"{name}.safetensors", cache / f"{name}.parts"
    with _alone_in(cache):
        if not whole.is_file():
            features = _make_features(encoder, dataset, change, batch_size, shown_as, folder)
            about = {"encoder": encoder.name, "classes": list(dataset.classes), "bad": features.bad}
            save_tensors(whole, {"features": features.features, "labels": features.labels}, about)
            shutil.rmtree(folder)
    tensors, state = load_tensors(whole)
    return FeatureSet(tensors["features"], tensors["labels"], tuple(dataset.classes), state["bad"])


@contextmanager
def _alone_in(cache: Path) -> Iterator[None]:
    """Inside, no other process is: it waits, and finds what was made meanwhile. A kill lets go."""
    import fcntl

    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_features(
    encoder: Encoder,
    dataset: PictureDataset,
    change: Change | None,
    batch_size: int,
    shown_as: str,
    folder: Path | None,
) -> FeatureSet:
    """The features of a dataset, part by part; the parts are kept in ``folder``."""
    parts: list[dict[str, Tensor]] = []
    bad: dict[str, str] = {}
    if folder is not None:
        folder.mkdir(exist_ok=True)
    with progress_bar(shown_as, len(dataset), quiet=not shown_as) as shown:
        for start in range(0, len(dataset), PART):
            stop = min(start + PART, len(dataset))
            path = None if folder is None else folder / f"{start:09d}.safetensors"
            if path is not None and path.is_file():
                part, state = load_tensors(path)
                part_bad = state["bad"]
            else:
                part, part_bad = _encode(encoder, dataset, range(start, stop), change, batch_size)
                if path is not None:
                    save_tensors(path, part, {"bad": part_bad})
            parts.append(part)
            bad |= part_bad
            shown.reach(stop)
    joined = {key: torch.cat([part[key] for part in parts]) for key in ("features", "labels")}
    return FeatureSet(joined["features"], joined["labels"], tuple(dataset.classes), bad)


@torch.no_grad()
def _encode(
    encoder: Encoder, dataset: PictureDataset, index: range, change: Change | None, batch_size: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Features and labels of some pictures, and which could not be read."""
    features, labels, bad = [torch.zeros(0, encoder.width)], [], dict[str, str]()
    for start in range(index.start, index.stop, batch_size):
        pictures = []
        for i in range(start, min(start + batch_size, index.stop)):
            try:
                sample = dataset[i]
            except BadSample as error:
                bad[error.id] = error.why
                continue
            pictures.append(sample.image if change is None else change(sample.image))
            labels.append(_label(sample))
        if pictures:
            features.append(encoder.encode_images(encoder.preprocess(pictures)).float().cpu())
    return {"features": torch.cat(features), "labels": torch.tensor(labels, dtype=torch.int64)}, bad


def _label(sample: Any) -> int:
    if sample.label is None:
        raise UserError(f"{sample.id} has no class; few-shot learning needs pictures with one class each")
    return int(sample.label)


# --------------------------------------------------------------------------------------------------------------- shifts


def _grey(image: Tensor) -> Tensor:
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    return (image.float() * weights).sum(0, keepdim=True).round().to(torch.uint8).expand(3, -1, -1).contiguous()


def _noise(image: Tensor) -> Tensor:
    # The same picture always gets the same noise: it is seeded by the picture.
    seed = int.from_bytes(hashlib.sha256(image.contiguous().numpy().tobytes()).digest()[:7], "big")
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    return (image.float() + 32 * noise).round().clamp(0, 255).to(torch.uint8)


def _blur(image: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(image.float()[None], (1, 1, 1, 1), mode="replicate")
    return torch.nn.functional.avg_pool2d(padded, 3, 1)[0].round().to(torch.uint8)


SHIFTS: dict[str, Change] = {
    "grey": _grey,
    "noise": _noise,
    "blur": _blur,
    "negative": lambda image: 255 - image,
    "upside-down": lambda image: image.flip(1),
}
"""Shifts of domain that need no second dataset."""

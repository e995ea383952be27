"""The model that ``hyptree reduce`` measures and the pictures it is measured on: a run's own, or as the flags say."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hyptree.data.settings import IMAGENET_MEAN, IMAGENET_STD, DataSettings, read_data_flag
from hyptree.errors import UserError, as_user_error
from hyptree.files import hash_tensors
from hyptree.runs import RunFolder
from hyptree.train.evaluate import load_task
from hyptree.train.parallel.distributed import Processes
from hyptree.train.run.recipe import ModelSettings, Recipe
from hyptree.train.run.settings import ReduceSettings
from hyptree.train.source import find_model
from hyptree.train.task import Task
from hyptree.train.tasks import build_task

CACHE_BYTES = 2 * 2**30
"""Bytes: a set of pictures up to this size is read once instead of once for every row."""


@dataclass
class ReducedModel:
    """A classifier in eval mode on its device, and what it is measured on."""

    model: nn.Module
    name: str
    task: Task
    device: torch.device
    batches: Batches | None = None
    """None: accuracy is left out."""
    notes: list[str] = field(default_factory=list)

    @property
    def data(self) -> DataSettings:
        return self.task.recipe.data

    def accuracy(self) -> dict[str, float]:
        """top1 and top5 over the pictures, as ``hyptree eval`` measures them; empty without pictures."""
        if self.batches is None:
            return {}
        scores = self.task.score(self.model, self.batches, self.device)
        return {name: scores[name] for name in ("top1", "top5")}

    def timed_input(self, num: int, seed: int) -> Tensor:
        """(num, 3, S, S) pictures to be timed on: of the data, else of the built-in world, repeated as needed.

        Not noise: how many rounds a clustering takes depends on how alike the patches of a picture are.
        """
        if self.batches is not None:
            x = next(iter(self.batches))["image"]
        else:
            from hyptree.data.pictures.single import fit
            from hyptree.data.world import World

            world = World(split="val", size=min(max(self.data.size, 32), 512), seed=seed, num_images=16)
            pictures = [fit(world[k].image.permute(1, 2, 0).numpy(), self.data.size) for k in range(16)]
            x = self.normalised(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2))
        return x.repeat(-(-num // len(x)), 1, 1, 1)[:num].to(self.device)

    def normalised(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) uint8 as the model wants them."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.data.mean, self.data.std))
        return ((images.float() / 255 - mean) / std).to(self.device)

    def autocast(self) -> Any:
        """The precision of ``--precision``."""
        return self.task.autocast(self.device)

    def about(self, settings: ReduceSettings) -> dict[str, Any]:
        """What all rows of a table share; numbers of another model, data or machine are not mixed with these."""
        from hyptree.tokens.patch import find_adapter
        from hyptree.tokens.schedule import check_layers, default_layers

        depth = len(find_adapter(self.model).blocks)
        data = None
        if self.batches is not None:
            where = self.data.root or self.data.name
            data = f"{self.batches.num_samples:,} pictures of {where}, {settings.split}"
        device = f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
        if self.device.type == "cuda":
            device = torch.cuda.get_device_name()
        return {
            "model": self.name,
            "weights": self.fingerprint(),
            "data": data,
            "size": self.data.size,
            "layers": list(check_layers(settings.layers or default_layers(depth), depth)),
            "batch_size": settings.batch_size,
            "precision": settings.precision,
            "device": device,
            "seed": settings.seed,
            "notes": self.notes,
        }

    def fingerprint(self) -> str:
        """Sixteen letters that change when a weight does."""
        digest = hashlib.sha256()
        hash_tensors(digest, self.model.state_dict())
        return digest.hexdigest()[:16]


class Batches:
    """The batches of a loader, again and again; a small set is read only once."""

    def __init__(self, loader: Any, num_samples: int, size: int):
        self.loader, self.num_samples = loader, num_samples
        self._cached: list[Any] | None = [] if num_samples * 3 * size**2 * 4 <= CACHE_BYTES else None

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._cached is None:
            return iter(self.loader)
        if not self._cached:
            self._cached = list(self.loader)
            self.loader.close()
        return iter(self._cached)


def load_subject(settings: ReduceSettings) -> ReducedModel:
    """The model and the pictures that the flags name.

    Raises:
        UserError: unknown model or data, a run of another task, classes that are not the model's.
    """
    device = Processes(settings.device).device
    on_gpu = device.type == "cuda"
    if settings.batch_size is None:
        settings.batch_size = 256 if on_gpu else 8
    if settings.repeats is None:
        settings.repeats = 9 if on_gpu else 3
    is_run = find_model(settings.model, "run", "timm").kind == "run"
    subject = (_from_run if is_run else _from_name)(settings, device)
    if settings.data != "none" and (is_run or settings.data is not None):
        _add_batches(subject, settings.split)
    subject.model.to(device).eval()
    return subject


def _from_run(settings: ReduceSettings, device: torch.device) -> ReducedModel:
    if settings.pretrained or settings.weights is not None or settings.size is not None:
        raise UserError("a run brings its weights and its size: leave out --pretrained, --weights and --size")
    recipe = RunFolder(settings.model).recipe(Recipe)
    if recipe.task != "classify":
        raise UserError(f"{settings.model} is a run of the task {recipe.task}; hyptree reduce measures classifiers")
    recipe.tokens = None  # whatever it was trained with, here the plain model is reduced
    if settings.data not in (None, "none"):
        name, root = read_data_flag(settings.data)
        recipe.data = dataclasses.replace(recipe.data, name=name, root=root, num_classes=None)
    task, model = load_task(settings.model, _with_flags(recipe, settings))
    return ReducedModel(model, recipe.model.name, task, device)


def _from_name(settings: ReduceSettings, device: torch.device) -> ReducedModel:
    import timm

    from hyptree.data.pictures.single import default_size
    from hyptree.data.seeding import reseed
    from hyptree.train.model import create_model, load_weights

    chosen = ModelSettings(settings.model, pretrained=settings.pretrained)
    if settings.size is not None:
        chosen.args["img_size"] = settings.size
    reseed(settings.seed, gpus=True)
    options: dict[str, Any] = {}
    about = timm.get_pretrained_cfg(settings.model) if timm.is_model(settings.model) else None
    mean, std = (getattr(about, "mean", IMAGENET_MEAN), getattr(about, "std", IMAGENET_STD))
    with as_user_error("--size"):
        look = DataSettings(size=settings.size or 224, mean=mean, std=std, crop_pct=getattr(about, "crop_pct", 1.0))
    task = build_task(_with_flags(Recipe(data=look, model=chosen), settings))
    if settings.data not in (None, "none"):
        look.name, look.root = read_data_flag(settings.data)
        if not settings.pretrained:  # fresh weights, or those of a file: the classes are those of the data
            options["num_classes"] = len(task.build_dataset(settings.split).classes)
    model = create_model(chosen, **options)
    look.size = settings.size or default_size(model)
    subject = ReducedModel(model, settings.model, task, device)
    if settings.weights is not None:
        fresh = load_weights(model, settings.weights)
        if fresh:
            raise UserError(f"{settings.weights} lacks {fresh[0]} of {settings.model}; give weights of the same model")
    elif not settings.pretrained:
        subject.notes.append("fresh weights: speed and FLOPs count, accuracy and clusters mean nothing")
    return subject


def _with_flags(recipe: Recipe, settings: ReduceSettings) -> Recipe:
    recipe.data.num_val = settings.num_val or recipe.data.num_val
    recipe.data.workers = settings.workers
    recipe.data.eval_batch_size = settings.batch_size
    recipe.run.precision = settings.precision
    return recipe


def _add_batches(subject: ReducedModel, split: str) -> None:
    dataset = subject.task.build_dataset(split)
    count = getattr(subject.model, "num_classes", len(dataset.classes))
    if len(dataset.classes) != count:
        raise UserError(
            f"{subject.name} knows {count} classes, the data has {len(dataset.classes)}: accuracy would mean nothing; "
            "give a run that was trained on them, or --data none"
        )
    subject.batches = Batches(subject.task.build_loader(dataset, False), len(dataset), subject.data.size)

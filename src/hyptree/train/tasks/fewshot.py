"""Few-shot learning: attributes between classes and pictures from a few shots, on a frozen or prompted CLIP."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.data.build import build_dataset
from hyptree.data.npz import name_some
from hyptree.data.plan import Loader, Plan
from hyptree.data.sample import PictureDataset
from hyptree.data.seeding import mix_bits
from hyptree.data.settings import read_data_flag
from hyptree.errors import UserError
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Gather, Task
from hyptree.vlm.adapters.base import samples
from hyptree.vlm.encoders.encoder import Encoder, load_encoder
from hyptree.vlm.encoders.features import SHIFTS, FeatureSet, PixelSet, encoder_fingerprint, labels_of, picture_features
from hyptree.vlm.encoders.spec import check_spec
from hyptree.vlm.encoders.texts import TextTable
from hyptree.vlm.lathadapter.fewshot import (
    FewShotModel,
    Tally,
    build_head,
    build_host,
    class_names,
    harmonic_mean,
    sample_shots,
    split_base_new,
)

Batch = dict[str, Any]
Pictures = FeatureSet | PixelSet

TestOf = tuple[PictureDataset, str, Sequence[int]]
"""What there is to be right about: a dataset, how its pictures are shifted, and the classes tested on."""

BASE, NEW = "base", "new"
"""Tests on the classes that are learned, and on the others of the same data."""


class Subset:
    """Pictures of some classes (places in ``pictures.classes``), to be told apart among these classes."""

    def __init__(self, pictures: Pictures, classes: Sequence[int]):
        self.pictures = pictures
        names = class_names(pictures.classes)
        self.names = tuple(names[label] for label in classes)
        places = torch.full((len(pictures.classes),), -1)
        places[list(classes)] = torch.arange(len(classes))
        self.targets = places[pictures.labels.cpu()]
        """(n,) the place of each picture's class among these classes; -1 for others."""


class ShotLoader(Loader):
    """Batches of the pictures at ``index`` in an order by (seed, epoch); the last one may be smaller."""

    def __init__(self, shots: Subset, index: Tensor, batch_size: int, seed: int):
        super().__init__(Plan(len(index), batch_size, seed, True, 0, 1))
        self.shots, self.index = shots, index

    def __len__(self) -> int:
        return math.ceil(len(self.index) / self.plan.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(mix_bits(self.plan.seed, self.epoch, 0xBA7C) >> 1)
        order = self.index[torch.randperm(len(self.index), generator=generator)]
        for batch in order.split(self.plan.batch_size)[self.start_batch :]:
            yield {"inputs": self.shots.pictures.inputs(batch), "label": self.shots.targets[batch]}


class SubsetLoader(Loader):
    """Batches of one test after the other, each with the name of its test."""

    def __init__(self, tests: dict[str, Subset], batch_size: int):
        self.tests = tests
        self.batches = []
        for name, test in tests.items():
            index = (test.targets >= 0).nonzero()[:, 0]
            if len(index) == 0:
                raise UserError(f"no test picture is of {name_some(test.names, 3)}")
            self.batches += [(name, batch) for batch in index.split(batch_size)]
        super().__init__(Plan(len(self.batches), 1, 0, False, 0, 1))

    def __iter__(self) -> Iterator[Batch]:
        for name, index in self.batches[self.start_batch :]:
            test = self.tests[name]
            yield {"test": name, "inputs": test.pictures.inputs(index), "label": test.targets[index]}


class FewShot(Task):
    """Cosine, distance and hierarchy losses on a few shots; accuracy on the same, new, other and shifted classes.

    ``model.name`` is an encoder of ``hyptree.vlm`` (``hf:FOLDER``, ``open_clip:NAME:PRETRAINED``), whose features are
    made once and kept in ``fewshot.cache``. ``top1`` is on the classes that are learned; with protocol base-to-new it
    is called ``base`` too, beside ``new`` and the harmonic mean ``h``. ``cosine`` leaves the hyperbolic term out,
    ``zero_shot`` the head.
    """

    metric = "top1"

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.settings = recipe.fewshot
        check_spec(recipe.model.name)
        self.names: tuple[str, ...] = ()
        """Of all classes, in order."""
        self._others: dict[str, TestOf] | None = None
        self._tests: dict[str, Subset] = {}

    @functools.cached_property
    def encoder(self) -> Encoder:
        """The CLIP that the recipe names, frozen and on its device."""
        device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        random_init, seed = self.settings.random_init, self.recipe.run.seed
        encoder = load_encoder(self.recipe.model.name, random_init=random_init, seed=seed, device=device)
        if encoder.image_tower is None:
            raise UserError(f"{encoder.name} reads text alone; few-shot learning needs a CLIP or SigLIP model")
        encoder.model.requires_grad_(False)
        return encoder

    @functools.cached_property
    def fingerprint(self) -> str:
        """What stands for the encoder's weights."""
        return encoder_fingerprint(self.encoder)

    @property
    def base_new(self) -> tuple[list[int], list[int]]:
        """Classes to train on, and those that are tested apart."""
        is_split = self.settings.protocol == "base-to-new"
        return split_base_new(len(self.names)) if is_split else (list(range(len(self.names))), [])

    # -------------------------------------------------------------------------------------------------------- data

    def build_dataset(self, split: str) -> PictureDataset:
        """The pictures; what cannot be is told here, before any feature is made."""
        dataset = self._dataset(split)
        names = class_names(dataset.classes)
        if self.names and names != self.names:
            raise UserError(
                f"data {self.recipe.data.name}: the {len(names)} classes of {split} are not the {len(self.names)} that "
                "were learned; fewshot.transfer tests on others"
            )
        self.names = names
        if split == "train" and hasattr(dataset, "labels"):
            sample_shots(labels_of(dataset), self.settings.shots, self.recipe.run.seed, self.base_new[0], names)
        if self._others is None:
            self._others = self._find_others()
        return dataset

    def _dataset(self, split: str, data: str = "") -> PictureDataset:
        """A split of the recipe's data, or of others."""
        settings = self.recipe.data
        if data:
            name, root = read_data_flag(data, "fewshot.transfer or shift")
            settings = dataclasses.replace(settings, name=name, root=root, num_classes=None)
        dataset = build_dataset(settings, split)
        if not dataset.classes:
            raise UserError(f"data {data or settings.name} has no class per picture, as pets or world have it")
        return dataset

    def _find_others(self) -> dict[str, TestOf]:
        """Tests on other data and on shifted pictures, by their names."""
        others: dict[str, TestOf] = {}
        for name, data in by_name(self.settings.transfer, "transfer").items():
            dataset = self._dataset("val", data)
            others[name] = (dataset, "", range(len(dataset.classes)))
        for name, data in by_name(self.settings.shift, "shift").items():
            dataset = self._dataset("val", "" if data in SHIFTS else data)
            shared = [i for i, known in enumerate(class_names(dataset.classes)) if known in self.names]
            if not shared:
                raise UserError(f"fewshot.shift {data} has none of the {len(self.names)} classes; use fewshot.transfer")
            others[name] = (dataset, data if data in SHIFTS else "", shared)
        return others

    def _pictures(self, dataset: PictureDataset, what: str, shift: str = "") -> Pictures:
        """What the host takes for pictures: features, or pixels where its image tower learns."""
        change = SHIFTS[shift] if shift else None
        if self.settings.host == "joint":
            return PixelSet(self.encoder, dataset, change)
        features = picture_features(
            *(self.encoder, dataset, self.settings.cache),
            change=change,
            change_name=shift,
            shown_as=f"features of {what}",
            fingerprint=self.fingerprint,
        )
        if features.bad and self.recipe.data.strict:
            name, why = next(iter(features.bad.items()))
            raise UserError(f"cannot read picture {name}: {why}; repair it or switch strict off")
        return features

    def build_loader(
        self, dataset: Any, train: bool, *, rank: int = 0, world_size: int = 1, skipped: dict[str, str] | None = None
    ) -> Loader:
        """Shots, or every test in turn; one process alone, since the losses compare all pictures of a batch."""
        if world_size > 1:
            raise UserError(
                f"the task fewshot compares all pictures of a batch, which {world_size} processes cannot share; start "
                "one, and runs at the same time by hyptree compare --jobs"
            )
        base, new = self.base_new
        tests: dict[str, TestOf] = {BASE: (dataset, "", base)}
        if not train:
            tests |= self._others or {}
        subsets = {
            name: Subset(self._pictures(pictures, f"{'train' if train else 'test'} {name}", shift), classes)
            for name, (pictures, shift, classes) in tests.items()
        }
        skipped = {} if skipped is None else skipped
        for subset in subsets.values():
            skipped.update(subset.pictures.bad)
        if not train:
            subsets |= {NEW: Subset(subsets[BASE].pictures, new)} if new else {}
            self._tests = subsets
            return SubsetLoader(subsets, self.batch_size(False))
        shots, seed = subsets[BASE], self.recipe.run.seed
        index = sample_shots(shots.pictures.labels, self.settings.shots, seed, base, self.names)
        return ShotLoader(shots, index, self.batch_size(True), seed)

    def describe(self, dataset: Any) -> dict[str, Any]:
        """Names of all classes and how many of them are learned, the encoder's name, scale and some of its weights."""
        return {
            "classes": list(self.names),
            "num_learned": len(self.base_new[0]),
            "logit_scale": float(self.encoder.logit_scale.detach()),
            "encoder": self.encoder.name,
            "encoder_weights": samples(self.encoder.model),
        }

    # ------------------------------------------------------------------------------------------------------- model

    def build_model(self, data: dict[str, Any]) -> FewShotModel:
        recipe, settings = self.recipe, self.settings
        self.names = tuple(data["classes"])
        names = self.names[: data["num_learned"]]
        texts = TextTable(self.encoder.encode_text)  # its weights stand still for the whole run
        sentences = [*(settings.template.format(name) for name in self.names), *class_names(settings.attribute_words)]
        texts.fill_from(settings.cache / f"{self.fingerprint}-texts.safetensors", sentences, self.fingerprint)
        host = build_host(settings, self.encoder, texts, recipe.run.seed)
        head = build_head(host, names, data["logit_scale"], settings, recipe.run.seed)
        for p in head.parameters():
            p._lr_scale = (settings.attribute_lr or recipe.optim.lr) / recipe.optim.lr  # type: ignore[attr-defined]
        for p in (*head.parameters(), *host.parameters()):
            p._no_weight_decay = False  # type: ignore[attr-defined]  # vectors are decayed too, as published
        return FewShotModel(head, host, names, self.fingerprint)

    def training_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        _, losses = model(batch["inputs"], batch["label"])
        loss = losses.pop("total")
        if not loss.requires_grad:  # with these parts nothing that is learned reaches it
            loss = loss + 0 * model.head.attributes.sum()  # type: ignore[operator, union-attr]
        return loss, {name: value.detach() for name, value in losses.items()}

    # ----------------------------------------------------------------------------------------------------- numbers

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], gather: Gather) -> dict[str, float]:
        assert isinstance(model, FewShotModel)
        tallies: dict[str, Tally] = {}
        for batch in batches:
            images, name = model.host.image_features(batch["inputs"]), batch["test"]
            with torch.autocast(images.device.type, enabled=False):
                if name not in tallies:
                    tallies[name] = Tally(model, self._tests[name].names)
                tallies[name].add(images.float(), batch["label"])
        numbers = tallies.pop(BASE).numbers()
        top1 = numbers["top1"]
        if NEW in tallies:
            new = tallies.pop(NEW).numbers()["top1"]
            numbers |= {"base": top1, "new": new, "h": harmonic_mean(top1, new)}
        return numbers | {name: tally.numbers()["top1"] for name, tally in tallies.items()}


def by_name(datas: Sequence[str], key: str) -> dict[str, str]:
    """Names of the numbers of several data to these: ``transfer_pets`` of ``pets:DIR``, the end of a path otherwise."""
    names = {f"{key}_{data.partition(':')[0] if ':' in data else Path(data).name}": data for data in datas}
    if len(names) < len(datas):
        raise UserError(
            f"fewshot.{key} has two data of one name among {' '.join(datas)}; rename a folder, or test on one of them "
            f"by hyptree eval RUN --fewshot.{key}"
        )
    return names

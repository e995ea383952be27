"""Few-shot learning on plain vectors, by the training loop: shots, splits, parts, tests, the head of a run."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.config import load
from hyptree.data import DataSettings, build_dataset
from hyptree.errors import UserError
from hyptree.runs import RunFolder
from hyptree.train.evaluate import evaluate_run, load_model
from hyptree.train.loop import Result, fit
from hyptree.train.optimizer.build import Schedule
from hyptree.train.run.recipe import Recipe, ScheduleSettings
from hyptree.train.tasks import TASKS
from hyptree.train.tasks.fewshot import FewShot
from hyptree.vlm.encoders.features import FeatureSet
from hyptree.vlm.lathadapter.fewshot import (
    FewShotModel,
    Tally,
    build_head,
    class_names,
    harmonic_mean,
    load_head,
    sample_shots,
    split_base_new,
)
from hyptree.vlm.lathadapter.head import LatentHierarchyHead
from hyptree.vlm.lathadapter.hosts import Host
from hyptree.vlm.lathadapter.settings import FewShotSettings

NAMES = tuple(f"class {i}" for i in range(8))


class Vectors:
    """Vectors of labelled classes that count as a dataset of pictures."""

    classes = NAMES

    def __init__(self, features: Tensor, labels: Tensor):
        self.features, self._labels = features, labels

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self) -> Tensor:
        return self._labels


class Subject:
    """Eight classes whose texts are off by a rotation that the pictures do not have: something to be learned."""

    def __init__(self, seed: int, d: int = 24, each: int = 20):
        generator = torch.Generator().manual_seed(seed)
        self.text = F.normalize(torch.randn(8, d, generator=generator), dim=-1)
        centres = F.normalize(self.text + 1.5 * F.normalize(torch.randn(8, d, generator=generator), dim=-1), dim=-1)
        labels = torch.arange(8).repeat_interleave(each)
        images = centres[labels] + 0.35 * F.normalize(torch.randn(len(labels), d, generator=generator), dim=-1)
        # Every other picture, so that each class has as many in both.
        self.train = Vectors(images[::2] * 3, labels[::2])
        self.test = Vectors(images[1::2] * 3, labels[1::2])
        self.host = Host(self.encode, "{}")

    def encode(self, texts: list[str]) -> Tensor:
        return self.text[[NAMES.index(text) for text in texts]]


class StubEncoder:
    """What the task needs of an encoder: texts and a scale."""

    name, width, pixels, device, logit_scale = "stub", 24, None, torch.device("cpu"), torch.tensor(20.0)

    def __init__(self, subject: Subject):
        self.model, self.encode_text = nn.Linear(24, 24), subject.encode


class SubjectTask(FewShot):
    """The task on the vectors of ``Subject(data.seed)``."""

    fingerprint = "00" * 12
    change: Any = None
    """What happens to the subject first."""

    @functools.cached_property
    def subject(self) -> Subject:
        subject = Subject(self.recipe.data.seed)
        if SubjectTask.change is not None:
            SubjectTask.change(subject)
        return subject

    @functools.cached_property
    def encoder(self) -> Any:
        return StubEncoder(self.subject)

    def _dataset(self, split: str, data: str = "") -> Any:
        return getattr(self.subject, "train" if split == "train" else "test")

    def _pictures(self, dataset: Any, what: str, shift: str = "") -> Any:
        return FeatureSet(dataset.features, dataset.labels(), NAMES)


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "fewshot", f"{__name__}:SubjectTask")
    monkeypatch.setattr(SubjectTask, "change", None)


def trained(out: Path, seed: int = 0, data_seed: int = 0, **changes: Any) -> Result:
    """A run on ``Subject(data_seed)``; ``beta=1`` is ``fewshot.beta=1``, ``optim__lr=1`` is ``optim.lr=1``."""
    keys = {"task": "fewshot", "model.name": "hf:stub", "data.seed": data_seed, "run.seed": seed, "run.device": "cpu"}
    keys |= {"run.threads": 1, "run.tensorboard": False, "run.log_steps": 1, "fewshot.template": "{}"}
    keys |= {"fewshot.cache": str(out / "cache"), "fewshot.shots": 6, "schedule.epochs": 1}
    keys |= {key.replace("__", ".") if "__" in key else f"fewshot.{key}": value for key, value in changes.items()}
    return fit(load(Recipe, None, [f"{key}={json.dumps(value)}" for key, value in keys.items()]), out, quiet=True)


def losses(result: Result) -> list[dict[str, float]]:
    """The lines of metrics of every step."""
    return [line for line in RunFolder(result.folder).read_metrics() if line["split"] == "train"]


def head_of(result: Result) -> LatentHierarchyHead:
    return load_head(result.folder)[0]


def test_shots_are_so_many_of_each_class_and_fewer_are_some_of_more(seed: int) -> None:
    labels = torch.randint(5, (400,))
    for shots in (1, 4, 16):
        chosen = sample_shots(labels, shots, 3, [0, 2, 4], NAMES)
        assert torch.equal(labels[chosen].bincount(minlength=5), torch.tensor([1, 0, 1, 0, 1]) * shots)
        assert len(chosen.unique()) == len(chosen)
    few, many = (set(sample_shots(labels, shots, 3, range(5), NAMES).tolist()) for shots in (2, 8))
    assert few < many
    assert torch.equal(sample_shots(labels, 4, 3, range(5), NAMES), sample_shots(labels, 4, 3, range(5), NAMES))
    assert not torch.equal(sample_shots(labels, 4, 3, range(5), NAMES), sample_shots(labels, 4, 4, range(5), NAMES))


def test_base_and_new_halves_and_their_harmonic_mean() -> None:
    assert split_base_new(7) == ([0, 1, 2, 3], [4, 5, 6])
    assert split_base_new(8) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert harmonic_mean(0.8, 0.4) == pytest.approx(2 * 0.8 * 0.4 / 1.2)
    assert harmonic_mean(0.0, 0.0) == 0


def test_mistakes_in_classes_and_shots_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for classes, text in (
        (("cat", "dog", "Cat"), "classes 0 and 2 are both called 'Cat'"),
        (("a_cat", "a cat"), "both called 'a cat'"),
        (("cat", " "), "class 1 of 2 has an empty name"),
    ):
        with pytest.raises(UserError, match=text):
            class_names(classes)
    assert class_names(["English_setter", " pug ", "tailed_frog.n.01"]) == ("English setter", "pug", "tailed frog")
    with pytest.raises(UserError, match="4 shots need 4 pictures of every class, but class 1 has 1"):
        sample_shots(torch.tensor([0, 0, 0, 0, 1]), 4, 0, [0, 1], NAMES)
    with pytest.raises(UserError, match="at least 2 classes"):
        split_base_new(1)
    with pytest.raises(UserError, match="no place for the class"):
        Host(lambda texts: torch.zeros(len(texts), 4), "a photo")
    with pytest.raises(ValueError, match="a label for each of 3 pictures, got 2"):
        FeatureSet(torch.zeros(3, 4), torch.zeros(2), NAMES)

    def without_a_picture(subject: Subject) -> None:
        subject.test = Vectors(subject.test.features[:0], subject.test.labels()[:0])

    monkeypatch.setattr(SubjectTask, "change", without_a_picture)
    with pytest.raises(UserError, match="no test picture is of class 0, class 1, class 2"):
        trained(tmp_path)


def test_training_lowers_the_loss_and_repeats_exactly(seed: int, tmp_path: Path) -> None:
    options = {"data_seed": seed % 1000, "schedule__epochs": 6, "beta": 0.5, "optim__lr": 0.03}
    runs = [trained(tmp_path / str(i), run, **options) for i, run in enumerate((0, 0, 1))]
    assert set(losses(runs[0])[0]) >= {"L_e", "L_h", "L_va", "L_at", "hhl/skipped", "loss"}
    first, again, other = ([line["loss"] for line in losses(run)] for run in runs)
    assert first == again and first != other
    assert torch.equal(head_of(runs[0]).attributes, head_of(runs[1]).attributes)
    assert len(first) == 12  # 48 shots in batches of 32: the last one is smaller, and is not left out
    assert sum(first[-2:]) < 0.9 * sum(first[:2])


def test_scores_are_counted_among_the_given_classes(seed: int) -> None:
    subject = Subject(seed)
    classes = [1, 4, 6]
    head = build_head(subject.host, NAMES, 100.0, FewShotSettings(beta=0.0), 0)
    tally = Tally(FewShotModel(head, subject.host, NAMES, "00"), [NAMES[i] for i in classes])
    kept = torch.isin(subject.test.labels(), torch.tensor(classes))
    truth = torch.tensor([classes.index(int(label)) for label in subject.test.labels()[kept]])
    tally.add(subject.test.features[kept], truth)
    numbers = tally.numbers()
    cosine = F.normalize(subject.test.features[kept], dim=-1) @ subject.text[classes].T
    assert tally.count == int(kept.sum())
    assert numbers["zero_shot"] == pytest.approx(float((cosine.argmax(1) == truth).float().mean()))
    assert numbers["cosine"] == numbers["zero_shot"]  # no refinement: nothing but the distance could differ
    assert 0.01 < numbers["slope_ratio"] < 0.03


def test_new_classes_are_seen_in_no_part_of_training(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hide(subject: Subject) -> None:
        subject.train.features[subject.train.labels() >= 4] = torch.nan  # whoever looks at them fails

    monkeypatch.setattr(SubjectTask, "change", hide)
    data_seed = seed % 1000
    result = trained(tmp_path, 3, data_seed, protocol="base-to-new", optim__lr=1e-8, shots=4)
    subject, (head, learned, about) = Subject(data_seed), load_head(tmp_path)
    assert about["classes"] == list(NAMES[:4]) and head.logit_scale == 20 and not learned
    begun = LatentHierarchyHead.for_classes(subject.text[:4], seed=3)
    torch.testing.assert_close(head.attributes.detach(), begun.attributes.detach(), rtol=0, atol=1e-6)
    # Each half among its own classes, on the test pictures.
    for name, classes in zip(("base", "new"), split_base_new(8), strict=True):
        tally = Tally(FewShotModel(head, subject.host, (), "00"), [NAMES[i] for i in classes])
        kept = torch.isin(subject.test.labels(), torch.tensor(classes))
        tally.add(subject.test.features[kept], subject.test.labels()[kept] - classes[0])
        assert result.numbers[name] == tally.numbers()["top1"]
    numbers = result.numbers
    assert numbers["h"] == pytest.approx(harmonic_mean(numbers["base"], numbers["new"]))
    assert numbers["top1"] == numbers["base"]


def test_prompts_are_warmed_up_at_a_constant_rate(tmp_path: Path) -> None:
    """The first epoch of prompts at 1e-5, then a cosine to 0."""
    recipe = load(Recipe, None, ["task=fewshot", "fewshot.host=prompt"])
    optim, schedule = recipe.optim, Schedule(recipe.schedule, 10)
    assert (optim.name, recipe.data.batch_size, schedule.num_steps) == ("sgd", 4, 50)
    rates = [optim.lr * schedule.factor(step) for step in (0, 9, 10, 30)]
    assert rates == pytest.approx([1e-5, 1e-5, 0.0035, 0.00175])
    frozen = load(Recipe, None, ["task=fewshot"])
    assert (frozen.optim.name, frozen.optim.lr, frozen.data.batch_size) == ("adamw", 0.01, 32)
    assert [Schedule(frozen.schedule, 10).factor(step) for step in (0, 150)] == pytest.approx([1.0, 0.5])
    with pytest.raises(ValueError, match="warmup 1 at a constant rate is all of the run"):
        ScheduleSettings(epochs=1, warmup=1, warmup_lr=0.1)


def test_attributes_may_have_a_rate_of_their_own(tmp_path: Path) -> None:
    one, other = (trained(tmp_path / str(lr), attribute_lr=lr, optim__lr=1e-9, shots=1) for lr in (None, 0.1))
    begun = LatentHierarchyHead.for_classes(Subject(0).text, seed=0).attributes
    assert (head_of(one).attributes - begun).abs().max() < 1e-6
    assert (head_of(other).attributes - begun).abs().max() > 1e-3


def test_a_head_is_the_same_read_from_its_run(tmp_path: Path) -> None:
    result = trained(tmp_path, 7, lift="learned_scale", lca_sampling="argmin", k=2, parts=["atr", "va"])
    model, _ = load_model(tmp_path)
    assert isinstance(model, FewShotModel)
    head, _, about = load_head(tmp_path)
    subject = Subject(0)
    assert repr(head) == repr(model.head) and head.seed == 7 and head.weights["L_at"] == 0
    assert about["classes"] == list(NAMES) and about["settings"].lift == "learned_scale"
    assert about["numbers"] == result.numbers
    with torch.no_grad():
        actual, expected = (one(subject.test.features, subject.text)[0] for one in (head, model.head))
    assert torch.equal(actual, expected)
    numbers = evaluate_run(tmp_path)
    assert {name: numbers[name] for name in result.numbers} == result.numbers


def test_parts_that_are_off_have_no_loss_and_nothing_at_all_is_the_host_alone(tmp_path: Path) -> None:
    for i, (parts, present) in enumerate(
        (
            (("atr",), {"L_e"}),
            (("atr", "va"), {"L_e", "L_va"}),
            (("at", "h"), {"L_e", "L_h", "L_at"}),
        )
    ):
        result = trained(tmp_path / str(i), parts=parts)
        assert {name for name in losses(result)[0] if name.startswith("L_")} == present
        assert (head_of(result).beta == 0) == ("atr" not in parts)
    begun = LatentHierarchyHead.for_classes(Subject(0).text, seed=0).attributes
    unused = trained(tmp_path / "unused", parts=["va", "at"])
    # Attributes learn, but without the refinement no answer depends on them.
    assert not torch.equal(head_of(unused).attributes, begun)
    assert unused.numbers["cosine"] == unused.numbers["zero_shot"]
    for name, parts in (("alone", ()), ("h", ("h",))):
        result = trained(tmp_path / name, parts=parts)
        assert torch.equal(head_of(result).attributes, begun), parts
    alone = json.loads(json.dumps(trained(tmp_path / "again", parts=()).numbers))
    assert alone["top1"] == alone["zero_shot"] and alone["slope_ratio"] == 0
    with pytest.raises(UserError, match=r"fewshot.parts\[0\] must be one of atr, va, at, h, got 'hhl'"):
        trained(tmp_path / "x", parts=["hhl"])
    with pytest.raises(UserError, match="parts must be different ones of atr, va, at, h, got h, h"):
        trained(tmp_path / "x", parts=["h", "h"])


def test_attributes_may_begin_at_words(tmp_path: Path) -> None:
    words = ["class 3", "class 5"]
    result = trained(tmp_path, attribute_words=words, optim__lr=1e-9)
    torch.testing.assert_close(head_of(result).attributes.detach(), Subject(0).text[[3, 5]], rtol=0, atol=1e-6)
    assert head_of(result).attribute_names == ("class 3", "class 5")
    with pytest.raises(ValueError, match="2 attribute_words make 2 attributes, but num_attributes is 3"):
        FewShotSettings(attribute_words=("fur", "wing"), num_attributes=3)


@pytest.mark.parametrize(
    ("data", "classes"),
    [("pets:oxford-pets", 37), ("tiny-imagenet:tiny-imagenet-wordnet", 200), ("arrays:cifar10", 10)],
)
def test_classes_of_real_data_can_be_told_apart_by_their_names(data: str, classes: int, shared_data: Path) -> None:
    name, _, folder = data.partition(":")
    dataset = build_dataset(DataSettings(name=name, root=shared_data / folder), "val")  # type: ignore[arg-type]
    names = class_names(dataset.classes)
    assert len(names) == classes and not any("." in name or "_" in name for name in names)

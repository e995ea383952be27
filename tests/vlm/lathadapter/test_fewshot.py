"""The few-shot protocol on plain tensors: shots, splits, training, tests, ablation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.data import DataSettings, build_dataset
from hyptree.errors import UserError
from hyptree.files import save_tensors
from hyptree.vlm.encoders.features import FeatureSet
from hyptree.vlm.lathadapter.fewshot import (
    _rate,
    build_head,
    class_names,
    evaluate,
    harmonic_mean,
    sample_shots,
    split_base_new,
    train,
)
from hyptree.vlm.lathadapter.fewshot_run import FewShotSetup, run_one, summarise, table
from hyptree.vlm.lathadapter.head import LatentHierarchyHead
from hyptree.vlm.lathadapter.head_file import load_head, save_head
from hyptree.vlm.lathadapter.hosts import Host
from hyptree.vlm.lathadapter.settings import PARTS, FewShotJob, FewShotSettings

NAMES = tuple(f"class {i}" for i in range(8))


class Subject:
    """Eight classes whose texts are off by a rotation that the pictures do not have: something to be learned."""

    def __init__(self, seed: int, d: int = 24, each: int = 20):
        generator = torch.Generator().manual_seed(seed)
        self.text = F.normalize(torch.randn(8, d, generator=generator), dim=-1)
        centres = F.normalize(self.text + 1.5 * F.normalize(torch.randn(8, d, generator=generator), dim=-1), dim=-1)
        labels = torch.arange(8).repeat_interleave(each)
        images = centres[labels] + 0.35 * F.normalize(torch.randn(len(labels), d, generator=generator), dim=-1)
        # Every other picture, so that each class has as many in both.
        self.train = FeatureSet(images[::2] * 3, labels[::2], NAMES)
        self.test = FeatureSet(images[1::2] * 3, labels[1::2], NAMES)
        self.host = Host(self.encode, "{}")

    def encode(self, texts: list[str]) -> Tensor:
        return self.text[[NAMES.index(text) for text in texts]]


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


def test_mistakes_in_classes_and_shots_are_one_line() -> None:
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
    with pytest.raises(ValueError, match="--shots"):
        FewShotJob(model="m", data="world", shots=(4, 4))
    subject = Subject(0)
    head = build_head(subject.host, NAMES, 100.0, FewShotSettings(), PARTS, 0)
    nothing = FeatureSet(subject.test.features[:0], subject.test.labels[:0], NAMES)
    with pytest.raises(UserError, match="no test picture"):
        evaluate(head, subject.host, nothing)
    with pytest.raises(ValueError, match="a label for each of 3 pictures, got 2"):
        FeatureSet(torch.zeros(3, 4), torch.zeros(2), NAMES)


def test_training_lowers_the_loss_and_repeats_exactly(seed: int) -> None:
    subject, settings = Subject(seed), FewShotSettings(epochs=6, beta=0.5, lr=0.03)
    index = sample_shots(subject.train.labels, 6, 0, range(8), NAMES)
    scores = []
    for run in (0, 0, 1):
        head = build_head(subject.host, NAMES, 20.0, settings, PARTS, run)
        losses = train(head, subject.host, subject.train, index, range(8), NAMES, settings, run)
        assert set(losses) >= {"L_e", "L_h", "L_va", "L_at", "hhl/skipped", "total"}
        scores.append((losses["total"], head.attributes.detach().clone()))
    assert scores[0][0] == scores[1][0] and torch.equal(scores[0][1], scores[1][1])
    assert scores[2][0] != scores[0][0]
    head = build_head(subject.host, NAMES, 20.0, settings, PARTS, 0)
    first = train(head, subject.host, subject.train, index, range(8), NAMES, FewShotSettings(epochs=1, beta=0.5), 0)
    assert scores[0][0] < 0.9 * first["total"]


def test_scores_are_counted_among_the_given_classes(seed: int) -> None:
    subject, settings = Subject(seed), FewShotSettings(beta=0.0)
    head = build_head(subject.host, NAMES, 100.0, settings, PARTS, 0)
    classes = [1, 4, 6]
    score = evaluate(head, subject.host, subject.test, classes)
    kept = torch.isin(subject.test.labels, torch.tensor(classes))
    cosine = F.normalize(subject.test.features[kept], dim=-1) @ subject.text[classes].T
    truth = torch.tensor([classes.index(int(label)) for label in subject.test.labels[kept]])
    assert score.num_pictures == int(kept.sum())
    assert score.zero_shot == pytest.approx(float((cosine.argmax(1) == truth).float().mean()))
    assert score.cosine == score.zero_shot  # no refinement: nothing but the distance could differ
    assert 0.01 < score.slope_ratio < 0.03
    assert head.hyp_weight == 1.0  # put back


def test_a_head_of_base_classes_answers_about_new_ones(seed: int) -> None:
    subject, settings = Subject(seed), FewShotSettings(epochs=2)
    base, new = split_base_new(8)
    names = [NAMES[i] for i in base]
    head = build_head(subject.host, names, 50.0, settings, PARTS, 0)
    index = sample_shots(subject.train.labels, 4, 0, base, NAMES)
    train(head, subject.host, subject.train, index, base, names, settings, 0)
    score = evaluate(head, subject.host, subject.test, new)
    assert score.num_pictures == int((subject.test.labels >= 4).sum()) and 0 <= score.top1 <= 1


class StubEncoder:
    """What a row needs of an encoder: texts and a scale."""

    name, width, pixels, device = "stub", 24, None, torch.device("cpu")

    def __init__(self, subject: Subject):
        self.model, self.encode_text, self.logit_scale = nn.Linear(1, 1), subject.encode, torch.tensor(30.0)


def test_new_classes_are_seen_in_no_part_of_training(seed: int, tmp_path: Path) -> None:
    subject = Subject(seed)
    base, new = split_base_new(8)
    subject.train.features[subject.train.labels >= 4] = torch.nan  # whoever looks at them fails
    job = FewShotJob(
        model="stub", data="-", protocol="base-to-new", epochs=1, attribute_lr=1e-8, lr=1e-8, template="{}",
        shots=(4,), cache=tmp_path / "cache", out=tmp_path / "out",
    )  # fmt: skip
    setup = FewShotSetup(StubEncoder(subject), subject.train, subject.test, {}, NAMES)  # type: ignore[arg-type]
    row = run_one(job, setup, "full", PARTS, 4, 3)
    head, _, about = load_head(tmp_path / "out" / "heads" / "full-4-3.safetensors")
    assert about["classes"] == list(NAMES[:4]) and head.logit_scale == 30
    begun = LatentHierarchyHead.for_classes(subject.text[:4], seed=3)
    torch.testing.assert_close(head.attributes.detach(), begun.attributes.detach(), rtol=0, atol=1e-6)
    # Each half among its own classes, on the test pictures.
    assert row["base"] == evaluate(head, subject.host, subject.test, base).top1
    assert row["new"] == evaluate(head, subject.host, subject.test, new).top1
    assert row["h"] == pytest.approx(harmonic_mean(row["base"], row["new"]))


def test_rates_of_host_and_attributes(seed: int) -> None:
    """The first epoch of prompts at 1e-5, then a cosine; attributes have a rate of their own."""
    assert [_rate(2.0, epoch, 5, warm=True) for epoch in (0.0, 0.9, 1.0)] == [1e-5, 1e-5, 2.0]
    assert _rate(2.0, 3.0, 5, warm=True) == pytest.approx(1.0) and _rate(1e-7, 0.0, 5, warm=True) == 1e-7
    assert _rate(2.0, 0.0, 5, warm=False) == 2.0 and _rate(2.0, 2.5, 5, warm=False) == pytest.approx(1.0)

    class Shifted(Host):
        def __init__(self, encode: Callable[[list[str]], Tensor]) -> None:
            super().__init__(encode, "{}")
            self.shift = nn.Parameter(torch.zeros(24))

        def text_features(self, names: Sequence[str]) -> Tensor:
            return super().text_features(names) + self.shift

    subject, settings = Subject(seed), FewShotSettings(epochs=1, lr=1e-12, attribute_lr=0.1)
    host = Shifted(subject.encode)
    head = build_head(host, NAMES, 20.0, settings, PARTS, 0)
    before = head.attributes.detach().clone()
    index = sample_shots(subject.train.labels, 4, 0, range(8), NAMES)
    train(head, host, subject.train, index, range(8), NAMES, settings, 0)
    assert host.shift.abs().max() < 1e-8 and (head.attributes - before).abs().max() > 1e-5


def test_a_head_is_the_same_after_a_file(seed: int, tmp_path: Path) -> None:
    subject, settings = Subject(seed), FewShotSettings(epochs=1, lift="learned_scale", lca_sampling="argmin", k=2)
    head = build_head(subject.host, NAMES, 50.0, settings, ("atr", "va"), 7)
    index = sample_shots(subject.train.labels, 4, 0, range(8), NAMES)
    train(head, subject.host, subject.train, index, range(8), NAMES, settings, 0)
    save_head(head, tmp_path / "head.safetensors", {"context": torch.ones(2)}, {"classes": list(NAMES)})
    loaded, host, about = load_head(tmp_path / "head.safetensors")
    assert loaded.settings() == head.settings() and about == {"classes": list(NAMES)}
    assert torch.equal(host["context"], torch.ones(2))
    with torch.no_grad():
        assert torch.equal(loaded(subject.test.features, subject.text)[0], head(subject.test.features, subject.text)[0])
    save_tensors(tmp_path / "other.safetensors", {"x": torch.ones(1)})
    with pytest.raises(UserError, match="holds no head"):
        load_head(tmp_path / "other.safetensors")


def test_parts_that_are_off_have_no_loss_and_nothing_at_all_is_the_host_alone(seed: int) -> None:
    subject, settings = Subject(seed), FewShotSettings(epochs=1)
    index = sample_shots(subject.train.labels, 4, 0, range(8), NAMES)
    for parts, present in (
        (("atr",), {"L_e"}),
        (("atr", "va"), {"L_e", "L_va"}),
        (("at", "h"), {"L_e", "L_h", "L_at"}),
    ):
        head = build_head(subject.host, NAMES, 50.0, settings, parts, 0)
        losses = train(head, subject.host, subject.train, index, range(8), NAMES, settings, 0)
        assert {name for name in losses if name.startswith("L_")} == present
        assert (head.beta == 0) == ("atr" not in parts)
    unused = build_head(subject.host, NAMES, 50.0, settings, ("va", "at"), 0).eval()
    with torch.no_grad():
        answers = unused(subject.test.features, subject.text)[0]
        start = unused.attributes.clone()
        with torch.enable_grad():
            train(unused, subject.host, subject.train, index, range(8), NAMES, settings, 0)
        # Attributes learn, but without the refinement no answer depends on them.
        assert not torch.equal(unused.attributes, start)
        assert torch.equal(unused(subject.test.features, subject.text)[0], answers)
    head = build_head(subject.host, NAMES, 50.0, settings, (), 0)
    before = head.attributes.detach().clone()
    assert train(head, subject.host, subject.train, index, range(8), NAMES, settings, 0) == {}
    score = evaluate(head, subject.host, subject.test)
    assert score.top1 == score.zero_shot and score.slope_ratio == 0 and torch.equal(head.attributes, before)
    with pytest.raises(ValueError, match="unknown parts hhl"):
        build_head(subject.host, NAMES, 50.0, settings, ("hhl",), 0)


def test_attributes_may_begin_at_words(seed: int) -> None:
    subject, settings = Subject(seed), FewShotSettings(attribute_words=("class 3", "class 5"))
    head = build_head(subject.host, NAMES[:2], 50.0, settings, PARTS, 0)
    torch.testing.assert_close(head.attributes.detach(), subject.text[[3, 5]])
    assert head.attribute_names == ("class 3", "class 5")
    with pytest.raises(ValueError, match="2 attribute words make 2 attributes, but --num-attributes is 3"):
        FewShotSettings(attribute_words=("fur", "wing"), num_attributes=3)


def test_the_ablation_has_each_part_on_and_off() -> None:
    variants = FewShotJob(model="m", data="world", ablate=True).variants()
    for part in PARTS:
        assert variants[f"only {part}"] == (part,)
        assert set(variants[f"without {part}"]) == set(PARTS) - {part}
    assert variants["full"] == PARTS and variants["host alone"] == () == variants["zero-shot"]
    assert list(FewShotJob(model="m", data="world").variants()) == ["zero-shot", "full"]


def test_the_table_gives_mean_and_spread_and_says_the_ratio() -> None:
    rows = [
        {
            "variant": "full",
            "shots": 4,
            "seed": s,
            "base": b,
            "new": 0.5,
            "h": 0.6,
            "cosine only": b,
            "slope_ratio": 0.016,
        }
        for s, b in ((0, 0.7), (1, 0.8), (2, 0.9))
    ]
    summary = summarise(rows)
    assert summary[0]["base"]["mean"] == pytest.approx(0.8) and summary[0]["base"]["sd"] == pytest.approx(0.1)
    lines = "\n".join(table({"rows": rows, "summary": summary}))
    assert "80.0 ± 10.0" in lines and "50.0 ± 0.0" in lines
    assert "hyperbolic to cosine slope: 0.0160" in lines and "1.6%" in lines
    assert summarise(rows[:1])[0]["base"]["sd"] is None


@pytest.mark.parametrize(
    ("data", "classes"),
    [("pets:oxford-pets", 37), ("tiny-imagenet:tiny-imagenet-wordnet", 200), ("arrays:cifar10", 10)],
)
def test_classes_of_real_data_can_be_told_apart_by_their_names(data: str, classes: int, shared_data: Path) -> None:
    name, _, folder = data.partition(":")
    dataset = build_dataset(DataSettings(name=name, root=shared_data / folder), "val")  # type: ignore[arg-type]
    names = class_names(dataset.classes)
    assert len(names) == classes and not any("." in name or "_" in name for name in names)

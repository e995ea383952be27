"""From a run's folder to its page: the model, its answers on the validation pictures, its clusters, its curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.data.pictures.single import fit, model_input, read_picture
from hyptree.errors import UserError
from hyptree.explore.draw.scenes import Answer, Scene, class_path
from hyptree.explore.pages import himapper_page
from hyptree.explore.pages.run_page import Answers, PageRecord, run_page
from hyptree.models.clusters import BlockClusters, can_cluster, read_clusters
from hyptree.progress import say
from hyptree.tree import Tree

if TYPE_CHECKING:
    from hyptree.data.settings import DataSettings

BATCH = 256
SHOWN_PIXELS = 256
"""Pictures of the built-in world are drawn again at this size, to be looked at."""
MOST = 2000
"""Pictures of a set that are looked at."""


@dataclass
class Subject:
    """A model to look into, and what is known about it."""

    model: Any
    name: str
    size: int
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    classes: Sequence[str] = ()
    tree: Tree | None = None
    task: str | None = None
    """Task of the run it comes from; None for fresh weights."""
    data: DataSettings | None = None
    """Where that run's pictures are."""
    crop_pct: float = 1.0
    """Share of the resized picture's side that the run's evaluation sees."""

    def see(self, picture: np.ndarray) -> np.ndarray:
        """(size, size, 3) of a picture as the run's evaluation sees it."""
        seen = fit(picture, round(self.size / self.crop_pct))
        start = (len(seen) - self.size) // 2
        return np.ascontiguousarray(seen[start : start + self.size, start : start + self.size])

    def input(self, pictures: Sequence[np.ndarray]) -> Any:
        return model_input(self.model, pictures, self.mean, self.std)

    @property
    def has_queries(self) -> bool:
        """Whether it has a Hi-Mapper, a tree of queries in place of clusters."""
        return himapper_page.find_himapper(self.model) is not None

    @property
    def has_classes(self) -> bool:
        """Whether its answer is a class of the whole picture, unlike that of a run with a dense head."""
        return self.task in (None, "classify")

    def require_clusters(self) -> None:
        if not can_cluster(self.model) and not self.has_queries:
            if not self.has_classes:
                raise UserError(
                    f"a run of the task {self.task} cannot be explained: its head shows no clusters; give a run "
                    "of the task classify; hyptree eval gives the numbers of this one"
                )
            raise UserError(
                f"{self.name} cannot be explained: it does not cluster; give a run of an HCFormer or a Hi-Mapper, or a "
                "name, e.g. hcformer_nano"
            )


# ---- answers ---------------------------------------------------------------------------------------------------------


def probabilities(subject: Subject, pictures: Sequence[np.ndarray]) -> np.ndarray:
    """(n, C) probabilities of the classes."""
    import torch

    batches = []
    for start in range(0, len(pictures), BATCH):
        with torch.no_grad():
            answer = subject.model(subject.input(pictures[start : start + BATCH]))
        logits = getattr(answer, "logits", answer)  # a Hi-Mapper gives more than these
        batches.append(logits.float().softmax(-1).cpu().numpy())
    return np.concatenate(batches)


def classify_all(subject: Subject, pictures: Sequence[np.ndarray], labels: np.ndarray) -> tuple[np.ndarray, Answers]:
    """Probabilities of a labelled set, and the confusion of its classes with some pictures to look at."""
    p = probabilities(subject, pictures)
    guess = p.argmax(1)
    confusion = np.zeros((len(subject.classes), len(subject.classes)), np.int64)
    np.add.at(confusion, (labels, guess), 1)
    wrong, right = np.flatnonzero(guess != labels), np.flatnonzero(guess == labels)
    shots = []
    for i in [*_different(wrong, labels, 16), *_different(right, labels, 8)]:
        answer = make_answer(subject, p[i], int(labels[i]))
        if answer is not None:
            shots.append((pictures[i], answer))
    return p, Answers(confusion, subject.classes, subject.tree, shots)


def make_answer(subject: Subject, p: np.ndarray, label: int | None = None, num_best: int = 3) -> Answer | None:
    """The best answers of one picture; None for a model whose classes have no names."""
    if len(subject.classes) != len(p):
        return None
    best = np.argsort(-p, kind="stable")[:num_best]
    paths = [class_path(subject.tree, int(k), subject.classes) for k in best]
    truth = None if label is None else class_path(subject.tree, label, subject.classes)
    return Answer(paths, [float(p[k]) for k in best], truth)


def _different(index: np.ndarray, labels: np.ndarray, count: int) -> list[int]:
    """The first of each class, then the second of each, and so on."""
    seen: dict[int, int] = {}
    turn = []
    for i in index.tolist():
        turn.append(seen.get(int(labels[i]), 0))
        seen[int(labels[i])] = turn[-1] + 1
    return [index.tolist()[k] for k in np.argsort(turn, kind="stable")[:count]]


# ---- pages -----------------------------------------------------------------------------------------------------------


def page_of_pictures(subject: Subject, images: Sequence[Any], out: Path | str) -> Path:
    """A page on pictures of one's own."""
    subject.require_clusters()
    pictures = [subject.see(read_picture(image)) for image in images]
    names = [
        Path(image).name if isinstance(image, (str, Path)) else f"picture {k}" for k, image in enumerate(images, 1)
    ]
    p = probabilities(subject, pictures) if subject.has_classes else None
    scenes = [
        Scene(picture, name, own, None if p is None else make_answer(subject, p[k]))
        for k, (picture, name, own) in enumerate(zip(pictures, names, _clusters(subject, pictures), strict=True))
    ]
    fresh = "" if subject.task is not None else " Its weights are fresh: nothing was learned yet."
    did = "read" if subject.has_queries else "clustered"
    lead = f"How {subject.name} {did} {len(scenes)} picture{'s' if len(scenes) > 1 else ''}.{fresh}"
    record = PageRecord("What the model sees", lead, scenes, footer="Written by hyptree explain.")
    return run_page(out, _with_queries(subject, record))


def _clusters(subject: Subject, pictures: Sequence[np.ndarray]) -> list[list[BlockClusters]]:
    """The clusters of every picture; none for a Hi-Mapper, which has a tree of queries instead."""
    if subject.has_queries:
        return [[] for _ in pictures]
    return read_clusters(subject.model, subject.input(pictures))


def _with_queries(subject: Subject, record: PageRecord) -> PageRecord:
    """The record of a Hi-Mapper with the sections on its tree in place of an explorer; any other as it is."""
    if not subject.has_queries:
        return record
    mapper = himapper_page.find_himapper(subject.model)
    out = mapper.inspect(subject.input([scene.picture for scene in record.scenes]))
    alarm = himapper_page.even_maps(out)
    if alarm:
        say(f"warning: {alarm}")
    sections = himapper_page.mapper_sections(record.scenes, out, record.metrics)
    rest = himapper_page.without_tree(record.metrics)  # the other charts must not take them for accuracies
    return replace(record, scenes=(), sections=sections, metrics=rest, style=himapper_page.STYLE)


def page_of_run(
    subject: Subject,
    run: Path | str,
    out: Path | str,
    *,
    title: str | None = None,
    lead: str | None = None,
    num_pictures: int = 8,
    num_measured: int = 32,
    footer: str = "Written by hyptree explain.",
) -> tuple[Path, dict[str, float]]:
    """The page of a run on validation pictures of its own data, and the numbers at its top.

    Of ``num_measured`` pictures clusters are measured against masks, where the data has masks.
    """
    from hyptree.data.build import build_dataset
    from hyptree.runs import RunFolder

    subject.require_clusters()
    assert subject.data is not None
    dataset = build_dataset(subject.data, "val")
    # Of very many pictures some, evenly from end to end: sets on disk are in the order of classes.
    places = np.linspace(0, len(dataset) - 1, min(len(dataset), MOST)).round().astype(np.int64)
    pictures, labels = _pictures_at(dataset, places, subject)
    numbers: dict[str, float] = {}
    answers = None
    p = None
    chosen = list(range(min(num_pictures, len(pictures))))
    if labels is not None and subject.classes and subject.has_classes:
        p, answers = classify_all(subject, pictures, labels)
        numbers["leaf accuracy"] = answers.accuracy()
        if subject.tree is not None:
            levels = range(int(subject.tree.depth.max()) - 1, 0, -1)
            for depth, name in zip(levels, ("family accuracy", "group accuracy"), strict=False):
                numbers[name] = answers.accuracy(depth)
        chosen = _choose(p.argmax(1), labels, num_pictures)
    scenes, region_names = _scenes(subject, dataset, places, pictures, labels, p, chosen)
    rows = [] if subject.has_queries else _measured(subject, dataset, num_measured)
    metrics = RunFolder(run).read_metrics()
    seconds = max((float(row.get("time", 0)) for row in metrics), default=0.0)
    count = sum(weights.numel() for weights in subject.model.parameters())
    shown = {name: f"{value:.1%}" for name, value in numbers.items()}
    if numbers and len(places) < len(dataset):
        shown["measured on"] = f"{len(places):,} of {len(dataset):,} pictures"
    shown |= {"parameters": f"{count / 1e6:.2f} M", "training time": clock(seconds)}
    title = title or ("Where a Hi-Mapper looks" if subject.has_queries else "What an HCFormer sees")
    lead = lead or (
        f"{subject.name}: a vision model whose last features are read by a tree of queries. Here is where each of them "
        f"looked in {len(scenes)} pictures the model was not trained on, and where they lie in the tree's own space."
        if subject.has_queries
        else f"{subject.name}, a vision model that works by clustering: here is every cluster it made of {len(scenes)} "
        "pictures it was not trained on, the tree they form, and where they lie in hyperbolic space."
    )
    record = PageRecord(title, lead, scenes, region_names, shown, metrics, rows, answers, footer)
    return run_page(out, _with_queries(subject, record)), numbers


def clock(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _pictures_at(dataset: Any, places: np.ndarray, subject: Subject) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Pictures (size, size, 3) of the samples at these places, and their labels where all have one."""
    if hasattr(dataset, "images") and hasattr(dataset, "labels"):
        images = dataset.images()[places].permute(0, 2, 3, 1)
        return [subject.see(image) for image in np.asarray(images)], np.asarray(dataset.labels()[places])
    samples = [dataset[int(k)] for k in places]
    pictures = [subject.see(np.asarray(sample.image.permute(1, 2, 0))) for sample in samples]
    labels = [sample.label for sample in samples]
    return pictures, None if any(label is None for label in labels) else np.array(labels)


def _choose(guess: np.ndarray, labels: np.ndarray, count: int) -> list[int]:
    """Pictures of different classes, about one in four of them wrong where there are wrong ones."""
    wrong = _different(np.flatnonzero(guess != labels), labels, count)
    right = _different(np.flatnonzero(guess == labels), labels, count)
    num_wrong = max(min(len(wrong), count // 4), count - len(right))
    return right[: count - num_wrong] + wrong[:num_wrong]


def _scenes(
    subject: Subject,
    dataset: Any,
    places: np.ndarray,
    pictures: Sequence[np.ndarray],
    labels: np.ndarray | None,
    p: np.ndarray | None,
    chosen: Sequence[int],
) -> tuple[list[Scene], Sequence[str]]:
    from hyptree.data.world import World

    clusters = _clusters(subject, [pictures[i] for i in chosen])
    region_names: Sequence[str] = getattr(dataset, "part_classes", ()) or dataset.semantic_classes
    kind = "parts" if getattr(dataset, "part_classes", ()) else "semantic"
    shown: Sequence[np.ndarray | None] = [None] * len(chosen)
    if isinstance(dataset, World) and dataset.size < SHOWN_PIXELS:  # which can draw the same scenes in more pixels
        shown = world_pictures(dataset, places[chosen], SHOWN_PIXELS)
    scenes = []
    for i, own, finer in zip(chosen, clusters, shown, strict=True):
        sample = dataset[int(places[i])]
        regions = getattr(sample, kind)
        if regions is not None:
            regions = regions.numpy().astype(np.int64)
            regions[regions >= len(region_names)] = -1
            if regions.shape != pictures[i].shape[:2]:
                regions = None
        name = sample.captions[2] if len(sample.captions) > 2 else sample.id
        answer = None if p is None else make_answer(subject, p[i], None if labels is None else int(labels[i]))
        scenes.append(Scene(pictures[i], name, own, answer, regions, finer))
    return scenes, ["background" if name == "none" else name for name in region_names]


def world_pictures(world: Any, index: Any, size: int) -> list[np.ndarray]:
    """(size, size, 3) uint8 pictures of the world at these places; the dataset would draw their neighbours too."""
    from hyptree.data.world.render import render
    from hyptree.data.world.scene import picture_keys, sample_scenes

    scenes = sample_scenes(picture_keys(world.seed, world.split, np.asarray(index)))
    return list(np.ascontiguousarray(render(scenes, size).image.transpose(0, 2, 3, 1)))


def _measured(subject: Subject, dataset: Any, count: int) -> list[dict[str, Any]]:
    """Scores of each stage's last block against masks, beside a grid and SLIC; empty where they cannot be had."""
    from hyptree.evaluate.pictures.interpretability import interpretability_table

    if not count or not dataset.semantic_classes:
        return []
    try:
        rows = interpretability_table(subject.model, dataset, num_images=count, mean=subject.mean, std=subject.std)
    except UserError as error:  # no masks, pictures of many sizes, or scikit-image is not there
        say(f"the page does without scores of clusters: {error}")
        return []
    last = {row["stage"]: row["block"] for row in rows}
    return [row for row in rows if row["level"] == "patch" and row["block"] == last[row["stage"]]]

"""What hierarchy is in an encoder: ``hierarchy_report`` gives it as JSON, ``report_lines`` as a table.

Every tau_d stands beside the word count of the captions, which alone scores 0.89 on HierarCaps, and beside the order of
the two most general levels, where length says little; every angle beside the plain cosine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyptree.data.hierarchies.hierarcaps import (
    Chain,
    first_of_each_image,
    image_sources,
    read_hierarcaps,
    read_images,
    without_images_of,
)
from hyptree.data.hierarchies.hyperlex import read_hyperlex
from hyptree.errors import UserError, require_one_of
from hyptree.tables import without_nan
from hyptree.vlm.radial.coarse import coarse_classes, coarse_recall, words_of
from hyptree.vlm.radial.retrieval import TEMPLATE, class_embeddings, zero_shot_accuracy
from hyptree.vlm.radial.suites import Texts, chain_angles, chain_order, graded_entailment, picture_chains

SUITES = ("hierarcaps-text", "hyperlex", "world-text", "hierarcaps-images", "world-images", "tiny-imagenet", "cifar10")
"""Those that end in -text and hyperlex need a text encoder alone, the others pictures too."""

TINY_IMAGENET_CUT = (
    ["mammal.n.01", "bird.n.01", "reptile.n.01", "amphibian.n.03", "invertebrate.n.01", "clothing.n.01", "device.n.01"]
    + ["container.n.01", "conveyance.n.03", "equipment.n.01", "furnishing.n.02", "structure.n.01", "food.n.01"]
    + ["food.n.02", "geological_formation.n.01"]
)
"""Nodes of WordNet that are the coarse classes of Tiny-ImageNet; the nearest one above a class counts."""

WORLD_PICTURES = 1000


def hierarchy_report(
    encoder: Any,
    suite: Sequence[str] = ("hierarcaps-text", "hyperlex"),
    images: Any = None,
    *,
    data: Path | str | None = None,
    geometry: str | None = None,
    curvature: float | None = None,
    limit: int | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The hierarchy in an encoder, measured: one entry per suite, all plain numbers, None for what has no value.

    The root is embedded anew, by the encoder as it is now.

    Args:
        encoder: of ``load_encoder``, or a function from texts to (n, d) embeddings for the suites of text.
        suite: some of ``SUITES``.
        images: for hierarcaps: (n, d) embeddings of the test pictures in the order of the file, or the file or folder
            of the pictures. Given, they are measured whether or not the suite names hierarcaps-images.
        data: folder that holds hierarcaps/, hyperlex/, tiny-imagenet-wordnet/ and cifar10/.
        geometry: chord, geodesic or lorentz; by default lorentz for an encoder with a curvature, chord for the others.
        curvature: of lorentz; by default the encoder's own, else 1.
        limit: only so many chains, pairs or pictures of each suite, for a quick look.
        say: told what is measured now.
    """
    suite = check_request(suite, images, data=data, curvature=curvature, limit=limit)
    texts = Texts.of(encoder, geometry, curvature)
    report: dict[str, Any] = texts.about() | {"torch": torch.__version__.split("+")[0], "suites": {}}
    for name in suite:
        if say is not None:
            say(f"measuring {name}")
        read, measure = _SUITES[name]
        report["suites"][name] = without_nan(measure(texts, encoder, read(data, images, limit)))
    return report


def check_request(
    suite: Sequence[str],
    images: Any = None,
    *,
    data: Path | str | None = None,
    curvature: float | None = None,
    limit: int | None = None,
) -> list[str]:
    """The suites of a report, after a look at what they need; no encoder has to be loaded for that."""
    suite = [suite] if isinstance(suite, str) else list(suite)
    for name in suite:
        require_one_of("suite", name, SUITES)
    if limit is not None and limit < 1:
        raise UserError(f"limit must be 1 or more, got {limit}; leave it out to measure everything")
    if curvature is not None and not curvature > 0:
        raise UserError(f"curvature must be positive (it means -c), got {curvature}")
    if images is not None and "hierarcaps-images" not in suite:
        suite.append("hierarcaps-images")
    # Everything is read again where it is measured: little beside an encoder, and mistakes in files show here.
    for name in suite:
        _SUITES[name][0](data, images, limit)
    return suite


# ------------------------------------------------------------------------------------------------------------- suites


def _hierarcaps_chains(data: Any, images: Any, limit: int | None) -> tuple[list[Chain], list[Chain]]:
    test, expanded = (read_hierarcaps(_folder(data, "hierarcaps"), part) for part in ("test", "expanded"))
    # Chains of test pictures, one each: no training that drops the leaking rows has seen them.
    trainable = set(without_images_of(expanded, test))
    held_out = first_of_each_image(chain for chain in expanded if chain not in trainable)
    return test[:limit], held_out[:limit]


def _hierarcaps_pictures(data: Any, images: Any, limit: int | None) -> tuple[Any, list[Chain]]:
    test = read_hierarcaps(folder := _folder(data, "hierarcaps"), "test")[:limit]
    if isinstance(images, Tensor):
        return images[:limit], test
    where = folder if images is None else images
    image_sources(where, [chain.image for chain in test])
    return where, test


def _chains(texts: Texts, encoder: Any, chains: tuple[list[Chain], list[Chain]]) -> dict[str, Any]:
    """Order along the first chains, angles of the second ones."""
    return {**chain_order(texts, [chain.captions for chain in chains[0]]), "angles": chain_angles(texts, chains[1])}


def _hierarcaps_images(texts: Texts, encoder: Any, inputs: tuple[Any, list[Chain]]) -> dict[str, Any]:
    where, test = inputs
    if not isinstance(where, Tensor):
        where = _embed_pictures(encoder, read_images(where, [chain.image for chain in test]))
    return picture_chains(texts, where, [chain.captions for chain in test])


def _world_images(texts: Texts, encoder: Any, count: int) -> dict[str, Any]:
    from hyptree.data.world import World, class_tree

    world = World("val", num_images=count)
    rows = _embed_pictures(encoder, world.images())
    chains = [world[i].captions for i in range(len(world))]
    coarse = {}
    for name, depth in (("groups", 1), ("families", 2)):
        cut = coarse_classes(class_tree(), len(world.classes), depth)
        coarse[name] = coarse_recall(rows, world.labels(), cut, texts.raw, template="a {}", c=texts.own_c)
    zero_shot = _zero_shot(texts, rows, world.classes, world.labels(), "a {}")
    return {**picture_chains(texts, rows, chains), "zero_shot": zero_shot, "coarse": coarse}


def _tiny_imagenet(data: Any, images: Any, limit: int | None) -> tuple[Any, list[str]]:
    from hyptree.data.pictures.tiny_imagenet import TinyImageNet

    pictures = TinyImageNet(_folder(data, "tiny-imagenet-wordnet"), "val")
    known = set(pictures.tree.label or ()) if pictures.tree is not None else set()
    pictures.limit(limit)
    return pictures, [label for label in TINY_IMAGENET_CUT if label in known]


def _cifar10(data: Any, images: Any, limit: int | None) -> tuple[Any, int]:
    from hyptree.data.pictures.arrays import ArrayPictures

    pictures = ArrayPictures(_folder(data, "cifar10"), "test")
    pictures.limit(limit)
    return pictures, 1


def _labelled(texts: Texts, encoder: Any, inputs: tuple[Any, int | list[str]]) -> dict[str, Any]:
    """Zero-shot classification of labelled pictures, and of the coarse classes of a cut through their tree."""
    pictures, cut = inputs
    if pictures.tree is None:
        raise UserError(
            "these pictures come without a tree of classes; put classes.json or wordnet.is_a.txt beside them"
        )
    samples = [pictures[i] for i in range(len(pictures))]
    labels = [sample.label for sample in samples]
    rows = _embed_pictures(encoder, [sample.image.permute(1, 2, 0).numpy() for sample in samples])
    names = [words_of(name) for name in pictures.classes]
    # Two classes of one name cannot be told apart by it; a number keeps the list free of repeats.
    distinct = [name if names.count(name) == 1 else f"{name} {i}" for i, name in enumerate(names)]
    coarse = coarse_classes(pictures.tree, len(names), cut)
    recall = coarse_recall(rows, labels, coarse, texts.raw, c=texts.own_c)
    return {
        "zero_shot": _zero_shot(texts, rows, distinct, labels, TEMPLATE),
        "coarse": {f"{len(coarse.coarse)} above {len(coarse.fine)}": recall},
    }


def _zero_shot(texts: Texts, rows: Tensor, names: Sequence[str], labels: Any, template: str) -> dict[str, float]:
    classes = class_embeddings(texts.raw, names, (template,), normalize=texts.own_c is None)
    return zero_shot_accuracy(texts.comparable(rows), texts.comparable(classes), labels, c=texts.own_c)


_SUITES: dict[str, tuple[Callable[[Any, Any, int | None], Any], Callable[[Texts, Any, Any], dict[str, Any]]]] = {
    "hierarcaps-text": (_hierarcaps_chains, _chains),
    "hyperlex": (
        lambda data, images, limit: read_hyperlex(_folder(data, "hyperlex"))[:limit],
        lambda texts, encoder, pairs: graded_entailment(texts, pairs),
    ),
    "world-text": (
        lambda data, images, limit: limit or WORLD_PICTURES,
        lambda texts, encoder, count: _chains(texts, encoder, (world_chains("val", count),) * 2),
    ),
    "hierarcaps-images": (_hierarcaps_pictures, _hierarcaps_images),
    "world-images": (lambda data, images, limit: limit or WORLD_PICTURES, _world_images),
    "tiny-imagenet": (_tiny_imagenet, _labelled),
    "cifar10": (_cifar10, _labelled),
}
"""What reads the inputs of a suite (of data, images, limit), and what measures them."""


def world_chains(split: str = "train", num_chains: int = 1000, seed: int = 0) -> list[Chain]:
    """Chains of the built-in world: four captions and four contradictions of each picture; nothing is downloaded."""
    from hyptree.data.world import World

    world = World(split, num_images=num_chains, size=32, seed=seed)  # the words do not depend on the size
    samples = (world[i] for i in range(len(world)))
    return [Chain(sample.captions, sample.contradictions, sample.id) for sample in samples]


def _folder(data: Path | str | None, name: str) -> Path:
    if data is None:
        raise UserError(
            f"{name} needs its files: give the folder that holds {name}/ as data (--data on the command line)"
        )
    if not Path(data).is_dir():
        raise UserError(f"there is no folder {data}; expected the one that holds {name}/")
    return Path(data) / name if (Path(data) / name).is_dir() else Path(data)


def _embed_pictures(encoder: Any, pictures: Any, block: int = 256) -> Tensor:
    if not hasattr(encoder, "encode_images"):
        raise UserError("this encoder reads text alone; for pictures use a CLIP or SigLIP model")
    with torch.no_grad():
        parts = [encoder.encode_images(pictures[i : i + block]) for i in range(0, len(pictures), block)]
    return torch.cat(parts).float().cpu()

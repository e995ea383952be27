"""From what people give on the command line to the page of an encoder: texts, pictures, a head, or the world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hyptree.data.hierarchies.hierarcaps import Chain, read_hierarcaps
from hyptree.errors import UserError, as_user_error
from hyptree.explore.draw.latent_tree import LatentTree
from hyptree.explore.draw.radial import same_levels
from hyptree.explore.pages.encoder_page import EncodedPicture, write
from hyptree.explore.pages.run_pictures import world_pictures as drawn

NUM_LOOKED = 8
"""Pictures of the world for which captions are looked up."""
NUM_TREE = 40
"""Pictures of the world in its tree."""
SHOWN_PIXELS = 128


def page_of_encoder(
    model: str,
    out: Path | str,
    *,
    images: Sequence[Path] = (),
    texts: Sequence[str] = (),
    head: Path | None = None,
    pairs: Path | None = None,
    num_pictures: int | None = None,
    geometry: str | None = None,
    random_init: bool = False,
    make_head: Callable[[], Path] | None = None,
) -> Path:
    """The page of an encoder by its name, see ``hyptree explain --help``.

    Args:
        make_head: trains a head and gives its run, where nothing else is given to look at.
    """
    from hyptree.data.hierarchies.hyperlex import read_hyperlex
    from hyptree.data.pictures.single import read_picture
    from hyptree.vlm.encoders.encoder import load_encoder

    chains = read_texts(texts) if texts else None
    word_pairs = read_hyperlex(pairs) if pairs is not None else []
    looked = [EncodedPicture(read_picture(path), path.name) for path in images]
    encoder = load_encoder(model, random_init=random_init)
    sees = encoder.image_tower is not None
    if num_pictures is not None and (images or texts or not sees):
        raise UserError("--pictures counts pictures of the built-in world, of which none are shown here; leave it out")
    if not sees and (images or head):
        raise UserError(f"{model} reads text alone; leave {'the pictures' if images else '--head'} out")
    if sees and not images and not texts:
        looked = world_pictures(num_pictures or NUM_LOOKED)
    latent = None
    if head is not None:
        latent = head_latent(encoder, head, looked if images else ())
    elif make_head is not None and sees and not images and not texts:
        latent = head_latent(encoder, make_head(), ())
    says = "" if texts else "Captions are those of the built-in world" + (", and so are the pictures." if sees else ".")
    if not texts and images:
        says = "Captions are those of the built-in world."
    return write(
        *(encoder, out),
        chains=chains,
        pictures=looked,
        pairs=word_pairs,
        latent=latent,
        geometry=geometry,
        says=says,
        random_init=random_init,
    )


def read_texts(values: Sequence[str]) -> list[Chain]:
    """Chains from what ``--texts`` was given: files, folders of HierarCaps, or chains as they are.

    A file is HierarCaps (CSV, JSON), or has one chain in each line: ``an animal => a dog => a black dog``.

    Raises:
        UserError: neither a file nor a chain, an empty caption, or chains of different lengths.
    """
    chains: list[Chain] = []
    for value in values:
        path = Path(value)
        if "=>" in value:
            chains.append(_chain(value, f"--texts {value!r}"))
        elif path.is_dir():
            chains += read_hierarcaps(path, "test")
        elif not path.is_file():
            raise UserError(
                f"--texts {value!r}: no such file; give one, or a chain 'an animal => a dog => a black dog'"
            )
        elif path.suffix == ".txt":
            with as_user_error(str(path)):
                lines = path.read_text(encoding="utf-8").splitlines()
            chains += [_chain(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
        else:
            chains += read_hierarcaps(path)
    with as_user_error("--texts"):
        same_levels([chain.captions for chain in chains])
    return chains


def _chain(text: str, where: str) -> Chain:
    captions = tuple(part.strip() for part in text.split("=>"))
    if not all(captions):
        raise UserError(f"{where}: caption {captions.index('') + 1} is empty; write it or drop the chain")
    return Chain(captions)


# ---- the built-in world ----------------------------------------------------------------------------------------------


def world_pictures(count: int) -> list[EncodedPicture]:
    """Validation pictures of the built-in world, with the captions that are true of them."""
    from hyptree.data.world import World
    from hyptree.vlm.clip.world_text import captions_of

    world = World("val", num_images=count, size=SHOWN_PIXELS)
    words = [captions for captions, _ in captions_of(world)]
    return [
        EncodedPicture(picture, captions[2], frozenset(captions))
        for picture, captions in zip(drawn(world, range(count), SHOWN_PIXELS), words, strict=True)
    ]


# ---- the tree of a head ----------------------------------------------------------------------------------------------


def head_latent(encoder: Any, run: Path, looked: Sequence[EncodedPicture]) -> LatentTree:
    """The tree of a head that ``hyptree train`` left in a run of the task ``fewshot``, with these pictures in it.

    By default validation pictures of the run's own data, of classes that it learned.
    """
    import torch

    from hyptree.data.build import build_dataset
    from hyptree.vlm.encoders.features import labels_of
    from hyptree.vlm.lathadapter.fewshot import build_host, load_head

    head, learned, about = load_head(run, encoder)
    settings = about["settings"]
    host = build_host(settings, encoder, encoder.encode_text, 0)
    host.load_state_dict(learned)
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in about["numbers"].items())
    says = (
        f"A head with {head.num_attributes} attributes learned ({Path(run).name}) from {settings.shots} pictures of "
        f"each of {len(about['classes'])} classes; the encoder stayed as it is. When it was tested: {numbers}."
    )
    pictures, names, labels = [one.picture for one in looked], [one.name for one in looked], list[int]()
    if not looked:
        dataset = build_dataset(about["data"], "val")
        places = [i for i, label in enumerate(labels_of(dataset).tolist()) if label < len(about["classes"])]
        samples = [dataset[i] for i in places[:: max(1, len(places) // NUM_TREE)][:NUM_TREE]]
        pictures = [sample.image.permute(1, 2, 0).numpy() for sample in samples]
        names = [sample.captions[2] if sample.captions else sample.id for sample in samples]
        labels = [int(sample.label or 0) for sample in samples]
    with torch.no_grad():
        takes_pixels = hasattr(host, "to_image")
        inputs = encoder.preprocess(pictures).to(encoder.device) if takes_pixels else encoder.encode_images(pictures)
        images = host.image_features(inputs).float()
        tree = head.to_tree(host.text_features(about["classes"]).to(images), images, about["classes"], names)
    return LatentTree(tree, pictures, labels, says)

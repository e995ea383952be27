"""``hyptree vlm build-chains``: caption hierarchies from plain captions."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hyptree.cli.config import OnDevice
from hyptree.errors import UserError
from hyptree.files import full_disk_is_one_line, open_packed

if TYPE_CHECKING:
    from hyptree.data.hierarchies.caption_chains import Parts


@dataclass(kw_only=True)
class BuildChainsConfig(OnDevice):
    """``hyptree vlm build-chains``."""

    captions: Annotated[Path, "CAPTIONS"]
    """Text file with a caption per line, or a CSV with the columns caption and, if there are pictures, image_url."""
    wordnet: Path
    """Folder of WordNet's tables (noun_synsets.tsv.gz, noun_hypernyms.tsv.gz)."""
    out: Path = Path("chains.csv")
    """CSV to write, as radial.chains of a recipe reads it."""
    generator: str | None = None
    """Language model that writes more general captions: a folder of transformers or a name on the hub. [WordNet]"""
    entailment: str | None = None
    """Model of inference that checks them. [WordNet]"""
    contradictor: str | None = None
    """Language model that writes contradicting captions. [WordNet]"""
    threshold: float = 0.5
    """A caption counts as entailed from this probability on, and as contradicting below it."""
    limit: int | None = None
    """Only so many captions."""
    seed: int = 0
    """Of the choice of contradictions."""
    overwrite: bool = False
    """Replace the file."""


def build_chains(config: BuildChainsConfig) -> None:
    """Build chains from general to specific, with contradictions, from plain captions.

    Without models: noun phrases and WordNet. Each of the three parts can be a model.
    """
    from hyptree.data.hierarchies.caption_chains import build_chain, default_parts, write_chains
    from hyptree.data.hierarchies.wordnet import Nouns
    from hyptree.progress import progress_bar

    if config.out.exists() and not config.overwrite:
        raise UserError(f"{config.out} is there already; name another file with --out, or give --overwrite")
    rows = list(_captions(config.captions))[: config.limit]
    if not rows:
        raise UserError(f"{config.captions}: no captions in it")
    parts = _with_models(config, default_parts(Nouns.read(config.wordnet), config.seed))
    chains = []
    with progress_bar("captions", len(rows)) as shown:
        for caption, image in rows:
            chain = build_chain(caption, parts, image=image)
            if chain is not None:
                chains.append(chain)
            shown.advance()
    if not chains:
        raise UserError(f"{config.captions}: no caption of {len(rows)} has four levels; are they English sentences?")
    with full_disk_is_one_line(config.out.parent, "build again"):
        config.out.parent.mkdir(parents=True, exist_ok=True)
        write_chains(config.out, chains)
    print(f"{len(chains):,} of {len(rows):,} captions became chains, in {config.out}")


def _with_models(config: BuildChainsConfig, parts: Parts) -> Parts:
    parts = replace(parts, threshold=config.threshold, reject=config.threshold)
    if config.generator or config.contradictor or config.entailment:
        from hyptree.data.hierarchies.caption_models import InferenceEntailment, TextContradictor, TextGenerator

        config.find_device()  # whose name the models take, and the threads
        if config.generator:
            parts = replace(parts, generator=TextGenerator.load(config.generator, config.device))
        if config.contradictor:
            parts = replace(parts, contradictor=TextContradictor.load(config.contradictor, config.device))
        if config.entailment:
            parts = replace(parts, entailment=InferenceEntailment.load(config.entailment, config.device))
    return parts


def _captions(path: Path) -> Iterator[tuple[str, str]]:
    """Caption and picture of every row."""
    with open_packed(path) as file:
        if path.suffix != ".csv":
            for number, line in enumerate(file, 1):
                if not line.strip():
                    raise UserError(f"{path}, line {number}: the caption is empty; write it or drop the line")
                yield line.strip(), ""
            return
        reader = csv.DictReader(file)
        if "caption" not in (reader.fieldnames or ()):
            columns = ", ".join(reader.fieldnames or ()) or "nothing"
            raise UserError(f"{path}: expected a column 'caption', found {columns}")
        for row in reader:
            if not (row["caption"] or "").strip():
                raise UserError(f"{path}, line {reader.line_num}: the caption is empty; write it or drop the row")
            yield row["caption"], (row.get("image_url") or "").rsplit("/", 1)[-1]

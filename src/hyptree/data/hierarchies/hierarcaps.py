"""HierarCaps: captions of one picture in four levels, from general to specific, and contradicting ones beside them.

The files are read, never packaged. A level is split from the next by ``=>``; commas, quotes and case stay as they are.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hyptree.errors import UserError, shown
from hyptree.files import find_file, open_packed, path_inside

if TYPE_CHECKING:
    import numpy as np

NUM_LEVELS = 4
"""Levels of every chain."""

FILES = {
    "test": ("hierarcaps_test.csv",),
    "expanded": ("hierarcaps_test_expanded.csv.gz", "hierarcaps_test_expanded.csv"),
    "train": ("hierarcaps_train.csv.gz", "hierarcaps_train.csv"),
    "sample": ("hierarcaps_train_sample100.json",),
}
"""Names of the files of each part, in a folder."""

_EXPECTED = "expected HierarCaps: a CSV with a column 'captions' or with the columns 'positive' and 'negative'"


@dataclass(frozen=True)
class Chain:
    """Captions of one picture from general to specific.

    Attributes:
        captions: one per level.
        negatives: one per level that contradicts the picture, or none at all.
        image: file name of the picture, empty where none is known.
    """

    captions: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    image: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All captions, then all negatives."""
        return self.captions + self.negatives


def split_chain(text: str, where: str) -> tuple[str, ...]:
    """The captions of ``general => ... => specific``.

    Args:
        where: file and line, for the message.

    Raises:
        UserError: another number of levels, or a caption without a letter.
    """
    captions = tuple(part.strip() for part in text.split("=>"))
    if len(captions) != NUM_LEVELS:
        raise UserError(
            f"{where}: a chain has {NUM_LEVELS} captions joined by ' => ', got {len(captions)}: {shown(text)}"
        )
    for level, caption in enumerate(captions, 1):
        if not caption:
            raise UserError(
                f"{where}: the caption of level {level} is empty in {shown(text)}; write it or drop the row"
            )
    return captions


def read_hierarcaps(path: Path | str, part: str | None = None) -> list[Chain]:
    """The chains of a HierarCaps file (CSV, also gzipped, or the JSON sample), or of a part of its folder.

    Args:
        path: a file, or the folder of HierarCaps.
        part: in a folder: "test" (1000 curated chains), "expanded" (23,479 with negatives), "train" or "sample".

    Raises:
        UserError: no such file, not HierarCaps, an empty caption, or a chain of other than four levels.
    """
    path = _find(Path(path), part)
    with open_packed(path, hint=_EXPECTED) as file:
        return _read_json(file, path) if path.suffix == ".json" else _read_csv(file, path)


def without_images_of(chains: Iterable[Chain], held_out: Iterable[Chain]) -> list[Chain]:
    """The chains whose picture is not among those of ``held_out``: what may be trained on.

    4,709 of the 23,479 expanded chains describe a picture of the test set; 18,770 are left.
    """
    seen = {chain.image for chain in held_out if chain.image}
    return [chain for chain in chains if chain.image not in seen]


def first_of_each_image(chains: Iterable[Chain]) -> list[Chain]:
    """One chain per picture, the first, in order; of those without a picture every one."""
    first: dict[str | Chain, Chain] = {}
    for chain in chains:
        first.setdefault(chain.image or chain, chain)
    return list(first.values())


def distinct_texts(chains: Iterable[Chain]) -> list[str]:
    """Every caption and negative once, in the order of their first appearance."""
    return list(dict.fromkeys(text for chain in chains for text in chain.texts))


def read_images(path: Path | str, names: Sequence[str]) -> list[np.ndarray]:
    """(H, W, 3) uint8 pictures by file name, from an .npz file (jpeg, offsets, name) or a folder of picture files."""
    from hyptree.data.pictures.decoding import decode_image
    from hyptree.data.sample import BadSample

    sources = image_sources(path, names)
    try:
        return [decode_image(sources[name], name).permute(1, 2, 0).numpy() for name in names]
    except BadSample as error:
        raise UserError(f"{path}: {error}") from error


def image_sources(path: Path | str, names: Sequence[str]) -> dict[str, Path | bytes]:
    """Where each picture is, not decoded yet: a file, or its bytes.

    Raises:
        UserError: some picture is not there.
    """
    from hyptree.data.npz import open_npz, take, take_packed

    path = Path(path)
    sources: dict[str, Path | bytes] = {}
    if path.is_dir() and (path / "test_images_160.npz").is_file():
        path = path / "test_images_160.npz"
    if path.is_dir():
        files = {name: path_inside(path, name, "a picture of the captions") for name in names}
        sources = {name: file for name, file in files.items() if file.is_file()}
    elif not path.exists():
        raise UserError(f"there are no pictures at {path}; expected an .npz file or a folder")
    else:
        with open_npz(path) as archive:
            packed = take_packed(archive, "jpeg", "offsets", path)
            sources = {str(name): packed[i] for i, name in enumerate(take(archive, "name", path).tolist())}
    missing = [name for name in names if name not in sources]
    if missing:
        raise UserError(f"{path}: {len(missing)} of {len(names)} pictures are not there, the first is {missing[0]}")
    return sources


# -------------------------------------------------------------------------------------------------------------- files


def _find(path: Path, part: str | None) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"cannot read {path}: no such file")
        return path
    if part not in FILES:
        raise UserError(f"{path} is a folder: part must be one of {', '.join(FILES)}, got {part!r}")
    return find_file(path, "hierarcaps", FILES[part], "HierarCaps")


def _read_csv(file: IO[str], name: Path) -> list[Chain]:
    reader = csv.DictReader(file)
    columns = set(reader.fieldnames or ())
    if "captions" not in columns and not {"positive", "negative"} <= columns:
        names = ", ".join(map(str, reader.fieldnames or ())) or "nothing"
        raise UserError(f"{name}: {_EXPECTED}, found {shown(names)}")
    positive = "captions" if "captions" in columns else "positive"
    chains = []
    for row in reader:
        where = f"{name}, line {reader.line_num}"
        captions = split_chain(row[positive] or "", where)
        negatives = split_chain(row["negative"] or "", where) if positive == "positive" else ()
        chains.append(Chain(captions, negatives, (row.get("image_url") or "").rsplit("/", 1)[-1]))
    if not chains:
        raise UserError(f"{name}: no chains in it; {_EXPECTED}")
    return chains


def _read_json(file: IO[str], path: Path) -> list[Chain]:
    """Columns of a table as {"positive": {row: chain}, "negative": {row: chain}}."""
    try:
        values = json.load(file)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(values.get(key), dict) for key in ("positive", "negative")):
        raise UserError(f"{path}: {_EXPECTED}, or JSON with 'positive' and 'negative'")
    positive, negative = values["positive"], values["negative"]
    if set(positive) != set(negative):
        raise UserError(f"{path}: 'positive' and 'negative' must have the same rows")
    return [
        Chain(split_chain(positive[row], f"{path}, row {row}"), split_chain(negative[row], f"{path}, row {row}"))
        for row in sorted(positive, key=lambda row: (len(row), row))
    ]

"""Pictures with a class for every pixel: CamVid, Oxford Pets, ADE20K, in their usual folders or packed in one .npz."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyptree.data.npz import Packed, check_equal, check_labels, find_npz, name_some, open_npz, take, take_packed
from hyptree.data.pictures.decoding import Pictures, class_tree, decode_image, decode_labels, find_split, list_pictures
from hyptree.data.sample import IGNORE, BadSample, Sample, by
from hyptree.errors import UserError
from hyptree.files import path_inside

CAMVID_CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree"),
    *("signsymbol", "fence", "car", "pedestrian", "bicyclist"),
)
"""As the data set calls them, in small letters."""


class LabelMaps(Pictures):
    """Pictures with label maps; file ``i`` is a path or packed bytes, stored numbers become classes by a table.

    Args:
        images: the pictures.
        maps: their label maps, in the same order.
        names: what the samples are called.
        table: class of each stored number; a number beyond it, or one with None, makes the sample a bad one.
    """

    def __init__(
        self,
        images: Sequence[Path] | Packed,
        maps: Sequence[Path] | Packed,
        names: Sequence[str],
        table: Sequence[int | None],
        semantic_classes: Sequence[str],
        **options: Any,
    ):
        super().__init__(len(images), semantic_classes=semantic_classes, **options)
        self._images, self._maps, self._names = images, maps, names
        # As bytes: translating them takes a tenth of the time of indexing with a tensor.
        self._table = bytes(IGNORE if value is None else value for value in [*table, *[None] * (256 - len(table))])
        self._known = bytes(number for number, value in enumerate(table) if value is not None)

    def _read(self, i: int) -> Sample:
        id = str(self._names[i])
        stored = decode_labels(self._maps[i], id)
        image = decode_image(self._images[i], id, (stored.shape[0], stored.shape[1]))
        if stored.shape != image.shape[1:]:
            raise BadSample(id, f"picture of {by(image.shape)} pixels with a label map of {by(stored.shape)}")
        numbers = stored.numpy().tobytes()
        if wrong := numbers.translate(None, self._known):
            raise BadSample(id, f"its label map holds {max(wrong)}, not one of {len(self.semantic_classes)} classes")
        semantic = torch.frombuffer(bytearray(numbers.translate(self._table)), dtype=torch.uint8)
        return Sample(image, id, semantic=semantic.view(stored.shape))


class CamVid(LabelMaps):
    """Street scenes in 11 classes; 11 (and 255) in a label map means unlabelled.

    Read from an .npz file with ``{split}_jpeg``, ``{split}_jpeg_offsets``, ``{split}_png``, ``{split}_png_offsets`` and
    ``class_names``, or from a folder: ``{split}/images`` with ``{split}/labels``, ``images/{split}`` with
    ``labels/{split}``, or ``{split}`` with ``{split}annot``. A ``classes.txt`` beside them names other classes, one per
    line.
    """

    def __init__(self, root: Path | str, split: str = "train"):
        root = Path(root)
        images: Sequence[Path] | Packed
        maps: Sequence[Path] | Packed
        if (path := find_npz(root)) is not None:
            with open_npz(path) as archive:
                images, maps, names, _ = _take_pairs(archive, split, path)
                classes = [str(c).lower() for c in take(archive, "class_names", path).tolist()]
        else:
            images, maps = _pair_folders(root, split)
            names = [path.relative_to(root).as_posix() for path in images]
            listed = root / "classes.txt"
            classes = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else list(CAMVID_CLASSES)
            classes = [name.strip() for name in classes if name.strip()]
        if classes and classes[-1].lower().startswith(("unlabel", "void")):
            classes.pop()
        super().__init__(images, maps, names, _table(len(classes), unlabelled=len(classes)), classes)


class ADE20K(LabelMaps):
    """ADE20K for scene parsing (ADEChallengeData2016): 150 classes, 0 in a label map means other.

    The folder holds ``images/{training,validation}``, ``annotations/{training,validation}`` and ``objectInfo150.txt``,
    from which the names come.
    """

    def __init__(self, root: Path | str, split: str = "train"):
        root = Path(root)
        if (root / "ADEChallengeData2016").is_dir():
            root = root / "ADEChallengeData2016"
        images, maps = _pair_folders(root, split, labels="annotations")
        classes = _ade_names(root / "objectInfo150.txt")
        names = [path.relative_to(root).as_posix() for path in images]
        table = [IGNORE, *range(len(classes)), *[None] * (254 - len(classes)), IGNORE]
        super().__init__(images, maps, names, table, classes)


class Pets(LabelMaps):
    """Oxford-IIIT Pets: 37 breeds under 2 species to classify; background, cat and dog to segment, borders ignored.

    Read from an .npz file with ``{trainval,test}_{jpeg,jpeg_offsets,png,png_offsets,breed,species,name}``,
    ``breed_names`` and ``species_names``, or from the original folder with ``images/``, ``annotations/trimaps/``,
    ``annotations/trainval.txt`` and ``annotations/test.txt``. ``val`` is the official test set.
    """

    def __init__(self, root: Path | str, split: str = "train"):
        root = Path(root)
        images: Sequence[Path] | Packed
        maps: Sequence[Path] | Packed
        if (path := find_npz(root)) is not None:
            with open_npz(path) as archive:
                images, maps, names, name = _take_pairs(archive, split, path)
                classes = [str(breed) for breed in take(archive, "breed_names", path).tolist()]
                kinds = [str(kind) for kind in take(archive, "species_names", path).tolist()]
                breeds = check_labels(take(archive, f"{name}_breed", path), len(classes), f"{path}: {name}_breed")
                species = check_labels(take(archive, f"{name}_species", path), len(kinds), f"{path}: {name}_species")
            counts = {"pictures": len(images), "breeds": len(breeds), "species": len(species)}
            check_equal(f"{path}, split {name}", counts)
        else:
            names, breeds, species = _read_pet_list(root, "trainval" if split == "train" else "test")
            classes, kinds = _breed_names(root), ["cat", "dog"]
            breeds = check_labels(breeds, len(classes), f"{root}: breeds")
            images = [path_inside(root / "images", f"{name}.jpg", f"{root}/annotations") for name in names]
            maps = [root / "annotations" / "trimaps" / f"{name}.png" for name in names]
        self._breeds, self._species = breeds, species
        kind_of = dict(zip(breeds.tolist(), species.tolist(), strict=True))
        # A small selection may lack a breed; the authors write cats with a capital letter and dogs without.
        paths = [["pet", kinds[kind_of.get(i, not name[0].isupper())], name] for i, name in enumerate(classes)]
        # Trimaps say 1 pet, 2 background, 3 border; 1 becomes the species when a sample is read.
        super().__init__(
            *(images, maps, names, [None, 1, 0, IGNORE], ["background", *kinds]),
            classes=classes,
            tree=class_tree(paths),
        )

    def _read(self, i: int) -> Sample:
        sample = super()._read(i)
        assert sample.semantic is not None, "LabelMaps gives it"
        sample.semantic[sample.semantic == 1] = int(self._species[i]) + 1
        sample.label = int(self._breeds[i])
        return sample

    def read_picture(self, index: int) -> Sample:
        """Without the label map, which takes four times as long to read as the picture."""
        i = int(self._kept[index])
        id = str(self._names[i])
        return Sample(decode_image(self._images[i], id), id, label=int(self._breeds[i]))


# ------------------------------------------------------------------------------------------------------------- helpers


def _table(num_classes: int, unlabelled: int) -> list[int | None]:
    """Stored numbers are classes; ``unlabelled`` and 255 count nowhere; anything else is wrong."""
    table: list[int | None] = [*range(num_classes), *[None] * (256 - num_classes)]
    table[unlabelled] = table[255] = IGNORE
    return table


def _take_pairs(archive: Any, split: str, path: Path) -> tuple[Packed, Packed, list[str], str]:
    """Packed pictures and label maps of a split, what they are called, and what the split is called there."""
    name = find_split([key.removesuffix("_jpeg") for key in archive.files if key.endswith("_jpeg")], split, path)
    images, maps = (take_packed(archive, f"{name}_{kind}", f"{name}_{kind}_offsets", path) for kind in ("jpeg", "png"))
    check_equal(f"{path}, split {name}", {"pictures": len(images), "label maps": len(maps)})
    called = take(archive, f"{name}_name", path).tolist() if f"{name}_name" in archive else range(len(images))
    return images, maps, [f"{name}/{item}" for item in called], name


def _pair_folders(root: Path, split: str, labels: str = "labels") -> tuple[list[Path], list[Path]]:
    """Pictures and their label maps, paired by name without the suffix."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; expected one with images and {labels} in it")
    inside = [path.name for path in root.iterdir() if path.is_dir()]
    if "images" in inside and labels in inside:
        name = find_split([path.name for path in (root / "images").iterdir()], split, root / "images")
        pair = root / "images" / name, root / labels / name
    else:
        name = find_split(inside, split, root)
        if (root / f"{name}annot").is_dir():
            pair = root / name, root / f"{name}annot"
        else:
            pair = root / name / "images", root / name / labels
    for folder in pair:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}; expected images/{name} with {labels}/{name}, {name}/images with"
                f" {name}/{labels}, or {name} with {name}annot"
            )
    images, files = list_pictures(pair[0]), list_pictures(pair[1])
    maps = {path.stem: path for path in files}
    if twice := [path.name for path in files if maps[path.stem] != path]:
        raise UserError(f"{pair[1]}: beside {name_some(twice)} lies another label map of the same name; keep one")
    if missing := [path.name for path in images if path.stem not in maps]:
        raise UserError(f"{pair[1]}: no label map for {name_some(missing)} of {pair[0]}")
    return images, [maps[path.stem] for path in images]


def _ade_names(path: Path) -> list[str]:
    """The first name of each class in objectInfo150.txt; numbers where the file is missing."""
    if not path.exists():
        return [f"class {i}" for i in range(1, 151)]
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    names = [cells[4].split(",")[0].strip() for cells in rows if len(cells) > 4 and cells[0].strip().isdigit()]
    if not 1 <= len(names) <= 254:
        raise UserError(f"{path}: expected a line of number, three ratios and names for each class, found {len(names)}")
    return names


def _read_pet_list(root: Path, split: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, breeds and species (both from 0) of annotations/SPLIT.txt."""
    path = root / "annotations" / f"{split}.txt"
    for needed in (path, root / "images", root / "annotations" / "trimaps"):
        if not needed.exists():
            raise UserError(f"there is no {needed}; expected images/, annotations/trimaps/ and annotations/{split}.txt")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = line.split()
        if len(cells) < 3 or not (cells[1].isdigit() and cells[2] in ("1", "2")):
            raise UserError(f"{path}, line {number}: expected a name, the breed from 1 and the species 1 or 2")
        rows.append((cells[0], int(cells[1]) - 1, int(cells[2]) - 1))
    names = [name for name, _, _ in rows]
    return names, np.array([b for _, b, _ in rows], np.int64), np.array([s for _, _, s in rows], np.int64)


def _breed_names(root: Path) -> list[str]:
    """Breeds in the order of their numbers, from the names of the training pictures (``pug_12`` is a pug)."""
    names, breeds, _ = _read_pet_list(root, "trainval")
    by_number = {int(breed): name.rpartition("_")[0] for name, breed in zip(names, breeds, strict=True)}
    missing = [number for number in range(max(by_number, default=-1) + 1) if number not in by_number]
    if missing:
        raise UserError(f"{root}/annotations/trainval.txt: no picture of breed {missing[0] + 1}")
    return [by_number[number] for number in sorted(by_number)]

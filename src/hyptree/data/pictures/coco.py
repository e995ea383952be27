"""COCO and everything in its format: boxes, instance masks and crowd regions from a .json file beside the pictures."""

from __future__ import annotations

import json
import posixpath
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hyptree.data.npz import name_some
from hyptree.data.pictures.decoding import Pictures, class_tree, decode_image
from hyptree.data.sample import BadSample, Sample
from hyptree.errors import UserError, require
from hyptree.files import path_inside

if TYPE_CHECKING:
    from hyptree.tree import Tree

_LAYOUT = "annotations/instances_train2017.json with train2017/ (and val2017), or train/_annotations.coco.json"


class Coco(Pictures):
    """Pictures with instances, of ``root`` as COCO lays it out.

    Understands ``annotations/instances_NAME.json`` with the pictures in ``NAME/`` or ``images/NAME/``, where NAME
    starts with the split (``train2017``), and ``SPLIT/_annotations.coco.json`` with the pictures beside it.

    Category ids of the file may have gaps; ``box_labels`` run from 1 to K in the order of the ids and ``category_ids``
    leads back. Pictures without annotations give no boxes. Masks come when every annotation has a segmentation.

    Attributes:
        annotation_file: the .json file, for the official evaluation.
        category_ids: the file's id of label k is ``category_ids[k - 1]``.
        image_ids: the file's id of each picture, by ``Sample.id``.
        box_tree: supercategories above ``box_classes``, when the file has them.
    """

    def __init__(self, root: Path | str, split: str = "train"):
        self.annotation_file, folder = _find(Path(root), split)
        data = _load(self.annotation_file)
        categories = sorted(data["categories"], key=lambda category: category["id"])
        self.category_ids = tuple(int(category["id"]) for category in categories)
        label_of = {id: k for k, id in enumerate(self.category_ids, 1)}
        self._images = sorted(data["images"], key=lambda image: image["id"])
        self.image_ids = {str(image["file_name"]): int(image["id"]) for image in self._images}
        image_ids = [image["id"] for image in self._images]
        for what, ids in (("categories", self.category_ids), ("pictures", image_ids)):
            if len(set(ids)) < len(ids):
                raise UserError(f"{self.annotation_file}: two {what} have the same id")
        if len(self.image_ids) < len(self._images):
            raise UserError(f"{self.annotation_file}: two pictures have the same file name")
        self._files = [
            path_inside(folder, posixpath.normpath(name), f"{self.annotation_file}: file_name")
            for name in self.image_ids
        ]
        self._annotations = _by_image(data["annotations"], self._images, label_of, self.annotation_file)
        self._has_masks = all(a.get("segmentation") for rows in self._annotations for a in rows)
        if self._has_masks:
            require("pycocotools", extra="eval")
        self._label_of = label_of
        self.box_tree = _tree(categories)
        super().__init__(len(self._images), box_classes=[str(category["name"]) for category in categories])

    def _read(self, i: int) -> Sample:
        entry, rows = self._images[i], self._annotations[i]
        id = str(entry["file_name"])
        image = decode_image(self._files[i], id, (entry["height"], entry["width"]))
        height, width = image.shape[1:]
        if (entry["height"], entry["width"]) != (height, width):
            raise BadSample(id, f"picture of {width}x{height} pixels, annotated as {entry['width']}x{entry['height']}")
        boxes = np.array([row["bbox"] for row in rows], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        masks = None
        if self._has_masks:
            masks = torch.from_numpy(_decode_masks(rows, height, width, id))
        return Sample(
            image,
            id,
            boxes=torch.from_numpy(boxes),
            box_labels=torch.tensor([self._label_of[row["category_id"]] for row in rows], dtype=torch.int64),
            masks=masks,
            crowd=torch.tensor([bool(row.get("iscrowd", 0)) for row in rows], dtype=torch.bool),
        )


def _find(root: Path, split: str) -> tuple[Path, Path]:
    """The annotation file of a split and the folder of its pictures."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; expected {_LAYOUT}")
    for name in {"train": ("train",), "val": ("val", "valid", "test"), "test": ("test", "val", "valid")}[split]:
        if (beside := root / name / "_annotations.coco.json").exists():
            return beside, beside.parent
        files = sorted((root / "annotations").glob(f"instances_{name}*.json"))
        if len(files) > 1:
            raise UserError(f"{root}/annotations: several files for {split}: {name_some(p.name for p in files)}")
        if files:
            folder = files[0].stem.removeprefix("instances_")
            for place in (root / folder, root / "images" / folder):
                if place.is_dir():
                    return files[0], place
            raise UserError(f"there is no folder {root / folder} with the pictures of {files[0].name}")
    inside = name_some(sorted(path.name for path in root.iterdir())) or "nothing"
    raise UserError(f"{root}: no annotations for {split}; expected {_LAYOUT}, found {inside}")


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    needed = {
        "images": ("id", "file_name", "height", "width"),
        "annotations": ("image_id", "category_id", "bbox"),
        "categories": ("id", "name"),
    }
    for part, keys in needed.items():
        if not isinstance(data, dict) or not isinstance(data.get(part), list):
            raise UserError(f"{path}: expected lists images, annotations and categories; {part} is missing")
        for i, row in enumerate(data[part]):
            if missing := [key for key in keys if key not in row]:
                raise UserError(f"{path}: {part}[{i}] has no {missing[0]}")
    return data


def _by_image(
    annotations: Sequence[dict[str, Any]], images: Sequence[dict[str, Any]], label_of: dict[int, int], path: Path
) -> list[list[dict[str, Any]]]:
    """The annotations of each picture; boxes without area are left out, they teach nothing and break detectors."""
    number = {image["id"]: i for i, image in enumerate(images)}
    rows: list[list[dict[str, Any]]] = [[] for _ in images]
    for i, annotation in enumerate(annotations):
        if annotation["image_id"] not in number:
            raise UserError(f"{path}: annotations[{i}] is for picture {annotation['image_id']}, which is not listed")
        if annotation["category_id"] not in label_of:
            raise UserError(
                f"{path}: annotations[{i}] has category {annotation['category_id']},"
                f" which is not one of the {len(label_of)} categories"
            )
        if len(annotation["bbox"]) != 4:
            raise UserError(f"{path}: annotations[{i}] has a bbox of {len(annotation['bbox'])} numbers, expected 4")
        if min(annotation["bbox"][2:]) > 0:
            rows[number[annotation["image_id"]]].append(annotation)
    return rows


def _decode_masks(rows: Sequence[dict[str, Any]], height: int, width: int, id: str) -> np.ndarray:
    """(N, H, W) bool from polygons or run lengths, plain and compressed."""
    from pycocotools import mask

    masks = np.zeros((len(rows), height, width), bool)
    for out, row in zip(masks, rows, strict=True):
        shape = row["segmentation"]
        try:
            if isinstance(shape, list):
                if any(len(part) < 6 or len(part) % 2 for part in shape):  # four numbers would be taken for a box
                    raise ValueError("a polygon is x and y of three points or more")
                runs = mask.merge(mask.frPyObjects(shape, height, width))
            else:
                _check_runs(shape, height, width)
                runs = mask.frPyObjects(shape, height, width) if isinstance(shape["counts"], list) else shape
            with warnings.catch_warnings():  # its compiled part is older than numpy 2
                warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
                out[:] = mask.decode(runs)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise BadSample(id, f"cannot read the segmentation of annotation {row.get('id', '?')}: {error}") from error
    return masks


def _check_runs(shape: dict[str, Any], height: int, width: int) -> None:
    """Raise unless run lengths cover the picture: pycocotools leaves what they do not reach as it was in memory."""
    if list(shape["size"]) != [height, width]:
        raise ValueError(f"its run lengths are for (height, width) {shape['size']}, the picture has {[height, width]}")
    counts = shape["counts"]
    runs = counts if isinstance(counts, list) else _unpacked(counts)
    if min(runs, default=0) < 0 or sum(runs) != height * width:
        raise ValueError(f"its run lengths cover {sum(runs)} pixels, the picture has {height * width}")


def _unpacked(text: str | bytes) -> list[int]:
    """COCO's packed run lengths: five bits per character and one that says that more follow, from the third run on as
    the difference to the last but one."""
    runs: list[int] = []
    value = bits = 0
    for byte in text.encode() if isinstance(text, str) else text:
        piece = byte - 48
        value |= (piece & 31) << bits
        bits += 5
        if not piece & 32:
            if piece & 16:
                value -= 1 << bits
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = bits = 0
    if bits:
        raise ValueError("its run lengths break off")
    return runs


def _tree(categories: Sequence[dict[str, Any]]) -> Tree | None:
    above = [category.get("supercategory") for category in categories]
    if not categories or not all(above) or len(set(above)) == len(above):
        return None
    return class_tree([["all", str(up), str(c["name"])] for up, c in zip(above, categories, strict=True)])

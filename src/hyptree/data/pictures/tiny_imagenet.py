"""Tiny-ImageNet: 200 classes of 64 px pictures with the tree of WordNet above them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyptree.data.npz import check_equal, check_labels, find_npz, name_some, open_npz, take, take_packed
from hyptree.data.pictures.decoding import (
    FilePictures,
    MemoryPictures,
    Pictures,
    class_tree,
    find_split,
    list_pictures,
)
from hyptree.errors import UserError
from hyptree.files import path_inside

if TYPE_CHECKING:
    from hyptree.tree import Tree

_EXPECTED = "expected the folder tiny-imagenet-200 (wnids.txt, train/, val/) or an .npz file with train_jpeg in it"


def TinyImageNet(root: Path | str, split: str = "train") -> Pictures:
    """The pictures of a split, from the usual folder ``tiny-imagenet-200`` or from one .npz file.

    The .npz file holds ``{split}_jpeg``, ``{split}_offsets``, ``{split}_label`` and ``wnids``. The test pictures of the
    usual folder have no labels, so there ``test`` means ``val``.

    The tree needs one of two files beside the pictures: ``classes.json``, a list of {wnid, name, path_names} from the
    root down, or ``wordnet.is_a.txt``, lines of parent and child. Without them there is no tree.
    """
    root = Path(root)
    if not root.exists():
        raise UserError(f"there is no {root}; {_EXPECTED}")
    if (root / "tiny-imagenet-200").is_dir():
        root = root / "tiny-imagenet-200"
    if root.is_dir() and (root / "wnids.txt").exists():
        return _in_files(root, split)
    path = find_npz(root)
    if path is None:
        raise UserError(f"{root}: {_EXPECTED}, found {name_some(sorted(p.name for p in root.iterdir())) or 'nothing'}")
    return _packed(path, split)


def _packed(path: Path, split: str) -> MemoryPictures:
    with open_npz(path) as archive:
        splits = [key.removesuffix("_jpeg") for key in archive.files if key.endswith("_jpeg")]
        name = find_split(splits, split, path)
        wnids = [str(wnid) for wnid in take(archive, "wnids", path).tolist()]
        files = take_packed(archive, f"{name}_jpeg", f"{name}_offsets", path)
        labels = check_labels(take(archive, f"{name}_label", path), len(wnids), f"{path}: {name}_label")
        check_equal(f"{path}, split {name}", {"pictures": len(files), "labels": len(labels)})
    names, tree = _names_and_tree(path.parent, wnids)
    return MemoryPictures(files, labels, names, prefix=f"{path.stem}/{name}", tree=tree)


def _in_files(root: Path, split: str) -> FilePictures:
    """The layout of the original archive; a ``val`` that was sorted into folders per class is fine as well."""
    wnids = (root / "wnids.txt").read_text(encoding="utf-8").split()
    number = {wnid: i for i, wnid in enumerate(wnids)}
    if len(number) < len(wnids):
        raise UserError(f"{root / 'wnids.txt'}: a class is listed twice")
    folder = root / ("train" if split == "train" else "val")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; {_EXPECTED}")
    files: list[Path] = []
    labels: list[int] = []
    annotations = folder / "val_annotations.txt"
    if split != "train" and annotations.exists():
        for line_number, line in enumerate(annotations.read_text(encoding="utf-8").splitlines(), 1):
            where, cells = f"{annotations}, line {line_number}", line.split("\t")
            if len(cells) < 2 or cells[1] not in number:
                raise UserError(f"{where}: expected a file and one of the {len(wnids)} wnids")
            files.append(path_inside(folder / "images", cells[0], where))
            labels.append(number[cells[1]])
    else:
        for wnid in wnids:
            of_class = path_inside(folder, wnid, str(root / "wnids.txt"))
            if not of_class.is_dir():
                raise UserError(f"there is no folder {of_class}; {_EXPECTED}")
            inside = list_pictures(of_class / "images" if (of_class / "images").is_dir() else of_class)
            files += inside
            labels += [number[wnid]] * len(inside)
    names, tree = _names_and_tree(root, wnids)
    below = [path.relative_to(folder).as_posix() for path in files]
    return FilePictures(folder, below, labels, classes=names, tree=tree)


def _names_and_tree(folder: Path, wnids: Sequence[str]) -> tuple[list[str], Tree | None]:
    """Readable names of the classes and the WordNet tree above them, from what lies beside the pictures."""
    known = folder / "classes.json"
    if known.exists():
        try:
            entries = {entry["wnid"]: entry for entry in json.loads(known.read_text(encoding="utf-8"))}
            paths = [entries[wnid]["path_names"] for wnid in wnids]
            return [entries[wnid]["name"] for wnid in wnids], class_tree(paths)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{known}: expected a list of {{wnid, name, path_names}}, got {error!r}") from error
    words: dict[str, str] = {}  # wnid to its first name, from lines of wnid, tab, names
    if (folder / "words.txt").exists():
        lines = (line.split("\t") for line in (folder / "words.txt").read_text(encoding="utf-8").splitlines())
        words = {cells[0]: cells[1].split(",")[0].strip() for cells in lines if len(cells) > 1}
    names = [words.get(wnid, wnid) for wnid in wnids]
    is_a = folder / "wordnet.is_a.txt"
    if not is_a.exists():
        return names, None
    pairs = [line.split()[:2] for line in is_a.read_text(encoding="utf-8").splitlines() if line.strip()]
    if any(len(pair) < 2 for pair in pairs):
        raise UserError(f"{is_a}: expected lines of two wnids, the parent and the child")
    parent: dict[str, str] = {}
    for above, below in pairs:
        parent.setdefault(below, above)  # the first-listed of several, as everywhere in this library
    paths = [[words.get(wnid, wnid) for wnid in _path(wnid, parent, is_a)] for wnid in wnids]
    return names, class_tree(paths)


def _path(wnid: str, parent: Mapping[str, str], where: Path) -> list[str]:
    """From the root down to ``wnid``."""
    path = [wnid]
    while path[-1] in parent:
        path.append(parent[path[-1]])
        if len(path) > 100:
            raise UserError(f"{where}: there is a cycle above {wnid}")
    return path[::-1]

"""From settings to a dataset of pictures."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

from hyptree.data.pictures.decoding import MemoryPictures, Pictures
from hyptree.data.sample import PictureDataset
from hyptree.data.settings import DataSettings
from hyptree.errors import UserError
from hyptree.files import cache_folder

# Imported when asked for: COCO needs an extra, and most runs need one of these only.
_READERS = {
    "folder": "hyptree.data.pictures.folders:FolderPictures",
    "arrays": "hyptree.data.pictures.arrays:ArrayPictures",
    "tiny-imagenet": "hyptree.data.pictures.tiny_imagenet:TinyImageNet",
    "camvid": "hyptree.data.pictures.segmentation:CamVid",
    "pets": "hyptree.data.pictures.segmentation:Pets",
    "ade20k": "hyptree.data.pictures.segmentation:ADE20K",
    "coco": "hyptree.data.pictures.coco:Coco",
}


def build_dataset(settings: DataSettings, split: str) -> PictureDataset:
    """The pictures of a split, ``train``, ``val`` or ``test``, as the settings want them.

    Raises:
        UserError: the files are not there, not laid out as expected, or have another number of classes than told.
    """
    limit = settings.num_train if split == "train" else settings.num_val
    dataset: PictureDataset
    if settings.name == "world":
        from hyptree.data.world import World

        options = {} if limit is None else {"num_images": limit}
        world = World(split=split, size=settings.size, seed=settings.seed, cache=settings.cache, **options)
        dataset = cast(PictureDataset, world)
    else:
        assert settings.root is not None, "DataSettings asks for it"
        module, name = _READERS[settings.name].split(":")
        reader = cast(Callable[[Path, str], Pictures], getattr(import_module(module), name))
        pictures = reader(settings.root.expanduser(), split)
        pictures.limit(limit, settings.seed)
        if settings.cache and isinstance(pictures, MemoryPictures):
            pictures.store(cache_folder("pixels") if settings.cache is True else settings.cache)
        dataset = pictures
    if len(dataset) == 0:
        raise UserError(f"{settings.root or settings.name}: no pictures in the split {split}")
    classes = dataset.classes or dataset.semantic_classes or dataset.box_classes
    if settings.num_classes is not None and len(classes) != settings.num_classes:
        raise UserError(
            f"{settings.root or settings.name} has {len(classes)} classes, but num_classes is {settings.num_classes};"
            " leave num_classes out to take what is there"
        )
    return dataset

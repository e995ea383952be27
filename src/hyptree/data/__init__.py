"""Data: pictures (built-in and real), their augmentation and batches; hierarchies as edge lists and closures.

Nothing is imported until it is asked for: reading the settings costs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyptree.lazy import lazy

if TYPE_CHECKING:
    from hyptree.data.build import build_dataset
    from hyptree.data.hierarchies.edges import Hierarchy, read_hierarchy, transitive_closure
    from hyptree.data.loader import Loader, build_loader
    from hyptree.data.pictures.transforms import Mixer, eval_transform, train_transform
    from hyptree.data.sample import IGNORE, BadSample, PictureDataset, Sample
    from hyptree.data.settings import AugmentSettings, DataSettings
    from hyptree.data.world import World

__all__ = [
    "IGNORE",
    "AugmentSettings",
    "BadSample",
    "DataSettings",
    "Hierarchy",
    "Loader",
    "Mixer",
    "PictureDataset",
    "Sample",
    "World",
    "build_dataset",
    "build_loader",
    "eval_transform",
    "read_hierarchy",
    "train_transform",
    "transitive_closure",
]

__getattr__, __dir__ = lazy(__name__, __file__)

"""``hyptree reduce``: a vision transformer with fewer tokens, measured and drawn."""

from __future__ import annotations

from hyptree.data.settings import read_data_flag
from hyptree.files import require_path
from hyptree.train.run.settings import ReduceSettings
from hyptree.train.source import find_model


def run(config: ReduceSettings) -> None:
    """Measure a vision transformer with fewer tokens: accuracy, images per second, FLOPs; a table, a plot and a page.

    hyptree reduce runs/vit --keep 0.7 0.5 0.25 --method atc tome --image photo.jpg
    """
    for path in config.image:
        require_path(path, "picture")
    if config.weights is not None:
        require_path(config.weights)
    config.model = find_model(config.model, "run", "timm").name
    if config.data not in (None, "none"):
        read_data_flag(config.data)
    from hyptree.train.reduction.reduce import reduce

    reduce(config)

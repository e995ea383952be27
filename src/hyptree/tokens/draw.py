"""Pictures of what was merged: each cluster of patches in its mean colour, with a border in a colour of its own."""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.data.pictures.single import read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["cluster_colours", "draw"]

_GOLDEN = 0.6180339887498949
_FADED = 0.25
"""How much of its colour a dropped patch keeps."""


def draw(
    image: Any,
    source: Any,
    grid: tuple[int, int],
    *,
    side: int | None = None,
    border: int | None = None,
    colours: np.ndarray | None = None,
) -> Image:
    """The picture with every cluster of patches in its mean colour and a coloured border around it.

    A cluster has the colour of its first patch, and where clusters are merged again one of them has the first patch of
    the new one: so the pictures of successive layers show the same colour at the same place. Patches that a method
    dropped are faded and have no border.

    Args:
        image: a PIL image, or (H, W, 3) uint8: what the model saw, before it was normalised.
        source: (P,) cluster of every patch, row by row (one row of ``Handle.sources[i]``); -1 for a dropped patch.
        grid: rows and columns of patches, P = rows * columns.
        side: enlarge so that the longer side has at least this many pixels; by default the picture's own size.
        border: pixels of the line; by default it follows the size of a patch. 0 for none.
        colours: (P, 3) uint8, the border's colour of every patch; by default ``cluster_colours(source)``.

    Returns:
        A PIL image.
    """
    from PIL import Image

    labels = _labels(source)
    rows, columns = grid
    if rows < 1 or columns < 1 or len(labels) != rows * columns:
        raise ValueError(f"source has {len(labels)} patches, but the grid is {rows} x {columns}")
    picture = read_picture(image)
    height, width = picture.shape[:2]
    if side is not None and side > max(height, width):
        zoom = side / max(height, width)
        height, width = round(height * zoom), round(width * zoom)
        picture = np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))
    if height < rows or width < columns:
        raise ValueError(f"{rows} x {columns} patches need at least as many pixels, the picture has {height} x {width}")
    paint = cluster_colours(labels) if colours is None else np.asarray(colours, np.uint8)
    if paint.shape != (len(labels), 3):
        raise ValueError(f"colours has shape {paint.shape}, expected ({len(labels)}, 3)")

    patch = (np.arange(height) * rows // height)[:, None] * columns + np.arange(width) * columns // width  # (H, W)
    label = labels[patch]  # (H, W)
    canvas = np.where((label < 0)[..., None], _fade(picture), _means(picture, label))
    line = max(1, round(min(height / rows, width / columns) / 10)) if border is None else border
    edge = _edges(label, line) & (label >= 0)
    return Image.fromarray(np.where(edge[..., None], paint[patch], canvas).astype(np.uint8))


def cluster_colours(source: Any) -> np.ndarray:
    """(P, 3) uint8: a strong colour for every patch, that of its cluster; grey for dropped ones (-1).

    The colour is a function of the cluster's first patch alone, so it survives merges (see ``draw``).
    """
    labels = _labels(source)
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    table = np.array([_colour(int(k)) for k in first], np.uint8).reshape(-1, 3)
    return np.where((labels < 0)[:, None], np.uint8(128), table[inverse])


def _colour(k: int) -> tuple[int, int, int]:
    """The k-th of a row of colours in which neighbours differ: hues by the golden ratio, three brightnesses in turn."""
    hue = (0.02 + k * _GOLDEN) % 1
    r, g, b = colorsys.hsv_to_rgb(hue, (0.85, 0.6, 0.95)[k % 3], (0.95, 1.0, 0.7)[k % 3])
    return round(255 * r), round(255 * g), round(255 * b)


def _means(picture: np.ndarray, label: np.ndarray) -> np.ndarray:
    """(H, W, 3) the mean colour of every pixel's cluster."""
    flat = label.ravel() - min(int(label.min()), 0)
    count = np.maximum(np.bincount(flat), 1)
    mean = np.stack([np.bincount(flat, picture[..., c].ravel()) / count for c in range(3)], -1)
    means: np.ndarray = np.rint(mean)[flat].reshape(picture.shape)
    return means


def _fade(picture: np.ndarray) -> np.ndarray:
    grey = picture.mean(-1, keepdims=True)
    faded: np.ndarray = 255 - (255 - (_FADED * picture + (1 - _FADED) * grey)) * _FADED
    return faded


def _edges(label: np.ndarray, line: int) -> np.ndarray:
    """(H, W) pixels within ``line`` of another cluster or of the picture's rim, by rows and columns."""
    edge = np.zeros(label.shape, bool)
    padded = np.pad(label, line, constant_values=-2)
    height, width = label.shape
    for shift in range(1, line + 1):
        for dy, dx in ((shift, 0), (-shift, 0), (0, shift), (0, -shift)):
            edge |= padded[line + dy : line + dy + height, line + dx : line + dx + width] != label
    return edge


def _labels(source: Any) -> np.ndarray:
    labels = np.asarray(source.detach().cpu() if hasattr(source, "detach") else source)
    if labels.ndim != 1 or len(labels) == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"source is (P,) whole numbers, the cluster of every patch of one picture; got {labels.shape} of "
            f"{labels.dtype}; take one row, e.g. handle.sources[-1][0]"
        )
    return labels.astype(np.int64)

"""Pictures of dense predictions: classes of pixels, and objects with boxes, masks and names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyptree.data.pictures.single import fit, read_picture
from hyptree.data.sample import IGNORE
from hyptree.tree.arrays import as_array

_GOLDEN_TURN = (math.sqrt(5) - 1) / 2
_INK, _PAPER = (20, 20, 24), (250, 250, 250)
_OPACITY = 0.5


def class_colours(num_classes: int) -> np.ndarray:
    """(num_classes, 3) uint8 colours; neighbours differ most, and class k has the same one whatever ``num_classes`` is.

    Hues go round by the golden ratio, which never comes close to a place where it has been; three lightnesses take
    turns. All are of the OKLCH kind, so that none shouts.
    """
    k = np.arange(num_classes)
    hue = 2 * np.pi * (k * _GOLDEN_TURN + 0.07)
    light, chroma = np.array([0.72, 0.60, 0.82])[k % 3], 0.14
    a, b = chroma * np.cos(hue), chroma * np.sin(hue)
    # OKLab to linear sRGB (Ottosson 2020).
    roots = np.stack([light + 0.3963377774 * a + 0.2158037573 * b, light - 0.1055613458 * a - 0.0638541728 * b], -1)
    roots = np.concatenate([roots, (light - 0.0894841775 * a - 1.2914855480 * b)[:, None]], -1)
    matrix = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = np.clip(roots**3 @ matrix.T, 0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return (255 * encoded).round().astype(np.uint8)


def draw_segmentation(image: Any, semantic: Any, classes: Sequence[str], *, side: int = 384) -> np.ndarray:
    """The picture with its classes in colour, their borders, and a legend of those that cover most of it.

    A class named ``background`` keeps the picture's own colours; pixels that count nowhere are grey.

    Args:
        image: path, PIL image, or (H, W, 3) / (3, H, W) uint8 -> (h, w, 3) uint8, the legend below the picture.
        semantic: (H, W) class of every pixel, ``IGNORE`` where it does not count.
        side: the longer side is enlarged to at least this many pixels, so that names can be read.
    """
    picture, labels = read_picture(image), as_array(semantic).astype(np.int64)
    if labels.shape != picture.shape[:2]:
        raise ValueError(f"semantic must be (H, W) like the picture, {picture.shape[:2]}, got {labels.shape}")
    if len(classes) > IGNORE:
        raise ValueError(f"{len(classes)} classes cannot be told from {IGNORE}, which marks pixels that do not count")
    present, area = np.unique(labels[labels != IGNORE], return_counts=True)
    if len(present) and not 0 <= present.min() <= present.max() < len(classes):
        raise ValueError(f"semantic has class {present.max()}, but there are names for {len(classes)}")
    zoom = _zoom(picture, side)
    canvas = fit(picture, (picture.shape[0] * zoom, picture.shape[1] * zoom)).astype(np.float32)
    labels = labels.repeat(zoom, 0).repeat(zoom, 1)

    palette = np.full((256, 3), 128, np.uint8)
    palette[: len(classes)] = class_colours(len(classes))
    strength = np.full(256, _OPACITY, np.float32)
    strength[[k for k, name in enumerate(classes) if name == "background"]] = 0
    weight = strength[labels][..., None]
    canvas = (1 - weight) * canvas + weight * palette[labels]
    canvas[_borders(labels)] = _PAPER
    shown = [k for k in present[np.argsort(-area, kind="stable")].tolist() if strength[k] > 0]
    legend = [(classes[k], tuple(palette[k].tolist())) for k in shown]
    return _with_legend(canvas.round().astype(np.uint8), legend)


def draw_detections(
    image: Any,
    boxes: Any,
    labels: Any,
    masks: Any = None,
    *,
    scores: Any = None,
    classes: Sequence[str] = (),
    min_score: float = 0.5,
    side: int = 384,
) -> np.ndarray:
    """The picture with boxes, masks and names of objects, the surest on top.

    Args:
        image: path, PIL image, or (H, W, 3) / (3, H, W) uint8.
        boxes: (N, 4) x1 y1 x2 y2 in pixels. labels: (N,) from 1.
        masks: (N, H, W) or (N, 1, H, W), bool or in [0, 1]; None draws boxes alone.
        scores: (N,); objects below ``min_score`` are left out. None draws all.
        classes: names of labels 1, 2, ...; without them the number is shown.
        side: the longer side is enlarged to at least this many pixels, so that names can be read.
    """
    from PIL import Image, ImageDraw

    picture = read_picture(image)
    box, label = as_array(boxes).reshape(-1, 4).astype(np.float64), as_array(labels).astype(np.int64)
    score = None if scores is None else as_array(scores).astype(np.float64)
    on = None if masks is None else as_array(masks)
    if len(label) != len(box) or (score is not None and len(score) != len(box)):
        raise ValueError(f"boxes, labels and scores must be equally many, got {len(box)} boxes, {len(label)} labels")
    if on is not None:
        if on.size != len(box) * picture.shape[0] * picture.shape[1]:
            raise ValueError(f"masks are {on.shape}, expected one of {picture.shape[:2]} for each of {len(box)} boxes")
        on = on.reshape(len(box), *picture.shape[:2]) > 0.5
    if score is not None and not np.isfinite(score).all():
        raise ValueError("scores must be finite")
    order = range(len(box)) if score is None else [i for i in np.argsort(score, kind="stable") if score[i] >= min_score]
    zoom = _zoom(picture, side)
    colours = class_colours(int(label.max(initial=0)) + 1)
    canvas = fit(picture, (picture.shape[0] * zoom, picture.shape[1] * zoom)).astype(np.float32)
    for i, mask in () if on is None else ((i, on[i]) for i in order):
        inside = mask.repeat(zoom, 0).repeat(zoom, 1)
        canvas[inside] = (1 - _OPACITY) * canvas[inside] + _OPACITY * colours[label[i]]
        canvas[inside & _borders(inside)] = colours[label[i]]
    drawn = Image.fromarray(canvas.round().astype(np.uint8))
    pen, font = ImageDraw.Draw(drawn), _font()
    width = max(1, round(max(drawn.size) / 250))
    for i in order:
        colour = tuple(colours[label[i]].tolist())
        x1, y1, x2, y2 = (box[i] * zoom).tolist()
        x2, y2 = max(x1, x2 - 1), max(y1, y2 - 1)
        pen.rectangle((x1, y1, x2, y2), outline=colour, width=width)
        name = classes[label[i] - 1] if 1 <= label[i] <= len(classes) else str(label[i])
        text = name if score is None else f"{name} {score[i]:.2f}"
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        tall, wide = bottom - top + 6, right - left + 8
        x = min(max(x1, 0), drawn.width - wide)  # names stay inside the picture, above the box where there is room
        y = y1 - tall if y1 >= tall else min(y1, drawn.height - tall)
        pen.rectangle((x, y, x + wide, y + tall), fill=colour)
        pen.text((x + 4 - left, y + 3 - top), text, fill=_INK, font=font)
    return np.asarray(drawn)


def _zoom(picture: np.ndarray, side: int) -> int:
    """Whole steps, so that label maps stay exact."""
    return max(1, math.ceil(side / max(picture.shape[:2])))


def _borders(labels: np.ndarray) -> np.ndarray:
    """Pixels whose left or upper neighbour is another class."""
    borders = np.zeros(labels.shape, bool)
    borders[1:] |= labels[1:] != labels[:-1]
    borders[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    return borders


def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size=14)


def _with_legend(canvas: np.ndarray, legend: Sequence[tuple[str, tuple[int, ...]]]) -> np.ndarray:
    """The canvas with rows of colour chips and names below; what does not fit into three rows is counted."""
    from PIL import Image, ImageDraw

    if not legend:
        return canvas
    font, row_height, chip, gap = _font(), 22, 14, 8
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    rows: list[list[tuple[str, tuple[int, ...], int]]] = [[]]
    x = gap
    for number, (name, colour) in enumerate(legend):
        wide = chip + 5 + math.ceil(measure.textlength(name, font=font)) + 2 * gap
        if rows[-1] and x + wide > canvas.shape[1]:
            if len(rows) == 3:
                rows[-1][-1] = (f"and {len(legend) - number + 1} more", _PAPER, rows[-1][-1][2])
                break
            rows.append([])
            x = gap
        rows[-1].append((name, colour, x))
        x += wide
    strip = Image.new("RGB", (canvas.shape[1], row_height * len(rows) + 6), _PAPER)
    pen = ImageDraw.Draw(strip)
    for i, row in enumerate(rows):
        for name, colour, x in row:
            top = 3 + i * row_height
            pen.rectangle((x, top + 4, x + chip, top + 4 + chip), fill=colour)
            pen.text((x + chip + 5, top + 2), name, fill=_INK, font=font)
    return np.concatenate([canvas, np.asarray(strip)])

"""Pictures on their way into a model and into a page: reading, fitting to a size, normalising, writing as data."""

from __future__ import annotations

import base64
import io
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.errors import as_user_error
from hyptree.files import require_path

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

__all__ = ["data_url", "decode", "fit", "model_input", "read_picture", "resize_detections", "rgb_pixels"]

_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
"""TIFF's tags of bits per number, of what 0 is (0: white), and of whether numbers have a sign (2)."""


def read_picture(image: Any) -> np.ndarray:
    """(H, W, 3) uint8 RGB from a path, a PIL image, or a uint8 array or tensor, channels first or last."""
    from PIL import Image

    if isinstance(image, (str, Path)):
        require_path(image, "picture")
        with as_user_error(str(image)):
            return decode(Path(image), rgb_pixels)
    if isinstance(image, Image.Image):
        return rgb_pixels(image)
    pixels = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    shape = pixels.shape
    if pixels.ndim == 3 and pixels.shape[0] == 3 and pixels.shape[2] != 3:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise ValueError(
            f"a picture is (H, W, 3) or (3, H, W) uint8, a path or a PIL image; got {shape} of {pixels.dtype}"
        )
    return pixels


def decode(source: Path | bytes, take: Callable[[Image], np.ndarray]) -> np.ndarray:
    """What ``take`` makes of a picture in a file, or of the bytes of one.

    Raises:
        ValueError: why it cannot be read: it is missing, truncated, no picture, or not what ``take`` wants.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
        # PIL warns about odd EXIF data and palettes, a thousand times in some collections; what counts are the pixels.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as picture:
                return take(picture)
    except UnidentifiedImageError as error:
        raise ValueError("not a picture that can be read" if data else "empty file") from error
    except FileNotFoundError as error:
        raise ValueError("no such file") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"too many pixels: {error}") from error
    except (OSError, EOFError, SyntaxError, IndexError, struct.error, zlib.error) as error:
        # All of these are what PIL raises for damaged files of one format or another.
        raise ValueError(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error


def rgb_pixels(picture: Image) -> np.ndarray:
    """(H, W, 3) uint8 of a PIL image: upright by its EXIF orientation, 12 and 16 bits of grey brought to 8.

    Raises:
        ValueError: signed numbers or 32 bits per pixel, whole or float, which PIL would cut off without a word.
    """
    from PIL import ImageOps

    # PIL keeps grey of 16 bits and less as it is stored, and of TIFF leaves out what its tags say of it.
    tags = getattr(picture, "tag_v2", {})
    bits, is_negative = max(tags.get(_BITS, (16,))), tags.get(_PHOTOMETRIC) == 0
    kind = "I;16" if picture.mode == "I" and picture.format in ("PNG", "PPM") else picture.mode
    picture = ImageOps.exif_transpose(picture)
    if kind.startswith("I;16"):
        grey = np.asarray(picture).astype(np.uint32)
        white = 2**bits - 1
        grey = white - grey if is_negative else grey
        return np.repeat(((grey * 255 + white // 2) // white).astype(np.uint8)[..., None], 3, axis=2)
    if kind in ("I", "F"):
        raise ValueError("32 bits per pixel have no agreed range; save it with 8 or 16 bits")
    if tags.get(_SAMPLE_FORMAT, (1,))[0] == 2:
        raise ValueError("signed numbers have no agreed range; save it with 8 or 16 bits without a sign")
    return np.array(picture.convert("RGB"))


def fit(picture: np.ndarray, size: int | tuple[int, int]) -> np.ndarray:
    """The picture at (height, width) pixels: resized to cover it, then the centre is cut out."""
    from PIL import Image

    height, width = (size, size) if isinstance(size, int) else size
    h, w = picture.shape[:2]
    if (h, w) == (height, width):
        return picture
    scale = max(height / h, width / w)
    new = max(width, round(w * scale)), max(height, round(h * scale))
    resized = Image.fromarray(picture).resize(new, Image.Resampling.BICUBIC)
    left, top = (new[0] - width) // 2, (new[1] - height) // 2
    return np.asarray(resized.crop((left, top, left + width, top + height)))


def model_input(
    model: Any,
    pictures: Sequence[np.ndarray],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Tensor:
    """(B, 3, H, W) normalised as the model was trained, on its device; pictures are (H, W, 3) uint8 of one size.

    Args:
        mean, std: of red, green, blue in [0, 1]; by default those of ``model.pretrained_cfg``, else ImageNet's.
    """
    import torch

    from hyptree.data.settings import IMAGENET_MEAN, IMAGENET_STD

    config = getattr(model, "pretrained_cfg", None) or {}
    mean = mean or config.get("mean") or IMAGENET_MEAN
    std = std or config.get("std") or IMAGENET_STD
    first = next(model.parameters(), None)
    x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
    x = (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    return x if first is None else x.to(first.device, first.dtype)


def default_size(model: Any) -> int:
    """Height of the pictures the model is made for, from ``pretrained_cfg``; 224 if it does not say."""
    config = getattr(model, "pretrained_cfg", None) or {}
    return int((config.get("input_size") or (3, 224, 224))[-1])


def data_url(picture: np.ndarray, quality: int = 90) -> str:
    """The picture inside a text: PNG where that is smaller (few colours), else JPEG."""
    from PIL import Image

    encoded = []
    for kind, options in (("png", {}), ("jpeg", {"quality": quality})):
        held = io.BytesIO()
        Image.fromarray(picture).save(held, kind, **options)
        encoded.append((len(held.getvalue()), kind, held.getvalue()))
    _, kind, data = min(encoded)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def resize_detections(detections: dict[str, Tensor], seen: Sequence[int], size: Sequence[int]) -> dict[str, Tensor]:
    """Boxes and masks in the pixels (height, width) of what the model saw, brought to those of the picture itself."""
    import torch.nn.functional as F

    if tuple(seen) == tuple(size):
        return detections
    across, down = size[1] / seen[1], size[0] / seen[0]
    boxes = detections["boxes"]
    detections = detections | {"boxes": boxes * boxes.new_tensor([across, down, across, down])}
    if "masks" in detections and len(detections["masks"]):
        masks = F.interpolate(detections["masks"].float(), size=tuple(size), mode="bilinear", align_corners=False)
        detections["masks"] = masks
    elif "masks" in detections:
        detections["masks"] = detections["masks"].new_zeros(0, 1, *size)
    return detections

"""Many pictures on one sheet, to look at."""

from __future__ import annotations

import numpy as np

from hyptree.data.sample import PictureDataset


def contact_sheet(dataset: PictureDataset, num_images: int = 60, columns: int = 10, gap: int = 2) -> np.ndarray:
    """(H, W, 3) uint8: the first pictures of a dataset side by side; they must all have one size."""
    pictures = [np.asarray(dataset[i].image).transpose(1, 2, 0) for i in range(min(num_images, len(dataset)))]
    high, wide = pictures[0].shape[:2]
    rows = -(-len(pictures) // columns)
    sheet = np.full((rows * (high + gap) - gap, columns * (wide + gap) - gap, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * (high + gap), i % columns * (wide + gap)
        sheet[top : top + high, left : left + wide] = picture
    return sheet

"""What is in a picture: the random choices behind it, made for many pictures at once from each one's own key."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields

import numpy as np

from hyptree.data.world.classes import LEAVES
from hyptree.data.world.draws import Draws, derive, mix

COLOUR_NAMES = (
    "red", "orange", "yellow", "green", "teal", "blue", "purple", "pink", "brown", "white", "grey", "black",
)  # fmt: skip
COLOUR_VALUES = np.array(
    [
        (0.82, 0.13, 0.12), (0.94, 0.50, 0.10), (0.95, 0.82, 0.18), (0.22, 0.62, 0.22), (0.10, 0.62, 0.60),
        (0.16, 0.34, 0.84), (0.52, 0.22, 0.72), (0.95, 0.50, 0.68), (0.48, 0.29, 0.15), (0.94, 0.94, 0.92),
        (0.54, 0.55, 0.57), (0.13, 0.13, 0.15),
    ],
    np.float32,
)  # fmt: skip

PLACES = ("on a meadow", "by the sea", "in the desert", "in the mountains", "in a city", "in a room", "in a studio")
TIMES = ("by day", "at dusk", "at night", "in fog")

MAX_OBJECTS = 3
"""The main object (slot 0) and up to two smaller ones."""


@dataclass
class Scenes:
    """n scenes. Lengths are shares of the picture's side; the origin is its lower left corner, y points up."""

    key: np.ndarray
    """(n,) uint64."""
    place: np.ndarray
    """(n,) index into ``PLACES``."""
    time: np.ndarray
    """(n,) index into ``TIMES``."""
    horizon: np.ndarray
    """(n,) height of the line between ground and sky or wall."""
    light: np.ndarray
    """(n, 2) direction towards the light, in the plane of the picture."""
    leaf: np.ndarray
    """(n, MAX_OBJECTS) leaf class of each object, -1 where there is none."""
    count: np.ndarray
    """(n, MAX_OBJECTS) how many of its countable part it has."""
    colour: np.ndarray
    """(n, MAX_OBJECTS) index into ``COLOUR_NAMES`` of its main colour."""
    second: np.ndarray
    """(n, MAX_OBJECTS) index into ``COLOUR_NAMES`` of its second colour."""
    x: np.ndarray
    """(n, MAX_OBJECTS) middle of the object."""
    base: np.ndarray
    """(n, MAX_OBJECTS) height of its lowest point."""
    floor: np.ndarray
    """(n, MAX_OBJECTS) height of the ground under it: what lies lower is nearer."""
    half: np.ndarray
    """(n, MAX_OBJECTS) half its size."""
    tilt: np.ndarray
    """(n, MAX_OBJECTS) radians."""
    flip: np.ndarray
    """(n, MAX_OBJECTS) 1 or -1: whether it faces left."""

    def __len__(self) -> int:
        return len(self.key)

    def __getitem__(self, rows: slice) -> Scenes:
        return Scenes(*(getattr(self, field.name)[rows] for field in fields(self)))


def picture_keys(seed: int, split: str, index: np.ndarray) -> np.ndarray:
    """(n,) the key of each picture. Splits are told apart by their names, so their pictures never coincide."""
    start = mix(np.array([seed % 2**63], np.uint64) ^ (np.uint64(zlib.crc32(split.encode())) << np.uint64(32)))
    return derive(start, np.asarray(index))


def sample_scenes(key: np.ndarray) -> Scenes:
    """The scene of every key."""
    n, draws = len(key), Draws(key)
    shape = (n, MAX_OBJECTS)
    tops = np.array([leaf.top for leaf in LEAVES], np.float32)
    flies = np.array([leaf.flies for leaf in LEAVES])
    low, high, step = (np.array([getattr(leaf, name) for leaf in LEAVES]) for name in ("low", "high", "step"))

    place = draws.integer(0, len(PLACES) - 1)
    time = np.maximum(draws.integer(-1, len(TIMES) - 1), 0)  # day twice as often as each of the others
    horizon = draws.uniform(0.28, 0.6)
    angle = draws.uniform(0.5, 1.1) * draws.sign()  # from straight above
    light = np.stack([np.sin(angle), np.cos(angle)], -1)

    present = np.stack([np.ones(n, bool), draws.uniform() < 0.7, draws.uniform() < 0.45], -1)
    main = draws.integer(0, len(LEAVES) - 1)
    # The smaller ones are of other classes: "a red truck" always means the main object.
    others = [(main + draws.integer(1, len(LEAVES) - 1)) % len(LEAVES) for _ in range(1, MAX_OBJECTS)]
    leaf = np.stack([main, *others], -1)
    count = np.stack([low[k] + step[k] * draws.integer(0, (high[k] - low[k]) // step[k]) for k in leaf.T], -1)
    colour = np.stack([draws.integer(0, len(COLOUR_NAMES) - 1) for _ in range(MAX_OBJECTS)], -1)
    apart = np.stack([draws.integer(1, len(COLOUR_NAMES) - 1) for _ in range(MAX_OBJECTS)], -1)
    second = (colour + apart) % len(COLOUR_NAMES)
    tilt = np.stack([draws.uniform(-0.22, 0.22) for _ in range(MAX_OBJECTS)], -1) * np.where(flies[leaf], 1.6, 1.0)
    flip = np.stack([draws.sign() for _ in range(MAX_OBJECTS)], -1)
    lift = np.stack([draws.uniform() for _ in range(MAX_OBJECTS)], -1)

    half, x, floor = np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(shape, np.float32)
    half[:, 0] = draws.uniform(0.23, 0.4)
    span = np.maximum(1 - 2 * half[:, 0], 0) / 2 + 0.03
    x[:, 0] = 0.5 + span * draws.uniform(-1, 1)
    height = half[:, 0] * (1 + tops[leaf[:, 0]])
    # On the ground, and high enough on it for its top to use the picture, low enough for its top to stay inside.
    floor[:, 0] = draws.uniform(0.04, np.clip(np.minimum(horizon - 0.04, 0.98 - height), 0.05, None))
    # The smaller ones stand on the side where the main object leaves more room, farther away or nearer.
    side = np.where(np.abs(x[:, 0] - 0.5) < 0.02, draws.sign(), np.sign(0.5 - x[:, 0]))
    for slot in range(1, MAX_OBJECTS):
        towards = side if slot == 1 else -side
        edge = np.clip(x[:, 0] + towards * half[:, 0] * 0.85, 0.06, 0.94)
        wall = np.where(towards > 0, 0.97, 0.03)
        half[:, slot] = draws.uniform(0.09, 0.15)
        x[:, slot] = edge + (wall - edge) * draws.uniform(0.1, 1)
        floor[:, slot] = draws.uniform(0.03, horizon)
    gap = np.where(flies[leaf], lift * np.array([1, 0.3, 0.3], np.float32), 0)
    space = np.maximum(0.97 - floor - half * (1 + tops[leaf]), 0)
    base = floor + gap * np.minimum(space, 0.35)
    return Scenes(
        key, place, time, horizon, light, np.where(present, leaf, -1), count, colour, second, x,
        base.astype(np.float32), floor, half, tilt.astype(np.float32), flip,
    )  # fmt: skip

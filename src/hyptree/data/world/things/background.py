"""Skies, ridges, walls and grounds behind the objects."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hyptree.data.world.draws import Draws, derive, mix
from hyptree.data.world.scene import Scenes

NOISE_SIDE = 512
"""Side of the tile of noise that all surfaces take their grain from; half of it spans one picture."""

# By PLACES: meadow, sea, desert, mountains, city, room, studio.
_RIDGE = np.array([(0.42, 0.58, 0.38), (0.2, 0.42, 0.6), (0.85, 0.68, 0.42), (0.5, 0.55, 0.65), (0.52, 0.5, 0.54)]
                  + [(0.7, 0.66, 0.6)] * 2, np.float32)  # fmt: skip
_GROUND = np.array([(0.4, 0.6, 0.26), (0.84, 0.75, 0.55), (0.9, 0.75, 0.5), (0.86, 0.89, 0.93), (0.5, 0.5, 0.52),
                    (0.6, 0.43, 0.3), (0.7, 0.7, 0.7)], np.float32)  # fmt: skip
# By TIMES: day, dusk, night, fog.
_HIGH = np.array([(0.3, 0.55, 0.9), (0.32, 0.28, 0.55), (0.05, 0.07, 0.2), (0.72, 0.76, 0.8)], np.float32)
_LOW = np.array([(0.76, 0.88, 0.97), (0.98, 0.62, 0.38), (0.2, 0.24, 0.42), (0.86, 0.88, 0.9)], np.float32)
_AMBIENT = np.array([(1.0, 1.0, 1.0), (0.9, 0.7, 0.66), (0.36, 0.43, 0.66), (0.92, 0.94, 0.96)], np.float32)
_HAZE = np.array([0.35, 0.4, 0.35, 0.75], np.float32)


@lru_cache(1)
def noise() -> np.ndarray:
    """(NOISE_SIDE^2,) float32 smooth tileable noise in about [-1, 1]: five octaves, the finest 8 pixels wide."""
    side = NOISE_SIDE
    total = np.zeros((side, side))
    for octave in range(5):
        cells = 4 << octave
        grid = mix(np.arange(cells * cells, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(octave << 40))
        grid = (grid >> np.uint64(40)).astype(np.float64).reshape(cells, cells) * 2.0**-23 - 1
        at = np.arange(side) * cells / side
        low = at.astype(int)
        t = at - low
        t = t * t * (3 - 2 * t)
        rows = grid[low] * (1 - t)[:, None] + grid[(low + 1) % cells] * t[:, None]
        total += (rows[:, low] * (1 - t) + rows[:, (low + 1) % cells] * t) * 0.72**octave
    return (total / np.abs(total).max()).astype(np.float32).ravel()


def look_up(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The noise at any place; x and y in units of the picture's side."""
    scale = np.float32(NOISE_SIDE / 2)
    column = (x * scale).astype(np.int32) & (NOISE_SIDE - 1)
    row = (y * scale).astype(np.int32) & (NOISE_SIDE - 1)
    return noise()[row * NOISE_SIDE + column]


def paint_background(s: Scenes, size: int) -> np.ndarray:
    """(3, n, size, size) float32 pictures without objects, the first row on top."""
    n, draws = len(s), Draws(derive(s.key, 700))
    middle = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = middle[None, None, :], middle[None, ::-1, None]  # (1, 1, S), (1, S, 1)
    col = [draws.uniform() for _ in range(16)]
    room, studio, city = s.place == 5, s.place == 6, s.place == 4
    indoors = room | studio

    horizon = s.horizon[:, None, None]
    up = np.clip((y - horizon) / (1 - horizon), 0, 1)  # (n, S, 1)
    near = np.clip(1 - y / horizon, 0, 1)
    wall = np.stack([0.45 + 0.45 * col[i] for i in range(3)], -1)
    wall = wall + (0.7 - wall.mean(-1, keepdims=True)) * 0.5
    low = np.where(indoors[:, None], wall * _AMBIENT[s.time], _LOW[s.time] + _wobble(col[3:6], 0.08))
    high = np.where(indoors[:, None], wall * _AMBIENT[s.time] * 0.82, _HIGH[s.time] + _wobble(col[6:9], 0.1))
    ridge = np.clip((_RIDGE[s.place] + _wobble(col[9:12], 0.12)) * _AMBIENT[s.time], 0, 1)
    ridge = ridge + (low - ridge) * _HAZE[s.time][:, None]
    ground = _GROUND[s.place] + _wobble(col[11:14], 0.12)
    ground = np.where(studio[:, None], wall, ground) * _AMBIENT[s.time]
    far = ground + (low - ground) * (_HAZE[s.time] * np.where(indoors, 0.2, 0.8))[:, None]

    offset_x, offset_y = col[14][:, None, None], col[15][:, None, None]
    cloudy = look_up(x * 0.7 + offset_x, y * 1.6 + offset_y)  # (n, S, S)
    pattern = (
        _wall_pattern(Draws(derive(s.key, 701)), x, y) * np.where(room, 1.0, 0.0).astype(np.float32)[:, None, None]
    )
    depth = 1 / (near + np.float32(0.18))  # (n, S, 1)
    texture = look_up((x - 0.5) * depth * 0.6 + 8 + offset_x, depth * 1.1 + offset_y) * (0.3 + 0.7 * near)
    strength = np.where(studio, 0.03, np.where(city, 0.12, 0.2)).astype(np.float32)[:, None, None]
    tiles = np.sin((x - 0.5) * depth * 9) * np.sin(depth * 8) * near
    tiled = np.where(room | (city & (col[0] < 0.5)), 0.35, 0).astype(np.float32)[:, None, None]
    ground_light = 1 + strength * texture + tiled * np.clip(tiles * 3, -0.5, 0.5)
    sky_light = 1 + cloudy * np.where(indoors, 0.03, 0.09).astype(np.float32)[:, None, None] + pattern

    height = _ridge_height(s, middle)[:, None, :]  # (n, 1, S)
    behind = np.clip((height + horizon - y) * size + 0.5, 0, 1)
    ridge_light = 1 + 0.12 * cloudy
    on_ground = np.clip(
        (horizon - y) * size * np.where(studio, 8.0 / size, 1.0).astype(np.float32)[:, None, None] + 0.5, 0, 1
    )
    light_x = np.sign(s.light[:, 0]).astype(np.float32)[:, None, None]
    glow = 1 + 0.12 * (x - 0.5) * light_x - 0.16 * ((x - 0.5) ** 2 + (y - 0.5) ** 2)

    out = np.empty((3, n, size, size), np.float32)
    for c in range(3):
        a, b, g, f, r = (value[:, c, None, None].astype(np.float32) for value in (low, high, ground, far, ridge))
        sky = (a + (b - a) * up) * sky_light
        sky += (r * ridge_light - sky) * behind
        floor = (f + (g - f) * near) * ground_light
        sky += (floor - sky) * on_ground
        np.multiply(sky, glow, out=out[c])
    return out


def _wobble(columns: list[np.ndarray], size: float) -> np.ndarray:
    return (np.stack(columns, -1) - 0.5) * 2 * size


def _wall_pattern(draws: Draws, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(n, S, S) stripes or dots of a wallpaper."""
    along, across = draws.uniform(20, 50)[:, None, None], draws.uniform(20, 50)[:, None, None]
    kind, strength = draws.integer(0, 3)[:, None, None], draws.uniform(0.04, 0.12)[:, None, None]
    wave_x, wave_y = np.sin(x * along), np.sin(y * across)
    wave = np.where(kind == 0, 0, np.where(kind == 1, wave_x, np.where(kind == 2, wave_y, wave_x * wave_y)))
    return (np.clip(wave * 2, -1, 1) * strength).astype(np.float32)


def _ridge_height(s: Scenes, x: np.ndarray) -> np.ndarray:
    """(n, S) how far hills, dunes, peaks or roofs rise above the horizon; nothing at the sea and indoors."""
    draws = Draws(derive(s.key, 702))
    size, phase = draws.uniform(0.5, 1.0)[:, None], draws.uniform(0, 10)[:, None]
    pace = draws.uniform(0.7, 1.4)[:, None]
    hills = 0.07 + 0.045 * np.sin(x * 5 * pace + phase) + 0.025 * np.sin(x * 11 * pace + 2 * phase)
    dunes = 0.05 + 0.05 * np.abs(np.sin(x * 3 * pace + phase))
    saw = np.abs(((x * 2.2 * pace + phase) % 1) - 0.5) * 2
    saw2 = np.abs(((x * 5.1 * pace + phase * 1.7) % 1) - 0.5) * 2
    peaks = 0.04 + 0.2 * saw + 0.06 * saw2
    block = np.floor(x * 9 * pace + phase)
    roofs = 0.05 + 0.2 * np.abs(np.sin(block * 12.9898 + phase)) ** 1.5
    sea = np.full_like(hills, 0.0)
    height = np.choose(s.place[:, None], [hills, sea, dunes, peaks, roofs, sea, sea])
    return (height * size).astype(np.float32)

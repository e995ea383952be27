"""The clustering mixer and the model by loops over windows, heads, patches and centres, straight from the formulas.

Written for the tests, in float64; shares no code with the library except for reading the modules' parameters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def similarity(x: Tensor, y: Tensor, c: Tensor | float | None, clip: float) -> Tensor:
    """Cosine of two vectors, or minus the hyperbolic distance of the points they are mapped to."""
    if c is None:
        return x.dot(y) / (x.norm() * y.norm())
    s = c**0.5
    points = []
    for v in (x, y):
        v = v if v.norm() <= clip else v / v.norm() * clip
        time, space = torch.cosh(s * v.norm()) / s, torch.sinh(s * v.norm()) / (s * v.norm()) * v
        points.append((time, space))
    (t1, p1), (t2, p2) = points
    return -torch.acosh(c * (t1 * t2 - p1.dot(p2))) / s


def cells(length: int, parts: int) -> list[range]:
    """Positions of each part of an axis, as in adaptive pooling."""
    return [range(i * length // parts, math.ceil((i + 1) * length / parts)) for i in range(parts)]


def mean(vectors: list[Tensor]) -> Tensor:
    return torch.stack(vectors).sum(0) / len(vectors)


def cluster(points, values, centres, value_centres, level, bias) -> tuple[list[Tensor], Tensor]:
    """One level for one head and region; ``bias[i][j]`` is None or a number. Gives mixed values and assignments."""
    manifold = level.manifold
    c = None if manifold is None else manifold.c
    rows = []
    for i, x in enumerate(points):
        if level.alpha is None:
            rows.append(torch.ones(1, dtype=x.dtype))
            continue
        row = torch.stack([level.alpha * similarity(x, y, c, level.clip) + bias[i][j] for j, y in enumerate(centres)])
        if level.is_hard:
            row = row + level.beta
            best = int(row.argmax())
            rows.append(torch.stack([row[j].sigmoid() if j == best else 0 * row[j] for j in range(len(row))]))
        else:
            weights = row.exp()
            rows.append(weights / weights.sum())
    assign = torch.stack(rows)
    updated = []
    for j, u in enumerate(value_centres):
        total, mass = u, torch.ones((), dtype=u.dtype)
        for i, v in enumerate(values):
            total, mass = total + assign[i, j] * v, mass + assign[i, j]
        updated.append(total / mass)
    mixed = [sum(assign[i, j] * updated[j] for j in range(len(updated))) for i in range(len(points))]
    return mixed, assign


def mixer(module, image: Tensor, fold: int) -> Tensor:
    """What ``module`` (a ClusterMixer at its own size, "window" scaling) gives for one image (H, W, C).

    Shifted windows start half a window above and left of the map.
    """
    height, width, _ = image.shape
    heads, dim = module.num_heads, module.head_dim
    weight, offset = module.points_and_values.weight, module.points_and_values.bias
    both = torch.stack([torch.stack([weight @ image[y, x] + offset for x in range(width)]) for y in range(height)])
    wy, wx = math.ceil(height / fold), math.ceil(width / fold)
    top = wy // 2 if module.shifted and wy < height else 0
    left = wx // 2 if module.shifted and wx < width else 0
    rows, columns = math.ceil((height + top) / wy), math.ceil((width + left) / wx)
    py, px = min(module.max_patch_centres, wy), min(module.max_patch_centres, wx)

    def part(which: int, head: int, y: int, x: int) -> Tensor:
        start = which * heads * dim + head * dim
        return both[y, x, start : start + dim]

    per_head = []
    for head in range(heads):
        mixed = {}
        window_points, window_values = [], []
        for r in range(rows):
            for q in range(columns):
                inside = [
                    (y, x)
                    for y in range(r * wy - top, (r + 1) * wy - top)
                    for x in range(q * wx - left, (q + 1) * wx - left)
                    if 0 <= y < height and 0 <= x < width
                ]
                centres, value_centres, numbers = [], [], []
                for i, ys in enumerate(cells(wy, py)):
                    for j, xs in enumerate(cells(wx, px)):
                        members = [(r * wy - top + y, q * wx - left + x) for y in ys for x in xs]
                        members = [place for place in members if place in inside]
                        if members:
                            centres.append(mean([part(0, head, *place) for place in members]))
                            value_centres.append(mean([part(1, head, *place) for place in members]))
                            numbers.append(i * px + j)
                bias = []
                for y, x in inside:
                    place = (y + top - r * wy) * wx + (x + left - q * wx)
                    position = module.patch.position
                    bias.append(
                        [0.0 if position is None else position.bias[r * columns + q, head, n, place] for n in numbers]
                    )
                points = [part(0, head, *place) for place in inside]
                values = [part(1, head, *place) for place in inside]
                result, _ = cluster(points, values, centres, value_centres, module.patch, bias)
                mixed.update(dict(zip(inside, result, strict=True)))
                window_points.append(mean(points))
                window_values.append(mean(values))
        over_windows = None
        if module.window is not None:
            my, mx = min(module.max_window_centres, rows), min(module.max_window_centres, columns)
            grid = [(ys, xs) for ys in cells(height, my) for xs in cells(width, mx)]
            centres = [mean([part(0, head, y, x) for y in ys for x in xs]) for ys, xs in grid]
            value_centres = [mean([part(1, head, y, x) for y in ys for x in xs]) for ys, xs in grid]
            position = module.window.position
            bias = [
                [0.0 if position is None else position.bias[0, head, j, i] for j in range(my * mx)]
                for i in range(rows * columns)
            ]
            over_windows, _ = cluster(window_points, window_values, centres, value_centres, module.window, bias)
        per_head.append((mixed, over_windows))

    out = []
    for y in range(height):
        for x in range(width):
            window = ((y + top) // wy) * columns + (x + left) // wx
            own = [mixed[y, x] for mixed, _ in per_head]
            shared = [over[window] for _, over in per_head if over is not None]
            out.append(torch.cat([*shared, *own]))
    stacked = torch.stack(out)
    if isinstance(module.norm, torch.nn.Identity):
        normal = stacked
    else:
        normal = map_norm(module.norm, stacked)
    return (normal @ module.proj.weight.T + module.proj.bias).reshape(height, width, -1)


def map_norm(norm, x: Tensor) -> Tensor:
    """One mean and variance for all numbers of a sample, a factor and an offset per channel."""
    centred = x - x.mean()
    return centred / (centred.square().mean() + norm.eps).sqrt() * norm.weight + norm.bias

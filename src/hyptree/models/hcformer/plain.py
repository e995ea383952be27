"""What an HCFormer is, in plain torch, to be read from top to bottom.

Patches of a window gather around centres of the window, windows gather around centres of the map. Nothing is fused,
padded or batched over windows: each window is cut out of the map and clustered by itself. Tests hold the fast model to
what stands here; ``PlainHCFormer(**options).load_state_dict(model.state_dict())`` takes its weights. Options are those
of :class:`~hyptree.models.HCFormer`, without what is random in training. Shapes: B pictures, h heads of d numbers, a
map of H x W patches, N points (patches, or windows) and M centres.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import LayerScale, Mlp, get_act_layer
from torch import Tensor, nn

DEFAULTS: dict[str, Any] = {
    "img_size": 224, "in_chans": 3, "num_classes": 1000, "depths": (2, 2, 6, 2), "dims": (32, 64, 196, 224),
    "num_heads": (4, 4, 8, 8), "head_dim": 16, "mlp_ratios": (8, 8, 4, 4), "folds": (7, 7, 1, 1),
    "patch_centres": (4, 2, 7, 4), "window_centres": (4, 4, 1, 0), "scaling": "window", "patch_geometry": "euclidean",
    "window_geometry": "hyperbolic", "assignment": "soft", "context": "hierarchy", "position_bias": True, "alpha": 1.0,
    "curvature": 1.0, "learnable_curvature": False, "clip_norm": 1.0, "mixer_norm": True, "input_norm": False,
    "norm": "group", "convs": "plain", "layer_scale": 1e-5, "act_layer": "gelu",
}  # fmt: skip
Layout = Sequence[tuple[int, int]]  # rows and columns of a grid of windows, of a window, and of its grid of centres
Norm = Callable[[int], nn.Module]


class Part(NamedTuple):
    """A window along one axis: its patches, counted on the map and in the window, and its centres that have patches."""

    on_map: slice
    in_window: slice
    centres: list[int]
    members: list[list[int]]


def cells(length: int, count: int) -> list[range]:
    """The positions of each of ``count`` equal parts of an axis; they share one where they do not divide it."""
    return [range(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]


def cut(n: int, length: int, margin: int, count: int) -> list[Part]:
    """An axis of n patches in windows of ``length`` with ``count`` centres; the first has ``margin`` cells in front."""
    parts = []
    for start in range(-margin, n, length):
        first, stop = max(start, 0), min(start + length, n)
        members = [[p + start - first for p in cell if first <= p + start < stop] for cell in cells(length, count)]
        kept = [i for i, member in enumerate(members) if member]
        inside = slice(first - start, stop - start)
        parts.append(Part(slice(first, stop), inside, kept, [members[i] for i in kept]))
    return parts


def averages(x: Tensor, rows: Sequence[Sequence[int]], columns: Sequence[Sequence[int]]) -> Tensor:
    """Means of a map over a grid of parts, by the positions of each down and across: (..., H, W, d) -> (..., M, d)."""
    down, across = (x.new_tensor([[(i in part) / len(part) for i in range(size)] for part in parts])
                    for parts, size in ((rows, x.shape[-3]), (columns, x.shape[-2])))  # fmt: skip
    return torch.einsum("iy,jx,...yxd->...ijd", down, across, x).flatten(-3, -2)


def similarity(x: Tensor, y: Tensor, c: float | Tensor | None, clip: float) -> Tensor:
    """Of all pairs, (..., N, d), (..., M, d) -> (..., N, M): cosines, or minus distances on a hyperboloid.

    Tangent vectors at the origin, no longer than ``clip``, are mapped to points with space components ``s`` and times
    ``t``; the chord of two points is ``q = |s_x - s_y|^2 - (t_x - t_y)^2``, their distance follows from it.
    """
    if c is None:
        return F.normalize(x, dim=-1, eps=1e-6) @ F.normalize(y, dim=-1, eps=1e-6).mT
    points = []
    for v in (x, y):
        length = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        root_c_length = c**0.5 * length.clamp(min=1e-15, max=clip)
        points.append((v / length.clamp_min(1e-15) * root_c_length.sinh() / c**0.5, root_c_length.cosh() / c**0.5))
    (s, t), (of_y, time_of_y) = points
    chord = (s[..., :, None, :] - of_y[..., None, :, :]).square().sum(-1) - (t - time_of_y.mT).square()
    is_apart = chord > 0  # a window may be a centre itself, where the distance has a kink
    return -torch.where(is_apart, 2 / c**0.5 * (c * torch.where(is_apart, chord, 1.0) / 4).sqrt().asinh(), 0.0)


class Position(nn.Module):
    """A learned number for every window, head, centre and patch of the window.

    For other sizes, the grid of windows, the window and the grid of centres are resized each by itself, linearly: a
    centre's number means something else in the next window.
    """

    def __init__(self, heads: int, made_for: Layout, is_absent: bool):
        super().__init__()
        self.heads, self.made_for = heads, made_for
        windows, patches, centres = (rows * columns for rows, columns in made_for)
        self.bias = None if is_absent else nn.Parameter(torch.zeros(windows, heads, centres, patches))

    def forward(self, layout: Layout) -> Tensor:
        """(rows and columns of windows, h, rows and columns of centres, rows and columns of a window)."""
        if self.bias is None:
            return torch.zeros(*layout[0], self.heads, *layout[2], *layout[1])
        grid, window, centres = self.made_for
        full = self.bias.reshape(*grid, self.heads, *centres, *window)
        for axis, size in zip((0, 5, 3), layout, strict=True):
            last = full.movedim((axis, axis + 1), (-2, -1))
            flat = F.interpolate(last.reshape(1, -1, *last.shape[-2:]), size, mode="bilinear", align_corners=False)
            full = flat.reshape(*last.shape[:-2], *size).movedim((-2, -1), (axis, axis + 1))
        return full


class Level(nn.Module):
    """One level of clustering: what the values (..., N, d) of one region become."""

    def __init__(self, o: dict[str, Any], geometry: str, heads: int, made_for: Layout, is_single: bool):
        super().__init__()
        self.clip, self.is_hard = o["clip_norm"], o["assignment"] == "hard"
        is_trivial = is_single and not self.is_hard  # one centre, to which everything belongs
        self.alpha = None if is_trivial else nn.Parameter(torch.tensor(float(o["alpha"])))
        self.beta = nn.Parameter(torch.zeros(())) if self.is_hard else None
        self.position = Position(heads, made_for, is_absent=is_trivial or not o["position_bias"])
        self.c, self.manifold = o["curvature"] if geometry == "hyperbolic" else None, nn.ModuleDict()
        if self.c is not None and o["learnable_curvature"] and not is_trivial:
            self.c, self.manifold["curvature"] = "learned", nn.ParameterDict({"raw": torch.tensor([self.c]).log()})

    def forward(self, points: Tensor, values: Tensor, centres: Tensor, value_centres: Tensor, bias: Tensor) -> Tensor:
        """``centres`` and their values are (..., M, d), the bias is (h, rows and columns of centres, of points)."""
        assign = torch.ones_like(points[..., :1])
        if self.alpha is not None:
            c = next(self.manifold.parameters()).exp() if self.c == "learned" else self.c
            logits = self.alpha * similarity(points, centres, c, self.clip)  # (..., N, M)
            assign = (logits := logits + bias.flatten(3).flatten(1, 2).mT.to(points)).softmax(-1)
            if self.beta is not None:  # the best centre alone, weighted by a sigmoid, as in Context Cluster
                assign = F.one_hot(logits.argmax(-1), logits.shape[-1]) * (logits + self.beta).sigmoid()
        collected = (value_centres + assign.mT @ values) / (1 + assign.sum(-2).unsqueeze(-1))  # (..., M, d)
        return assign @ collected


class Mixer(nn.Module):
    """Both levels of clustering, side by side, through a norm and a projection: (B, H, W, C) -> (B, H, W, C)."""

    def __init__(self, o: dict[str, Any], stage: int, dim: int, made_for: Sequence[int], is_shifted: bool):
        super().__init__()
        self.heads, self.fold, self.is_shifted = o["num_heads"][stage], o["folds"][stage], is_shifted
        self.patch_centres = o["patch_centres"][stage]
        self.window_centres = o["window_centres"][stage] if o["context"] == "hierarchy" else 0
        self.lengths, self.keeps_lengths = [-(-n // self.fold) for n in made_for], o["scaling"] == "fold"
        of_patches, of_windows = self.layouts(made_for)[1:]
        inner = self.heads * (o["head_dim"] if isinstance(o["head_dim"], int) else o["head_dim"][stage])
        self.points_and_values = nn.Linear(dim, 2 * inner)
        self.patch = Level(o, o["patch_geometry"], self.heads, of_patches, self.patch_centres == 1)
        self.window = None
        if self.window_centres:
            self.window = Level(o, o["window_geometry"], self.heads, of_windows, self.window_centres == 1)
        width = inner * (2 if self.window_centres else 1)
        self.norm = nn.GroupNorm(1, width) if o["mixer_norm"] else nn.Identity()
        self.proj = nn.Linear(width, dim)

    def layouts(self, size: Sequence[int]) -> tuple[list[list[Part]], Layout, Any]:
        """The windows of a map, down and across, and what the levels have: patches in windows, and windows in it."""
        axes, counts = [], []
        for n, own in zip(size, self.lengths, strict=True):
            length = min(own, n) if self.keeps_lengths else -(-n // self.fold)
            counts.append((length, min(length, self.patch_centres)))
            axes.append(cut(n, length, length // 2 if self.is_shifted and length < n else 0, counts[-1][1]))
        grid: Any = tuple(map(len, axes))
        window, centres = zip(*counts, strict=True)
        return axes, (grid, window, centres), ((1, 1), grid, tuple(min(n, self.window_centres) for n in grid))

    def forward(self, x: Tensor) -> Tensor:
        (rows, columns), of_patches, of_windows = self.layouts(x.shape[1:3])
        both = self.points_and_values(x).unflatten(-1, (2, self.heads, -1)).permute(3, 0, 4, 1, 2, 5)
        own, means = torch.zeros_like(both[1]), []  # (B, h, H, W, d), and for each window (2, B, h, d)
        position = self.patch.position(of_patches)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                region = both[..., row.on_map, column.on_map, :]  # (2, B, h, H and W of the window, d)
                bias = position[i, j][:, row.centres][:, :, column.centres][..., row.in_window, column.in_window]
                mixed = self.patch(*region.flatten(3, 4), *averages(region, row.members, column.members), bias)
                own[..., row.on_map, column.on_map, :] = mixed.unflatten(2, region.shape[3:5])
                means.append(region.mean((3, 4)))
        if self.window is not None:
            around = averages(both, *(cells(n, m) for n, m in zip(x.shape[1:3], of_windows[2], strict=True)))
            over = self.window(*torch.stack(means, 3), *around, self.window.position(of_windows)[0, 0])
            over = over.unflatten(2, of_windows[1])  # (B, h, windows down and across, d), now to their patches
            for axis, parts in ((2, rows), (3, columns)):
                counts = torch.tensor([part.on_map.stop - part.on_map.start for part in parts], device=x.device)
                over = over.repeat_interleave(counts, axis)
            own = torch.cat([over, own], 1)
        return self.proj(self.norm(own.permute(0, 1, 4, 2, 3).flatten(1, 2)).movedim(1, -1))


class Block(nn.Module):
    """Clustering and an MLP, each with a factor and added to the map."""

    def __init__(self, o: dict[str, Any], dim: int, hidden: int, norm: Norm, mixer: Mixer):
        super().__init__()
        self.norm1, self.mixer, self.norm2 = norm(dim) if o["input_norm"] else nn.Identity(), mixer, norm(dim)
        self.mlp = Mlp(dim, hidden, act_layer=get_act_layer(o["act_layer"]))
        scale: Any = nn.Identity if o["layer_scale"] is None else partial(LayerScale, dim, o["layer_scale"])
        self.scale1, self.scale2 = scale(), scale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1(self.mixer(self.norm1(x).movedim(1, -1))).movedim(-1, 1)
        return x + self.scale2(self.mlp(self.norm2(x).movedim(1, -1))).movedim(-1, 1)


def downsampling(o: dict[str, Any], stage: int, last: int, dim: int, norm: Norm) -> nn.Module:
    """The convolutions in front of a stage: the paper's, or smaller ones with a norm and GELU behind each."""
    if o["convs"] == "plain":
        return nn.Conv2d(last, dim, 3, 2, 1) if stage else nn.Conv2d(last, dim, 4, 4)
    hidden, layers = max(16, dim // 2), nn.Sequential()
    stem = [("1", last, hidden, 2), ("2", hidden, hidden, 1), ("3", hidden, dim, 2)]
    for name, inputs, outputs, stride in [("", last, dim, 2)] if stage else stem:
        layers.add_module("conv" + name, nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False))
        layers.add_module("norm" + name, norm(outputs))
        layers.add_module("act" + name, nn.Identity() if name == "3" else nn.GELU())
    return layers


class PlainHCFormer(nn.Module):
    """Pictures (B, C, H, W) -> logits (B, classes) and the maps of all stages, whose sides are a 4th, ... a 32nd."""

    def __init__(self, **options: Any):
        super().__init__()
        if unknown := set(options) - set(DEFAULTS):
            raise ValueError(f"PlainHCFormer: {min(unknown)!r} is no option of the definition")
        self.options = o = {**DEFAULTS, **options}
        norm: Norm = partial(nn.GroupNorm, 1) if o["norm"] == "group" else nn.BatchNorm2d
        if isinstance(count := o["window_centres"], int):  # of the stages with several windows
            o["window_centres"] = [count if o["folds"][i] > 1 else (1, 1, 1, 0)[i] for i in range(4)]
        size, dims = o["img_size"], (o["in_chans"], *o["dims"])
        size, self.stages = [size, size] if isinstance(size, int) else size, nn.ModuleList()
        for i, (last, dim) in enumerate(pairwise(dims)):
            size, blocks = [-(-n // (2 if i else 4)) for n in size], nn.Sequential()
            for count in range(sum(o["depths"][:i]), sum(o["depths"][: i + 1])):
                mixer = Mixer(o, i, dim, size, o["context"] == "shifted" and count % 2 == 1)
                blocks.append(Block(o, dim, int(dim * o["mlp_ratios"][i]), norm, mixer))
            first = downsampling(o, i, last, dim, norm)
            self.stages.append(nn.Sequential(OrderedDict(downsample=first, blocks=blocks)))
        self.norm = norm(dims[-1])
        self.head = nn.ModuleDict({"fc": nn.Linear(dims[-1], o["num_classes"]) if o["num_classes"] else nn.Identity()})

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        maps = []
        if self.options["convs"] == "plain":  # every pixel is in a patch
            x = F.pad(x, (0, -x.shape[3] % 4, 0, -x.shape[2] % 4))
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return self.head["fc"](self.norm(x).mean((2, 3))), maps

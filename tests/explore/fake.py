"""A small model with HCFormer's own mixers, in the shapes that matter: windows in groups, and a flat last stage."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.nn.cluster.mixer import ClusterAssignment, ClusterMixer

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


class TinyClusters(nn.Module):
    """Stage 1: 8 x 8 patches in 16 windows, 4 groups. Stage 2: 4 x 4 patches in one window, no window level."""

    def __init__(self, num_classes: int = 5, **options: Any):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 4, 4)
        first = {"fold": 4, "patch_centres": 2, "window_centres": 2} | options
        self.first = nn.ModuleList([ClusterMixer(12, 3, 6, (8, 8), **first) for _ in range(2)])
        self.down = nn.Conv2d(12, 12, 2, 2)
        self.second = ClusterMixer(12, 2, 6, (4, 4), fold=1, patch_centres=2)
        self.head = nn.Linear(12, num_classes)
        self.pretrained_cfg = {"input_size": (3, 32, 32), "mean": MEAN, "std": STD}

    def run(self, x: Tensor, record: list[ClusterAssignment] | None) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        for mixer in self.first:
            x = x + mixer(x, record)
        x = self.down(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.head((x + self.second(x, record)).mean((1, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, None)

    def assignments(self, x: Tensor) -> list[ClusterAssignment]:
        record: list[ClusterAssignment] = []
        self.run(x, record)
        places = [(0, 0), (0, 1), (1, 0)]
        return [dataclasses.replace(seen, stage=s, block=b) for seen, (s, b) in zip(record, places, strict=True)]


def tiny(**options: Any) -> TinyClusters:
    """The model with weights large enough that its assignments are far from even."""
    model = TinyClusters(**options)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("alpha"):
                p.fill_(8.0)
    return model.eval()

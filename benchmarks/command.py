"""The benchmarks by name: what ``hyptree bench`` offers in a checkout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.hcformer.options import HCFormerOptions
from benchmarks.helm.options import HelmOptions
from benchmarks.himapper import HiMapperOptions
from benchmarks.kernels.options import KernelOptions
from benchmarks.lab import LabOptions
from benchmarks.launch import LaunchOptions
from benchmarks.options import GeometryOptions
from benchmarks.tokens.options import TokensOptions
from benchmarks.vlm.run import VlmOptions


def geometry(config: GeometryOptions) -> int:
    """Time and check the geometry against geoopt, HypLL and the Euclidean twin.

    One line per operation, shape and pass: the time of the Euclidean twin, everybody else as a multiple of it, and the
    largest error of each against float64. Exit code 1 if an answer of ours is wrong.
    """
    from benchmarks.geometry import run as bench

    return bench.run(config)


def hcformer(config: HCFormerOptions) -> int:
    """Show that HCFormer's cost per patch does not grow with the picture, and its speed beside its authors' and timm's.

    Exit code 1 if time or memory per patch grows by more than 1.3 from the smallest to the largest picture, if an
    answer of ours is wrong, or if a target of this device is missed.
    """
    from benchmarks.hcformer import run as bench

    return bench.run(config)


def tokens(config: TokensOptions) -> int:
    """Time the clustering of tokens on every backend beside its rivals, and whole models with fewer tokens.

    Exit code 1 if labels of ours are wrong or a target of this device is missed.
    """
    from benchmarks.tokens import run as bench

    return bench.run(config)


def lab(config: LabOptions) -> int:
    """Time the batched engine of the superposition lab against one model at a time by autograd.

    Exit code 1 if they disagree or the engine misses its target: 4 times the loop on a CPU, 50 times on a GPU.
    """
    from benchmarks import lab as bench

    return bench.run(config)


def helm(config: HelmOptions) -> int:
    """Time hyperbolic language models beside Llama and DeepSeek-V3 of equal shape, training and decoding.

    Exit code 1 if a model of ours fails or a target of the GPU is missed.
    """
    from benchmarks.helm import run as bench

    return bench.run(config)


def vlm(config: VlmOptions) -> int:
    """Time a training step of CLIP with adapters attached beside one without, and after merging.

    Exit code 1 if an answer is wrong or a limit of the GPU is missed.
    """
    from benchmarks.vlm import run as bench

    return bench.run(config)


def himapper(config: HiMapperOptions) -> int:
    """Count what Hi-Mapper adds to a backbone, and time the wrapped model beside the plain one.

    Exit code 1 if a fresh wrapped model is not the plain one, or a limit on parameters or (on a GPU) time is missed.
    """
    from benchmarks import himapper as bench

    return bench.run(config)


def kernels(config: KernelOptions) -> int:
    """Check every kernel against its definition, and time it beside that, compiled too, and the floor.

    One line per kernel, shape and pass; a kernel that is not faster than its compiled definition is no gain. Exit
    code 1 if a kernel is wrong or fails.
    """
    from benchmarks.kernels import run as bench

    return bench.run(config)


def launch(config: LaunchOptions) -> int:
    """Time what the host pays for a launch, and for a block of HCFormer and of HELM."""
    from benchmarks import launch as bench

    return bench.run(config)


SUBVERBS: dict[str, Callable[[Any], int]] = {
    "geometry": geometry,
    "kernels": kernels,
    "launch": launch,
    "hcformer": hcformer,
    "tokens": tokens,
    "lab": lab,
    "helm": helm,
    "himapper": himapper,
    "vlm": vlm,
}

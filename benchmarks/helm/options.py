"""What ``hyptree bench helm`` can be asked for; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from benchmarks.options import ModeOptions
from hyptree.errors import UserError


@dataclass
class HelmOptions(ModeOptions):
    QUICK: ClassVar[Mapping[str, Any]] = {
        "presets": ("helm-d-pico", "helm-mice-pico"), "vocab": (64,), "batch": 1, "length": 8, "decode_batch": 2,
        "context": 16, "dtype": "float32", "modes": ("eager",), "repeats": 2,
    }  # fmt: skip

    sections: tuple[Literal["step", "decode"], ...] = ("step", "decode")
    """What to measure."""
    presets: tuple[str, ...] = ("helm-d-pico", "helm-mice-pico")
    """Configurations, by name."""
    vocab: tuple[int, ...] = (0,)
    """Sizes of the vocabulary; 0 for that of the preset."""
    batch: int = 4
    """Sequences of a training step."""
    length: int = 0
    """Tokens of such a sequence; 0 for 2048 on cuda and 128 on cpu."""
    decode_batch: int = 8
    """Sequences that are decoded together."""
    context: int = 0
    """Tokens in the cache when decoding; 0 for 8192 on cuda and 256 on cpu."""
    dtype: Literal["bf16", "autocast", "float32"] = "bf16"
    """bf16 holds weights in bfloat16 too, autocast in float32."""
    twin_experts: Literal["auto", "grouped_mm", "hyptree"] = "auto"
    """Who runs the twin's experts: transformers (grouped_mm, compiles in bf16 only) or ours; auto takes what runs."""
    optimizer: bool = False
    """Let a training step end with fused AdamW."""
    repeats: int = 10
    clock: Literal["wall", "cpu", "device"] = "wall"
    """cpu counts CPU time, for a machine that others use as well; device counts the kernels of a GPU alone."""
    profile: bool = False
    """Print the kernels of ours and of the twin, by time."""
    top: int = 20
    """How many of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("batch", 1), ("decode_batch", 1), ("length", 0), ("context", 0), ("top", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if self.length == 1 or min(self.vocab) < 0:
            raise UserError("length must be 2 or more, so that a token has a next one, and vocab 0 or more")
        if (self.clock == "cpu") == (self.device == "cuda") and self.clock != "wall":
            raise UserError(f"clock {self.clock} does not belong to device {self.device}; use --clock wall")
        on_gpu = self.device == "cuda"
        self.length = self.length or (2048 if on_gpu else 128)
        self.context = self.context or (8192 if on_gpu else 256)

"""What ``hyptree bench hcformer`` can be asked for; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from benchmarks.options import ClockOptions, ModeOptions
from hyptree.errors import UserError

RIVALS = ("swin_tiny_patch4_window7_224", "convnext_tiny", "resnet50")
TABLES = ("growth", "throughput", "work")


@dataclass
class HCFormerOptions(ModeOptions, ClockOptions):
    QUICK: ClassVar[Mapping[str, Any]] = {
        "models": ("hcformer_pico", "resnet10t"), "modes": ("eager",), "size": 64, "batch": 2, "repeats": 2,
        "growth_model": "hcformer_pico", "sizes": (64, 128), "patches": 1024, "clock": "wall",
    }  # fmt: skip

    tables: tuple[str, ...] = ("growth", "throughput")
    """What to measure: growth, throughput; work counts kernels and bytes of a GPU without one."""
    models: tuple[str, ...] = ("hcformer_nano", "hcformer_medium", *RIVALS)
    """timm names for the throughput table; those of ours for the table of work."""
    recompute_mlp: bool = False
    """Let ours compute their MLPs again in the backward pass, for less memory."""
    optimizer: bool = False
    """Let a training step end with fused AdamW."""
    published: bool = True
    """Also run the authors' order of operations, written out in plain torch, eager."""
    growth_model: str = "hcformer_nano"
    """Model of the growth table."""
    sizes: tuple[int, ...] = (224, 448, 896)
    """Picture sizes of the growth table, in pixels, smallest first."""
    patches: int = 50176
    """Patches (4 x 4 pixels) per batch of the growth table, about; one picture of 896 px by default."""
    batch: int = 0
    """Pictures per batch of the throughput table; 0 for 128 on cuda and 32 on cpu."""
    size: int = 224
    """Picture size of the throughput table."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 means autocast; auto takes it on cuda, and float32 on cpu."""
    time_limit: float = 0.0
    """Seconds for the throughput table, about; what is not ready by then is left out. 0 for no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.tables) - set(TABLES):
            raise UserError(f"tables are {', '.join(TABLES)}, got {', '.join(sorted(unknown))}")
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or min(self.sizes) < 4:
            raise UserError(f"sizes must grow and be 4 or more, got {self.sizes}")
        if self.batch < 0 or self.size < 4 or self.time_limit < 0:
            got = f"{self.batch}, {self.size} and {self.time_limit:g}"
            raise UserError(f"batch must be 0 or more, size 4 or more and time-limit 0 or more, got {got}")
        if self.dtype == "auto":
            self.dtype = "bfloat16" if self.device == "cuda" else "float32"
        self.batch = self.batch or (128 if self.device == "cuda" else 32)

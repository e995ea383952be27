"""What a recipe says under ``radial:``. Imports no torch: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hyptree.checks import require_numbers


@dataclass
class RadialSettings:
    """How chains of captions train a text encoder (``model.name``: hf:FOLDER_OR_ID, open_clip:NAME:PRETRAINED).

    The defaults are the published recipe for CLIP: AdamW, constant rate, no clipping, fp32, one pass over the data.
    """

    chains: str = "world"
    """world (the built-in one), the folder of HierarCaps, or a CSV with the columns positive and negative. Training
    takes data.num_train of them [2000 of the world], validation data.num_val [1000]."""
    part: Literal["expanded", "train", "sample"] = "expanded"
    """In the folder of HierarCaps. Chains of test pictures are left out of training and are the validation set."""
    held_out: Path | None = None
    """Another CSV whose pictures are treated like those of the test set."""
    val_share: float = 0.1
    """Share of the pictures that is validation where none is held out."""
    method: Literal["tower", "scale", "lora", "diagonal", "orthogonal", "full"] = "tower"
    """What is trained: the whole text tower, or an adapter on it."""
    adapter: dict[str, Any] = field(default_factory=dict)
    """Options of the adapter, e.g. {block_size: 64} for scale, {rank: 8} for lora."""
    entail_weight: float = 1.0
    """Weight of the entailment term."""
    hard_weight: float = 1.0
    """Weight of the worst pairs; 0 switches the term off."""
    keep_weight: float = 10.0
    """Weight of staying near the first embeddings."""
    geometry: Literal["chord", "geodesic", "lorentz"] = "chord"
    """chord (the paper), geodesic, or lorentz, which lifts embeddings as tangent vectors at the origin."""
    objective: Literal["radial", "cones"] = "radial"
    """radial, or cones for comparison."""
    cone_size: float = 0.1
    """Distance from the root at which a cone opens to a half space."""
    cone_margin: float = 0.5
    """How far outside a cone a negative must lie, in radians."""
    curvature: float | None = None
    """The c of lorentz; by default the encoder's own, else 1."""
    random_init: bool = False
    """Random weights for the encoder, for smoke tests."""

    def __post_init__(self) -> None:
        require_numbers(self, "a positive number", "curvature", "cone_size")
        require_numbers(self, "at least 0", "entail_weight", "hard_weight", "keep_weight", "cone_margin")
        if not 0 < self.val_share < 1:
            raise ValueError(f"val_share is a share of the pictures, between 0 and 1, got {self.val_share:g}")
        if self.method == "tower" and self.adapter:
            raise ValueError("method tower takes no adapter options")

    def common_defaults(self) -> dict[str, Any]:
        """The published setting, where a recipe says nothing; adapters want a higher rate than a whole tower."""
        return {
            "data.batch_size": 8,
            "optim.lr": 1e-7 if self.method == "tower" else 1e-4,
            "optim.weight_decay": 0.01,
            "optim.clip": None,
            "schedule.name": "constant",
            "schedule.epochs": 1,
            "run.eval_every": 0,
            "run.save_steps": 500,
            "run.log_steps": 10,
        }

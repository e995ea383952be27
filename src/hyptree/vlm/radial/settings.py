"""What a radial training run is. Imports no torch: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass

from hyptree.errors import UserError, require_one_of

OBJECTIVES = ("radial", "cones")

TOWER_LR, ADAPTER_LR = 1e-7, 1e-4


@dataclass(kw_only=True)
class RadialSettings:
    """How chains of captions train a text encoder.

    The defaults are the published recipe for CLIP: AdamW, constant rate, no clipping, fp32, one pass over the data.
    """

    lr: float | None = None
    """Learning rate. [1e-7, for a whole CLIP text tower over 9,000 steps; 1e-4 for an adapter]"""
    batch_size: int = 8
    """Chains per step."""
    epochs: int = 1
    """Passes over the chains."""
    steps: int | None = None
    """Stop after so many steps; by default as many as the epochs have."""
    weight_decay: float = 0.01
    """Of AdamW."""
    entail_weight: float = 1.0
    """Weight of the entailment term."""
    hard_weight: float = 1.0
    """Weight of the worst pairs; 0 switches the term off."""
    keep_weight: float = 10.0
    """Weight of staying near the first embeddings."""
    geometry: str = "chord"
    """chord (the paper), geodesic, or lorentz, which lifts embeddings as tangent vectors at the origin."""
    objective: str = "radial"
    """radial, or cones for comparison."""
    cone_size: float = 0.1
    """Distance from the root at which a cone opens to a half space."""
    cone_margin: float = 0.5
    """How far outside a cone a negative must lie, in radians."""
    curvature: float = 1.0
    """The c of lorentz; an encoder that has its own keeps it."""
    seed: int = 0
    """Of the order of the chains."""

    def check(self) -> None:
        """One line for what cannot be."""
        if self.lr is not None and not self.lr > 0:
            raise UserError(f"lr must be positive, got {self.lr}")
        if self.batch_size < 1 or self.epochs < 1 or (self.steps is not None and self.steps < 1):
            raise UserError(
                f"batch_size, epochs and steps must be 1 or more, got {self.batch_size}, {self.epochs}, {self.steps}"
            )
        require_one_of("objective", self.objective, OBJECTIVES)
        if not self.curvature > 0:
            raise UserError(f"curvature must be positive (it means -c), got {self.curvature}")

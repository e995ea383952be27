"""Settings of training jobs: plain dataclasses, no torch, so that the command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from hyptree.checks import require_numbers


@dataclass
class EmbedSettings:
    """How a hierarchy is embedded. The defaults are the fastest found for WordNet's mammals."""

    edges: Path | None = None
    """File of (child, parent) or (child, ancestor) rows: .tsv, .csv, .txt (also .gz), or .npz with an array pairs. By
    default the classes of the built-in world."""
    closure: Literal["auto", "given", "compute"] = "auto"
    """auto, compute: embed the transitive closure of the edges; given: the pairs as they are."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line of the file names the columns."""
    dim: int = 5
    """Dimension of the space; model.name says which one: lorentz, poincare, or euclidean as a control."""
    curvature: float = 1.0
    """c > 0, the sectional curvature is -c; flat space ignores it."""
    loss: Literal["distance", "cones"] = "distance"
    """distance: softmax of distances over negatives; cones: descendants inside entailment cones."""
    negatives: int = 300
    """Negatives per positive; one sample of nodes serves all pairs of a step."""
    init: Literal["ancestors", "random"] = "ancestors"
    """ancestors: nodes that share ancestors start in similar directions; random: around the origin, wants a burn-in,
    which is schedule.warmup: a stretch at schedule.warmup_lr with frequent ancestors as negatives."""
    margin: float = 0.1
    """cones: angle by which negatives must miss the cone, in radians."""
    aperture: float = 0.1
    """cones: the constant K of the aperture."""
    dtype: Literal["float32", "float64"] = "float64"
    """Precision. float32 blurs neighbours that are far from the origin."""
    num_ranked: int | None = None
    """Nodes whose ancestors are ranked to measure; 0 for all. By default all up to 20,000 nodes, 2,000 of more."""

    def __post_init__(self) -> None:
        require_numbers(self, "at least 1", "dim", "negatives")
        require_numbers(self, "a positive number", "curvature", "margin", "aperture")
        require_numbers(self, "at least 0", "num_ranked")

    def common_defaults(self) -> dict[str, Any]:
        """Steps take milliseconds: one thread, and no number, line or file more often than they are looked at."""
        return {
            "model.name": "lorentz",
            "optim.lr": 0.3 if self.loss == "distance" else 0.1,
            "optim.betas": [0.9, 0.99],
            "optim.momentum": 0.0,
            "optim.clip": None,
            "optim.max_step": 0.5,
            "schedule.min_lr": 0.0,
            "schedule.warmup_lr": 0.01,
            "run.threads": 1,
            "run.eval_every": 0.0,
            "run.save_every": 0.0,
            "run.save_steps": 2000,
            "run.log_steps": 100,
        }


@dataclass(kw_only=True)
class ReduceSettings:
    """Which model is measured with fewer tokens, on what, and how."""

    model: Annotated[str, "MODEL"]
    """Name of a model that timm knows, or a folder that hyptree train wrote."""
    data: str | None = None
    """Pictures to be right about: world, a folder with one folder per class, a .npz file, or NAME:ROOT as in recipes
    (pets:DIR, tiny-imagenet:DIR, ...). A run brings its own; none to leave accuracy out."""
    split: Literal["train", "val", "test"] = "val"
    """Which part of the data."""
    keep: tuple[float, ...] = (0.9, 0.7, 0.5, 0.25)
    """Shares of the tokens that are kept, at each of the layers."""
    method: tuple[str, ...] = ("atc", "tome", "kmedoids", "dpcknn", "topk", "random")
    """Ways to reduce them, one after the other."""
    linkage: tuple[Literal["average", "complete", "single", "ward"], ...] = ("average",)
    """Linkages of atc."""
    layers: tuple[int, ...] = ()
    """Blocks that reduce, from 0; by default those at a quarter, a half and three quarters of the depth."""
    image: tuple[Path, ...] = ()
    """Pictures whose merged patches are drawn, layer by layer."""
    pretrained: bool = False
    """Take the weights that timm downloads for this name."""
    weights: Path | None = None
    """Take these weights: a run, or a .safetensors file."""
    size: int | None = None
    """Pixels of the model's input; by default what it was made for."""
    num_val: int | None = None
    """Use only so many pictures of the data."""
    workers: int = 0
    """Processes that read pictures."""
    batch_size: int | None = None
    """Pictures at once; by default 256 on a GPU, 8 on a CPU."""
    repeats: int | None = None
    """Timed rounds; each times the reduced and the plain model, and the medians are taken. By default 9 on a GPU, 3 on
    a CPU, where a round of a ViT-B takes seconds."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products in bfloat16 (autocast)."""
    device: str = "auto"
    """auto takes a GPU if there is one; cpu or cuda to insist."""
    threads: int | None = None
    """CPU threads; by default torch decides."""
    seed: int = 0
    """Of fresh weights, of the pictures that are timed, and of the method random."""
    out: Path = Path("runs/reduce")
    """Folder for results.json, results.csv, pareto.png and index.html."""
    overwrite: bool = False
    """Replace what the folder has; else that is kept, and only the rest is measured."""
    json: bool = False
    """Print the results as JSON."""

    def __post_init__(self) -> None:
        for name in ("keep", "method", "linkage"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                got = " ".join(map(str, values)) or "none"
                raise ValueError(f"--{name} must be different values, at least one, got {got}")
        for keep in self.keep:
            if not 0 < keep <= 1:
                raise ValueError(f"--keep must be in (0, 1], got {keep:g}; 1 keeps all tokens")
        if any(layer < 0 for layer in self.layers) or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"--layers must be different numbers from 0 on, got {' '.join(map(str, self.layers))}")
        require_numbers(self, "at least 1", "size", "num_val", "batch_size", "repeats", "threads", flag="--")
        require_numbers(self, "at least 0", "workers", flag="--")
        require_numbers(self, "from 0 to 2^31 - 1", "seed", flag="--")

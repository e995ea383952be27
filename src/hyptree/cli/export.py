"""``hyptree export RUN``: a trained model as one file for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal


@dataclass
class ExportConfig:
    """``hyptree export``."""

    run: Annotated[str, "RUN"]
    """Folder that hyptree train wrote."""
    format: Literal["safetensors", "torch-export", "onnx", "hf", "adapter"] = "safetensors"
    """safetensors: the weights; torch-export: a program (.pt2) that needs torch alone; onnx: one that needs none;
    hf: a folder with model and tokenizer for transformers' from_pretrained, of a language model, a CLIP or a text
    encoder of the task radial; adapter: what was attached to an encoder, alone, for hyptree vlm merge."""
    out: Path | None = None
    """File to write; by default model.safetensors, model.pt2, model.onnx, or the folder hf or adapter, in that of the
    run."""
    size: int | None = None
    """Side of the input pictures; by default that of the recipe."""
    batch: int | None = None
    """Fixed number of pictures per call; by default any number."""


def run(config: ExportConfig) -> int:
    """Write a run's best weights, or its model as a program that is checked against the original."""
    from hyptree.train.source import find_model

    run = Path(find_model(config.run, "run").name)
    from hyptree.train.export import export

    path, difference = export(run, config.format, config.out, size=config.size, batch=config.batch)
    print(path if difference is None else f"{path}  (largest difference to the model: {difference:.2g})")
    return 0

"""A trained model as one file: weights, or a program that is run once and compared before it is handed out."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyptree.errors import UserError, require
from hyptree.files import save_tensors, write_atomic
from hyptree.runs import RunFolder
from hyptree.train.evaluate import load_model
from hyptree.train.language import export_language_model, fresh_folder
from hyptree.train.plugin import LogitsOnly
from hyptree.train.run.recipe import Recipe

SUFFIXES = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
_HF = "is exported as hf (a folder for transformers) or safetensors"
_AS = {
    "language": f"a language model {_HF}",
    "contrast": f"a CLIP {_HF}",
    "radial": f"a text encoder {_HF}",
    "embed": "points of a hierarchy are exported as safetensors",
    "fewshot": "a few-shot head works beside its encoder and is exported as safetensors",
}
"""What is no function from pictures to numbers, by its task."""
TOLERANCE = 1e-4
"""Largest difference between program and model, relative to the largest output."""


def export(
    run: Path, format: str, out: Path | None = None, *, size: int | None = None, batch: int | None = None
) -> tuple[Path, float | None]:
    """Write the best model of a run in a format of ``SUFFIXES``, or as a folder.

    ``hf``: a language model, or the encoder of the task contrast or radial; ``adapter``: what was attached to one.

    Args:
        size: side of the input pictures, the recipe's by default.
        batch: fixed number of pictures per call; None for any.

    Returns:
        The file, and the largest difference between program and model on random input (None for weights).

    Raises:
        UserError: the model cannot be exported, or the program gives other numbers.
    """
    if format == "hf":
        if RunFolder(run).recipe(Recipe).task in ("contrast", "radial"):
            from hyptree.vlm.encoders.transformers import load_run

            return load_run(run).save(fresh_folder(out or run / "hf")), None
        return export_language_model(run, out), None
    if format == "onnx":
        require("onnx", "onnx")
        require("onnxscript", "onnx")
    model, recipe = load_model(run)
    if format == "adapter":
        handle: Any = getattr(model, "handle", None)
        if handle is None:
            raise UserError(f"{run} trained no adapter; give a run of openvocab or radial whose method is one")
        return handle.save(fresh_folder(out or run / "adapter")), None
    if recipe.task in _AS and format != "safetensors":
        raise UserError(f"{_AS[recipe.task]}, not {format}")
    path = out if out is not None else run / f"model{SUFFIXES[format]}"
    if path.parent != Path():
        path.parent.mkdir(parents=True, exist_ok=True)
    if format == "safetensors":
        save_tensors(path, model.state_dict())
        return path, None
    size = size or recipe.data.size
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(batch or 2, 3, size, size, generator=generator)
    if recipe.model.plugin is not None and recipe.task == "classify":
        model = LogitsOnly(model).eval()
    with torch.no_grad():
        expected = model(example)
    if not isinstance(expected, Tensor):
        raise UserError(f"{format} wants a model that gives one tensor, {recipe.model.name} gives {type(expected)}")
    shapes = ({0: torch.export.Dim("batch", min=1, max=4096)},) if batch is None else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, (example,), dynamic_shapes=shapes)
    except Exception as error:
        raise UserError(
            f"{recipe.model.name} cannot be exported: {str(error).splitlines()[0]}; try --batch 1"
        ) from error
    if format == "onnx":
        output = _write_onnx(program, example, path)
    else:
        with io.BytesIO() as held:  # the name of a temporary file does not end in .pt2, which the function insists on
            torch.export.save(program, held)
            write_atomic(path, lambda temporary: temporary.write_bytes(held.getvalue()))
        output = torch.export.load(path).module()(example)
    difference = (output - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    if not difference <= TOLERANCE * scale:
        path.unlink()
        raise UserError(f"the exported program differs from the model by {difference:.2g}: nothing was written")
    return path, difference


def _write_onnx(program: torch.export.ExportedProgram, example: Tensor, path: Path) -> Tensor:
    exported = torch.onnx.export(program, (example,), dynamo=True, verbose=False)
    assert exported is not None
    write_atomic(path, lambda temporary: exported.save(str(temporary)))
    try:
        import onnxruntime  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError:
        from onnx.reference import ReferenceEvaluator  # type: ignore[import-not-found, unused-ignore]

        session = ReferenceEvaluator(str(path))
        (output,) = session.run(None, {session.input_names[0]: example.numpy()})
    else:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (output,) = session.run(None, {session.get_inputs()[0].name: example.numpy()})
    return torch.as_tensor(output)

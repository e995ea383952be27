"""A trained ``LatentHierarchyHead`` from the folder of its run (task ``fewshot``), with what its host learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from hyptree.config import build
from hyptree.data.settings import DataSettings
from hyptree.errors import UserError
from hyptree.runs import RunFolder, best_weights
from hyptree.vlm.adapters.base import warn_of_another_base
from hyptree.vlm.encoders.encoder import Encoder
from hyptree.vlm.lathadapter.fewshot import class_names, head_options
from hyptree.vlm.lathadapter.head import LatentHierarchyHead
from hyptree.vlm.lathadapter.settings import FewShotSettings


def load_head(
    run: Path | str, encoder: Encoder | None = None
) -> tuple[LatentHierarchyHead, dict[str, Tensor], dict[str, Any]]:
    """The head of a run in eval mode, the tensors of its host, and what is to be known of it.

    Args:
        encoder: that is to give its features.

    Returns:
        The last has ``classes`` (names of those it learned), ``settings`` (``FewShotSettings``), ``data``
        (``DataSettings``), ``encoder`` (its name) and ``numbers`` (of the last test).

    Raises:
        UserError: a folder of another kind, or a head for features of another width.
    """
    folder = RunFolder(run)
    recipe = folder.settings()
    if recipe.get("task") != "fewshot":
        raise UserError(f"{run} is a run of the task {recipe.get('task')} and holds no head; expected fewshot")
    settings = build(FewShotSettings, recipe.get("fewshot"), "fewshot", str(run))
    about = folder.dataset("classes", "num_learned", "logit_scale", "encoder", "encoder_weights")
    tensors = best_weights(run)
    count, width = tensors["head.attributes"].shape
    if encoder is not None:
        if width != encoder.width:
            raise UserError(f"{run} is for features of {width} numbers, {encoder.name} gives {encoder.width}")
        warn_of_another_base(encoder.model, about["encoder_weights"], f"the head in {run}", about["encoder"])
    head = LatentHierarchyHead(width, count, **head_options(settings, about["logit_scale"], recipe["run"]["seed"]))
    head.load_state_dict(_below("head.", tensors))
    head.attribute_names = class_names(settings.attribute_words) or head.attribute_names
    classes = about["classes"][: about["num_learned"]]
    tested = [line for line in folder.read_metrics() if line["split"] == "val"][-1:]
    numbers = {key: line[key] for line in tested for key in line if key not in ("step", "epoch", "split", "time")}
    data = build(DataSettings, recipe.get("data"), "data", str(run))
    about = {"classes": classes, "settings": settings, "data": data, "encoder": about["encoder"], "numbers": numbers}
    return head.eval(), _below("host.", tensors), about


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

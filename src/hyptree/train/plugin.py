"""A plug-in on the model of a run: put on, its losses and numbers brought to the task, its learning rate set.

Only for recipes with ``model.plugin``: tasks call nothing of this, nor import it, where there is none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.errors import UserError, as_user_error
from hyptree.models.himapper import HiMapper
from hyptree.models.himapper.dense import HiMapperFeatures
from hyptree.train.run.recipe import PluginSettings

_OURS = {"name", "enabled", "args", "lr"}
"""Settings that are no arguments of the plug-in."""

NUMBERS = ("image_dependence", "distance_ratio", "parent_retrieval", "curvature")
"""What is logged of the tree beside its losses. ``parent_retrieval`` is high before any training, since parents start
as means of their children: it is worth something only beside ``distance_ratio``."""


def plug_in(model: nn.Module, settings: PluginSettings, *, lr: float, size: int) -> nn.Module:
    """The model with its plug-in.

    Args:
        lr: learning rate of the run, of which the plug-in's own is a share.
        size: of the pictures, for one look at the features before anything is trained.

    Raises:
        UserError: arguments that the plug-in does not take, or a model that cannot be read.
    """
    wrapped = _make(HiMapper, model, settings, lr)
    _look(wrapped, size)
    return wrapped


def plug_in_features(backbone: nn.Module, settings: PluginSettings, *, lr: float) -> nn.Module:
    """The same for a backbone that gives maps of several strides to a dense head."""
    return _make(HiMapperFeatures, backbone, settings, lr)


def with_plugin_loss(
    model: nn.Module, output: Any, loss: Tensor, numbers: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and numbers of a task with those of a plug-in, found in the output or, below a dense head, in the model."""
    for losses, stats in _readings(model, output):
        loss = loss + losses["aux_total"]
        tree_numbers = {name: losses[name] for name in ("contrastive", "kl")} | {name: stats[name] for name in NUMBERS}
        numbers = {**numbers, **{name: value.detach() for name, value in tree_numbers.items()}}
    return loss, dict(numbers)


class PluginNumbers:
    """Asks a model with a plug-in as it evaluates, and keeps the plug-in's numbers: means over pictures."""

    def __init__(self, model: HiMapper):
        self.model = model
        self._sums: list[Tensor] = []

    def __call__(self, images: Tensor) -> Any:
        """The model's answer; a plug-in is asked for its numbers as well, which it gives unasked only in training."""
        if not self.model.enabled:
            return self.model(images)
        output = self.model(images, compute_losses=True)
        values = [output.losses["contrastive"], *(output.stats[name] for name in NUMBERS)]
        sums = torch.stack([value.double() for value in values]) * len(images)
        self._sums.append(torch.cat([sums, sums.new_tensor([len(images)])]))
        return output

    def means(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The numbers, over all processes; none where the plug-in was switched off."""
        if not self.model.enabled:
            return {}
        *sums, count = gather(torch.stack(self._sums)).sum(0).tolist()
        return {name: value / count for name, value in zip(("contrastive", *NUMBERS), sums, strict=True)}


class LogitsOnly(nn.Module):
    """A model with a plug-in as a function from pictures to logits, for what wants one tensor (export)."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        output = self.model(x)
        return output if isinstance(output, Tensor) else output.logits


# ------------------------------------------------------------------------------------------------------------ the parts


def _make(kind: type[HiMapper], backbone: nn.Module, settings: PluginSettings, lr: float) -> HiMapper:
    options = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in _OURS}
    try:
        with as_user_error("model.plugin"), warnings.catch_warnings():
            # The recipe says sign: paper in so many words; who runs a table of ten runs need not read it ten times.
            warnings.filterwarnings("ignore", message="sign='paper'")
            wrapped = kind(backbone, **options | settings.args)
    except TypeError as error:
        if "unexpected keyword" not in str(error) and "multiple values" not in str(error):
            raise
        raise UserError(f"model.plugin.args: {str(error).split('() ')[-1]}") from error
    spared = wrapped.no_weight_decay()
    for name, parameter in wrapped.named_parameters():
        if name.startswith("backbone."):
            continue
        if name in spared:  # said by the parameter itself, as the plug-in may lie deep inside a model
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        if settings.lr is not None:
            parameter._lr_scale = settings.lr / lr  # type: ignore[attr-defined]
    return wrapped


@torch.no_grad()
def _look(model: HiMapper, size: int) -> None:
    """Read one empty picture, so that a backbone which cannot be read is one line and not a failure at some step."""
    was_training = model.training
    model.eval()
    try:
        model(torch.zeros(1, 3, size, size, device=next(model.parameters()).device))
    except AssertionError as error:  # timm's word on a picture of another size
        reason = f"{str(error).rstrip('.')}; set data.size or model.args.img_size"
        raise UserError(f"model.plugin cannot read this model at {size} px: {reason}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"model.plugin cannot read this model: {error}") from error
    finally:
        model.train(was_training)


def _readings(model: Any, output: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    losses = getattr(output, "losses", None)
    if losses is not None:
        return [(losses, output.stats)]
    if not isinstance(model, nn.Module):  # tests and scripts pass any function
        return []
    inside = (module.take_losses() for module in model.modules() if isinstance(module, HiMapperFeatures))
    return [reading for reading in inside if reading is not None]

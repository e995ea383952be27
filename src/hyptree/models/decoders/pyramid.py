"""The feature pyramid that segmentation and detection stand on, over any backbone timm can cut into features."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork

from hyptree.errors import UserError, suggest

FINEST_STRIDE = 4
"""Levels finer than this cost more than they give; the decoders of the literature start here too."""


def pyramid_backbone(name: str, **options: Any) -> nn.Module:
    """A timm model without its classifier that gives feature maps of several strides.

    Args:
        name: of a hierarchical model, e.g. ``hcformer_nano``, ``resnet18``, ``swin_tiny_patch4_window7_224``.
        options: passed on to ``timm.create_model``, e.g. ``drop_path_rate=0.1`` or ``img_size=512``.
    """
    import timm

    import hyptree.models  # noqa: F401  (registers our models with timm)

    if not timm.is_model(name):
        hint = suggest(name, timm.list_models()) or "see timm.list_models()"
        raise UserError(f"unknown backbone {name!r}; {hint}")
    try:
        backbone = timm.create_model(name, features_only=True, **options)
    except TypeError as error:
        raise UserError(f"backbone {name!r} does not take these options: {error}") from error
    except (AttributeError, RuntimeError) as error:
        # How models that cannot be cut answer to features_only differs from model to model.
        raise UserError(f"backbone {name!r} cannot give a pyramid of features: {error}") from error
    assert isinstance(backbone, nn.Module)
    return backbone


def adopt_backbone(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Weights of a classifier (or of another dense model) under the names that their backbone has in a dense model.

    timm renames what it cuts into features (``layers.0`` becomes ``layers_0``, or goes below ``model``), and what is
    here puts it below ``backbone``. Weights that no name asks for, such as a classifier's, are left out.

    Args:
        tensors: by the names they were saved with. names: of the dense model, its ``state_dict()``.
    """
    by_core = {_core(name): value for name, value in tensors.items()}
    return {name: by_core[_core(name)] for name in names if "backbone." in name and _core(name) in by_core}


def _core(name: str) -> str:
    """What stays of a parameter's name however its model is wrapped."""
    return name.rpartition("backbone.")[2].removeprefix("model.").replace(".", "_")


class Checkpointed:
    """Hands on to the ``pyramid`` or the ``backbone`` inside that activations are to be computed again."""

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade time for memory in the backbone.

        Raises:
            UserError: it has no such switch.
        """
        inner: Any = getattr(self, "pyramid" if hasattr(self, "pyramid") else "backbone")
        if not hasattr(inner, "set_grad_checkpointing"):
            raise UserError(f"{type(inner).__name__} cannot compute activations again; switch checkpointing off")
        inner.set_grad_checkpointing(enable)


class Pyramid(Checkpointed, nn.Module):
    """Feature maps of strides 4, 8, 16, 32, ... that all have ``channels`` channels (FPN, Lin et al. 2017).

    Of the backbone's maps the deepest one of each stride is taken, from stride 4 on.

    Shape:
        (B, 3, H, W) -> one (B, channels, about H / stride, about W / stride) per stride, finest first.
    """

    def __init__(self, backbone: nn.Module, channels: int = 256):
        super().__init__()
        info: Any = getattr(backbone, "feature_info", None)
        if not hasattr(info, "reduction"):  # a whole timm model has feature_info too, but as a plain list
            raise ValueError(
                f"backbone must give features, got {type(backbone).__name__}; "
                "create it with hyptree.models.decoders.pyramid_backbone(name) or timm's features_only=True"
            )
        strides: list[int] = info.reduction()
        self.taken = [i for i, s in enumerate(strides) if s >= FINEST_STRIDE and s not in strides[i + 1 :]]
        self.strides = [strides[i] for i in self.taken]
        if len(self.strides) < 2 or self.strides != sorted(self.strides):
            raise ValueError(
                f"backbone gives features of strides {strides}; a pyramid needs two or more that grow, "
                "like 4, 8, 16, 32: choose a hierarchical model"
            )
        widths = info.channels()
        self.backbone = backbone
        self.has_channels_last = str(getattr(backbone, "output_fmt", "NCHW")).endswith("NHWC")
        self.fpn = FeaturePyramidNetwork([widths[i] for i in self.taken], channels)
        self.channels = channels

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = self.backbone(x)
        chosen = [maps[i].permute(0, 3, 1, 2) if self.has_channels_last else maps[i] for i in self.taken]
        named = self.fpn(OrderedDict((str(i), level) for i, level in enumerate(chosen)))
        return list(named.values())

"""Hi-Mapper below segmentation and detection: a pyramid of features whose last map knows what the tree read."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hyptree.models.decoders.pyramid import Checkpointed
from hyptree.models.himapper.backbone import Features, map_tokens
from hyptree.models.himapper.wrap import HiMapper


class HiMapperFeatures(Checkpointed, HiMapper):
    """A backbone that gives features of several strides (timm's ``features_only``), the last of them read by a tree.

    The tree reads the last map; its mean over places is the global feature that reads the tree; and what it read is
    added to the last map, the same vector at every place: the additive form, which a global feature allows and which
    costs nothing per place. The layer that makes the vector starts at zero, so that fresh maps are the backbone's own.
    Finer maps learn of it through the pyramid that stands on them.

    The decoders that take the maps hand back their own answers, so the plug-in's losses wait here until they are taken:
    :meth:`take_losses`. Places that pad a batch to a common size (detection) are read like all others.

    Args:
        backbone: with ``feature_info``, as ``hyptree.models.decoders.pyramid_backbone`` makes it.
        options: of :class:`HiMapper`.

    Shape:
        (B, 3, H, W) -> the backbone's maps, in its own layout.
    """

    def __init__(self, backbone: nn.Module, **options: Any):
        info: Any = getattr(backbone, "feature_info", None)
        if not hasattr(info, "channels"):  # a whole timm model has feature_info too, but as a plain list
            raise ValueError(
                f"backbone must give features, got {type(backbone).__name__}; "
                "create it with hyptree.models.decoders.pyramid_backbone(name) or timm's features_only=True"
            )
        channels = int(info.channels()[-1])
        super().__init__(backbone, feature_fn=read_last_map, channels=channels, pooled_channels=channels, **options)
        self._pending: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    @property
    def feature_info(self) -> Any:
        """The backbone's: strides and channels of the maps."""
        return self.backbone.feature_info

    @property
    def output_fmt(self) -> str:
        """The backbone's: NCHW or NHWC."""
        return str(getattr(self.backbone, "output_fmt", "NCHW"))

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        """The maps; while training, losses and numbers are kept until :meth:`take_losses`."""
        output = super().forward(x)
        self._pending = None if output.losses is None else (output.losses, output.stats)
        return list(output.logits)

    def take_losses(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Losses and numbers of the last forward pass in training, once: they hold its graph."""
        pending, self._pending = self._pending, None
        return pending


def read_last_map(backbone: nn.Module, x: Tensor) -> Features:
    """The last map of a pyramid as tokens, its mean as the global feature; the answer are all maps."""
    maps = list(backbone(x))
    last, fmt = maps[-1], str(getattr(backbone, "output_fmt", "NCHW"))
    has_channels_last = fmt.endswith("NHWC")
    tokens, grid = map_tokens(backbone, last, last.shape[-1 if has_channels_last else 1], fmt)

    def answer(_: Tensor, delta: Tensor) -> Any:
        spread = delta[:, None, None, :] if has_channels_last else delta[:, :, None, None]
        return [*maps[:-1], last + spread.to(last.dtype)]

    return Features(tokens, grid, tokens.mean(1), answer)

"""What segmentation and detection share: a decoder on a backbone, and truth that stays as the dataset gave it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hyptree.data.sample import Sample
from hyptree.errors import as_user_error, require_known
from hyptree.train.run.recipe import Recipe


@dataclass
class ScoredSample(Sample):
    """A sample on its way to be scored: the picture as the model sees it, the truth as the dataset gave it.

    Numbers are then those of the dataset, whatever size the model looks at: predictions are brought to the truth, never
    the truth to the predictions.
    """

    truth: dict[str, Tensor] | None = None
    """Label map, or boxes, labels, masks and crowd, in the pixels of the dataset."""
    full_size: tuple[int, int] = (0, 0)
    """Height and width of the picture in the dataset."""
    extent: tuple[int, int] = (0, 0)
    """Height and width that the picture takes up, from the upper left corner, in what the model sees."""


def build_dense(make: Callable[..., Any], recipe: Recipe, num_classes: int, **options: Any) -> nn.Module:
    """A backbone of the recipe's name and arguments with the decoder that ``make(backbone, num_classes, ...)`` adds.

    A plug-in of the recipe goes between them.

    Args:
        options: of the decoder; the recipe's ``model.head`` wins over them.

    Raises:
        UserError: no such model, or options that backbone or decoder do not take.
    """
    from hyptree.models.decoders import pyramid_backbone

    settings = recipe.model
    choices = [
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    require_known("unknown key model.head.{}", settings.head, choices)
    backbone = pyramid_backbone(settings.name, pretrained=settings.pretrained, **settings.args)
    if settings.plugin is not None:
        from hyptree.train.plugin import plug_in_features

        backbone = plug_in_features(backbone, settings.plugin, lr=recipe.optim.lr)
    with as_user_error("model.head"):
        model: nn.Module = make(backbone, num_classes, **options | settings.head)
    return model

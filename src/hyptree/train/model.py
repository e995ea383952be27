"""Models by name, with fresh weights or with those of an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hyptree.errors import UserError, as_user_error, suggest
from hyptree.files import check_weights

if TYPE_CHECKING:
    from hyptree.train.run.recipe import ModelSettings, TokenSettings


def create_model(settings: ModelSettings, **options: Any) -> nn.Module:
    """``timm.create_model`` of the recipe's model, ours or timm's.

    Args:
        options: what the task decides (``num_classes``, ``features_only``, ...); the recipe's ``args`` win over them.

    Raises:
        UserError: unknown name, arguments that the model does not take, or weights that cannot be had.
    """
    import timm

    import hyptree.models  # noqa: F401  (registers our models)

    name = settings.name
    if not timm.is_model(name):
        hint = suggest(name, timm.list_models()) or "hyptree models FILTER lists what there is"
        raise UserError(f"unknown model {name!r}; {hint}")
    if "checkpoint_path" in settings.args:
        check_weights(settings.args["checkpoint_path"])
    try:
        with as_user_error(f"model {name}"):
            model = timm.create_model(name, pretrained=settings.pretrained, **options | settings.args)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise UserError(f"model {name}: {str(error).split('() ')[-1]}; see model.args in the recipe") from error
    except OSError as error:
        if not settings.pretrained:
            raise
        why = str(error).partition(". ")[0]
        raise UserError(
            f"the weights of {name} cannot be downloaded: {why}; give a file or a run as weights"
        ) from error
    assert isinstance(model, nn.Module)
    return model


def require_size(model: nn.Module, size: int) -> nn.Module:
    """The model itself, if it takes pictures of this size; most do, many transformers of timm take one size only."""
    embed = getattr(model, "patch_embed", None)
    made_for = getattr(embed, "img_size", None)
    if getattr(embed, "strict_img_size", False) and made_for is not None and tuple(made_for) != (size, size):
        raise UserError(
            f"{type(model).__name__} was made for pictures of {made_for[0]} x {made_for[1]} px, data.size is {size}; "
            f"set model.args.img_size {size} or data.size"
        )
    return model


def reduce_tokens(model: nn.Module, settings: TokenSettings) -> None:
    """Patch a model to keep a share of its tokens; one that keeps all stays untouched.

    The hooks are no part of the weights: a run that was trained with a reduction can be used without it, and the other
    way round.
    """
    if settings.keep < 1:
        from hyptree.tokens.patch import patch

        with as_user_error("tokens"):
            patch(
                model,
                settings.method,
                keep=settings.keep,
                layers=settings.layers or None,
                linkage=settings.linkage,
                prop_attn=settings.prop_attn,
            )


def checkpoint_activations(model: nn.Module, name: str, use_reentrant: bool = False) -> None:
    """Let a model compute activations again in the backward pass, by whatever word its library has for it.

    Args:
        use_reentrant: the older way of ``torch.utils.checkpoint``; timm has a switch of its own for it.
    """
    saver: Any = model.to_plain() if hasattr(model, "to_plain") else model  # type: ignore[operator]
    if hasattr(saver, "set_grad_checkpointing"):  # timm's word
        saver.set_grad_checkpointing(True)
        return
    for word in ("activation", "gradient"):  # that of transformers, and what it said up to 5.22
        if hasattr(saver, f"{word}_checkpointing_enable"):
            getattr(saver, f"{word}_checkpointing_enable")({"use_reentrant": use_reentrant})
            return
    raise UserError(f"model {name} cannot do run.grad_checkpointing; switch it off")


def load_weights(model: nn.Module, source: Path) -> list[str]:
    """Start from earlier weights: a run folder (its best weights) or a .safetensors file.

    A dense model also takes the weights of a classifier, or of another dense model: those of its backbone. A model with
    a plug-in takes those of one without, and the other way round.

    Returns:
        Names that keep their fresh values, because the source lacks them or has them in another shape (a classifier
        of other classes, say).

    Raises:
        UserError: no such file, or nothing in it fits.
    """
    from hyptree.files import load_tensors
    from hyptree.models.decoders import adopt_backbone
    from hyptree.runs import best_weights

    tensors = best_weights(source) if source.is_dir() else load_tensors(source)[0]
    mine = model.state_dict()
    plain = {name.removeprefix("backbone."): value for name, value in tensors.items()}
    fitting = _fitting(plain, mine) | _fitting(adopt_backbone(tensors, mine), mine) | _fitting(tensors, mine)
    if not fitting:
        raise UserError(f"no weight in {source} fits this model; model.weights wants weights of the same architecture")
    model.load_state_dict(fitting, strict=False)
    return [name for name in mine if name not in fitting]


def _fitting(tensors: dict[str, Tensor], mine: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name in mine and mine[name].shape == value.shape}

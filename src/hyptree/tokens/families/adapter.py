"""What a family of models says about itself so that its tokens can be reduced by hooks alone.

A family is one file with a function ``sites(model) -> FamilyAdapter`` that raises ``UnsupportedModel`` with a reason
when the model is not one of its own. The hooks of ``hyptree.tokens.handle`` know nothing about timm or transformers:
all they use is on this page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hyptree.errors import UserError

if TYPE_CHECKING:
    from hyptree.tokens.handle import Handle


class UnsupportedModel(UserError):
    """The tokens of this model cannot be reduced; the text names the layer and says why."""


@dataclass(frozen=True, eq=False)
class BlockParts:
    """The modules of one pre-norm transformer block that hooks are put on.

    The block must compute ``x = x + attention(...)`` and then ``x = x + branch_end(...mlp(norm(x)))``.

    Attributes:
        name: where the block is in the model, for messages, e.g. ``"blocks.3"``.
        block: the whole block; its first argument and its output are the tokens (B, N, C).
        attention: receives the log sizes, see ``FamilyAdapter.with_bias``.
        query, key: their outputs are the queries and keys that attention uses.
        norm: the first module of the MLP branch; its input is the residual stream after attention. Tokens are merged
            there.
        branch_end: the last module of the MLP branch; the block adds its output to the residual stream. It may also be
            used earlier in the block (a dropout that both branches share): calls before ``norm`` are left alone.
        scale: what attention multiplies ``q k^T`` by.
        num_heads: where queries and keys come as (B, N, H d); None where they come as (B, H, N, d).
        hands_on: the block hands keyword arguments that it does not know on to its attention.
    """

    name: str
    block: nn.Module
    attention: nn.Module
    query: nn.Module
    key: nn.Module
    norm: nn.Module
    branch_end: nn.Module
    scale: float
    num_heads: int | None = None
    hands_on: bool = False


@dataclass(frozen=True)
class Override:
    """An attribute to set on one module while the model is patched, e.g. a pooling that knows the sizes.

    ``value`` should be a bound method of the adapter: copies of a patched model then get an adapter of their own.
    """

    module: nn.Module
    name: str
    value: Callable[..., Any]


class FamilyAdapter:
    """What the hooks need to know about one model. Subclasses fill the attributes and change what differs.

    Attributes:
        model: the model that is patched.
        blocks: its transformer blocks, in the order in which they run.
        num_prefix: tokens in front that are never merged (class, distillation, registers).
        has_class_token: whether the first of them is a class token, whose attention scores the others.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[BlockParts], num_prefix: int, has_class_token: bool):
        self.model = model
        self.blocks = tuple(blocks)
        self.num_prefix = num_prefix
        self.has_class_token = has_class_token

    def with_bias(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], bias: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a block's attention with ``bias`` (B, 1, 1, N) added to the logits, by key.

        ``bias`` has the dtype of the queries; with ``prop_attn="channel"`` it is a ``SizeMask``, which acts like one in
        ``F.scaled_dot_product_attention`` and in sums. The default fills or extends the keyword ``attn_mask``.
        """
        mask = kwargs.get("attn_mask")
        return args, {**kwargs, "attn_mask": bias if mask is None else join_masks(mask, bias)}

    def check_call(self, index: int, kwargs: dict[str, Any]) -> None:
        """Raises ``UserError`` if a block that is about to reduce was called with what merged tokens cannot follow.

        A mask over all patches, say. ``kwargs`` are the keyword arguments of the block.
        """

    def overrides(self, handle: Handle) -> Iterable[Override]:
        """Attributes to set while patched. ``handle.token_weights(x)`` gives what a weighted pooling needs."""
        return ()

    def hooks(self, handle: Handle) -> Iterable[torch.utils.hooks.RemovableHandle]:
        """Registers further hooks (an attention pooling that needs the sizes, say) and returns their handles."""
        return ()


def unwrapped(block: nn.Module) -> nn.Module:
    """The block itself, below what ``apply_activation_checkpointing`` of torch put around it.

    A wrapper calls its block again for the gradient, and only the block's own hooks with it.
    """
    while (inner := block._modules.get("_checkpoint_wrapped_module")) is not None:
        block = inner
    return block


def join_masks(mask: Tensor | None, bias: Any) -> Any:
    """An attention mask and an additive bias as one additive bias; a boolean mask keeps what is True."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return mask + bias

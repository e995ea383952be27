"""Hosts of a head: encoders that are frozen, that learn words of context, or that learn prompts in both towers.

A host answers ``text_features(names)`` (C, D) and ``image_features(inputs)`` (B, D); its parameters are what it learns.
Prompts are put in by hooks that are there only during a call, so the encoder itself is the same before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.vlm.encoders.encoder import Encoder

TEMPLATE = "a photo of a {}."
CONTEXT = "a photo of a"
_FILLER = "a"  # one token for every tokenizer that has read captions; the learned vectors take its places
_STD = 0.02


class Host(nn.Module):
    """What gives a head its features. This one is frozen: ``encode`` gives (n, D) features of texts."""

    def __init__(self, encode: Callable[[list[str]], Tensor], template: str = TEMPLATE):
        super().__init__()
        if "{}" not in template:
            raise UserError(f"template {template!r} has no place for the class; write {{}} where it belongs")
        self._encode, self.template = encode, template

    def text_features(self, names: Sequence[str]) -> Tensor:
        """(C, D) features of classes."""
        return self.encode_words([self.template.format(name) for name in names])

    @torch.no_grad()
    def encode_words(self, words: Sequence[str]) -> Tensor:
        """(n, D) features of words as they are, without template or prompts."""
        return self._encode(list(words)).detach()

    def image_features(self, inputs: Tensor) -> Tensor:
        """(B, D) features of pictures: the inputs are features already."""
        return inputs


class PromptHost(Host):
    """Words of context before the class name, learned as vectors; the image tower stays as it is.

    Begins as ``"{context} {class}."``. Works with every encoder whose text begins in an ``nn.Embedding`` called
    ``token_embedding``: CLIP and SigLIP of transformers, open_clip. Its weights get no gradient from here; freeze them
    to save memory.

    Args:
        num_context: learned vectors; by default as many as ``context`` has tokens. Beyond these they begin random.
    """

    def __init__(self, encoder: Encoder, num_context: int | None = None, context: str = CONTEXT, seed: int = 0):
        super().__init__(encoder.encode_text, CONTEXT + " {}.")
        self.encoder = encoder
        self.__dict__["_embedding"] = _token_embedding(encoder)  # past torch: its weights are none of the host's
        self._start, words = _context_tokens(encoder, context)
        num_context = len(words) if num_context is None else num_context
        if num_context < 1:
            raise UserError(f"num_context must be at least 1, got {num_context}")
        self.num_context = num_context
        filler = " ".join([_FILLER] * num_context)
        if len(_context_tokens(encoder, filler)[1]) != num_context:
            raise UserError(f"{encoder.name}: its tokenizer cannot write {num_context} tokens of context; take fewer")
        self.template = filler + " {}."
        begin = torch.randn(num_context, self._embedding.embedding_dim, generator=torch.Generator().manual_seed(seed))
        begin *= _STD
        with torch.no_grad():
            known = self._embedding(words[:num_context]).float().cpu()  # called: the weight may be offloaded
        begin[: len(known)] = known
        self.context = nn.Parameter(begin.to(encoder.device))

    _embedding: nn.Embedding

    def text_features(self, names: Sequence[str]) -> Tensor:
        texts = [self.template.format(name) for name in names]
        with self._prompted_text():
            return self.encoder.encode_tokens(self.encoder.tokenize(texts))

    @contextmanager
    def _prompted_text(self) -> Iterator[None]:
        place = slice(self._start, self._start + self.num_context)

        def put_in(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return _replaced(place, self.context, output)

        with ExitStack() as hooks:
            hooks.callback(self._embedding.register_forward_hook(put_in).remove)
            yield


class JointHost(PromptHost):
    """Prompts in both towers, deep: each of the first blocks gets fresh ones, and those of pictures follow from text.

    The prompts of the text tower are learned, one set per block; a linear map per block makes those of the image tower,
    which go behind its patches and are taken off after the last block. This is the way of MaPLe.

    Args:
        num_context: prompts per block.
        depth: blocks with prompts of their own, at most all of either tower.
    """

    def __init__(
        self, encoder: Encoder, num_context: int | None = 2, context: str = CONTEXT, depth: int = 9, seed: int = 0
    ):
        text_blocks = _blocks(encoder, encoder.text_tower, "text")
        image_blocks = _blocks(encoder, encoder.image_tower, "image")
        super().__init__(encoder, num_context, context, seed)
        self._text_blocks, self._image_blocks = text_blocks, image_blocks  # lists: none of the host's weights
        if depth < 1:
            raise UserError(f"depth must be at least 1, got {depth}")
        self.depth = min(depth, len(self._text_blocks), len(self._image_blocks))
        norm = next(module for module in self._image_blocks[0].modules() if isinstance(module, nn.LayerNorm))
        text_width, image_width = self._embedding.embedding_dim, int(norm.normalized_shape[0])
        generator = torch.Generator().manual_seed(seed + 1)
        deeper = torch.randn(self.depth - 1, self.num_context, text_width, generator=generator) * _STD
        self.deeper = nn.Parameter(deeper.to(encoder.device))
        maps = torch.randn(self.depth, image_width, text_width, generator=generator) * text_width**-0.5
        self.to_image = nn.Parameter(maps.to(encoder.device))
        self.to_image_bias = nn.Parameter(torch.zeros(self.depth, image_width, device=encoder.device))

    def image_features(self, inputs: Tensor) -> Tensor:
        """(B, D) from prepared pictures (B, 3, size, size)."""
        with self._prompted_images():
            return self.encoder.encode_pixels(inputs)

    @contextmanager
    def _prompted_text(self) -> Iterator[None]:
        _refuse_checkpointing(self.encoder)
        place = slice(self._start, self._start + self.num_context)
        with super()._prompted_text(), ExitStack() as hooks:
            for block, prompts in zip(self._text_blocks[1 : self.depth], self.deeper, strict=True):
                hooks.callback(_before(block, partial(_replaced, place, prompts)))
            yield

    @contextmanager
    def _prompted_images(self) -> Iterator[None]:
        _refuse_checkpointing(self.encoder)
        text = torch.cat([self.context[None], self.deeper])  # (depth, n, text width)
        prompts = torch.einsum("lnw,lvw->lnv", text, self.to_image) + self.to_image_bias[:, None]
        count = self.num_context

        def append(hidden: Tensor) -> Tensor:
            return torch.cat([hidden, prompts[0].to(hidden).expand(len(hidden), -1, -1)], 1)

        def take_off(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (output[0][:, :-count], *output[1:])
            return output[:, :-count]

        with ExitStack() as hooks:
            hooks.callback(_before(self._image_blocks[0], append))
            for block, new in zip(self._image_blocks[1 : self.depth], prompts[1:], strict=True):
                hooks.callback(_before(block, partial(_replaced, slice(-count, None), new)))
            hooks.callback(self._image_blocks[-1].register_forward_hook(take_off).remove)
            yield


# -------------------------------------------------------------------------------------------------------------- helpers


def _replaced(place: slice, prompts: Tensor, hidden: Tensor) -> Tensor:
    """``hidden`` (B, L, W) with the vectors at ``place`` exchanged for ``prompts`` (n, W)."""
    first, last, _ = place.indices(hidden.shape[1])
    new = prompts.to(hidden).expand(len(hidden), -1, -1)
    return torch.cat([hidden[:, :first], new, hidden[:, last:]], 1)


def _before(block: nn.Module, change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Changes the first input of a block; gives the function that undoes it."""

    def put_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}

    return block.register_forward_pre_hook(put_in, with_kwargs=True).remove


def _refuse_checkpointing(encoder: Encoder) -> None:
    """Raise if blocks are computed again together with their hooks, which are gone by then: gradients would be wrong.

    From 5.23 on, transformers leaves the hooks of a block outside.
    """
    is_outside = hasattr(encoder.model, "activation_checkpointing_enable")
    for module in encoder.model.modules() if torch.is_grad_enabled() else ():
        again = module.training and not is_outside and getattr(module, "gradient_checkpointing", False)
        if again or getattr(module, "grad_checkpointing", False):
            raise UserError(f"{encoder.name}: prompts inside of the towers cannot be checkpointed; switch that off")


def _token_embedding(encoder: Encoder) -> nn.Embedding:
    for name, module in encoder.model.named_modules():
        if isinstance(module, nn.Embedding) and name.split(".")[-1] == "token_embedding":
            return module
    raise UserError(f"{encoder.name} has no token_embedding, so no context can be learned; use the frozen host")


def _context_tokens(encoder: Encoder, context: str) -> tuple[int, Tensor]:
    """Where words begin in a text, and the tokens of ``context``."""
    empty, ids = (encoder.tokenize([text])["input_ids"][0] for text in ("", context))
    start = 1 if ids[0] == empty[0] else 0
    end = empty[start]  # what closes a text
    closes = (ids[start:] == end).nonzero()
    if len(closes) == 0:
        raise UserError(f"context {context!r} is too long for {encoder.name}")
    return start, ids[start : start + int(closes[0])]


def _blocks(encoder: Encoder, tower: nn.Module | None, which: str) -> Sequence[nn.Module]:
    """The transformer blocks of a tower, in order."""
    if tower is not None and not getattr(encoder, "patches", False):
        for name, module in tower.named_modules():
            if name.split(".")[-1] in ("resblocks", "layers") and isinstance(module, nn.ModuleList | nn.Sequential):
                return list(module)
    raise UserError(
        f"{encoder.name}: its {which} tower is no plain transformer of transformers' CLIP or open_clip; "
        "use the host prompt or frozen"
    )

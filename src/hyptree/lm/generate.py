"""Text from a language model, piece by piece as it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyptree.errors import UserError


def generate_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    show: Callable[[str], None] | None = None,
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    greedy: bool = False,
    seed: int = 0,
) -> str:
    """What the model writes after the prompt, by transformers' ``generate``.

    The same seed on the same device gives the same text; torch's own generators are left as they were.

    Args:
        model: a causal language model of transformers' kind; tokenizer: its tokenizer.
        show: called with each new piece of text as soon as it is whole characters; what it gets adds up to the answer.
        temperature: below 1 for likelier text, above 1 for more surprising text.
        top_k: choose among so many of the likeliest tokens; 0 for all.
        top_p: choose among the likeliest tokens that together have this probability.
        greedy: always take the likeliest token; the three above then say nothing.

    Raises:
        UserError: a prompt without tokens, more tokens than the model's context, values out of range.
    """
    _check(max_new_tokens, temperature, top_k, top_p, seed)
    ids = encode_prompt(tokenizer, prompt)  # (1, N)
    num_tokens, context = ids.shape[1], model.config.max_position_embeddings
    if num_tokens + max_new_tokens > context:
        or_fewer = f" or ask for at most {context - num_tokens}" if num_tokens < context else ""
        raise UserError(
            f"the prompt has {num_tokens} tokens, {max_new_tokens} new ones would make {num_tokens + max_new_tokens}, "
            f"the model's context is {context}; shorten the prompt{or_fewer}"
        )
    if int(ids.max()) >= model.config.vocab_size:
        raise UserError(
            f"the tokenizer gives token {int(ids.max())}, the model knows {model.config.vocab_size} tokens; "
            "use the tokenizer it was trained with"
        )
    from transformers import GenerationConfig

    eos = tokenizer.eos_token_id
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": not greedy}
    options |= {"eos_token_id": eos, "bos_token_id": tokenizer.bos_token_id, "use_cache": True}
    options["pad_token_id"] = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if not greedy:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    stream = _Stream(tokenizer, ids[0].tolist(), show)
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        ids = ids.to(device)
        config = GenerationConfig(**options)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=stream)
    return stream.text


def encode_prompt(tokenizer: Any, prompt: str) -> Tensor:
    """(1, N) tokens of the beginning of a document: bos where the tokenizer has one, then the prompt."""
    if not prompt.strip():
        raise UserError("the prompt is empty; give the beginning of a text, e.g. hyptree generate RUN 'The tree'")
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id, *ids]
    return torch.tensor([ids])


class _Stream:
    """The streamer of transformers' ``generate``: decodes all tokens again and shows what is new."""

    def __init__(self, tokenizer: Any, prompt: list[int], show: Callable[[str], None] | None):
        self.tokenizer, self.tokens, self.show = tokenizer, list(prompt), show
        self.text = ""
        self._prompt = self._decode()
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Tokens as they come; the first call brings the prompt."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.tokens += value.reshape(-1).tolist()
        self._advance(final=False)

    def end(self) -> None:
        """The last token was given."""
        self._advance(final=True)

    def _decode(self) -> str:
        text: str = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        return text

    def _advance(self, final: bool) -> None:
        # With the prompt in front, because some tokenizers drop a space at the beginning of what they decode.
        text = self._decode()[len(self._prompt) :]
        if text.endswith("\ufffd") and not final:
            return  # some bytes of a character are still to come
        new, self.text = text[len(self.text) :], text
        if new and self.show is not None:
            self.show(new)


def _check(max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int) -> None:
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not temperature > 0:
        raise UserError(f"temperature must be positive, got {temperature:g}; greedy takes the likeliest token")
    if top_k < 0:
        raise UserError(f"top_k must be 0 (all tokens) or more, got {top_k}")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p must be in (0, 1], got {top_p:g}; 1 takes all tokens")
    if seed < 0:
        raise UserError(f"seed must be at least 0, got {seed}")

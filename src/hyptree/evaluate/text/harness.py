"""Any language model of ours behind the interface of EleutherAI's lm-evaluation-harness (``lm_eval.api.model.LM``).

HELMs are models of transformers: once ``hyptree.lm`` is imported, the harness's own type ``hf`` loads their folders.
The class here is for models that are in memory, e.g. of a run, and needs no harness to be tried: it takes the harness's
requests, or plain tuples of their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyptree.errors import UserError, require
from hyptree.evaluate.text.likelihood import Likelihood, Pair, PairEncoder, context_length, log_likelihoods

MAX_NEW_TOKENS = 256
"""The harness's own limit where a task names none."""


class HarnessModel:
    """The three questions of the harness: ``loglikelihood``, ``loglikelihood_rolling``, ``generate_until``.

    Args:
        model: a causal language model of transformers' kind, in eval mode.
        context: tokens that the model sees at once, by default as many as it can.
        seed: of text that is sampled; every request starts with it, and torch's own generators are left as they were.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_size: int = 16, context: int | None = None, seed: int = 0):
        super().__init__()
        self.seed = seed
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.context = context_length(model, context)
        self._encode = PairEncoder(tokenizer)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): the continuation's log-likelihood, and whether greedy text would be it."""
        pairs = self._encode([_arguments(request) for request in requests])
        return [(score.value, score.is_greedy) for score in self._score(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Of each (text,): the log-likelihood of all its tokens, each predicted once.

        A longer text than the context is cut into windows; what is left for the last one is seen after as many tokens
        as fit.
        """
        windows: list[Pair] = []
        owner: list[int] = []
        for i, request in enumerate(requests):
            cut = _windows(self._encode.text(_arguments(request)[0]), self.context)
            windows += cut
            owner += [i] * len(cut)
        sums = [0.0] * len(requests)
        for i, score in zip(owner, self._score(windows), strict=True):
            sums[i] += score.value
        return sums

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Of each (context, options): what the model writes up to one of ``options["until"]``, which is left out.

        Options are those of the harness: ``until`` (a text or several), ``max_gen_toks``, ``do_sample``,
        ``temperature``, ``top_p``, ``top_k``. Text is greedy unless sampling is asked for; a context that leaves no
        room loses tokens on the left.
        """
        return [self._write(*_arguments(request)) for request in requests]

    def _score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        return log_likelihoods(self.model, pairs, context=self.context, batch_size=self.batch_size)

    @torch.no_grad()
    def _write(self, text: str, options: dict[str, Any]) -> str:
        from transformers import GenerationConfig, StoppingCriteriaList

        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        most = int(options.get("max_gen_toks", MAX_NEW_TOKENS))
        if not 1 <= most < self.context:
            raise UserError(f"max_gen_toks must be from 1 to {self.context - 1}, less than the context, got {most}")
        ids = torch.tensor(
            [self._encode.prompt(text)[most - self.context :]], device=next(self.model.parameters()).device
        )
        eos = self.tokenizer.eos_token_id
        generation = {"max_new_tokens": most, "do_sample": bool(options.get("do_sample", False)), "eos_token_id": eos}
        generation["pad_token_id"] = eos if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        if generation["do_sample"]:
            generation |= {name: options[name] for name in ("temperature", "top_p", "top_k") if name in options}
        ends = _Ends(self.tokenizer, ids.shape[1], stops)
        with torch.random.fork_rng([ids.device] if ids.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(**generation),
                stopping_criteria=StoppingCriteriaList([ends]),
            )
        written = ends.text(out[0])
        return written[: min((at for stop in stops if (at := written.find(stop)) >= 0), default=len(written))]


def for_lm_eval(model: Any, tokenizer: Any, **options: Any) -> Any:
    """A :class:`HarnessModel` that ``lm_eval.simple_evaluate(model=...)`` takes, since it is one of its ``LM``."""
    try:
        base = require("lm_eval.api.model").LM
    except UserError as error:
        raise UserError("this needs EleutherAI's harness: pip install lm-eval") from error
    return type("HarnessLM", (HarnessModel, base), {})(model, tokenizer, **options)


class _Ends:
    """Whether what was written holds one of the stops; asked by transformers after every token."""

    def __init__(self, tokenizer: Any, num_given: int, stops: Sequence[str]):
        self.tokenizer, self.num_given, self.stops = tokenizer, num_given, stops

    def text(self, ids: Tensor) -> str:
        return self.tokenizer.decode(ids[self.num_given :], skip_special_tokens=True)

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ended = [any(stop in self.text(row) for stop in self.stops) for row in ids]
        return torch.tensor(ended, device=ids.device)


def _arguments(request: Any) -> tuple[Any, ...]:
    """What a request of the harness asks, or the tuple itself."""
    return tuple(getattr(request, "args", request))


def _windows(pair: Pair, context: int) -> list[Pair]:
    """The pair cut so that no part is longer than the context and every scored token is scored once."""
    tokens, start = pair.tokens, len(pair.tokens) - pair.num_scored
    windows = []
    while start < len(tokens):
        stop = min(start + context, len(tokens))
        windows.append(Pair(tokens[max(0, stop - context - 1) : stop], stop - start))
        start = stop
    return windows

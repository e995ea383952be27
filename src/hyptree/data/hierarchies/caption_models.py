"""Language models and models of inference as the parts of ``hyptree.data.hierarchies.caption_chains``.

    parts = Parts(
        TextGenerator.load("some/instruct-model"),
        InferenceEntailment.load("some/nli-model"),
        TextContradictor.load("some/instruct-model"),
    )

Any model of transformers that generates text (causal, or sequence to sequence) and any that classifies pairs with a
label "entailment" will do. Generation is greedy: the same caption gives the same answer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from hyptree.errors import UserError, require
from hyptree.files import check_weights

GENERALISE = (
    "Write shorter and more general descriptions of a picture, one per line, from the most general to the most "
    "specific. Say nothing that the caption does not say.\n"
    "Caption: A blue bird sitting on a branch with autumn leaves\n"
    "animal\nbird\nblue bird\nblue bird on a branch\n\n"
    "Caption: {caption}\n"
)
"""Prompt that makes a generator of a language model; ``{caption}`` is replaced."""

CONTRADICT = (
    "Write a description that is like the given one, as long and as detailed, but wrong for the picture.\n"
    "Picture: A blue bird sitting on a branch\nDescription: blue bird\nWrong: blue fish\n\n"
    "Picture: {caption}\nDescription: {text}\nWrong:"
)
"""Prompt that makes a contradictor of a language model; ``{caption}`` and ``{text}`` are replaced."""

_LIST_MARK = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s*")


class _Generates:
    """A model that answers prompts.

    Args:
        model: with ``generate``.
        tokenizer: of the model.
        prompt: what to ask.
        max_new_tokens: longest answer.
        max_lines: how many lines of the answer count; it ends with an empty line.
    """

    def __init__(
        self, model: Any, tokenizer: Any, prompt: str | None = None, max_new_tokens: int = 64, max_lines: int = 6
    ):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.prompt = prompt or self._prompt
        self.max_new_tokens, self.max_lines = max_new_tokens, max_lines

    _prompt: str
    _fields: tuple[str, ...]

    @classmethod
    def load(cls, name: Path | str, device: str = "cpu", **options: Any) -> Self:
        """From a folder of transformers or a name on the hub."""
        return cls(*_load(str(name), device), **options)

    def __call__(self, *texts: str) -> list[str]:
        """The lines of the answer, up to the first empty one, without bullets and quotes."""
        import torch

        question = self.prompt
        for name, value in zip(self._fields, texts, strict=True):
            question = question.replace(f"{{{name}}}", value)
        tokens = self.tokenizer(question, return_tensors="pt")
        tokens = {key: tokens[key].to(self.model.device) for key in ("input_ids", "attention_mask") if key in tokens}
        end = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        with torch.no_grad():
            output = self.model.generate(
                **tokens, max_new_tokens=self.max_new_tokens, do_sample=False, pad_token_id=end
            )[0]
        if not self.model.config.is_encoder_decoder:
            output = output[tokens["input_ids"].shape[1] :]
        answer = self.tokenizer.decode(output, skip_special_tokens=True).strip("\n")
        lines = (_LIST_MARK.sub("", line).strip().strip('"').strip() for line in answer.splitlines())
        return list(itertools.takewhile(bool, lines))[: self.max_lines]


class TextGenerator(_Generates):
    """A ``Generator``: asks a language model for more general captions."""

    _prompt, _fields = GENERALISE, ("caption",)


class TextContradictor(_Generates):
    """A ``Contradictor``: asks a language model for a description that is wrong."""

    _prompt, _fields = CONTRADICT, ("text", "caption")


class InferenceEntailment:
    """An ``Entailment``: the probability of the label "entailment" under a model of natural language inference.

    Args:
        model: a classifier of pairs; its ``config.id2label`` names a label that begins with "entail".
        batch_size: pairs at once.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int = 32):
        labels = {int(i): str(name).lower() for i, name in model.config.id2label.items()}
        fitting = [i for i, name in labels.items() if name.startswith("entail")]
        if len(fitting) != 1:
            raise UserError(
                f"expected a model of inference with one label 'entailment', got {', '.join(labels.values())}; "
                "use one that was trained on MNLI or SNLI"
            )
        self.model, self.tokenizer, self.batch_size, self.label = model.eval(), tokenizer, batch_size, fitting[0]

    @classmethod
    def load(cls, name: Path | str, device: str = "cpu", **options: Any) -> Self:
        """From a folder of transformers or a name on the hub."""
        return cls(*_load(str(name), device, classifies=True), **options)

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """For each (premise, hypothesis)."""
        import torch

        scores: list[float] = []
        for start in range(0, len(pairs), self.batch_size):
            part = pairs[start : start + self.batch_size]
            tokens = self.tokenizer(
                [premise for premise, _ in part],
                [hypothesis for _, hypothesis in part],
                padding=True,
                truncation=True,
                return_tensors="pt",
            )
            with torch.no_grad():
                logits = self.model(**{key: value.to(self.model.device) for key, value in tokens.items()}).logits
            scores += logits.float().softmax(-1)[:, self.label].tolist()
        return scores


def _load(name: str, device: str, classifies: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer: one that tells classes apart, or one that writes text."""
    from hyptree.devices import find_device

    transformers = require("transformers", "lm")
    what = "model"
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        writes = "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM"
        auto = getattr(transformers, f"AutoModelFor{'SequenceClassification' if classifies else writes}")
        what = "weights of"
        check_weights(name)
        model, info = auto.from_pretrained(name, trust_remote_code=False, output_loading_info=True)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        why = " ".join(str(error).split())[:160]
        raise UserError(
            f"cannot read the {what} {name}: {why}; give a folder of save_pretrained with a tokenizer"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:  # a head that is not in the checkpoint would be random
        raise UserError(f"{name} lacks {len(missing)} weights, e.g. {missing[0]}; it was made for another task")
    return model.to(find_device(device)), tokenizer

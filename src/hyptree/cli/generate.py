"""``hyptree generate RUN "prompt"``: text from a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hyptree.cli.config import AsJson, OnDevice
from hyptree.errors import UserError
from hyptree.train.source import find_model


@dataclass(kw_only=True)
class GenerateConfig(AsJson, OnDevice):
    """``hyptree generate``; as JSON one object per text instead of showing it as it comes."""

    model: Annotated[str, "MODEL"]
    """Folder that hyptree train wrote, or hf:FOLDER_OR_ID of transformers, with model and tokenizer."""
    prompt: Annotated[str, "PROMPT"]
    """Beginning of the text."""
    max_new_tokens: int = 200
    """Tokens to write at most; the model may end earlier."""
    temperature: float = 1.0
    """Below 1 for likelier text, above 1 for more surprising text."""
    top_k: int = 0
    """Choose among so many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    greedy: bool = False
    """Always take the likeliest token."""
    num: int = 1
    """Texts to write, each with the next seed."""
    seed: int = 0
    """Same seed, same device: same text."""


def run(config: GenerateConfig) -> None:
    """Write text with a language model and show it as it comes."""
    if config.num < 1:
        raise UserError(f"--num must be at least 1, got {config.num}")
    source = find_model(config.model, "run", "hf")
    import json

    from hyptree.lm.generate import generate_text
    from hyptree.train.language import load_language_model

    model, tokenizer = load_language_model(source.folder(), config.find_device())
    options = {name: getattr(config, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "greedy")}
    for seed in range(config.seed, config.seed + config.num):
        if config.json:
            text = generate_text(model, tokenizer, config.prompt, seed=seed, **options)
            print(json.dumps({"prompt": config.prompt, "text": text, "seed": seed}), flush=True)
            continue
        if seed > config.seed:
            print(f"\n--- seed {seed}")
        generate_text(model, tokenizer, config.prompt, _Printer(config.prompt), seed=seed, **options)
        print()


class _Printer:
    """Shows the prompt with the first piece: an error that comes before any text leaves standard output empty."""

    def __init__(self, prompt: str):
        self.prompt = prompt

    def __call__(self, text: str) -> None:
        print(self.prompt + text, end="", flush=True)
        self.prompt = ""

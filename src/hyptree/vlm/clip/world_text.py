"""What the built-in world says: its words as a tokenizer, the captions of its pictures, prompts for its classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.data.world import CLASSES, World
from hyptree.data.world.captions import NUMBERS, Facts, facts_of
from hyptree.data.world.captions import captions as write_captions
from hyptree.data.world.classes import LEAVES
from hyptree.data.world.scene import COLOUR_NAMES, PLACES, TIMES, picture_keys, sample_scenes
from hyptree.errors import require

PROMPTS = ("{}", "a photo of {}", "a picture of {}", "{} in the scene", "a photo of {} in the scene")
"""How a caption may be put in training; the first one is the caption itself."""

SPECIAL = ("<pad>", "<bos>", "<unk>", "<eos>")
"""Tokens 0 to 3. The end is not 2: transformers takes a CLIP with that number for an old one, pooled elsewhere."""

CONTEXT = 24
"""Tokens that hold every caption in every prompt, with begin and end."""


def world_words() -> list[str]:
    """Every word that a caption or a prompt can hold, sorted."""
    texts = list(PROMPTS)
    for index, leaf in enumerate(LEAVES):
        for count in range(leaf.low, leaf.high + 1):
            texts += Facts(index, 0, count, 0, 0).captions()
    texts += [*COLOUR_NAMES, *NUMBERS[1:], *PLACES, *TIMES, "an"]
    return sorted({word for text in texts for word in text.replace("{}", "").split()})


def world_tokenizer(context: int = CONTEXT) -> Any:
    """A tokenizer of transformers that knows the world's words; others are ``<unk>``, punctuation is left out."""
    require("tokenizers", "vlm")
    require("transformers", "vlm")
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pad, bos, unk, eos = SPECIAL
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *world_words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex(r"[^\w\s]"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=[(bos, vocabulary[bos]), (eos, vocabulary[eos])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        unk_token=unk,
        eos_token=eos,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def captions_of(world: World) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Captions of every picture from general to specific, and contradictions; without rendering a picture."""
    scenes = sample_scenes(picture_keys(world.seed, world.split, np.arange(len(world))))
    facts = facts_of(scenes).tolist()
    present = [[leaf for leaf in leaves if leaf >= 0] for leaves in scenes.leaf.tolist()]
    return [write_captions(leaves, row) for leaves, row in zip(present, facts, strict=True)]


def class_prompts(coloured: bool = True) -> list[list[str]]:
    """Texts for each of ``CLASSES``: "a red truck" in every colour, or the bare "a truck"."""
    if not coloured:
        return [[f"{'an' if name[0] in 'aeiou' else 'a'} {name}"] for name in CLASSES]
    colours = range(len(COLOUR_NAMES))
    return [[Facts(leaf, colour, 1, 0, 0).coloured() for colour in colours] for leaf in range(len(CLASSES))]


def encode_table(tokenizer: Any, texts: Sequence[str], length: int) -> Tensor:
    """(texts, length) int64: tokens of many texts, cut to a length (the end stays) and padded on the right."""
    table = np.full((len(texts), length), tokenizer.pad_token_id, np.int64)
    if texts:
        token_ids = tokenizer(list(texts), truncation=True, max_length=length, return_attention_mask=False)["input_ids"]
        for row, ids in zip(table, token_ids, strict=True):
            row[: len(ids)] = ids
    return torch.from_numpy(table)

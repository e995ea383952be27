"""From settings to blocks of tokens, and to their loader."""

from __future__ import annotations

from typing import Any

from hyptree.data.text.packing import TextBlocks
from hyptree.data.text.settings import TextSettings
from hyptree.data.text.sources import source_of
from hyptree.data.text.stream import TextLoader
from hyptree.data.text.tokenizer import default_tokenizer, load_tokenizer
from hyptree.data.text.tokens import tokens_of


def build_tokenizer(settings: TextSettings) -> Any:
    """The tokenizer of the settings: the one of their folder, or one trained on the training text and cached."""
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    return default_tokenizer(source_of(settings, "train"), settings.vocab_size, settings.cache_folder)


def build_text(settings: TextSettings, split: str, tokenizer: Any = None) -> TextBlocks:
    """The blocks of a split, ``train``, ``val`` or ``test``; the text is tokenised once and then read from the cache.

    Args:
        tokenizer: one that is loaded already; by default that of the settings.

    Raises:
        UserError: text or tokenizer cannot be read, are empty or do not fit each other.
    """
    source = source_of(settings, split)
    tokenizer = build_tokenizer(settings) if tokenizer is None else tokenizer
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return TextBlocks(
        tokens_of(source, tokenizer, settings.cache_folder, settings.bos, settings.eos),
        settings.block_length,
        packing=settings.packing,
        positions=settings.positions,
        mask_boundaries=settings.mask_boundaries,
        train=split == "train",
        pad_token_id=pad,
        tokenizer=tokenizer,
    )


def build_text_loader(dataset: TextBlocks, **options: Any) -> TextLoader:
    """The loader of a split: ``set_epoch(epoch, start_batch)``, ``len``, iteration, ``state_dict``, ``close``.

    See :class:`hyptree.data.text.stream.BlockBatches` for the options, and ``pin_memory``. Whether it trains or
    evaluates follows from the dataset.
    """
    return TextLoader(dataset, **options)

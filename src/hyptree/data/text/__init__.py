"""Text for language models: files -> documents -> tokens -> blocks, nothing dropped, resumable at the exact token.

Nothing is imported until it is asked for: reading the settings costs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyptree.lazy import lazy

if TYPE_CHECKING:
    from hyptree.data.text.packing import TextBlocks
    from hyptree.data.text.settings import TextSettings
    from hyptree.data.text.sources import TextSource, source_of
    from hyptree.data.text.stream import BlockBatches, TextLoader, build_text, build_text_loader, build_tokenizer
    from hyptree.data.text.tokenizer import (
        check_vocabulary,
        default_tokenizer,
        load_tokenizer,
        pack_tokenizer,
        save_tokenizer,
        train_tokenizer,
        unpack_tokenizer,
    )
    from hyptree.data.text.tokens import Tokens, in_memory, tokens_of

__all__ = [
    "BlockBatches",
    "TextBlocks",
    "TextLoader",
    "TextSettings",
    "TextSource",
    "Tokens",
    "build_text",
    "build_text_loader",
    "build_tokenizer",
    "check_vocabulary",
    "default_tokenizer",
    "in_memory",
    "load_tokenizer",
    "pack_tokenizer",
    "save_tokenizer",
    "source_of",
    "tokens_of",
    "train_tokenizer",
    "unpack_tokenizer",
]

__getattr__, __dir__ = lazy(__name__, __file__)

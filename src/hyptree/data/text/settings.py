"""Settings of text for language models: a plain dataclass, no torch, so that the command line starts fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyptree.checks import require_numbers
from hyptree.files import cache_folder

SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
MIN_VOCABULARY = 256 + len(SPECIAL_TOKENS)
"""A byte-level vocabulary has every byte, so that it can write any text."""

Documents = Literal["auto", "articles", "paragraphs", "lines", "files"]


@dataclass
class TextSettings:
    """Which text, which tokens, and how they are packed into blocks."""

    path: tuple[Path, ...] = ()
    """Files or folders (.txt, .md, .jsonl, .parquet; also .gz and .xz). Empty: the English text inside CPython."""
    val_path: tuple[Path, ...] = ()
    """Validation text; by default some documents of path are held out for it (val_share)."""
    val_share: float = 0.1
    """Share of the text, in whole documents spread over it, that is validation where no val_path is given."""
    documents: Documents = "auto"
    """What a document is in a text file: articles start with "= Title =", paragraphs end at blank lines, lines, or the
    whole file. auto: articles where the file begins with a title, otherwise paragraphs."""
    field: str = "text"
    """Field of a JSON record or column of a parquet file that holds the text."""
    num_documents: int | None = None
    """Use only the first so many documents (before any are held out); by default all."""
    tokenizer: Path | None = None
    """Folder of a Hugging Face tokenizer; by default one is trained on the training text and kept in the cache."""
    vocab_size: int = 4096
    """Tokens of the tokenizer that is trained, special ones included."""
    bos: bool = True
    """Begin every document with the tokenizer's bos token, if it has one."""
    eos: bool = True
    """End every document with the tokenizer's eos token, if it has one."""
    block_length: int = 256
    """Tokens of a block, which is a row of a batch."""
    packing: Literal["stream", "documents"] = "stream"
    """stream: one text after the other, each token sees all before it in its block, fastest. documents: position_ids
    start again at each document, so that tokens see their own document only."""
    positions: Literal["restart", "continue"] = "restart"
    """Of a document that goes on in the next block (packing documents): count from 0 there, or go on counting."""
    mask_boundaries: bool | None = None
    """Do not train on the first token of a document, which follows another; by default only in packing documents."""
    cache: Path | None = None
    """Folder that keeps tokens and trained tokenizers; by default $HYPTREE_CACHE/text or .cache/hyptree/text here."""

    def __post_init__(self) -> None:
        self.path, self.val_path = _paths(self.path), _paths(self.val_path)
        if self.block_length < 2:
            raise ValueError(
                f"block_length must be at least 2 (a token and the one it predicts), got {self.block_length}"
            )
        if self.tokenizer is None:
            check_vocab_size(self.vocab_size)
        if not 0 < self.val_share < 1:
            raise ValueError(f"val_share is a share of the text, between 0 and 1, got {self.val_share:g}")
        require_numbers(self, "at least 1", "num_documents")

    @property
    def cache_folder(self) -> Path:
        """Where tokens and trained tokenizers are kept."""
        if self.cache is not None:
            return self.cache.expanduser()
        return cache_folder("text")


def _paths(paths: Any) -> tuple[Path, ...]:
    """Paths, also from a single one or from strings, which Python would take for many letters."""
    return tuple(Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths))


def check_vocab_size(vocab_size: int) -> None:
    """``ValueError`` when a byte-level vocabulary cannot have this size."""
    if vocab_size < MIN_VOCABULARY:
        raise ValueError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens need at least "
            f"{MIN_VOCABULARY}"
        )

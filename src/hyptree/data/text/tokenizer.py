"""Tokenizers: train a byte-level BPE, keep it as a Hugging Face folder, load any such folder, encode documents.

What is trained here can write any text: every byte is a token, nothing is normalised, so decoding gives back what was
encoded, to the last character. ``tokenizer(text)`` begins with ``<bos>``, as the documents of the training text do.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from hyptree.data.text.settings import SPECIAL_TOKENS, check_vocab_size
from hyptree.data.text.sources import TextSource
from hyptree.errors import UserError, require
from hyptree.files import new_folder, path_inside, read_json

_PADDING_ROWS = 1024
"""Rows that a model's vocabulary may have beyond the tokenizer's: many are padded to a round number."""


def train_tokenizer(documents: Iterable[str], vocab_size: int, name: str = "the text") -> Any:
    """A byte-level BPE tokenizer with exactly ``vocab_size`` tokens; the same text gives the same one.

    Args:
        documents: the training text; read once.
        name: what messages call the text.

    Returns:
        A ``transformers.PreTrainedTokenizerFast`` with <bos>, <eos> and <pad> as tokens 0, 1 and 2.

    Raises:
        UserError: no text, or a vocabulary that the text cannot fill.
        ValueError: a vocabulary that cannot hold the bytes.
    """
    check_vocab_size(vocab_size)
    require("transformers", "lm")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = iter(documents)
    first = list(islice(documents, 1))
    if not first:
        raise UserError(f"{name}: there is no text to train a tokenizer on")
    tokenizer.train_from_iterator(chain(first, documents), trainer)
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        raise UserError(
            f"vocab_size {vocab_size} is too large for {name}: it gives {size} tokens; "
            "choose at most that, or more text"
        )
    bos, eos, pad = SPECIAL_TOKENS
    special = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        clean_up_tokenization_spaces=False,  # decoding gives back the text, spaces before commas included
        padding_side="left",  # generation goes on at the right end
    )


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of any Hugging Face folder on this machine (nothing is downloaded, no code of others is run).

    Raises:
        UserError: no such folder, or no tokenizer in it.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"cannot read the tokenizer {folder}: no such folder")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserError(f"{folder} holds no tokenizer; expected a Hugging Face folder with tokenizer.json")
    require("transformers", "lm")
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer reads the config.json of a model beside it too, and refuses a kind that nobody has registered.
    kind = None
    with contextlib.suppress(UserError):  # there is none, or nothing that can be read
        kind = read_json(folder / "config.json").get("model_type")
    reader = AutoTokenizer if kind is None or kind in CONFIG_MAPPING else PreTrainedTokenizerFast
    try:
        tokenizer = reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises all sorts of things for damaged files
        raise UserError(f"cannot read the tokenizer in {folder}: {' '.join(str(error).split())[:300]}") from error
    require_plain_templates(tokenizer, folder)
    return tokenizer


def require_plain_templates(tokenizer: Any, source: Path | str) -> None:
    """Raise if a tokenizer of others has chat templates that would be saved outside its folder, each under its name."""
    templates = getattr(tokenizer, "chat_template", None)
    for name in templates if isinstance(templates, dict) else ():
        path_inside("additional_chat_templates", f"{name}.jinja", f"{source}: chat_template")


def save_tokenizer(tokenizer: Any, folder: Path | str) -> Path:
    """Write a tokenizer as a new Hugging Face folder, all of it or nothing; gives the folder.

    Raises:
        UserError: the folder already holds something, or cannot be written.
    """
    folder = Path(folder).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} already holds something; name a new folder for the tokenizer")
    with new_folder(folder) as work:
        tokenizer.save_pretrained(work)
    return folder


def pack_tokenizer(tokenizer: Any) -> dict[str, str]:
    """The files of a tokenizer, name to text: what a run keeps of it."""
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        files = sorted(path for path in Path(place).rglob("*") if path.is_file())
        try:
            return {path.relative_to(place).as_posix(): path.read_text(encoding="utf-8") for path in files}
        except UnicodeDecodeError as error:
            raise UserError("this tokenizer has files that are no text; use one with a tokenizer.json") from error


def unpack_tokenizer(files: dict[str, str]) -> Any:
    """The tokenizer that :func:`pack_tokenizer` packed.

    Raises:
        UserError: a name that would lead out of the folder, or no files at all: a dataset.json may come from anybody.
    """
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise UserError("the tokenizer in a run's dataset.json is damaged: expected the text of each of its files")
    with tempfile.TemporaryDirectory() as place:
        for name, text in files.items():
            path = path_inside(place, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return load_tokenizer(place)


def default_tokenizer(source: TextSource, vocab_size: int, folder: Path | str) -> Any:
    """The tokenizer of this size for this text: trained once, then read from ``folder``.

    Its place in the folder is named by the size and by a fingerprint of the text, so another text gets another one.
    """
    path = Path(folder) / f"bpe-{vocab_size}-{source.fingerprint()[:16]}"
    if path.is_dir():
        try:
            return load_tokenizer(path)
        except UserError:  # damaged: it can be made again
            shutil.rmtree(path)
    tokenizer = train_tokenizer(source, vocab_size, source.name)
    with new_folder(path) as work:
        tokenizer.save_pretrained(work)
    return load_tokenizer(path)  # what every later run gets


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hexadecimal digits that are equal for tokenizers that give equal tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = backend.to_str()
    else:
        content = repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return hashlib.sha256(f"{special} {content}".encode()).hexdigest()


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the largest token, added ones included."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)


def check_vocabulary(tokenizer: Any, config: Any) -> None:
    """``UserError`` when a tokenizer is not the one of a model: tokens without an embedding, or far too few tokens.

    Args:
        config: anything with ``vocab_size``, e.g. the ``HelmConfig`` of a model.
    """
    size, rows = vocabulary_size(tokenizer), int(config.vocab_size)
    if size > rows:
        raise UserError(
            f"the tokenizer has {size} tokens but the model's vocabulary only {rows}; "
            f"set the model's vocab_size to {size}, or take the tokenizer it was trained with"
        )
    if rows > size + _PADDING_ROWS:
        raise UserError(
            f"the tokenizer has {size} tokens but the model's vocabulary {rows}: they do not belong together; "
            f"set the model's vocab_size to {size}, or take the tokenizer it was trained with"
        )


class Encoder:
    """Documents to tokens, many at once. Special tokens that a text spells out (``<eos>``) are plain text in it."""

    def __init__(self, tokenizer: Any, bos: bool = True, eos: bool = True):
        self.size = vocabulary_size(tokenizer)
        self.before = [tokenizer.bos_token_id] if bos and tokenizer.bos_token_id is not None else []
        self.after = [tokenizer.eos_token_id] if eos and tokenizer.eos_token_id is not None else []
        self._slow = tokenizer
        self._fast: Any = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            from tokenizers import Tokenizer

            self._fast = Tokenizer.from_str(backend.to_str())  # our own, so that nobody's settings change
            self._fast.encode_special_tokens = True
            self._fast.no_truncation()
            self._fast.no_padding()

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every token."""
        return np.dtype(np.uint16 if self.size <= 1 << 16 else np.uint32)

    def __call__(self, documents: list[str]) -> list[np.ndarray]:
        """The tokens of each document, with its begin and end."""
        if self._fast is not None:
            encoded = [encoding.ids for encoding in self._fast.encode_batch_fast(documents, add_special_tokens=False)]
        else:
            options = {"add_special_tokens": False, "split_special_tokens": True, "truncation": False}
            encoded = self._slow(documents, **options)["input_ids"]
        return [np.asarray(self.before + ids + self.after, self.dtype) for ids in encoded]

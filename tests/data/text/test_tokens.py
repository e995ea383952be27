"""Tokenizers that lose nothing, tokens kept on disk whole or not at all, and the way from settings to blocks."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hyptree.data.text import (
    TextSettings,
    TextSource,
    build_text,
    build_text_loader,
    check_vocabulary,
    default_tokenizer,
    load_tokenizer,
    save_tokenizer,
    source_of,
    tokens_of,
    train_tokenizer,
)
from hyptree.data.text.sources import builtin_documents
from hyptree.data.text.tokenizer import Encoder, tokenizer_fingerprint, vocabulary_size
from hyptree.errors import UserError

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(builtin_documents(), 600)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"Document {i} says: {'la ' * i}<eos> ü {i * i}." for i in range(60)), encoding="utf-8")
    return file


@given(st.text())
@example("<bos>a<eos><pad> , x . \r\n\t  \u2028 \x00 👩‍👩‍👧 e\u0301 é")
def test_any_text_comes_back_from_its_tokens(tokenizer: Any, text: str) -> None:
    (tokens,) = Encoder(tokenizer)([text])
    assert tokens[0] == 0 and tokens[-1] == 1 and tokens.max() < 600
    assert not np.isin(tokens[1:-1], [0, 1, 2]).any(), "a text that spells <eos> has no eos token"
    assert tokenizer.decode(tokens[1:-1].tolist()) == text
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id and tokenizer.decode(ids[1:]) == text


def test_training_is_repeatable_in_another_process(tokenizer: Any, run_python) -> None:
    code = (
        "from hyptree.data.text.sources import builtin_documents; from hyptree.data.text.tokenizer import *;"
        "print(tokenizer_fingerprint(train_tokenizer(builtin_documents(), 600)))"
    )
    actual = run_python(code, PYTHONHASHSEED="77", TOKENIZERS_PARALLELISM="false")
    assert actual.strip() == tokenizer_fingerprint(tokenizer)


def test_folder_is_one_of_hugging_face(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = save_tokenizer(tokenizer, tmp_path / "tokenizer")
    text = "An identifier occurring as an atom is a name , ü <eos>"
    ids = tokenizer(text).input_ids
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        theirs = kind.from_pretrained(folder)
        assert theirs(text).input_ids == ids and len(theirs) == 600
        assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<bos>", "<eos>", "<pad>")
        assert theirs.decode(ids, skip_special_tokens=True).rstrip() == text.removesuffix("<eos>").rstrip()
    ours = load_tokenizer(folder)
    assert tokenizer_fingerprint(ours) == tokenizer_fingerprint(tokenizer)
    (folder / "config.json").write_text('{"model_type": "helm"}')  # beside a model that transformers does not know
    assert load_tokenizer(folder)(text).input_ids == ids
    padded = ours([text, "a"], padding=True)
    assert padded.attention_mask[1][0] == 0 and padded.attention_mask[1][-1] == 1, "generation needs left padding"
    with pytest.raises(UserError, match="tokenizer already holds something; name a new folder"):
        save_tokenizer(tokenizer, folder)


def test_wrong_vocabularies_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="vocab_size 200 is too small: 256 bytes and 3 special tokens need at least 259"
    ):
        train_tokenizer(["text"], 200)
    with pytest.raises(UserError, match=r"vocab_size 5000 is too large for the text: it gives 26\d tokens; choose at"):
        train_tokenizer(["some words"], 5000)
    with pytest.raises(UserError, match=r"^the text: there is no text to train a tokenizer on$"):
        train_tokenizer([], 300)
    with pytest.raises(UserError, match=r"cannot read the tokenizer .*nothing: no such folder$"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"holds no tokenizer; expected a Hugging Face folder with tokenizer\.json$"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"^cannot read the tokenizer in .*") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_tokenizer_that_does_not_fit_a_model(tokenizer: Any) -> None:
    for rows in (600, 640, 1600):  # models are often padded to a round number
        check_vocabulary(tokenizer, SimpleNamespace(vocab_size=rows))
    with pytest.raises(
        UserError, match="tokenizer has 600 tokens but the model's vocabulary only 599; set the model's"
    ):
        check_vocabulary(tokenizer, SimpleNamespace(vocab_size=599))
    with pytest.raises(
        UserError, match="has 600 tokens but the model's vocabulary 128256: they do not belong together"
    ):
        check_vocabulary(tokenizer, SimpleNamespace(vocab_size=128256))


def test_tokenizers_without_a_fast_backend_work_too() -> None:
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    assert getattr(slow, "backend_tokenizer", None) is None
    encode = Encoder(slow)
    texts = ["aü", "x</s>y"]
    for text, tokens in zip(texts, encode(texts), strict=True):
        assert tokens.tolist() == [byte + 3 for byte in text.encode()] + [slow.eos_token_id]
    assert vocabulary_size(slow) == 384 and encode.dtype == np.uint16
    assert tokenizer_fingerprint(slow) != tokenizer_fingerprint(ByT5Tokenizer(extra_ids=0))


def test_large_vocabularies_need_four_bytes(tokenizer: Any) -> None:
    many = pickle.loads(pickle.dumps(tokenizer))
    many.add_tokens([f"<extra{i}>" for i in range(66_000)])
    encode = Encoder(many)
    (tokens,) = encode(["a<extra65999>b"])
    assert encode.dtype == np.uint32 and tokens.max() == 66_599


def test_default_tokenizer_is_trained_once_for_each_text(text_file: Path, tmp_path: Path) -> None:
    source = TextSource((text_file,))
    cache = tmp_path / "cache"
    first = default_tokenizer(source, 300, cache)
    (folder,) = cache.iterdir()
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer_fingerprint(default_tokenizer(source, 300, cache)) == tokenizer_fingerprint(first)
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written and folder.name.startswith("bpe-300-")
    default_tokenizer(source, 310, cache)
    text_file.write_text(text_file.read_text() + " More.")
    default_tokenizer(source, 300, cache)
    assert len(list(cache.iterdir())) == 3
    (folder / "tokenizer.json").write_text("{")  # damaged: made again from the text it belongs to
    text_file.write_text(text_file.read_text().removesuffix(" More."))
    assert tokenizer_fingerprint(default_tokenizer(source, 300, cache)) == tokenizer_fingerprint(first)


def test_tokens_of_documents_are_kept_with_their_boundaries(tokenizer: Any, text_file: Path, tmp_path: Path) -> None:
    source = TextSource((text_file,))
    tokens = tokens_of(source, tokenizer, tmp_path / "cache")
    documents = list(source)
    assert tokens.num_documents == len(documents) == 60 and tokens.tokens.dtype == np.uint16
    for i, text in enumerate(documents):
        assert tokens.document(i).tolist()[0] == 0 and tokens.document(i).tolist()[-1] == 1
        assert tokenizer.decode(tokens.document(i)[1:-1].tolist()) == text
    assert sum(len(tokens.document(i)) for i in range(60)) == tokens.num_tokens
    bare = tokens_of(source, tokenizer, tmp_path / "cache", bos=False, eos=False)
    assert bare.num_tokens == tokens.num_tokens - 120 and bare.fingerprint != tokens.fingerprint
    copy = pickle.loads(pickle.dumps(tokens))
    assert np.array_equal(copy.tokens, tokens.tokens) and len(pickle.dumps(tokens)) < 1000


def test_cache_is_used_until_text_or_tokenizer_change(
    tokenizer: Any, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    encode = Encoder.__call__
    monkeypatch.setattr(Encoder, "__call__", lambda self, texts: calls.append(len(texts)) or encode(self, texts))
    source, cache = TextSource((text_file,)), tmp_path / "cache"
    first = tokens_of(source, tokenizer, cache)
    os.utime(text_file, (1, 1))
    again = tokens_of(source, tokenizer, cache)
    assert calls == [60] and np.array_equal(first.tokens, again.tokens)
    text_file.write_text(text_file.read_text().replace("Document 7", "Document 8"))
    changed = tokens_of(source, tokenizer, cache)
    assert calls == [60, 60] and changed.fingerprint != first.fingerprint
    other = train_tokenizer(builtin_documents(), 601)
    assert tokens_of(source, other, cache).num_tokens <= changed.num_tokens
    assert calls == [60, 60, 60] and len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "about"])
def test_damaged_cache_is_made_again(tokenizer: Any, text_file: Path, tmp_path: Path, damage: str) -> None:
    source = TextSource((text_file,))
    expected = tokens_of(source, tokenizer, tmp_path / "cache").tokens.copy()
    (folder,) = (tmp_path / "cache").iterdir()
    file = folder / "tokens.bin"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-2])
    elif damage == "flipped":
        content[100] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    else:
        (folder / "about.json").write_text("{}")
    assert np.array_equal(tokens_of(source, tokenizer, tmp_path / "cache").tokens, expected)
    assert file.stat().st_size == 2 * len(expected)


SLOW_READER = """
import sys, time
from pathlib import Path
from hyptree.data.text import tokens, load_tokenizer, TextSource
tokens._BATCH = 1
batches = tokens._batches
def slowly(source):
    for batch in batches(source):
        yield batch
        time.sleep(0.05)
tokens._batches = slowly
tokens.tokens_of(TextSource((Path(sys.argv[1]),)), load_tokenizer(sys.argv[2]), sys.argv[3])
"""


def test_kill_while_writing_leaves_no_half_file(tokenizer: Any, text_file: Path, tmp_path: Path) -> None:
    folder, cache = save_tokenizer(tokenizer, tmp_path / "tokenizer"), tmp_path / "cache"
    arguments = [sys.executable, "-c", SLOW_READER, str(text_file), str(folder), str(cache)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(arguments, env=env)
    try:
        deadline = time.monotonic() + 60
        while not list(cache.glob(".tokens-*/tokens.bin")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = list(cache.iterdir())
    assert len(left) == 1 and left[0].name.startswith(".tokens-"), "half of it, under a name that nobody reads"
    tokens = tokens_of(TextSource((text_file,)), tokenizer, cache)
    assert tokens.num_documents == 60
    assert list(cache.iterdir()) == [tokens.folder], "what the killed process left is gone"


def test_failed_writing_leaves_nothing(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"fine\n\n" * 10 + b"\xff")
    with pytest.raises(UserError, match="byte 0xff at offset 60"):
        tokens_of(TextSource((file,)), tokenizer, tmp_path / "cache")
    file.write_bytes(b" \n\n ")
    with pytest.raises(UserError, match=r"text\.txt: there is no text in it$"):
        tokens_of(TextSource((file,)), tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").write_text("")
    file.write_bytes(b"fine")
    with pytest.raises(UserError, match=r"^cannot write .*: (Not a directory|File exists); free some space, or name"):
        tokens_of(TextSource((file,)), tokenizer, tmp_path / "file")


def test_from_settings_to_batches(text_file: Path, tmp_path: Path, seed: int) -> None:
    options: dict[str, Any] = {"path": (text_file,), "vocab_size": 300, "cache": tmp_path / "cache"}
    settings = TextSettings(**options, block_length=32)
    train, val = build_text(settings, "train"), build_text(settings, "val")
    assert train.tokenizer.decode(train.tokens.document(0)[1:-1].tolist()) == next(iter(source_of(settings, "train")))
    assert train.num_documents + val.num_documents == 60
    assert len(train) == train.num_tokens // 32 and len(val) == -(-val.num_tokens // 32)
    (batch, *_) = build_text_loader(train, batch_size=4, seed=seed)
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 32) and set(batch) == {"input_ids", "labels"}
    last = val[len(val) - 1]
    num_padding = len(val) * 32 - val.num_tokens
    assert (last["input_ids"] == val.tokenizer.pad_token_id).sum() == (last["labels"] == -100).sum() == num_padding
    packed = build_text(TextSettings(**options, block_length=32, packing="documents"), "train", train.tokenizer)
    assert torch.equal(packed[5]["input_ids"], train[5]["input_ids"]) and packed.tokenizer is train.tokenizer
    assert (packed[5]["position_ids"][1:] == 0).any()
    elsewhere = TextSettings(**options | {"tokenizer": next((tmp_path / "cache").glob("bpe-*"))}, block_length=32)
    assert build_text(elsewhere, "val").tokens.fingerprint == val.tokens.fingerprint


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("only one document " * 50)
    settings = TextSettings(path=(file,), vocab_size=260, cache=tmp_path / "cache")
    with pytest.raises(UserError, match=r"one\.txt \(validation share\): there is no text in it; give val_path"):
        build_text(settings, "val")


def test_settings_import_no_torch(run_python) -> None:
    code = "import sys; from hyptree.data.text import TextSettings; TextSettings(); print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_real_text(shared_data: Path, tmp_path: Path) -> None:
    file = shared_data / "text" / "wiki_valid.txt.xz"
    if not file.is_file():
        pytest.skip(f"no {file}")
    settings = TextSettings(path=(file,), vocab_size=2048, block_length=128, cache=tmp_path, packing="documents")
    blocks = [build_text(settings, split) for split in ("train", "val")]
    texts: list[str] = []
    for part in blocks:
        stream = torch.cat([part[i]["input_ids"] for i in range(-(-part.num_tokens // 128))])[: part.num_tokens]
        pieces = "".join(part.tokenizer.decode(stream.tolist()).split("<bos>")).split("<eos>")[:-1]
        assert len(pieces) == part.num_documents
        texts += pieces
    assert sorted(texts) == sorted(TextSource((file,))), "blocks, decoded, are the articles to the last character"
    assert json.loads((blocks[0].tokens.folder / "about.json").read_text())["num_documents"] == blocks[0].num_documents


@pytest.mark.slow
def test_fifteen_megabytes_are_tokenised_once(shared_data: Path, tmp_path: Path) -> None:
    file = shared_data / "text" / "wiki_train.txt.xz"
    if not file.is_file():
        pytest.skip(f"no {file}")
    settings = TextSettings(path=(file,), vocab_size=8192, block_length=512, cache=tmp_path)
    first = build_text(settings, "train")
    began = time.perf_counter()
    again = build_text(settings, "train")
    assert time.perf_counter() - began < 2
    assert first.num_tokens == again.num_tokens > 3_000_000 and len(again) == again.num_tokens // 512
    assert first.num_documents + build_text(settings, "val").num_documents == 2038


@pytest.mark.parametrize("name", ["../../outside", "/outside", "a/../../b"])
def test_templates_of_others_stay_in_the_folder_of_their_tokenizer(tmp_path, name):
    folder = save_tokenizer(train_tokenizer(["to be or not to be"], vocab_size=262), tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for templates, is_fine in ({"default": "a", "tool_use": "b"}, True), ({"default": "a", name: "b"}, False):
        named = [{"name": key, "template": value} for key, value in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
        if is_fine:
            saved = save_tokenizer(load_tokenizer(folder), tmp_path / "again")
            assert load_tokenizer(saved).chat_template == templates
        else:
            with pytest.raises(UserError, match=r"tokenizer: chat_template: .* is not the name of a file inside"):
                load_tokenizer(folder)

"""Files to documents: every kind of file, what a document is, which split it is in, one line for each mistake."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyptree.data.text import TextSettings, TextSource, source_of
from hyptree.data.text.sources import builtin_documents, hold_out, read_documents
from hyptree.errors import UserError

ARTICLES = """= Anarchism =
First paragraph.

Second paragraph, x = y.

== Origins ==

= = Schools = =
Third.

= B =
Other article.
= not a title: no blank line before =
"""


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(data))
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.xz", "no_suffix"])
def test_what_a_document_is(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, ARTICLES)
    first, second = ARTICLES[: ARTICLES.index("\n\n= B =")], ARTICLES[ARTICLES.index("= B =") :].rstrip("\n")
    assert list(read_documents(file)) == list(read_documents(file, "articles")) == [first, second]
    assert list(read_documents(file, "paragraphs")) == ARTICLES.rstrip("\n").split("\n\n")
    assert list(read_documents(file, "lines")) == [line for line in ARTICLES.split("\n") if line]
    assert list(read_documents(file, "files")) == [ARTICLES]


def test_paragraphs_unless_the_file_begins_with_a_title(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "\n  Indented.\r\nTwo.\r\n\r\n \nThree.\n\n= Late title =\nFour.")
    expected = ["  Indented.\r\nTwo.", "Three.", "= Late title =\nFour."]
    assert list(read_documents(file)) == expected, "spaces and line ends inside a document stay as they are"
    assert list(read_documents(file, "articles")) == ["  Indented.\r\nTwo.\r\n\r\n \nThree.", expected[2]]


def test_mark_at_the_beginning_is_no_text(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"\xef\xbb\xbf= A =\nText \xef\xbb\xbf.")
    assert list(read_documents(file)) == ["= A =\nText \ufeff."]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.sampled_from([".jsonl", ".jsonl.gz", ".ndjson.xz"]))
def test_json_records_come_back_as_they_were(tmp_path_factory: Any, texts: list[str], suffix: str) -> None:
    file = tmp_path_factory.mktemp("json") / f"a{suffix}"
    write(file, "\n\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)))
    assert list(read_documents(file)) == [text for text in texts if text.strip()]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 3}', r"line 2 has no field 'text', only 'body', 'id'; set field"),
        ("{}", r"line 2 has no field 'text', only no fields at all; set field"),
        ('{"text": 3}', r"line 2: field 'text' must hold text, got int"),
        ('["x"]', r"line 2: expected a record \{...\}, got list"),
        ('{"text": "x"', r"line 2 is not JSON: Expecting ',' delimiter at column 13"),
        ('{"text": "ab\\ud800"}', r"line 2: '\\ud800' at character 2 is no Unicode character"),
    ],
)
def test_wrong_records_are_one_line(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "fine", "body": "other"}\n' + line)
    with pytest.raises(UserError, match=rf"a\.jsonl {message}") as caught:
        list(read_documents(file))
    assert "\n" not in str(caught.value)


def test_other_field(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "fine", "body": "other"}')
    assert list(read_documents(file, field="body")) == ["other"]


class FakeParquet(types.ModuleType):
    """As much of pyarrow.parquet as we use; files are JSON here."""

    class ParquetFile:
        def __init__(self, file: Path):
            try:
                self.columns = json.loads(file.read_text())
            except json.JSONDecodeError:
                raise ValueError("Parquet magic bytes not found in footer.\nFile is damaged.") from None
            self.schema_arrow = types.SimpleNamespace(names=list(self.columns))

        def iter_batches(self, batch_size: int, columns: list[str]) -> Any:
            (name,) = columns
            for begin in range(0, len(self.columns[name]), 2):
                part = types.SimpleNamespace(to_pylist=lambda begin=begin: self.columns[name][begin : begin + 2])
                yield types.SimpleNamespace(column=lambda _, part=part: part)


def test_parquet_by_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", FakeParquet("pyarrow.parquet"))
    file = write(tmp_path / "a.parquet", json.dumps({"text": ["one", "", "two", "three"], "n": [1, 2, 3, 4]}))
    assert list(read_documents(file)) == ["one", "two", "three"]
    with pytest.raises(UserError, match=r"a\.parquet has no column 'body', only 'text', 'n'; set field$"):
        list(read_documents(file, field="body"))
    with pytest.raises(UserError, match=r"a\.parquet row 1: field 'n' must hold text, got int$"):
        list(read_documents(file, field="n"))
    broken = write(tmp_path / "b.parquet", "PAR1")
    with pytest.raises(UserError, match=r"b\.parquet is not a whole parquet file: Parquet magic .* File is damaged\.$"):
        list(read_documents(broken))


def test_parquet_for_real(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"text {i} ü" for i in range(3000)]
    parquet.write_table(arrow.table({"id": list(range(3000)), "text": texts}), tmp_path / "a.parquet")
    assert list(read_documents(tmp_path / "a.parquet")) == texts


def test_parquet_without_pyarrow_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    file = write(tmp_path / "a.parquet", "")
    with pytest.raises(UserError, match=r"^reading .*a\.parquet needs pyarrow: pip install hyptree\[parquet\]$"):
        list(read_documents(file))


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.xz", ".jsonl"])
def test_byte_that_is_not_utf8_is_named(tmp_path: Path, suffix: str) -> None:
    good = '{"text": "ä"}\n'.encode() * 100
    file = write(tmp_path / f"a{suffix}", good + b'{"text": "\xff"}\n')
    offset = len(good) + 10
    with pytest.raises(UserError, match=rf"is not UTF-8: byte 0xff at offset {offset}; convert it to UTF-8 first$"):
        list(read_documents(file))


@pytest.mark.parametrize("suffix", [".txt.gz", ".txt.xz"])
def test_damaged_archives_are_one_line(tmp_path: Path, suffix: str) -> None:
    whole = write(tmp_path / f"a{suffix}", "text " * 1000).read_bytes()
    for name, content in (("cut", whole[: len(whole) // 2]), ("other", b"plain text")):
        file = tmp_path / f"{name}{suffix}"
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}{suffix} is not a whole {suffix[4:]} file: \S"):
            list(read_documents(file))


def test_folders_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "third")
    write(tmp_path / "a" / "z.jsonl.gz", '{"text": "first"}\n{"text": "second"}')
    write(tmp_path / "c.md.xz", "fourth\n\nfifth")
    for ignored in (".hidden.txt", ".git/x.txt", "picture.png", "a/notes.csv"):
        write(tmp_path / ignored, "ignored")
    assert list(TextSource((tmp_path,))) == ["first", "second", "third", "fourth", "fifth"]
    assert list(TextSource((tmp_path / "c.md.xz", tmp_path / "a"), num_documents=3)) == ["fourth", "fifth", "first"]


def test_missing_paths_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^cannot read .*nothing\.txt: no such file or folder$"):
        list(TextSource((tmp_path / "nothing.txt",)))
    with pytest.raises(UserError, match=r"no text in this folder; expected files that end in \.txt, .*\(or \.gz, \.xz"):
        list(TextSource((tmp_path,)))
    with pytest.raises(UserError, match="split must be one of train, val, test, got 'valid'"):
        source_of(TextSettings(), "valid")


def test_fingerprint_follows_content_and_reading(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one\n\ntwo")
    source = TextSource((file,))
    first = source.fingerprint()
    assert first == TextSource((write(tmp_path / "sub" / "copy.txt", "one\n\ntwo"),)).fingerprint()
    others = [
        TextSource((file,), documents="lines").fingerprint(),
        TextSource((file,), field="body").fingerprint(),
        TextSource((file,), num_documents=1).fingerprint(),
        TextSource((file,), held_out=0.1).fingerprint(),
        TextSource((file,), held_out=0.1, is_val=True).fingerprint(),
        TextSource((file, file)).fingerprint(),
        TextSource().fingerprint(),
    ]
    write(file, "one\n\ntwO")
    assert len({first, *others, source.fingerprint()}) == len(others) + 2


def test_split_of_the_built_in_text_is_by_document() -> None:
    settings = TextSettings()
    train, val = list(source_of(settings, "train")), list(source_of(settings, "val"))
    everything = list(builtin_documents())
    assert sorted(train + val) == sorted(everything) and not set(train) & set(val)
    assert list(source_of(settings, "test")) == val == list(source_of(settings, "val"))
    share = sum(map(len, val)) / sum(map(len, everything))
    assert 0.05 < share < 0.25, share
    assert sum(map(len, everything)) > 300_000


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.floats(0.01, 0.99))
def test_kept_share_is_right_to_one_document(lengths: list[int], share: float) -> None:
    documents = ["x" * length for length in lengths]
    actual = list(hold_out(documents, share))
    assert [text for text, _ in actual] == documents
    aside, total = sum(len(text) for text, is_val in actual if is_val), sum(lengths)
    assert abs(aside - share * total) <= max(lengths)


def test_validation_text_of_its_own(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a.txt", "a\n\nb\n\nc"), write(tmp_path / "b.txt", "d")
    settings = TextSettings(path=str(one), val_path=two)  # type: ignore[arg-type]  (one path instead of many)
    assert settings.path == (one,)
    assert list(source_of(settings, "train")) == ["a", "b", "c"] and list(source_of(settings, "val")) == ["d"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_length": 1}, r"block_length must be at least 2 .* got 1"),
        ({"vocab_size": 258}, r"vocab_size 258 is too small: 256 bytes and 3 special tokens need at least 259"),
        ({"val_share": 1.0}, r"val_share is a share of the text, between 0 and 1, got 1"),
        ({"num_documents": 0}, r"num_documents must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextSettings(**options)


def test_real_articles(shared_data: Path) -> None:
    file = shared_data / "text" / "wiki_valid.txt.xz"
    if not file.is_file():
        pytest.skip(f"no {file}")
    articles = list(read_documents(file))
    assert len(articles) == 52 and all(text.startswith("= ") for text in articles)
    assert "\n\n".join(articles) == lzma.decompress(file.read_bytes()).decode().rstrip("\n")
    wikitext = shared_data / "text" / "wikitext2_valid.txt.xz"
    assert len(list(read_documents(wikitext))) == 60

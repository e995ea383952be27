"""HierarCaps and HyperLex: the real files by their known sizes, small made-up ones by their mistakes."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from hyptree.data.hierarchies.hierarcaps import (
    Chain,
    distinct_texts,
    first_of_each_image,
    read_hierarcaps,
    read_images,
    split_chain,
    without_images_of,
)
from hyptree.data.hierarchies.hyperlex import read_hyperlex
from hyptree.errors import UserError
from tests.data.make import write_picture


def need(folder: Path) -> Path:
    if not folder.is_dir():
        pytest.skip(f"no {folder.name} here")
    return folder


def test_sizes_of_the_real_files(shared_data):
    folder = need(shared_data / "hierarcaps")
    test, expanded = read_hierarcaps(folder, "test"), read_hierarcaps(folder.parent, "expanded")
    assert len(test) == 1000 and len({chain.image for chain in test}) == 1000
    assert {len(chain.captions) for chain in test} == {4} and not test[0].negatives
    assert [len({chain.captions[level] for chain in test}) for level in range(4)] == [491, 717, 999, 1000]
    words = [np.mean([len(chain.captions[level].split()) for chain in test]) for level in range(4)]
    assert np.allclose(words, [1.3, 1.8, 6.3, 11.7], atol=0.05)
    assert len(expanded) == 23_479 and len({chain.image for chain in expanded}) == 5000
    assert {(len(chain.captions), len(chain.negatives)) for chain in expanded} == {(4, 4)}
    train = without_images_of(expanded, test)
    assert len(train) == 18_770
    assert not {chain.image for chain in train} & {chain.image for chain in test}
    assert len(read_hierarcaps(folder, "sample")) == 100


def test_pictures_lie_inside_their_folder(tmp_path):
    (tmp_path / "in").mkdir()
    write_picture(tmp_path / "out.jpg", np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(UserError, match=r"'\.\./out\.jpg' is not the name of a file inside a folder"):
        read_images(tmp_path / "in", ["../out.jpg"])


def test_pictures_of_the_test_set(shared_data):
    folder = need(shared_data / "hierarcaps")
    names = [chain.image for chain in read_hierarcaps(folder, "test")][:3]
    pictures = read_images(folder, names[::-1])
    assert [picture.shape for picture in pictures] == [(160, 160, 3)] * 3
    again = read_images(folder / "test_images_160.npz", names)
    assert all((a == b).all() for a, b in zip(pictures, again[::-1], strict=True))
    with pytest.raises(UserError, match=r"1 of 2 pictures are not there, the first is none\.jpg"):
        read_images(folder, [names[0], "none.jpg"])


def test_sizes_of_hyperlex(shared_data):
    folder = need(shared_data / "hyperlex")
    pairs = read_hyperlex(folder)
    assert len(pairs) == 2616 and sum(pair.pos == "N" for pair in pairs) == 2163
    for split, sizes in {"random": (1831, 130, 655), "lexical": (1133, 85, 269)}.items():
        files = [f"hyperlex_{portion}_all_{split}.txt" for portion in ("training", "dev", "test")]
        assert tuple(len(read_hyperlex(folder / "splits" / split / file)) for file in files) == sizes
    pair = read_hyperlex(folder / "hyperlex-nouns.txt")[1]
    assert (pair.word, pair.general, pair.pos, pair.relation, pair.score) == ("mason", "worker", "N", "hyp-3", 7.5)


HEADER = "positive,negative,image_url\n"
ROW = '"dog => wet dog => wet, ""big"" dog => A wet dog, => x","cat => dry => c => d",http://a/b/1.jpg\n'


def test_commas_quotes_case_and_gzip(tmp_path):
    row = '"dog => wet dog => a ""wet"" dog, outside => A Wet dog, etc.",a => b => c => d,http://a/b/1.jpg\n'
    with gzip.open(tmp_path / "x.csv.gz", "wt", encoding="utf-8") as file:
        file.write(HEADER + row)
    (chain,) = read_hierarcaps(tmp_path / "x.csv.gz")
    assert chain.captions == ("dog", "wet dog", 'a "wet" dog, outside', "A Wet dog, etc.")
    assert chain.negatives == ("a", "b", "c", "d") and chain.image == "1.jpg"
    assert chain.texts == chain.captions + chain.negatives


def test_arrow_without_spaces():
    assert split_chain("a=>b =>c=> d ", "here") == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", HEADER + ROW, r"x\.csv, line 2: a chain has 4 captions joined by ' => ', got 5"),
        ("x.csv", HEADER + "a => b => c,a => b => c => d,u\n", "a chain has 4 captions joined by ' => ', got 3"),
        ("x.csv", HEADER + "a =>  => c => d,a => b => c => d,u\n", "line 2: the caption of level 2 is empty"),
        ("x.csv", HEADER + "a => b => c => d,a => b => c => ,u\n", "line 2: the caption of level 4 is empty"),
        ("x.csv", "name,age\nbob,3\n", r"x\.csv: expected HierarCaps: .*found 'name, age'"),
        ("x.csv", "", "expected HierarCaps.*found 'nothing'"),
        ("x.csv", HEADER, "no chains in it"),
        ("x.csv", b"\xff\xfe\x00\x01", "not a text file in UTF-8"),
        ("x.csv.gz", b"no gzip", r"x\.csv\.gz is not a whole \.gz file: "),
        ("x.json", '{"a": 1}', "expected HierarCaps"),
        ("x.json", "{", "not JSON"),
        ("x.json", '{"positive": {"0": "a"}, "negative": {"1": "a"}}', "the same rows"),
    ],
)
def test_a_file_that_is_not_hierarcaps_is_one_line(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as caught:
        read_hierarcaps(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_without_it(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_hierarcaps(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"has no hierarcaps_test\.csv"):
        read_hierarcaps(tmp_path, "test")
    with pytest.raises(UserError, match="part must be one of test, expanded, train, sample, got 'tset'"):
        read_hierarcaps(tmp_path, "tset")


def test_choosing_among_chains():
    a, b = Chain(("x",), ("y",), "1.jpg"), Chain(("x",), ("z",), "1.jpg")
    c, unknown = Chain(("w",), ("y",), "2.jpg"), Chain(("q",))
    assert first_of_each_image([a, b, unknown, c, Chain(("r",))]) == [a, unknown, c, Chain(("r",))]
    assert distinct_texts([a, b, c]) == ["x", "y", "z", "w"]
    assert without_images_of([a, b, c, unknown], [Chain(("t",), (), "1.jpg"), Chain(("t",))]) == [c, unknown]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b c\n", "expected HyperLex, whose first line begins with WORD1"),
        ("WORD1 WORD2 POS TYPE A B\nx y N\n", "line 2: expected two words"),
        ("WORD1 WORD2 POS TYPE A B\nx y N hyp 1 many\n", "line 2: expected two words"),
    ],
)
def test_a_file_that_is_not_hyperlex_is_one_line(tmp_path, text, message):
    (tmp_path / "h.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read_hyperlex(tmp_path / "h.txt")


def test_a_folder_without_hyperlex(tmp_path):
    with pytest.raises(UserError, match=r"has no hyperlex-all\.txt"):
        read_hyperlex(tmp_path)

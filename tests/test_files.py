"""Files that are whole or not there, names that stay inside their folder, logs that a kill cut short."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import tempfile
from pathlib import Path

import pytest
import torch

from hyptree.data.text import unpack_tokenizer
from hyptree.errors import UserError
from hyptree.files import (
    load_tensors,
    new_folder,
    open_packed,
    path_inside,
    read_json,
    read_log,
    save_tensors,
    write_atomic,
    write_text,
)
from hyptree.runs import MANIFEST, damage


def test_the_log_of_a_killed_run_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_log(path, "step") == []
    path.write_text('{"step": 1, "split": "train"}\n{"step": 2, "sp')
    assert read_log(path, "step") == [{"step": 1, "split": "train"}]
    path.write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        read_log(path, "step")
    path.write_text('{"step": 1}\n{"epoch": 1}\n')
    with pytest.raises(UserError, match="line 2 has no 'step'"):
        read_log(path, "step")


@pytest.mark.parametrize(
    "name",
    ["../out", "a/../../out", "/etc/passwd", "C:out", "C:\\out", "..\\out", "a//b", "", ".", "..", "a\0b", "a/", "./a"],
)
def test_a_name_from_a_file_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is not the name of a file inside a folder"):
        path_inside(tmp_path, name)


def test_a_plain_name_is_taken(tmp_path: Path) -> None:
    assert path_inside(tmp_path, "tokenizer.json") == tmp_path / "tokenizer.json"
    assert path_inside(tmp_path, "sub/vocab..txt") == tmp_path / "sub" / "vocab..txt"


@pytest.mark.parametrize("name", ["{outside}/owned", "../owned", "sub/../../owned"])
def test_the_tokenizer_of_a_run_cannot_write_outside(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may have written a run's dataset.json: its names used to be joined to a folder as they were."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "unpacked"))
    (tmp_path / "unpacked").mkdir()
    with pytest.raises(UserError, match="is not the name of a file inside a folder"):
        unpack_tokenizer({"tokenizer.json": "{}", name.format(outside=tmp_path): "owned"})
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize("name", ["{outside}/secret", "../secret"])
def test_the_manifest_of_a_checkpoint_names_nothing_outside(tmp_path: Path, name: str) -> None:
    """Else its answer would tell what stands in a file that is no part of the run."""
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "last"
    folder.mkdir()
    entry = {"bytes": 6, "sha256": "0"}
    (folder / MANIFEST).write_text(json.dumps({"files": {name.format(outside=tmp_path): entry}}))
    assert damage(folder) == f"{MANIFEST} cannot be read"


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "made"
    with pytest.raises(TypeError, match="data must be str"), new_folder(place) as work:
        (work / "half").write_text(b"")  # type: ignore[arg-type]
    assert not place.exists() and list(place.parent.iterdir()) == []
    with new_folder(place) as work:
        (work / "whole").write_text("first")
        with new_folder(place) as other:  # a faster process
            (other / "whole").write_text("second")
    assert (place / "whole").read_text() == "second" and list(place.parent.iterdir()) == [place]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, r"cannot read .*x\.json: No such file"),
        (b"{", r"x\.json is damaged: Expecting"),
        (b"\xff", r"x\.json is damaged: 'utf-8' codec"),
        (b"[1]", r"x\.json is damaged: it has no name"),
        (b'{"kind": 1}', r"x\.json is damaged: it has no name"),
    ],
)
def test_a_json_file_of_others_is_what_it_should_be_or_one_line(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=why) as caught:
        read_json(path, "name")
    assert "\n" not in str(caught.value)


def test_a_json_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"name": "é"}', encoding="utf-8")
    assert read_json(tmp_path / "x.json", "name") == {"name": "é"}
    (tmp_path / "x.json").write_text("3")
    with pytest.raises(UserError, match="it has no keys and values"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_a_packed_text_is_read_or_one_line(tmp_path: Path, suffix: str) -> None:
    opener = {"": open, ".gz": gzip.open, ".xz": lzma.open}[suffix]
    path = tmp_path / f"x.txt{suffix}"
    with pytest.raises(UserError, match=r"cannot read .*x\.txt.*: no such file"), open_packed(path):
        pass
    with opener(path, "wb") as file:
        file.write("\ufeffé\r\nb\n".encode() * 1000)
    with open_packed(path) as file:
        assert file.read() == "é\r\nb\n" + "\ufeffé\r\nb\n" * 999
    with opener(path, "wb") as file:
        file.write("é".encode("latin-1"))
    with (
        pytest.raises(UserError, match=r"not a text file in UTF-8; say what$"),
        open_packed(path, hint="say what") as file,
    ):
        file.read()
    if suffix:
        for damaged in (b"plain", path.read_bytes()[:-5]):
            path.write_bytes(damaged)
            why = rf"x\.txt\{suffix} is not a whole \{suffix} file: \S"
            with pytest.raises(UserError, match=why), open_packed(path) as file:
                file.read()


@pytest.mark.parametrize("files", [None, [], {"tokenizer.json": 3}])
def test_a_damaged_tokenizer_of_a_run_is_one_line(files: object) -> None:
    with pytest.raises(UserError, match=r"dataset\.json is damaged: expected the text of each of its files"):
        unpack_tokenizer(files)  # type: ignore[arg-type]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_files_are_open_to_those_the_umask_allows(tmp_path: Path) -> None:
    """Some writers make files for their owner alone; others must be able to read a run."""
    (tmp_path / "plain").touch()
    write_atomic(tmp_path / "made", lambda path: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)) or path.chmod(0o600))
    save_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["made"] == modes["a.safetensors"] == modes["plain"]


def test_a_damaged_checkpoint_is_one_line(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a.safetensors", {"x": torch.arange(3)}, {"epoch": 2, "value": 0.1})
    tensors, state = load_tensors(tmp_path / "a.safetensors")
    assert tensors["x"].tolist() == [0, 1, 2] and state == {"epoch": 2, "value": 0.1}
    (tmp_path / "a.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(UserError, match="is damaged"):
        load_tensors(tmp_path / "a.safetensors")

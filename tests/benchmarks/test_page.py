"""The commands of docs/BENCHMARKS.md: each of them runs, with ``--quick``, on this machine."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.command import SUBVERBS
from hyptree.cli import main
from tests.benchmarks.words import options_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "BENCHMARKS.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """The words of every command of the page."""
    text = re.sub(r"\\\n\s*", "", PAGE)
    return [shlex.split(line) for line in re.findall(r"^    (hyptree .*)$", text, re.MULTILINE)]


def shrunk() -> dict[str, list[str]]:
    """Every command as a CPU runs it at tiny sizes, one for all those that become the same one."""
    actual = {}
    for _, _, verb, *flags in commands():
        words = " ".join(flags).replace("--device cuda", "").split()
        words += ["--quick", "--repeats", "2", "--threads", "1"]
        words += {"geometry": ["--no-compile"], "kernels": ["--no-compiled"]}.get(verb, [])
        options = options_of(["hyptree", "bench", verb, *words])
        actual[" ".join(["hyptree", "bench", verb, *options.flags()])] = [verb, *words]
    return actual


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in shrunk().items()])
def test_command_runs_quick(words: list[str], tmp_path: Path) -> None:
    if words[0] == "kernels":
        pytest.importorskip("triton")  # comes with torch for CUDA alone
    out = tmp_path / "lines.jsonl"
    assert main(["bench", *words, "--out", str(out)]) == 0
    header, *lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert header["kind"] == "header" and header["versions"]["torch"] and lines
    assert not [line for line in lines if line.get("status") in ("failed", "wrong")]


def test_every_table_has_its_command_mode_and_machine() -> None:
    """A command stands between a table of numbers and the next, and every row says where it was measured."""
    tables = re.findall(r"((?:^\|.*\n)+)((?:(?!^\|).*\n)*)", PAGE, re.MULTILINE)
    machines = {row.split("|")[1].strip() for row in tables[0][0].splitlines()[2:]}
    assert len(tables) >= 12 and {"H200", "EPYC"} <= machines
    for table, after in tables[1:]:
        head, _, *rows = table.splitlines()
        assert re.search(r"^    hyptree bench ", after, re.MULTILINE), f"no command below the table {head}"
        assert head.endswith("| mode | machine |"), head
        for row in rows:
            mode, machine = (cell.strip() for cell in row.split("|")[-3:-1])
            assert mode in ("eager", "compiled", "graphs") and machine in {*machines, "CPU"}, row
            assert row.count("|") == head.count("|"), row


def test_every_benchmark_has_a_table() -> None:
    assert {words[2] for words in commands()} == set(SUBVERBS)

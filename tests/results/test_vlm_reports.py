"""Tables of many reports: mean and spread over folders, baselines below, mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hyptree.cli import call
from results.vlm_reports import table, vlm_table


def hierarchy(folder: Path, tau: float, suites: dict[str, Any] | None = None) -> Path:
    actual = {
        "tau_d": {"tau_b": tau, "first_two": 0.25},
        "baselines": {"words": {"tau_b": 0.9, "first_two": 0.2}},
        "angles": {"negative": {"accuracy": 0.75, "cosine_accuracy": 0.5}},
    }
    folder.mkdir(parents=True)
    report = {"geometry": "lorentz", "suites": {"world-text": actual} if suites is None else suites}
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def test_reports_over_folders_with_the_length_of_captions_below(tmp_path: Path) -> None:
    rows = {
        "untuned": [hierarchy(tmp_path / "a0", 0.5), hierarchy(tmp_path / "a1", 0.7)],
        "tuned": [hierarchy(tmp_path / "b0", 0.95)],
    }
    lines = vlm_table(rows).splitlines()
    assert lines[0].startswith("| world-text | tau_d | levels 1-2 |")
    assert lines[2].startswith("| untuned | 0.600 ± 0.141 | 0.250 ± 0.000 | 0.750 ± 0.000 | 0.500 ± 0.000 | – |")
    assert lines[3].startswith("| tuned | 0.950 | 0.250 |")
    assert lines[4] == "| words alone | 0.900 | 0.200 | – | – | – | – |"


def test_retrieval_is_by_the_distance_of_the_report(tmp_path: Path) -> None:
    def pictures(away: str, value: float) -> dict[str, Any]:
        return {away: {"precision": value, "recall": value, "length": 9.0}}

    suites = {"world-images": {"retrieval": pictures("chord", 0.1) | pictures("lorentz", 0.3)}}
    assert "| a | 0.300 | 0.300 | 9.000 |" in vlm_table({"a": [hierarchy(tmp_path / "a", 0, suites)]})
    suites = {"world-images": {"retrieval": pictures("chord", 0.1)}}
    assert "| b | 0.100 | 0.100 | 9.000 |" in vlm_table({"b": [hierarchy(tmp_path / "b", 0, suites)]})


def test_the_command_writes_into_a_page_and_says_mistakes_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- few -->\n<!-- /few -->\nafter\n")
    report = hierarchy(tmp_path / "h", 0.5)
    assert call(table, "vlm", ["--row", "plain", str(report), "--results", str(page), "--name", "few"]) == 0
    text = capsys.readouterr().out
    assert "commit" in text and text in page.read_text() and page.read_text().endswith("after\n")
    for options, message in (
        (["--row", "a", str(tmp_path / "none")], "holds no report.json of eval-hierarchy"),
        (["--row", "a", str(report), "--row", "a", str(report)], "a name of its own"),
        (["--row", "a"], "at least one folder"),
    ):
        assert call(table, "vlm", options) == 2
        error = capsys.readouterr().err.strip()
        assert message in error and len(error.splitlines()) == 1

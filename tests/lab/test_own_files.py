"""No command of the lab writes over a file that the user gave it, or over another of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hyptree.cli import main
from hyptree.tables import to_csv
from tests.lab.figures.test_figures import RUNS

LOSSES = "model,family,dataset,m,loss\n" + "".join(f"A{m},A,x,{m},{300 * m**-0.9 + 2!r}\n" for m in (64, 128, 256, 512))


def refused(args: list[str], capsys: pytest.CaptureFixture[str], *output: str) -> None:
    assert main(["lab", *args]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.out == ""
    for text in output:
        assert text in captured.err


@pytest.mark.parametrize("name", ["losses", "losses.png", "sub/../losses.csv", "link"])
def test_a_figure_does_not_replace_the_losses_it_shows(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    table = tmp_path / "losses.csv"
    table.write_text(LOSSES)
    (tmp_path / "link.csv").symlink_to(table)
    args = ["llm-fit", str(table), "--draws", "2", "--plot", str(tmp_path / name)]
    refused(args, capsys, "over the table of losses", "give another name")
    assert table.read_text() == LOSSES and sorted(path.name for path in tmp_path.iterdir()) == [
        "link.csv",
        "losses.csv",
        "sub",
    ]


def test_a_figure_and_a_table_of_heads_are_two_files(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    model = tmp_path / "model.safetensors"
    save_file({"lm_head.weight": torch.randn(40, 6)}, model)
    before = model.read_bytes()
    table = tmp_path / "heads.csv"
    args = ["overlap", str(model), "--csv", str(table)]
    refused([*args, "--plot", str(tmp_path / "heads")], capsys, "heads.csv over the file of --csv")
    refused(["overlap", str(model), "--csv", str(model)], capsys, "over the checkpoint")
    assert not table.exists() and model.read_bytes() == before
    assert main(["lab", *args, "--plot", str(tmp_path / "heads-figure")]) == 0
    assert "mso_centred" in table.read_text() and "panel" in (tmp_path / "heads-figure.csv").read_text()


def test_runs_are_kept_from_their_fits_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for name in ("runs.csv", "fits.csv", "loss.csv"):
        (tmp_path / name).write_text(to_csv(RUNS))
    refused(["fit", str(tmp_path / "fits.csv")], capsys, "over the table of runs fits.csv")
    refused(["fit", str(tmp_path), "--out", str(tmp_path / "runs.csv")], capsys, "over the table of runs runs.csv")
    refused(["plot", str(tmp_path / "loss.csv"), "--out", str(tmp_path)], capsys, "over the table of runs")
    assert all((tmp_path / name).read_text() == to_csv(RUNS) for name in ("runs.csv", "fits.csv", "loss.csv"))
    assert main(["lab", "fit", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "new.csv")]) == 0
    assert "theory_finite" in (tmp_path / "new.csv").read_text()

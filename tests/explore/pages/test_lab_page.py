"""The page of a sweep: one file, exponents with their regime check and theory, diverged models counted, figures."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hyptree.cli import main
from hyptree.errors import UserError
from hyptree.explore.pages.lab_page import FIGURES as ON_PAGE
from hyptree.explore.pages.lab_page import lab_page, lab_sections
from hyptree.lab.engine import Engine
from hyptree.lab.figures.sweep_figures import FIGURES
from hyptree.lab.fits import fit_runs
from hyptree.lab.sweeps.grid import Grid
from hyptree.lab.sweeps.run_table import COLUMNS, read_runs, write_runs
from hyptree.lab.sweeps.runner import sweep
from hyptree.lab.theory import finite_exponent, strong_exponent
from hyptree.tables import to_csv
from tests.lab.figures.test_figures import RUNS, WIDTHS, frequencies, run


class Cells(HTMLParser):
    """All rows of all tables, as texts."""

    def __init__(self, html: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.is_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.is_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.is_cell = self.is_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.is_cell:
            self.rows[-1][-1] += data


def sweep_folder(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.csv").write_text(to_csv(rows))
    (folder / "config.json").write_text(json.dumps({"parts": {"a": Grid(name="a", n=100, m=WIDTHS).as_dict()}}))
    return folder


def test_exponents_stand_beside_their_regime_and_theory(tmp_path: Path) -> None:
    path = lab_page(sweep_folder(tmp_path, RUNS), {})
    html = path.read_text(encoding="utf-8")
    assert path == tmp_path / "index.html" and "12 toy models squeeze 100 sparse features into 4 to 16" in html
    actual = Cells(html).rows
    head, *strong = actual[:3]
    weak = actual[4:6]
    assert head.index("theory") < head.index("in 95 %") and actual[3] == head
    place = {name: k for k, name in enumerate(head)}
    for lines, regime in ((strong, "strong"), (weak, "weak")):
        fits = [fit for fit in fit_runs(RUNS) if fit["regime"] == regime]
        assert len(lines) == len(fits) == 2
        for line, fit in zip(lines, fits, strict=True):
            finite = finite_exponent(frequencies(100, fit["alpha"]), WIDTHS)
            theory = strong_exponent(fit["alpha"]) if regime == "strong" else finite
            assert line[place["data"]] == f"α = {fit['alpha']:g}"
            assert line[place["exponent"]] == f"{fit['exponent']:.2f} ± {fit['error']:.2f}"
            assert line[place["theory"]] == f"{theory:.2f}" and line[place["finite-n"]] == f"{finite:.2f}"
            assert line[place["in 95 %"]] == ("yes" if fit["low"] <= theory <= fit["high"] else "no")
            kept = f"{fit['kept_low']:.3g} to {fit['kept_high']:.3g}"
            assert line[place["kept n/m"]] == kept and line[place["models"]] == "3"
    assert Cells(html).rows[-1][:3] == ["a", "100", "4 8 16"]
    assert "None of 12" in html


def test_a_mixed_regime_has_no_theory(tmp_path: Path) -> None:
    rows = [run(m, 1.0, -1.0, regime="mixed" if m == 8 else "strong") for m in WIDTHS]
    head, line = Cells(lab_page(sweep_folder(tmp_path, rows), {}).read_text(encoding="utf-8")).rows[:2]
    assert (line[head.index("theory")], line[head.index("in 95 %")]) == ("–", "–")
    assert line[head.index("exponent")].startswith("1.00")


def test_curved_models_stand_beside_flat_ones_and_have_no_theory_of_flat_space(tmp_path: Path) -> None:
    rows = [
        run(m, 1.0, -1.0, curvature=c, loss_eval=(1 - c / 2) * m ** -(1 + c / 4)) for c in (0.0, 1.0) for m in WIDTHS
    ]
    head, flat, curved = Cells(lab_page(sweep_folder(tmp_path, rows), {}).read_text(encoding="utf-8")).rows[:3]
    place = {name: k for k, name in enumerate(head)}
    names = ("c", "exponent", "theory", "from flat")
    assert [flat[place[name]] for name in names] == ["0", "1.00 ± 0.00", "1.00", "–"]
    assert [curved[place[name]] for name in names] == ["1", "1.25 ± 0.00", "–", "0.25 ± 0.00"]
    assert curved[place["in 95 %"]] == "–"
    assert curved[place["loss / flat"]] == f"{0.5 * 8**-0.25:.2f}"


def test_diverged_models_are_counted_and_named(tmp_path: Path) -> None:
    rows = [*RUNS, run(32, 1.0, -1.0, diverged=True, seed=7, loss_eval=1e9)]
    html = lab_page(sweep_folder(tmp_path, rows), {}).read_text(encoding="utf-8")
    assert "1 of 13. They are marked" in html and "a: m = 32, α = 1, γ = -1, seed 7" in html
    head, first = Cells(html).rows[:2]
    assert first[head.index("diverged")] == "1" and first[head.index("models")] == "3"


def test_one_file_with_the_figures_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = sweep_folder(tmp_path / "sweep", RUNS)
    assert main(["lab", "plot", str(folder), "--which", "loss", "density"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == str(folder / "index.html") and "no figure density" in captured.err
    html = (folder / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', html) == [] and html.count("<img ") == 1
    assert ON_PAGE["loss"][0] in html and ON_PAGE["density"][0] not in html
    (folder / "index.html").unlink()
    assert main(["lab", "plot", str(folder), "--which", "loss", "--no-page"]) == 0
    assert not (folder / "index.html").exists()
    assert main(["lab", "plot", str(folder), "--which", "loss", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "index.html").is_file() and not (folder / "index.html").exists()


@pytest.mark.slow
def test_the_widest_table_fits_a_window_of_1200(tmp_path: Path) -> None:
    """Measured by a browser, where one is installed: parts, densities, curvatures and seeds all have their columns."""
    browser = shutil.which("chromium") or pytest.skip("needs chromium")
    rows = [
        run(m, 1.0, -0.556, density, part=part, curvature=c, seed=seed, loss_eval=(1 + 0.1 * seed) / m ** (1 + c / 4))
        for part in ("strong-flat", "strong-skewed")
        for density in (1.0, 3.485)
        for c in (0.0, 0.25)
        for m in WIDTHS
        for seed in range(3)
    ]
    path = lab_page(sweep_folder(tmp_path, rows), {})
    look = "[...document.querySelectorAll('.wide')].map(e => e.scrollWidth + '/' + e.clientWidth).join(' ')"
    html = path.read_text(encoding="utf-8")
    assert "95 % over seeds" in html and "loss / flat" in html and "<th>E</th>" in html
    path.write_text(html.replace("</body>", f"<script>document.title = {look}</script></body>"), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    actual = re.search(r"<title>([\d/ ]+)</title>", done.stdout)
    assert actual, done.stdout[:500]
    for pair in actual[1].split():
        table, room = map(int, pair.split("/"))
        assert 0 < table <= room


def test_a_damaged_configuration_is_told(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path, RUNS)
    (folder / "config.json").write_text('{"parts": ')
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        lab_page(folder, {})
    (folder / "config.json").unlink()
    assert "What was trained" not in lab_page(folder, {}).read_text(encoding="utf-8")


def test_every_figure_has_a_caption() -> None:
    assert list(ON_PAGE) == list(FIGURES)
    assert "least possible for min(n, m²/2) rows" in ON_PAGE["strong"][1]  # as the figure names its line
    assert [part.title for part in lab_sections(RUNS, {})] == ["Exponents", "Models that diverged"]


def test_a_full_disk_is_one_line_and_keeps_what_was_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder = sweep_folder(tmp_path, RUNS)
    assert main(["lab", "plot", str(folder), "--which", "loss"]) == 0
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, command in (
        ("hyptree.lab.figures.drawing.write_atomic", "plot"),
        ("hyptree.files._write_text", "plot"),  # the page
        ("hyptree.cli.lab.write_text", "fit"),
    ):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(name, full)
            args = ["--which", "loss"] if command == "plot" else []
            assert main(["lab", command, str(folder), *args]) == 2
        error = capsys.readouterr().err
        assert "is full" in error and error.count("\n") == 1
        assert {path: path.read_bytes() for path in files} == files


def test_a_full_disk_at_the_tables_loses_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(n=20, m=(3, 5), alpha=(1.0,), gamma=(-1.0,), batch=16, steps=5, eval_samples=32)

    def full(path: Path, text: str) -> None:
        if "runs" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_text(text, encoding="utf-8")

    with monkeypatch.context() as patch:
        patch.setattr("hyptree.files._write_text", full)
        patch.setattr("hyptree.lab.sweeps.run_table.find_spec", lambda name: None)  # as if pyarrow were not there
        with pytest.raises(UserError, match=r"the disk of .* is full .*free some space and go on with --resume"):
            sweep(grid, tmp_path)
    assert (tmp_path / "parts" / "grid.safetensors").is_file() and not (tmp_path / "runs.csv").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "advance", None)  # nothing is trained again
        rows = sweep(grid, tmp_path, resume=True)
    assert [row["m"] for row in rows] == [3, 5] and len(read_runs(tmp_path)) == 2


def test_parquet_where_pyarrow_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = [*RUNS, run(4, 1.0, -1.0, diverged=True, loss_eval=math.nan)]
    assert write_runs(tmp_path, rows) == tmp_path / "runs.parquet"
    back = read_runs(tmp_path)
    assert len(back) == len(rows) and math.isnan(back[-1].pop("loss_eval")) and rows[-1].pop("loss_eval")
    assert back == [{name: kind(row[name]) for name, kind in COLUMNS.items() if name in row} for row in rows]

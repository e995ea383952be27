"""What the guides tell people to type works: their Python blocks, the examples, the pictures and the tables."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path

import pytest

from hyptree.tables import spread

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
WITHOUT_CODE = {"BENCHMARKS", "CONTRIBUTING", "RESULTS", "gallery", "glossary", "options", "which"}


def blocks(page: str) -> list[tuple[int, str]]:
    """Line number and text of every Python block of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    actual = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in actual]


CASES = [pytest.param(page, line, code, id=f"{page}:{line}") for page in PAGES for line, code in blocks(page)]


@pytest.mark.parametrize(("page", "line", "code"), CASES)
def test_code_block_runs(page: str, line: int, code: str) -> None:
    # Blank lines in front make the line numbers of a traceback those of the page.
    exec(compile("\n" * (line - 1) + code, str(ROOT / page), "exec"), {"__name__": "__main__"})


def test_pages_have_blocks_and_name_their_language() -> None:
    for page in PAGES:
        assert bool(blocks(page)) != (Path(page).stem in WITHOUT_CODE), page
        fences = re.findall(r"^```(\w*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        opening = fences[::2]
        assert len(fences) % 2 == 0 and set(opening) <= {"python", "text", "bash"}, (
            f"{page}: a block that no test reads"
        )


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip(), "an example shows something"


def test_the_page_of_options_is_what_the_command_line_reads() -> None:
    """Made again by ``python docs/options.py``."""
    page = runpy.run_path(str(ROOT / "docs" / "options.py"))["page"]()
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == page


def test_pictures_are_small_and_nearly_all_are_made_by_the_script() -> None:
    others = {"world", "demo_page", "demo_clusters"}  # a contact sheet of the world, and the demo in a browser
    others |= set(runpy.run_path(str(ROOT / "docs" / "lab_figures.py"))["PICTURES"])  # from a sweep on a GPU
    others |= set(runpy.run_path(str(ROOT / "docs" / "helm_figures.py"))["PICTURES"])  # from runs on a GPU
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))["FIGURES"]
    pictures = {path.stem: path.stat().st_size for path in (ROOT / "docs" / "img").iterdir()}
    assert set(figures) <= set(pictures) <= set(figures) | others
    assert max(pictures.values()) < 300_000


def test_tables_of_helm_beside_its_twin_are_those_of_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Validation losses lie on straight lines, so reading one between two steps is exact.
    for model, slope in (("helm", 0.001), ("llama", 0.002)):
        for seed in range(3):
            train = [{"split": "train", "step": step, "loss": 6 - slope * step} for step in range(20, 401, 20)]
            val = [{"split": "val", "step": step, "loss": 5 + 0.1 * seed - slope * step} for step in (100, 200, 400)]
            (tmp_path / f"{model}-{seed}").mkdir()
            lines = "".join(json.dumps(row) + "\n" for row in train + val)
            (tmp_path / f"{model}-{seed}" / "metrics.jsonl").write_text(lines)
    runpy.run_path(str(ROOT / "docs" / "helm_figures.py"))["main"](tmp_path, tmp_path)
    shown = capsys.readouterr().out
    assert (tmp_path / "helm_wiki.png").stat().st_size > 10_000

    def cell(slope: float, step: float) -> str:
        return spread([math.exp(5 + 0.1 * seed - slope * step) for seed in range(3)], 1)

    helm, llama = cell(0.001, 200), cell(0.002, 200)
    assert f"| 200 | {helm} | {llama} | 5.840 ± 0.000 | 5.680 ± 0.000 |" in shown  # lines of steps 120 to 200
    assert f"| best of a run | {cell(0.001, 400)} | {cell(0.002, 400)} |" in shown
    assert f"| 200 | {helm} | {llama} | {cell(0.002, 214)} | {cell(0.002, 276)} |" in shown
    assert f"| 400 | {cell(0.001, 400)} | {cell(0.002, 400)} |  |  |" in shown  # the twin has not run that long


def test_accuracy_table_is_what_the_tests_assert() -> None:
    """Every tolerance of tests/geometry/test_accuracy.py appears in the table of the guide."""
    text = (ROOT / "docs" / "geometry.md").read_text(encoding="utf-8")
    table = text[text.index("## Accuracy") : text.index("## Dtypes")]
    source = (ROOT / "tests" / "geometry" / "test_accuracy.py").read_text(encoding="utf-8")
    body = source[source.index("TOLERANCE:") : source.index("SAME_RAY_GRADIENT")]
    figures = set(re.findall(r": (\d+e-\d+)", body))
    assert figures and figures <= set(re.findall(r"\d+e-\d+", table))

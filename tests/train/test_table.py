"""Tables: every row with every seed, finished runs kept, the Markdown, and mistakes in one line."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ramify.cli.config import to_yaml
from ramify.errors import UserError
from ramify.train.table import (
    Outcome,
    TableSettings,
    _main,
    compare,
    make_table,
    read_table,
    row_recipe,
    to_markdown,
    write_between_marks,
)

from . import tiny


@pytest.fixture
def table(tmp_path):
    """A table of two rows and two seeds over a recipe that trains in a second."""
    (tmp_path / "base.yaml").write_text(to_yaml(tiny.recipe()))
    path = tmp_path / "small.yaml"
    rows = {"base": {}, "no smoothing, hot": {"optim.lr": 0.05}}
    path.write_text(yaml.safe_dump({"title": "Small", "recipe": "base.yaml", "rows": rows, "seeds": [3, 4]}))
    return path


def test_trains_every_row_with_every_seed_and_keeps_what_is_finished(table, tmp_path):
    lines = []
    outcomes = make_table(read_table(table), tmp_path / "runs", say=lines.append)
    assert [(o.row, o.seed) for o in outcomes] == [(r, s) for r in ("base", "no smoothing, hot") for s in (3, 4)]
    assert len(lines) == 4 and lines[-1].startswith("[4/4]")
    assert len({json.dumps(o.numbers) for o in outcomes}) > 1  # rows and seeds are really different runs
    assert all(o.parameters > 0 and o.seconds > 0 for o in outcomes)
    weights = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*.safetensors")}
    assert make_table(read_table(table), tmp_path / "runs") == outcomes
    assert weights == {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*.safetensors")}


def test_writes_the_table_into_a_page_between_its_marks(table, tmp_path):
    page = tmp_path / "RESULTS.md"
    page.write_text("# Results\n\nbefore\n\n<!-- small -->\nold\n<!-- /small -->\n\nafter\n")
    text = compare(table, tmp_path / "runs", page)
    found = page.read_text()
    assert text in found and "old" not in found
    assert found.startswith("# Results\n\nbefore\n") and found.endswith("after\n")
    assert (tmp_path / "runs" / "table.md").read_text() == text
    assert "commit" in text and "torch" in text


def test_overrides_reach_every_row(table):
    settings = read_table(table, ["optim.weight_decay=0.25"])
    found = [row_recipe(settings, row, 3) for row in settings.rows]
    assert [recipe.optim.weight_decay for recipe in found] == [0.25, 0.25] and found[1].optim.lr == 0.05
    with pytest.raises(UserError, match=r"looks like schedule.epochs=30, got 'epochs'"):
        read_table(table, ["epochs"])
    with pytest.raises(UserError, match=r"optim\.lt"):
        read_table(table, ["optim.lt=1"])


def test_mean_and_spread_over_seeds():
    settings = TableSettings("T", "r.yaml", {"a": {}, "b": {}}, seeds=[0, 1, 2])
    values = {"a": [0.1, 0.2, 0.6], "b": [0.5, 0.5, 0.5]}
    outcomes = [Outcome(r, s, {"top1": values[r][s]}, 1234, 10.0) for r in "ab" for s in range(3)]
    text = to_markdown(settings, outcomes)
    assert f"| a | 1,234 | 0.3000 ± {statistics.stdev(values['a']):.4f} | 10 s |" in text
    assert "| b | 1,234 | **0.5000 ± 0.0000** | 10 s |" in text


def test_marks_are_added_to_a_page_without_them_and_half_a_pair_is_refused(tmp_path):
    page = tmp_path / "R.md"
    write_between_marks(page, "x", "one\n")
    write_between_marks(page, "x", "two\n")
    assert page.read_text() == "# Results\n\n<!-- x -->\ntwo\n<!-- /x -->\n"
    page.write_text("<!-- x -->\n")
    with pytest.raises(UserError, match="only one of the marks"):
        write_between_marks(page, "x", "three\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": {}}, "rows is empty"),
        ({"seeds": [1, 1]}, "seeds must be different"),
        ({"rows": {"a": {"optim.lrr": 1}}}, "optim.lrr"),
        ({"recipe": "nowhere.yaml"}, "nowhere.yaml"),
        ({"rows": {"a b": {}, "a-b": {}}}, "must differ"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(table, change, message):
    table.write_text(yaml.safe_dump({**yaml.safe_load(table.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        read_table(table)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the process in /proc")
def test_workers_end_when_the_table_is_killed():
    code = (
        "import multiprocessing, os, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from ramify.train.table import end_with_parent\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(1, multiprocessing.get_context('spawn'), initializer=end_with_parent)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    pool.submit(time.sleep, 60)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.kill(worker, 0)  # it is there
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not _is_running(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived the table by ten seconds")


def _is_running(pid):
    try:
        # One that has ended may stay listed as a zombie where nobody collects it.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_unknown_metric_is_named(table, tmp_path):
    table.write_text(yaml.safe_dump({**yaml.safe_load(table.read_text()), "metrics": ["top2"]}))
    with pytest.raises(UserError, match="no 'top2'; did you mean"):
        compare(table, tmp_path / "runs")


def test_the_module_runs_without_the_command_line(table, tmp_path, capsys):
    assert _main([str(table), "--out", str(tmp_path / "runs")]) == 0
    assert "### Small" in capsys.readouterr().out
    assert _main([str(tmp_path / "gone.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1

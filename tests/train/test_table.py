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

from hyptree.config import to_yaml
from hyptree.errors import UserError
from hyptree.tables import write_between_marks
from hyptree.train.compare import (
    Outcome,
    TableSettings,
    compare,
    make_table,
    read_table,
    row_recipe,
    stretch_to,
    to_markdown,
)
from hyptree.train.parallel.workers import workers
from tests.train import tiny


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


def test_a_value_may_hold_the_seed(table):
    settings = read_table(table, ["model.weights=runs/first/seed{seed}/best.safetensors"])
    for seed in settings.seeds:
        assert row_recipe(settings, "base", seed).model.weights == Path(f"runs/first/seed{seed}/best.safetensors")


def test_shows_which_run_is_trained_where_asked(table, tmp_path, capsys):
    settings = read_table(table)
    make_table(settings, tmp_path / "runs")
    assert capsys.readouterr().out == ""
    make_table(settings, tmp_path / "more", quiet=False)
    text = capsys.readouterr().out
    assert "[2/4] no smoothing, hot, seed 3 ..." in text and "parameters" in text


def test_writes_the_table_into_a_page_between_its_marks(table, tmp_path):
    page = tmp_path / "RESULTS.md"
    page.write_text("# Results\n\nbefore\n\n<!-- small -->\nold\n<!-- /small -->\n\nafter\n")
    text = compare(table, tmp_path / "runs", page)
    actual = page.read_text()
    assert text in actual and "old" not in actual
    assert actual.startswith("# Results\n\nbefore\n") and actual.endswith("after\n")
    assert (tmp_path / "runs" / "table.md").read_text() == text
    assert "commit" in text and "torch" in text


def test_overrides_reach_every_row(table):
    settings = read_table(table, ["optim.weight_decay=0.25"])
    actual = [row_recipe(settings, row, 3) for row in settings.rows]
    assert [recipe.optim.weight_decay for recipe in actual] == [0.25, 0.25] and actual[1].optim.lr == 0.05
    with pytest.raises(UserError, match=r"override 'epochs' must look like key=value"):
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


def test_a_number_that_some_rows_lack_is_a_dash_there():
    settings = TableSettings("T", "r.yaml", {"a": {}, "b": {}}, seeds=[0], metrics=["top1", "curvature"])
    outcomes = [Outcome("a", 0, {"top1": 0.5}, 1, 1.0), Outcome("b", 0, {"top1": 0.25, "curvature": 1.5}, 1, 1.0)]
    text = to_markdown(settings, outcomes)
    assert "| a | 1 | **0.5000** | – | 1 s |" in text and "| b | 1 | 0.2500 | 1.5000 | 1 s |" in text
    with pytest.raises(UserError, match="gives no 'curvature'"):
        to_markdown(settings, [outcomes[0], Outcome("b", 0, {"top1": 0.25}, 1, 1.0)])


# ------------------------------------------------------------------------------------------------------- equal time


def test_a_schedule_is_stretched_by_the_pace_of_its_steps():
    # 10 s of compiling, 100 steps of 0.1 s; the other row took 35 s: 25 s are left for steps.
    twin = Outcome("plain", 0, {}, 1, 20.0, steps=100, step_seconds=0.1)
    slow = Outcome("slow", 0, {}, 1, 35.0, steps=100, step_seconds=0.25)
    assert stretch_to(slow, twin) == pytest.approx(2.5)
    assert stretch_to(twin, slow) == pytest.approx((100 - 60) / 100)
    assert stretch_to(slow, Outcome("plain", 0, {}, 1, 20.0, steps=1)) == pytest.approx(35 / 20)
    assert stretch_to(Outcome("quick", 0, {}, 1, 0.1, 100, 1e-3), twin) == 1 / 100  # one step at least


def test_a_row_is_trained_for_the_time_of_another(table, tmp_path, monkeypatch):
    """The clock is replaced by one that the row decides on: 1 s a step, 3 s a step with the slow row's key."""
    import hyptree.train.compare as module

    rows = {"base": {}, "base, equal time": {"time_of": "slow"}, "slow": {"optim.weight_decay": 0.5}}
    table.write_text(yaml.safe_dump({**yaml.safe_load(table.read_text()), "rows": rows}))
    real = module.train_one

    def timed(settings, row, seed, *rest):
        outcome = real(settings, row, seed, *rest)
        pace = 3.0 if row == "slow" else 1.0
        return Outcome(*(row, seed, outcome.numbers, 1), 5 + pace * outcome.steps, outcome.steps, pace)

    monkeypatch.setattr(module, "train_one", timed)
    settings = read_table(table)
    lines = []
    outcomes = make_table(settings, tmp_path / "runs", say=lines.append)
    assert [(o.row, o.seed) for o in outcomes] == [(row, seed) for row in rows for seed in (3, 4)]
    assert [line.split("] ")[1].split(", seed")[0] for line in lines[:3]] == ["base", "slow", "base, equal time"]
    by_row = {row: [o for o in outcomes if o.row == row] for row in rows}
    assert [o.steps for o in by_row["base"]] == [12, 12] and [o.steps for o in by_row["slow"]] == [12, 12]
    assert [o.steps for o in by_row["base, equal time"]] == [36, 36]
    assert [o.seconds for o in by_row["base, equal time"]] == [o.seconds for o in by_row["slow"]]
    assert make_table(settings, tmp_path / "runs") == outcomes  # found finished, with the same recipe


def test_a_stretched_recipe_keeps_all_but_its_length(table):
    settings = read_table(table)
    base = row_recipe(settings, "base", 3)
    long = row_recipe(settings, "base", 3, stretch=2.25)
    assert (long.schedule.epochs, long.schedule.warmup) == (4.5, base.schedule.warmup)
    long.schedule = base.schedule
    assert long == base
    counted = read_table(table, ["schedule.steps=10", "schedule.warmup=0"])
    assert row_recipe(counted, "base", 3, stretch=2.25).schedule.steps == 22


def test_real_times_are_read_from_the_lines_of_metrics(table, tmp_path):
    (outcome, *_) = make_table(read_table(table), tmp_path / "runs")
    assert outcome.steps == 12 and outcome.step_seconds is not None
    assert 0 < outcome.step_seconds * 12 < 2 * outcome.seconds


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
        ({"rows": {"a": {}, "b": {"time_of": "c"}}}, "time_of 'c' is no row that has a time of its own"),
        ({"rows": {"a": {}, "b": {"time_of": "b"}}}, "time_of 'b' is no row that has a time of its own"),
        ({"rows": {"a": {}, "b": {"time_of": "a", "optim.lr": 1.0}}}, "needs a row of the same keys without it"),
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
        "from hyptree.train.parallel.workers import end_with_parent\n"
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


def test_a_killed_process_is_one_clear_line():
    with pytest.raises(UserError, match=r"one of 2 processes was killed, .* fewer --jobs"), workers(2) as pool:
        pool.submit(os._exit, 9).result()

"""The command: quick help, exit codes, one-line errors, strict configurations."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hyptree
from hyptree import cli
from hyptree.cli import config as configs
from hyptree.config import load, read_yaml, recipe_folder, to_yaml
from hyptree.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

ZOO = '''
"""A verb with subverbs, as another engineer would write it."""
from __future__ import annotations
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from hyptree.errors import UserError

@dataclass
class Food:
    name: str = "hay"
    """What it eats."""
    grams: float = 10.0
    """How much."""

@dataclass
class FeedConfig:
    animal: Annotated[str, "ANIMAL"]
    """Who is fed."""
    times: int = 1
    """How often."""
    mood: Literal["calm", "wild"] = "calm"
    food: Food = field(default_factory=Food)
    shelf: Path | None = None
    """Where it is kept."""

    def __post_init__(self):
        if self.times < 1:
            raise ValueError(f"times must be 1 or more, got {self.times}")

def feed(config: FeedConfig) -> None:
    """Feed one animal.

    Slowly.
    """
    print(config.animal, config.times, config.mood, config.food.name, config.food.grams)

@dataclass
class FailConfig:
    how: str = "user"

def fail(config: FailConfig) -> int | None:
    """Go wrong in the named way."""
    if config.how == "user":
        raise UserError("two\\nlines become one")
    if config.how == "folder":
        Path(__file__).mkdir()
    if config.how == "below a file":
        (Path(__file__) / "run").mkdir()
    if config.how == "renamed":
        raise IsADirectoryError(21, "Is a directory", "runs/.page.html.123.tmp")
    if config.how == "read-only":
        raise OSError(30, "Read-only file system", "runs")
    if config.how == "full":
        raise OSError(28, "No space left on device")
    if config.how == "bug":
        raise ValueError("this is our mistake")
    if config.how == "interrupt":
        raise KeyboardInterrupt
    if config.how == "file":
        open("no/such/file")
    if config.how == "flood":
        for i in range(100_000):
            print(i)
    return 7

SUBVERBS = {"feed": feed, "fail": fail}
'''


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """The verb ``zoo`` in a folder of its own beside the real ones."""
    folder = tmp_path / "verbs"
    folder.mkdir()
    (folder / "zoo.py").write_text(ZOO)
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(folder)])
    monkeypatch.setitem(cli.VERBS, "zoo", "keep animals")
    yield folder
    sys.modules.pop("hyptree.cli.zoo", None)
    vars(cli).pop("zoo", None)


def one_error_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hyptree: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys; from hyptree.cli import main; code = main(['--help']);"
        "print([m for m in ('torch', 'numpy', 'yaml', 'rich', 'hyptree.cli.demo') if m in sys.modules], code)"
    )
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], env=ENV, check=True, capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
        assert done.stdout.endswith("[] 0\n")
    assert min(seconds) < 0.5


def test_verb_help_loads_no_torch():
    code = (
        "import sys; from hyptree.cli import main; codes = [main([verb, '--help']) for verb in sys.argv[1:]];"
        "print('torch' in sys.modules, set(codes))"
    )
    command = [sys.executable, "-c", code, *cli.VERBS]
    done = subprocess.run(command, env=ENV, check=True, capture_output=True, text=True)
    assert done.stdout.endswith("False {0}\n")


def test_help_lists_exactly_the_verbs_that_exist(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb}" in out and summary in out for verb, summary in cli.VERBS.items())
    places = (ROOT / "src" / "hyptree" / "cli").iterdir()
    exist = {place.stem for place in places if place.suffix == ".py" or (place / "__init__.py").is_file()}
    assert set(cli.VERBS) == exist - {"__init__", "config"}
    assert cli.main(["ghost"]) == 2
    assert "unknown verb 'ghost'" in one_error_line(capsys)


def test_every_verb_follows_the_rules():
    """One dataclass per command, a summary, no reserved names; found through the table, so none is forgotten."""
    from importlib import import_module

    assert "demo" in cli.VERBS
    for verb in cli.VERBS:
        module = import_module(f"hyptree.cli.{verb}")
        assert hasattr(module, "run") != hasattr(module, "SUBVERBS")
        for command in module.SUBVERBS.values() if hasattr(module, "SUBVERBS") else [module.run]:
            assert cli._summary(command)
            fields = {field.name for field in dataclasses.fields(configs.config_class(command))}
            assert not fields & {"config", "print_config", "traceback", "help"}
            keys = getattr(configs.config_class(command), "keys", None)
            assert keys is None or not fields & {field.name for field in dataclasses.fields(keys)}


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hyptree {hyptree.__version__}\n"


def test_nothing_said_prints_help_on_stderr_and_fails(capsys, zoo):
    for args in ([], ["zoo"]):
        assert cli.main(args) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("usage: hyptree ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["dmeo"], "unknown verb 'dmeo' for hyptree; did you mean 'demo'?"),
        (["qqqq"], "unknown verb 'qqqq' for hyptree; see hyptree --help"),
        (["--versoin"], "unknown option '--versoin' for hyptree; did you mean '--version'?"),
        (["zoo", "fed"], "unknown verb 'fed' for hyptree zoo; did you mean 'feed'?"),
        (["zoo", "feed"], "animal"),
        (["zoo", "feed"], "hyptree zoo feed needs ANIMAL (see hyptree zoo feed --help)"),
        (["zoo", "feed", "cow", "yak"], "takes ANIMAL, 'yak' is one too many (see hyptree zoo feed --help)"),
        (["zoo", "feed", "cow", "--tmes", "3"], "unknown flag --tmes for hyptree zoo feed; did you mean '--times'?"),
        (["zoo", "feed", "cow", "--qqqq", "3"], "unknown flag --qqqq for hyptree zoo feed; see hyptree zoo feed"),
        (["zoo", "feed", "cow", "-x"], "unknown flag -x for hyptree zoo feed; see"),
        (["zoo", "feed", "cow", "--food.gram", "3"], "did you mean '--food.grams'?"),
        (["zoo", "feed", "cow", "--no-times"], "unknown flag --no-times"),
        (["zoo", "feed", "cow", "--times", "x"], "--times must be a whole number, got 'x'"),
        (["zoo", "feed", "cow", "--times="], "--times must be a whole number, got None"),
        (["zoo", "feed", "cow", "--times"], "--times needs a whole number"),
        (["zoo", "feed", "cow", "--mood", "sad"], "--mood must be one of calm, wild, got 'sad'"),
        (["zoo", "feed", "cow", "--times", "0"], "error: times must be 1 or more, got 0"),
        (["zoo", "feed", "cow", "--config"], "--config needs a file"),
        (["zoo", "feed", "cow", "--config", "/no/such.yaml"], "cannot read /no/such.yaml: No such file"),
        (["zoo", "fail"], "two lines become one"),
        (["zoo", "fail", "--how", "file"], "no/such/file: No such file or directory"),
        (["zoo", "fail", "--how", "folder"], "zoo.py: File exists; a file is where a folder is needed"),
        (["zoo", "fail", "--how", "below a file"], "Not a directory; a file is where a folder is needed"),
        (
            ["zoo", "fail", "--how", "renamed"],
            "error: runs/page.html: Is a directory; a folder is where",
        ),
        (["zoo", "fail", "--how", "read-only"], "runs: Read-only file system; give a place that can be written"),
        (["zoo", "fail", "--how", "full"], "error: No space left on device; free some space"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(zoo, capsys, args, message):
    assert cli.main(args) == 2
    line = one_error_line(capsys)
    assert message.lower() in line.lower()
    assert not set("╭│─╰\x1b") & set(line)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_work_for_one_process_is_not_done_by_several(capsys, monkeypatch, tmp_path, rank):
    for name, value in (("LOCAL_RANK", rank), ("RANK", rank), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert cli.main(["models"]) == cli.main(["tree", "draw", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "hyptree: error: hyptree models is work for one process, got 2; start it without torchrun",
        "hyptree: error: hyptree tree draw is work for one process, got 2; start it without torchrun",
    ] * (rank == "0")
    assert cli.main(["train", str(tmp_path / "none.yaml")]) == 2  # which says what is wrong with it
    assert "one process" not in capsys.readouterr().err


def test_a_verb_that_is_gone_says_what_to_type_instead(zoo, capsys, monkeypatch):
    monkeypatch.setitem(cli.GONE, "zoo stroke", "hyptree zoo feed ANIMAL")
    monkeypatch.setitem(cli.GONE, "zoo feed", "never looked up: the verb is there")
    assert cli.main(["zoo", "stroke", "cow", "--tmes", "3"]) == 2
    assert one_error_line(capsys) == "hyptree: error: hyptree zoo stroke is no more; type: hyptree zoo feed ANIMAL\n"
    assert cli.main(["zoo", "feed", "cow"]) == 0


@dataclasses.dataclass
class _Base:
    depth: int = 3
    """Levels."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Whatever else."""


@dataclasses.dataclass
class _Every:
    paths: Annotated[tuple[Path, ...], "[PATH ...]"] = ()
    """Files."""
    short: int | None = None
    """Number of rows. [7]"""
    numbers: tuple[float, ...] = (0.5, 2.0)
    """So many words that what follows them, however long the line may be, wraps to a next row, as it should."""
    pair: tuple[int, int] | None = None
    very_long_name_of_a_flag: Path | None = None
    """Folder."""
    choice: Literal["left", "right", "on"] | None = None
    """By default either."""
    text: str | None = ""
    folder: bool | Path | None = None
    """Whether to keep it."""
    quiet: bool = False
    draw: bool = True
    """Also a picture."""
    rows: tuple[tuple[str, ...], ...] = ()
    base: _Base = dataclasses.field(default_factory=_Base)
    """What is below."""


def _every(config: _Every) -> None:
    """Do it.

    With a second paragraph that is long enough to be wrapped in every terminal that is narrower than this sentence is.
    """


_every.__annotations__["config"] = _Every


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("a b --short 3 -- -c --d", {"paths": (Path("a"), Path("b"), Path("-c"), Path("--d")), "short": 3}),
        ("--numbers -1 .2 3e-4 --short=-7", {"numbers": (-1.0, 0.2, 3e-4), "short": -7}),
        ("--short 3 --numbers 1 2 --short 4 --numbers 5", {"short": 4, "numbers": (5.0,)}),
        ("--numbers [1,2]", {"numbers": (1.0, 2.0)}),
        ("--numbers=4", {"numbers": (4.0,)}),
        ("--numbers", {"numbers": ()}),
        ("--pair 1 2 a", {"pair": (1, 2), "paths": (Path("a"),)}),
        ("--pair [1,2] a", {"pair": (1, 2), "paths": (Path("a"),)}),
        ("--pair null", {}),
        ("--very_long_name_of_a_flag 12", {"very_long_name_of_a_flag": Path("12")}),
        ("--very-long-name-of-a-flag null", {}),
        ("--choice on", {"choice": "on"}),
        ("--text on", {"text": "on"}),
        ("--text #3", {"text": "#3"}),
        ("--text=", {"text": ""}),
        ("--text null", {"text": None}),
        ("--folder", {"folder": True}),
        ("--no-folder", {"folder": False}),
        ("--folder 7", {"folder": Path("7")}),
        ("--quiet a", {"quiet": True, "paths": (Path("a"),)}),
        ("--quiet false --no-draw", {"quiet": False, "draw": False}),
        ("--quiet=true --draw=false", {"quiet": True, "draw": False}),
        ("--rows a b --rows c", {"rows": (("a", "b"), ("c",))}),
        ("--base.depth 4", {"base": _Base(4)}),
        ("--base.args.x_y 1e-3 --base.args.z [a,1]", {"base": _Base(args={"x_y": "1e-3", "z": ["a", 1]})}),
        ("--base.args {x:1}", {"base": _Base(args={"x:1": None})}),
        ("--base.args.a.b true", {"base": _Base(args={"a": {"b": True}})}),
    ],
)
def test_every_kind_of_value_is_read(words, expected):
    assert configs.parse(_every, "hyptree every", words.split()) == _Every(**expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pair 1", "--pair must be a list of 2 values or null, got [1]"),
        ("--pair", "--pair must be a list of 2 values or null, got []"),
        ("--numbers a", "--numbers must be a number, got 'a'"),
        ("--quiet maybe", None),
        ("--quiet=maybe", "--quiet must be true or false, got 'maybe'"),
        ("--choice lfet", "--choice must be one of left, right, on or null, got 'lfet'"),
        ("--very-long-name-of-a-flag --quiet", "--very-long-name-of-a-flag needs a path"),
        ("--paths a", "unknown flag --paths for hyptree every"),
        ("--base 3", "unknown flag --base for hyptree every"),
        ("--base.args {x", "--base.args: not valid YAML"),
    ],
)
def test_a_word_that_does_not_fit_is_one_line(words, message):
    if message is None:  # a place of its own
        assert configs.parse(_every, "hyptree every", words.split()).paths == (Path("maybe"),)
        return
    with pytest.raises(UserError, match=re.escape(message)):
        configs.parse(_every, "hyptree every", words.split())


@pytest.mark.parametrize("width", [60, 79, 80, 100, 120])
def test_help_shows_everything_and_fits_the_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert configs.parse(_every, "hyptree every", ["--help"]) is None
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "usage: hyptree every [PATH ...] [options]"
    assert max(map(len, lines)) <= width and lines == [line.rstrip() for line in lines]
    assert not re.search(r"\bNone\b", out)
    said = " ".join(out.split())
    for text in (
        "--short Number of rows. [7] (a whole number) --numbers So many words",
        "as it should. (a list of number values) [0.5 2.0]",
        "--very-long-name-of-a-flag Folder. (a path)",
        "(one of left, right, on)",
        "--folder Whether to keep it. (true or false or a path)",
        "--quiet --draw, --no-draw Also a picture. [true]",
        "base: What is below. --base.depth Levels. (a whole number) [3] --base.args.KEY Whatever else.",
    ):
        assert text in said
    assert not re.search(r"^  --short\b(?!.* Number)", out, re.MULTILINE) or width < 80


def test_subverb_runs_with_flags(zoo, capsys):
    assert cli.main(["zoo", "feed", "cow", "--times", "3", "--food.grams", "2.5", "--mood", "wild"]) == 0
    assert capsys.readouterr().out == "cow 3 wild hay 2.5\n"
    assert cli.main(["zoo", "fail", "--how", "code"]) == 7


def test_help_of_a_group_and_of_a_subverb(zoo, capsys):
    assert cli.main(["zoo", "--help"]) == 0
    out = capsys.readouterr().out
    assert "keep animals" in out
    assert "  feed  Feed one animal\n" in out
    assert cli.main(["zoo", "feed", "-h"]) == 0
    out = capsys.readouterr().out
    assert "Slowly." in out
    assert "How often." in out
    assert "--food.grams" in out


def test_flags_win_over_the_config_file(zoo, capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("animal: yak\ntimes: 4\nfood:\n  grams: 3e-4\n")
    args = ["zoo", "feed", "--config", str(recipe), "--times", "5"]
    # A positional argument that the file fills may be left out.
    assert cli.main([*args, "--food.name", "oats"]) == 0
    assert capsys.readouterr().out == "yak 5 calm oats 0.0003\n"
    assert cli.main([*args, "--print-config"]) == 0
    assert (
        capsys.readouterr().out
        == "animal: yak\ntimes: 5\nmood: calm\nfood:\n  name: hay\n  grams: 0.0003\nshelf: null\n"
    )


def test_config_file_may_leave_what_flags_give(zoo, capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("times: 0\n")  # not allowed by the dataclass, repaired by the flag
    assert cli.main(["zoo", "feed", "emu", f"--config={recipe}", "--times", "2"]) == 0
    assert capsys.readouterr().out == "emu 2 calm hay 10.0\n"
    assert cli.main(["zoo", "feed", "emu", f"--config={recipe}"]) == 2
    assert "times must be 1 or more, got 0" in one_error_line(capsys)
    assert cli.main(["zoo", "feed", f"--config={recipe}", "--times", "2"]) == 2
    assert "animal" in one_error_line(capsys).lower()


def test_unknown_key_in_the_config_file(zoo, capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("food: {gram: 3}\n")
    assert cli.main(["zoo", "feed", "emu", "--config", str(recipe)]) == 2
    assert f"{recipe}: unknown key 'food.gram'; did you mean 'food.grams'?" in one_error_line(capsys)


def test_arguments_after_two_dashes_belong_to_the_verb():
    args = ["a", "--traceback", "--", "--traceback", "--config", "x"]
    assert cli._take(args, "--traceback") and not cli._take(args, "--config", "a file")
    assert args == ["a", "--", "--traceback", "--config", "x"]


def test_our_own_bugs_are_not_dressed_as_the_users(zoo):
    with pytest.raises(ValueError, match="this is our mistake"):
        cli.main(["zoo", "fail", "--how", "bug"])


def test_interrupt_is_130(zoo, capsys):
    assert cli.main(["zoo", "fail", "--how", "interrupt"]) == 130
    assert capsys.readouterr().err == "hyptree: interrupted\n"


def test_traceback_on_request(zoo, capsys, monkeypatch):
    assert cli.main(["zoo", "--traceback", "fail"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback ")
    assert err.endswith("hyptree: error: two lines become one\n")
    monkeypatch.setenv("HYPTREE_DEBUG", "1")
    assert cli.main(["zoo", "fail"]) == 2
    assert capsys.readouterr().err.startswith("Traceback ")
    monkeypatch.setenv("HYPTREE_DEBUG", "0")
    assert cli.main(["zoo", "fail"]) == 2
    one_error_line(capsys)


def test_reader_that_goes_away_is_no_crash(zoo):
    code = (
        "import sys, hyptree.cli as cli; cli.__path__.append(sys.argv[1]); cli.VERBS['zoo'] = '';"
        "sys.exit(cli.main(['zoo', 'fail', '--how', 'flood']))"
    )
    command = [sys.executable, "-c", code, str(zoo)]
    process = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


def test_module_can_be_run():
    done = subprocess.run([sys.executable, "-m", "hyptree", "dmeo"], env=ENV, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hyptree: error: unknown verb 'dmeo' for hyptree; did you mean 'demo'?\n"


def test_demo_hands_its_settings_on(monkeypatch):
    from hyptree.train import demo

    calls = []
    monkeypatch.setattr(demo, "run", lambda **settings: calls.append(settings))
    assert cli.main(["demo", "--out", "somewhere", "--seed", "3"]) == 0
    assert calls == [{"out": Path("somewhere"), "seed": 3, "recipe": None, "device": "auto", "threads": None}]


class Colour(enum.Enum):
    red = 1
    blue = 2


@dataclasses.dataclass
class Optim:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int | None = None


@dataclasses.dataclass
class Recipe:
    name: str
    space: Literal["lorentz", "poincare"] = "lorentz"
    out: Path = Path("runs")
    colour: Colour = Colour.red
    layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    resume: bool = False
    optim: Optim = dataclasses.field(default_factory=Optim)

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("name must not be 'bad'")


def load_text(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return load(Recipe, path, overrides)


def test_load_fills_the_dataclass(tmp_path):
    text = "name: x\nspace: poincare\nout: a/b\ncolour: blue\nlayers: [3]\nweights: {a: 1}\noptim:\n  lr: 1e-2\n"
    loaded = load_text(tmp_path, text, ("optim.warmup=7", "optim.betas=[0.8, 0.9]", "resume=true"))
    expected = Recipe("x", "poincare", Path("a/b"), Colour.blue, [3], {"a": 1.0}, True, Optim(0.01, (0.8, 0.9), 7))
    assert loaded == expected
    assert isinstance(loaded.weights["a"], float)
    assert load(Recipe, None, ["name=y", "optim.lr=2"]) == Recipe("y", optim=Optim(lr=2.0))
    assert load_text(tmp_path, "name: z\noptim:\n") == Recipe("z")


@given(
    st.builds(
        Recipe,
        name=st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "bad"),
        space=st.sampled_from(["lorentz", "poincare"]),
        out=st.sampled_from([Path("runs"), Path("a/b c"), Path("1e-3")]),
        colour=st.sampled_from(Colour),
        layers=st.lists(st.integers(), max_size=3),
        weights=st.dictionaries(st.sampled_from(["on", "1", "x: y"]), st.floats(allow_nan=False), max_size=3),
        resume=st.booleans(),
        optim=st.builds(
            Optim,
            lr=st.floats(allow_nan=False),
            betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
            warmup=st.none() | st.integers(),
        ),
    )
)
def test_yaml_round_trip(tmp_path_factory, recipe):
    path = tmp_path_factory.mktemp("yaml") / "r.yaml"
    path.write_text(to_yaml(recipe), encoding="utf-8")
    assert load(Recipe, path) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmae: x", "unknown key 'nmae'; did you mean 'name'?"),
        ("name: x\noptim: {lrr: 1}", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("name: x\nzzzzz: 1", "unknown key 'zzzzz'; expected one of name, space, out,"),
        ("space: lorentz", "'name' is required, expected text"),
        ("name: 3", "name must be text, got 3"),
        ("name: yes", "name must be text, got True"),
        ("name: x\nspace: lorenz", "space must be one of lorentz, poincare, got 'lorenz'; did you mean 'lorentz'?"),
        ("name: x\ncolour: green", "colour must be one of red, blue, got 'green'"),
        ("name: x\nresume: 1", "resume must be true or false, got 1"),
        ("name: x\nlayers: 3", "layers must be a list of whole number values, got 3"),
        ("name: x\nlayers: [1, a]", "layers[1] must be a whole number, got 'a'"),
        ("name: x\nlayers: [true]", "layers[0] must be a whole number, got True"),
        ("name: x\nweights: {a: b}", "weights.a must be a number, got 'b'"),
        ("name: x\noptim: {lr: fast}", "optim.lr must be a number, got 'fast'"),
        ("name: x\noptim: {lr: true}", "optim.lr must be a number, got True"),
        ("name: x\noptim: {betas: [1]}", "optim.betas must be a list of 2 values, got [1]"),
        ("name: x\noptim: {warmup: 1.5}", "optim.warmup must be a whole number or null, got 1.5"),
        ("name: x\noptim: 3", "optim must be a section of keys, got 3"),
        ("name: bad", "name must not be 'bad'"),
        ("name: x\nname: y", "not valid YAML: key 'name' is given twice (line 2, column 1)"),
        ("- 1", "expected a mapping of keys to values, got [1]"),
        ("name: [", "not valid YAML"),
        ("name: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_load_is_strict(tmp_path, text, message):
    with pytest.raises(UserError) as caught:
        load_text(tmp_path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'r.yaml'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["optim.lr", "=3", "name.x=3", "optim.lr=[", "optim.lrr=1", "layers=x"])
def test_overrides_are_strict(tmp_path, override):
    with pytest.raises(UserError, match=r"override|unknown key|must be"):
        load_text(tmp_path, "name: x", (override,))


def test_unreadable_files(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        load(Recipe, tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        load(Recipe, tmp_path / "binary.yaml")


def test_recipes_of_hyptree_are_known_from_any_folder(tmp_path, monkeypatch, capsys):
    shown = []
    monkeypatch.chdir(tmp_path)
    for name in ("world_classify", "recipes/world_classify.yaml", str(recipe_folder() / "world_classify.yaml")):
        assert cli.main(["train", name, "--print-config"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] and shown[0] == shown[1] == shown[2]
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "world_classify.yaml").write_text("run: {seed: 7}\n", encoding="utf-8")
    assert read_yaml("recipes/world_classify.yaml") == {"run": {"seed": 7}}  # a file that is there comes first
    with pytest.raises(UserError, match=r"elsewhere/world_classify\.yaml: No such file"):
        read_yaml("elsewhere/world_classify.yaml")

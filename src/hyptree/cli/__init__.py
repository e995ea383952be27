"""The command ``hyptree``: finds the verb, reads its configuration, runs it.

How to add a verb
    1. Write ``hyptree/cli/<verb>.py``. It imports no torch at the top:
       heavy imports go inside ``run``. It defines a dataclass and one function::

           @dataclass
           class DemoConfig:
               out: Path = Path("runs/demo")
               '''Folder for the page.'''          # the string below a field is its help

           def run(config: DemoConfig) -> int | None:
               '''Embed a small tree and draw it.'''  # shown by `hyptree demo --help`
               from hyptree.explore import demo      # heavy, so here
               demo.run(config.out)

       The annotation of the parameter is how the command finds the dataclass. None means success (exit code 0).
       A positional argument is ``edges: Annotated[Path, "EDGES"]``. A verb whose flags lie over a recipe or a preset
       has ``keys`` and ``bases`` (:func:`hyptree.cli.config.parse`); ``--print-config`` prints what came out of them.
    2. Add a line to ``VERBS`` below.

How to add a subverb (``hyptree tree draw``)
    In ``hyptree/cli/tree.py`` write such a function with its own dataclass and add it to that file's table::

        SUBVERBS = {"draw": draw, "show": show}

    The first line of the function's docstring is its summary in ``hyptree tree --help``. A module has ``SUBVERBS`` or
    ``run``, not both. Nothing in this file changes.

Every verb understands ``--config FILE`` (YAML that fills the dataclass, flags win over it), ``--print-config`` and
``--traceback``; a dataclass must not use these names. A mistake of the user is raised as ``hyptree.errors.UserError``.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hyptree.errors import UserError, as_called, suggest
from hyptree.signals import Stopped, is_main_process

# Kept here, not read from the modules, so that `hyptree --help` imports none of them.
VERBS: dict[str, str] = {
    "demo": "train a small model on built-in data and write a page on what it sees",
    "train": "train what a recipe says: pictures, segments, objects",
    "runs": "list runs: how far they are, what they came to",
    "eval": "numbers of a trained run",
    "generate": "text from a trained language model",
    "compare": "train variants of a recipe alike and write the table",
    "explain": "show what a model clustered, on a page or in numbers",
    "reduce": "measure and draw a vision transformer with fewer tokens",
    "models": "list the models that a recipe can name",
    "export": "write a trained model as one file for other programs",
    "tree": "look at hierarchies, draw embeddings of them",
    "lab": "superposition: train grids of toy models, fit how loss falls with width",
    "vlm": "CLIP and its kin: adapters, few-shot heads, the hierarchy of their embeddings",
    "bench": "time and check the library against its rivals in one run",
}

GONE: dict[str, str] = {
    "vlm train-radial": "hyptree train recipes/radial_world.yaml --model.name MODEL",
    "vlm train-fewshot": "hyptree train recipes/fewshot_world.yaml --model.name MODEL",
    "vlm train-scale": "hyptree train recipes/openvocab_world.yaml --model.name MODEL",
    "tree embed": "hyptree train recipes/embed_mammals.yaml --embed.edges FILE",
    "tree eval": "hyptree eval RUN",
}
"""What to type instead of a verb that is no more. A verb that is there is not looked up."""

SHARED = ("train", "eval", "lab sweep")
"""Verbs whose work several processes (torchrun) share. Of any other each would do all, and write over the others."""

Command = Callable[[Any], "int | None"]

_GLOBAL_OPTIONS = """\
options of every verb:
  -h, --help       what the verb does and its flags
  --config FILE    read settings from a YAML file; flags win over it
  --print-config   print the resolved settings as YAML and stop
  --traceback      show where an error comes from (also HYPTREE_DEBUG=1)"""

_ADVICE = {
    errno.EEXIST: "a file is where a folder is needed",
    errno.ENOTDIR: "a file is where a folder is needed",
    errno.EISDIR: "a folder is where a file is needed",
    errno.EACCES: "give a place that you may read and write",
    errno.EPERM: "give a place that you may read and write",
    errno.EROFS: "give a place that can be written",
    errno.ENOSPC: "free some space and start again; runs go on with --resume",
    errno.EDQUOT: "free some space and start again; runs go on with --resume",
}
"""What to do about an error of the system, where its own words leave that open."""


def main(argv: Sequence[str] | None = None, run: Callable[[list[str], bool, str | None], int] | None = None) -> int:
    """Runs the command and gives the exit code: 0 fine, 2 user error, 130 interrupted, 141 reader went away.

    Args:
        argv: words of the command line; those of this process by default.
        run: what takes them, --print-config and --config; by default what finds the verb.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    show_traceback = bool(_take(args, "--traceback")) or os.environ.get("HYPTREE_DEBUG", "0") not in ("", "0")
    try:
        # Taken out here, so that they may stand anywhere, before the verb too.
        prints, files = _take(args, "--print-config"), _take(args, "--config", "a file, e.g. --config recipe.yaml")
        code = (run or _dispatch)(args, bool(prints), files[-1] if files else None)
        sys.stdout.flush()  # here, where a closed pipe is still caught
        return code
    except BrokenPipeError:
        # `hyptree ... | head`: the reader has what it wanted. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt as stop:
        _report(f"interrupted{stop}", show_traceback)
        return 130
    except UserError as error:
        _report(f"error: {error}", show_traceback)
        return 2
    except OSError as error:
        if error.filename is None and error.errno not in _ADVICE:
            raise
        _report(f"error: {_in_words(error)}", show_traceback)
        return 2


def _in_words(error: OSError) -> str:
    """What the system said about a file, and what it means; a file that was to be renamed goes by its final name."""
    message = f"{error.filename}: " if error.filename is not None else ""
    message = re.sub(r"([^/]*/)?\.([^/]+)\.\d+\.tmp: $", r"\1\2: ", message) + str(error.strerror)
    return f"{message}; {_ADVICE[error.errno]}" if error.errno in _ADVICE else message


def call(command: Command, prog: str, argv: Sequence[str] | None = None) -> int:
    """Runs a single command of its own, e.g. a script that writes a table, as :func:`main` runs a verb."""
    return main(argv, lambda args, *common: _run(command, prog, args, *common))


def _dispatch(args: list[str], print_config: bool, yaml_path: str | None) -> int:
    if args and args[0] in ("-V", "--version"):
        from hyptree import __version__

        print(f"hyptree {__version__}")
        return 0
    verb = _choose("hyptree", args, VERBS)
    if verb is None:
        about = "hierarchy in deep learning: find it, learn it, use it, show it"
        return _print_usage("hyptree [--version]", about, VERBS, asked=bool(args))

    from importlib import import_module

    module = import_module(f"{__name__}.{verb}")
    prog = f"hyptree {verb}"
    subverbs: dict[str, Command] | None = getattr(module, "SUBVERBS", None)
    if subverbs is None:
        return _run(module.run, prog, args[1:], print_config, yaml_path)

    args = args[1:]
    subverb = _choose(prog, args, subverbs)
    if subverb is None:
        summaries = {name: _summary(command) for name, command in subverbs.items()}
        return _print_usage(prog, VERBS[verb], summaries, asked=bool(args))
    return _run(subverbs[subverb], f"{prog} {subverb}", args[1:], print_config, yaml_path)


def _choose(prog: str, args: list[str], names: dict[str, Any]) -> str | None:
    """The verb that was named; None when help was asked for or nothing was said."""
    if not args or args[0] in ("-h", "--help"):
        return None
    if args[0] in names:
        return args[0]
    gone = f"{prog} {args[0]}".removeprefix("hyptree ")
    if gone in GONE:
        raise UserError(f"hyptree {gone} is no more; type: {GONE[gone]}")
    kind = "option" if args[0].startswith("-") else "verb"
    choices = ["--help", "--version"] if kind == "option" else list(names)
    hint = suggest(args[0], choices) or f"see {prog} --help"
    raise UserError(f"unknown {kind} {args[0]!r} for {prog}; {hint}")


def _print_usage(prog: str, about: str, names: dict[str, str], asked: bool) -> int:
    width = max((len(name) for name in names), default=0) + 2
    rows = "\n".join(f"  {name:<{width}}{summary}" for name, summary in names.items())
    usage = f"usage: {prog} VERB [options]\n\n{about}\n\nverbs:\n{rows}\n\n{_GLOBAL_OPTIONS}"
    print(usage, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _summary(command: Command) -> str:
    return (command.__doc__ or "").strip().split("\n")[0].rstrip(".")


def _run(command: Command, prog: str, args: list[str], print_config: bool, yaml_path: str | None) -> int:
    from hyptree.cli import config as configs
    from hyptree.config import to_yaml

    config = configs.parse(command, prog, args, yaml_path)
    if config is None:  # help was printed
        print(f"\n{_GLOBAL_OPTIONS}")
        return 0
    if print_config:
        resolved = config.settings if hasattr(config, "bases") else [config]
        print(to_yaml(resolved[0] if len(resolved) == 1 else {"parts": resolved}), end="")
        return 0
    if (
        "LOCAL_RANK" in os.environ
        and os.environ.get("WORLD_SIZE", "1") != "1"
        and prog[len("hyptree ") :] not in SHARED
    ):
        if not is_main_process():
            return 2
        raise UserError(f"{prog} is work for one process, got {os.environ['WORLD_SIZE']}; start it without torchrun")
    try:
        return int(command(config) or 0)
    except Stopped as stop:
        again = [*prog.split()[1:], *args, *([] if yaml_path is None else ["--config", yaml_path])]
        again += [] if "--resume" in args else ["--resume"]
        stop.args = (f"; go on with: {as_called(*again)}",)
        raise


def _take(args: list[str], flag: str, value: str = "") -> list[str]:
    """What is given by ``--flag``, or by ``--flag VALUE`` and ``--flag=VALUE``, up to a bare ``--``; taken out of them.

    Args:
        value: what it needs, in words; without, the flag stands alone.
    """
    end, taken, kept = args.index("--") if "--" in args else len(args), [], []
    words = iter(args[:end])
    for word in words:
        if word == flag and value:
            word = f"{flag}={next(words, '-')}"
            if word.startswith(f"{flag}=-"):
                raise UserError(f"{flag} needs {value}")
        if word == flag or (value and word.startswith(f"{flag}=")):
            taken.append(word[len(flag) + 1 :])
        else:
            kept.append(word)
    args[:end] = kept
    return taken


def _report(message: str, show_traceback: bool) -> None:
    if show_traceback:
        import traceback

        traceback.print_exc()
    # One line whatever the message holds: scripts and logs read it.
    print("hyptree: " + " ".join(message.split()), file=sys.stderr)

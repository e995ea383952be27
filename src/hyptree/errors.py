"""Messages for people: the error that becomes one line, spelling suggestions, missing extras, commands to paste."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType


class UserError(ValueError):
    """A mistake the user can repair; the text says what was given, what is expected and what to do.

    The command line prints it as one line and exits with 2. In a library call it is an ordinary ``ValueError``.
    """


def suggest(name: str, choices: Iterable[str], part: Callable[[str], str] = str) -> str:
    """``did you mean 'x'?`` for the closest choice, or an empty string when nothing is close.

    Args:
        part: what is compared of a choice; of paths the name alone, since folders and endings that all of them share
            would make them alike.
    """
    import difflib  # here because every start of the command would pay for it

    by_lower_case = {part(choice).lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    return f"did you mean {by_lower_case[close[0]]!r}?" if close else ""


def shown(value: object, most: int = 60) -> str:
    """A value as Python writes it, cut short for a message."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def require_one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise unless a setting has one of its values; the message suggests the nearest."""
    choices = list(choices)
    if value not in choices:
        words = list(map(str, choices))
        hint = suggest(str(value), words)
        raise UserError(f"{name} must be one of {', '.join(words)}, got {value!r}" + (hint and f"; {hint}"))


def require_known(message: str, names: Iterable[object], choices: Iterable[object], otherwise: str = "") -> None:
    """Raise for the first of ``names`` that is none of the choices.

    Args:
        message: with ``{}`` or ``{!r}`` for the name; the nearest choice is suggested behind it.
        otherwise: what is said where none is near; by default all choices.
    """
    known = list(choices)
    for name in names:
        if name not in known:
            words = [str(choice) for choice in known]
            hint = suggest(str(name), words) or otherwise or f"expected one of {', '.join(words)}"
            raise UserError(f"{message.format(name)}; {hint}")


def require(module: str, extra: str | None = None, asked_by: str = "this") -> ModuleType:
    """The imported module, or a ``UserError`` that says how to install it.

    Args:
        module: dotted name to import, e.g. ``"matplotlib.pyplot"``.
        extra: the extra of hyptree that brings it; None when hyptree itself depends on it.
        asked_by: what needs it, e.g. the flag.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # A module that is installed but broken inside is a different problem: show that one as it is.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0]
        target = f"hyptree[{extra}]" if extra else "hyptree"
        raise UserError(f"{asked_by} needs {package}: pip install {target}") from error


def as_called(*words: str | os.PathLike[str]) -> str:
    """``hyptree`` with these words as a line to paste: by the path, module or launcher that started this process.

    Plain ``hyptree`` where it is on the PATH, and in a program that uses the library.
    """
    import shlex
    from shutil import which

    def runnable(path: str) -> str:
        """The bare name of a program where a shell finds this one by it, else its path, short below this folder."""
        name, here = os.path.basename(path), os.path.relpath(path)
        if os.path.abspath(which(name) or "") == os.path.abspath(path):
            return name
        return os.path.abspath(path) if here.startswith("..") else os.path.join(".", here) if name == here else here

    script, started = sys.argv[0], ["hyptree"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = ["torchrun"] if which("torchrun") else [runnable(sys.executable), "-m", "torch.distributed.run"]
        started = [*launcher, "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "hyptree"]
    elif script.endswith(os.path.join("hyptree", "__main__.py")):
        started = [runnable(sys.executable), "-m", "hyptree"]
    elif os.path.basename(script) == "hyptree":
        started = [runnable(script)]
    return shlex.join([*started, *(str(word) for word in words)])


@contextmanager
def as_user_error(where: str = "") -> Iterator[None]:
    """Turns a ``ValueError`` raised inside into a ``UserError``, with ``where`` (a file, a flag) put before it.

    For the places where a verb hands what the user gave to the library: the library's message becomes the one line.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from error

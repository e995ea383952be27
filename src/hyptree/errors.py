"""Messages for people: the error that becomes one line, spelling suggestions, missing extras."""

from __future__ import annotations

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

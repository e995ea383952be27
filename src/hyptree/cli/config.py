"""Configurations from the flags of a command, on top of what YAML says (``hyptree.config``)."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import inspect
import io
import re
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

from hyptree.config import build, load, read_yaml, to_yaml
from hyptree.errors import UserError, require

__all__ = ["config_class", "load", "parse", "read_yaml", "show_help", "to_yaml"]


def parse(command: Callable[..., Any], prog: str, args: Sequence[str], yaml_path: str | None = None) -> Any:
    """The configuration of a command from flags, on top of a YAML file when one is named.

    Args:
        command: function whose only parameter is annotated with a dataclass; its docstring is the help.
        prog: how the command was called, for the usage line.
        args: flags and positional arguments after the verb.
        yaml_path: values to use where no flag is given.

    Returns:
        An instance of the dataclass, or None when help was asked for and printed.
    """
    tyro = require("tyro")
    cls = config_class(command)
    options: dict[str, Any] = {}
    if yaml_path is not None:
        # No __init__ yet: required fields may come from flags, and the dataclass's checks are for the final values.
        options["default"] = build(cls, read_yaml(yaml_path), "", yaml_path, missing=tyro.MISSING)
    return _ask_tyro(cls, prog, inspect.getdoc(command), args, **options)


def show_help(cls: type, prog: str, about: str | None) -> None:
    """Print the help of a verb that reads its flags by :func:`load`, as YAML."""
    _ask_tyro(cls, prog, about, ["--help"], _with_yaml_values, config=(require("tyro").conf.FlagConversionOff,))


def _ask_tyro(
    cls: type, prog: str, about: str | None, args: Sequence[str], edit: Callable[[str], str] = str, **options: Any
) -> Any:
    # With an encoding, by its plain name: tyro draws frames where it is utf-8.
    encoding = codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            return require("tyro").cli(cls, prog=prog, description=about, args=list(args), **options)
    except SystemExit as stop:
        if not stop.code:
            stdout.seek(0)
            print(edit(_without_none(stdout.read())), end="")
            return None
        # A failed check of a dataclass is reported under the class's name, which means nothing to the user.
        message = re.sub(r"^error parsing \w+: ", "", _one_line(stderr.getvalue()), flags=re.IGNORECASE)
        raise UserError(f"{message} (see {prog} --help)") from None
    except UserError:
        raise
    except ValueError as error:  # a check in the dataclass's __post_init__
        raise UserError(str(error)) from error


def config_class(command: Callable[..., Any]) -> type:
    """The dataclass that annotates the only parameter of a command."""
    hints = typing.get_type_hints(command)
    (name,) = inspect.signature(command).parameters
    assert dataclasses.is_dataclass(hints[name]), f"{command} must take one parameter annotated with a dataclass"
    return hints[name]


def _without_none(text: str) -> str:
    """Help without None among what may be given and ``(default: None)`` behind a text: both say "may be left out".

    So does an empty default. What goes leaves as many spaces, so that the frame stays straight; a row that held nothing
    else goes with it.
    """
    text = re.sub(r"\{None\}\|(\{\[.*?\]\]\}|\S+)", lambda match: match[1] + " " * len("{None}|"), text)
    text = re.sub(r"\{None,(\S+)", lambda match: "{" + match[1] + " " * len("None,"), text)
    usage, blank, rest = text.partition("\n\n")
    usage = re.sub(r"(?<=\S) +(?=\S)", " ", usage).rstrip()
    rest = re.sub(r"(^│ *)?\(default:( *│?\n│? *| +)(?:None|'')?\)( *│\n)?", _blank, rest, flags=re.MULTILINE)
    return usage + blank + rest


def _with_yaml_values(text: str) -> str:
    """Help with true and false as YAML writes them; a flag without a dot is the command's own switch and takes none."""
    text = re.sub(r"(--[\w-]+[\s│]+)(\{True,False\})", lambda match: match[1] + " " * len(match[2]), text)
    text = text.replace("{True,False", "{true,false")
    return re.sub(r"\(default:[\s│]+(?:True|False)\)", lambda match: match[0].lower(), text)


def _blank(match: re.Match[str]) -> str:
    if match[1] and match[3]:
        return ""  # a row of its own
    first, *second = re.sub(r"[^│\n]", " ", match[0]).split("\n", 1)
    if second and match[3]:  # the last row held its end alone
        return f"{first}\n"
    return "\n".join([first, *second])


def _one_line(text: str) -> str:
    """The sentence inside tyro's box, without its frame, its title and its pointer to the help.

    tyro offers no stable way to get the message alone, so this reads what it prints and keeps whatever it does not
    recognise: a changed layout costs beauty, not information.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.strip() for line in text.splitlines()]
    # The title is part of the frame or, where the terminal has no line characters, a row underlined with dashes.
    if len(rows) > 2 and rows[1] and set(rows[1]) == {"-"}:
        rows = rows[2:]
    lines = [row.strip("│").strip() for row in rows if not row.startswith(("╭", "╰"))]
    sections: list[str] = [""]
    for line in lines:
        if line and set(line) <= {"─", "-"}:
            sections.append("")
        else:
            sections[-1] = f"{sections[-1]} {line}".strip()
    kept = [part for part in sections if part and not part.startswith(("For full helptext", "Argument helptext"))]
    message = "; ".join(part[0].lower() + part[1:] for part in kept)
    message = message.replace("{None}|", "").replace("{None,", "{").replace(" (default: None)", "")
    return message or " ".join(text.split()) or "wrong arguments"

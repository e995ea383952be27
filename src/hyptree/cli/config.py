"""A verb's settings from the words of its command line, on top of what YAML says (``hyptree.config``), and its help.

All verbs are read alike: ``--key value``, ``--key=value``, dashes or underscores, lists as several words or ``[1, 2]``,
``--flag``, ``--no-flag`` and ``--flag true`` for what is true or false, ``null`` for nothing. Of a flag that is given
twice the last counts, as everywhere.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyptree.checks import require_numbers
from hyptree.config import coerce, expected, load, parse_yaml, read_yaml, section_class
from hyptree.errors import UserError, suggest


@dataclass(kw_only=True)
class AsJson:
    """A verb that may answer in JSON."""

    json: bool = False
    """Print JSON."""


@dataclass(kw_only=True)
class OnDevice:
    """A verb that computes."""

    device: str = "auto"
    """auto takes a GPU if there is one; cpu or cuda to insist."""
    threads: int | None = None
    """CPU threads; by default torch decides."""

    def find_device(self) -> Any:
        """The device; from now on this process uses so many CPU threads."""
        import torch

        from hyptree.devices import find_device

        if self.threads is not None:
            require_numbers(self, "at least 1", "threads", flag="--")
            torch.set_num_threads(self.threads)
        return find_device(self.device)


_IS_FLAG = re.compile("--|-[a-zA-Z]").match
_OWN_TYPE = {"null": types.NoneType, "true": bool, "false": bool}
"""Words that mean what they mean in YAML, also where text is wanted too."""


def parse(command: Callable[..., Any], prog: str, args: Sequence[str], yaml_path: str | None = None) -> Any:
    """The settings of a verb; None when help was asked for and printed.

    A verb whose flags lie over something else (a recipe, a preset) names the dataclass of these flags as ``keys``, and
    its method ``bases(chosen)`` says over which files or mappings. What comes out is its ``settings``, one for each.

    Args:
        command: function whose only parameter is annotated with a dataclass; its docstring is the help.
        prog: how the command was called.
        args: the words after the verb.
        yaml_path: values to use where the words give none.
    """
    cls: Any = config_class(command)
    keys = getattr(cls, "keys", None)
    words = args[: args.index("--")] if "--" in args else args
    wants_help = "-h" in words or "--help" in words
    short = getattr(cls, "short", {})
    own = list(_options(cls, short=short))
    options = [*own, *_options(keys, short=short, words=None if wants_help else words)] if keys else own
    if wants_help:
        print("\n".join(_help(inspect.getdoc(command) or "", prog, options)))
        return None
    chosen = _read(options, args, prog)
    if keys is not None and yaml_path is not None and own[0].metavar and own[0].name not in chosen:
        chosen[own[0].name], yaml_path = yaml_path, None  # the file alone is what the flags lie over
    file = {} if yaml_path is None else read_yaml(yaml_path)
    names = {field.name for field in dataclasses.fields(cls)}
    rest = {} if keys is None else {key: file.pop(key) for key in list(file) if key not in names}
    mine = {key: chosen.pop(key) for key in list(chosen) if key.partition(".")[0] in names}
    for option in own:
        if option.default is dataclasses.MISSING and option.name not in {**file, **mine} and "." not in option.name:
            raise UserError(f"{prog} needs {option.flag} (see {prog} --help)")
    config: Any = load(cls, file, mine, yaml_path or "")
    if keys is not None:
        config.settings = []
        for base in config.bases({**rest, **chosen}):
            source = " with ".join(str(part) for part in (base, yaml_path) if part and not isinstance(part, Mapping))
            config.settings.append(load(keys, [base, rest] if rest else [base], chosen, source))
    return config


def config_class(command: Callable[..., Any]) -> type:
    """The dataclass that annotates the only parameter of a command."""
    hints = typing.get_type_hints(command)
    (name,) = inspect.signature(command).parameters
    assert dataclasses.is_dataclass(hints[name]), f"{command} must take one parameter annotated with a dataclass"
    return hints[name]


@dataclass
class Option:
    """One field that words can fill, or the heading of a section of them."""

    name: str
    """With dots and underscores, as in YAML."""
    kind: Any
    default: Any = None
    metavar: str = ""
    """What it is called if it has a place and no flag: ``RUN``, ``[FILTER]``, ``PATH ...``."""
    short: str = ""
    """Another, shorter name."""
    owner: type = object
    """The dataclass whose field it is."""

    def __post_init__(self) -> None:
        is_union = typing.get_origin(self.kind) in (typing.Union, types.UnionType)
        self.kinds: tuple[Any, ...] = typing.get_args(self.kind) if is_union else (self.kind,)
        lists = [kind for kind in self.kinds if typing.get_origin(kind) in (list, tuple)]
        ends = (...,) if lists and typing.get_origin(lists[0]) is list else ()
        self.items = typing.get_args(lists[0]) + ends if lists else ()  # types of its values, the last may be `...`
        self.flag = self.metavar or "--" + self.name.replace("_", "-")


def _options(
    cls: type, prefix: str = "", *, short: Mapping[str, str] | None = None, words: Sequence[str] | None = None
) -> Iterator[Option]:
    """The fields of a dataclass that words can fill: its own, inherited ones, those of sections below their heading.

    Sections whose class is imported only where it is used have theirs if a word names one of them, or without words.
    """
    hints, sections = typing.get_type_hints(cls, include_extras=True), []
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name not in inspect.get_annotations(cls)):
        kind, name, metavar = hints[field.name], prefix + field.name, ""
        if typing.get_origin(kind) is typing.Annotated:
            kind, metavar = typing.get_args(kind)
        flags = (f"--{name}.", f"--no-{name}.")
        if words is not None and "section" in field.metadata and not any(word.startswith(flags) for word in words):
            continue
        if (section := section_class(field, kind)) is not None:
            sections.append(Option(name, section, owner=cls))
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        option = Option(name, kind, default, metavar, (short or {}).get(name, ""), cls)
        if field.init and not any(map(dataclasses.is_dataclass, option.items)):
            yield option
    for section in sections:
        yield section
        yield from _options(section.kind, f"{section.name}.", short=short, words=words)


# --------------------------------------------------------------------------------------------------------------- words


def _read(options: Sequence[Option], args: Sequence[str], prog: str) -> dict[str, Any]:
    """What the words say, by the names of the options and in YAML's types; each value fits its option."""
    flags = {option.name: option for option in options if not (option.metavar or dataclasses.is_dataclass(option.kind))}
    flags |= {option.short: option for option in options if option.short}
    chosen: dict[str, Any] = {}
    places, rest = [], list(args)
    while rest:
        word = rest.pop(0)
        if word == "--":
            places += rest
            break
        if not _IS_FLAG(word):
            places.append(word)
            continue
        flag, equals, value = word.partition("=")
        option, is_off = _find(flag, flags, prog)
        value = _take(option, flag, [value] if equals else ["false"] if is_off else rest, bool(equals))
        if option.items and typing.get_origin(option.items[0]) is tuple:  # one more of them each time
            value = chosen.get(option.name, []) + value
        chosen[option.name] = value
    for option in (option for option in options if option.metavar and places):
        chosen[option.name] = _take(option, option.metavar, places, True)
    if places:
        wanted = " ".join(option.metavar for option in options if option.metavar) or "no words without a flag"
        raise UserError(f"{prog} takes {wanted}, {places[0]!r} is one too many (see {prog} --help)")
    return chosen


def _find(flag: str, flags: Mapping[str, Option], prog: str) -> tuple[Option, bool]:
    """The option of a flag, and whether ``--no-`` switches it off."""
    name = flag.removeprefix("--").replace("-", "_")
    if name in flags:
        return flags[name], False
    if bool in (switched := flags.get(name.removeprefix("no_"), Option("", None))).kinds:
        return switched, True
    section = name
    while section := section.rpartition(".")[0]:  # keys that no class knows, such as model.args.depth
        if section in flags and typing.get_origin(flags[section].kind) is dict:
            return Option(name, typing.get_args(flags[section].kind)[1]), False
    hint = suggest(flag, ["--" + name.replace("_", "-") for name in flags])
    raise UserError(f"unknown flag {flag} for {prog}; {hint or f'see {prog} --help'}")


def _take(option: Option, flag: str, rest: list[str], takes_all: bool = False) -> Any:
    """The value that the next words stand for, which are taken off ``rest``; with ``takes_all`` whatever they are."""
    most: float = 1
    if option.items and not (rest and rest[0].startswith("[")):
        most = math.inf if option.items[-1] is ... else len(option.items)
    elif option.kind is bool and not takes_all and rest[:1] not in (["true"], ["false"]):
        most = 0
    words: list[str] = []
    while rest and len(words) < most and (takes_all or not _IS_FLAG(rest[0])):
        words.append(rest.pop(0))
    if most > 1 and words != ["null"]:
        item = Option("", option.items[0])
        value: Any = [words] if item.items else [_take(item, flag, [word], True) for word in words]
    elif not words and (option.kind is Any or bool in option.kinds):
        value = True
    elif not words:
        raise UserError(f"{flag} needs {expected(option.kind).removesuffix(' or null')}")
    elif words[0] in _OWN_TYPE:
        value = parse_yaml(words[0], flag) if {_OWN_TYPE[words[0]], Any} & {*option.kinds} else words[0]
    else:
        origins = {typing.get_origin(kind) or kind for kind in option.kinds}
        is_text = option.kind is not bool and not origins & {int, float, Any, dict, list, tuple}
        value = words[0] if is_text else parse_yaml(words[0], flag)
    coerce(value, option.kind, flag, "")
    return value


# ---------------------------------------------------------------------------------------------------------------- help


def _help(about: str, prog: str, options: Sequence[Option]) -> Iterator[str]:
    """The lines of a verb's help, as wide as the terminal."""
    width = shutil.get_terminal_size().columns
    docs = {owner: _docs(owner) for owner in {option.owner for option in options}}
    needed = [option.flag for option in options if option.metavar or option.default is dataclasses.MISSING]
    for paragraph in (f"usage: {' '.join([prog, *needed])} [options]", *about.split("\n\n")):
        yield from [*textwrap.wrap(paragraph, width, break_on_hyphens=False), ""]
    for option in options:
        text = docs[option.owner].get(option.name.rpartition(".")[2], "")
        if dataclasses.is_dataclass(option.kind):
            yield from ["", *textwrap.wrap(f"{option.name}: {text}", width)]
            continue
        left, value = option.flag, option.default
        if option.short:
            left = f"--{option.short}, {left}"
        if option.kind is bool and value is True:
            left += f", --no-{option.flag[2:]}"
        if typing.get_origin(option.kind) is dict:
            left += ".KEY"
        if option.kind is not bool and not option.metavar:
            text += f" ({expected(option.kind).removesuffix(' or null')})"
        if value is not False and value not in (dataclasses.MISSING, None, "", (), [], {}):
            shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            text += f" [{'true' if value is True else shown}]"
        yield from _row(left, text, width)


def _row(left: str, text: str, width: int) -> Iterator[str]:
    """A flag and, beside or below it, what it means."""
    indent = 28 if width >= 80 else 8
    lines = textwrap.wrap(text, width - indent, break_on_hyphens=False)
    if len(left) + 4 > indent:
        yield from (f"  {part}" for part in textwrap.wrap(left, width - 2, break_on_hyphens=False))
    else:
        yield f"  {left:<{indent - 2}}{lines.pop(0) if lines else ''}".rstrip()
    yield from (" " * indent + line for line in lines)


def _docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass, its parents' included."""
    docs = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, text in itertools.pairwise(typing.cast(ast.ClassDef, tree).body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs

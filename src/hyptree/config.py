"""Configurations: a dataclass filled from YAML and dotted overrides, strictly; flags are cli/config.py's.

An unknown key is an error that names the full key and suggests the nearest one; a value of the wrong type is one line.
Types understood: bool, int, float, str, Path, None, Literal, Enum (by name), unions, list, tuple, dict and dataclasses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from hyptree.errors import UserError, shown, suggest
from hyptree.files import open_packed

T = TypeVar("T")


def load(
    cls: type[T],
    sources: Path | str | Mapping[str, Any] | Sequence[Path | str | Mapping[str, Any]] | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    source: str | None = None,
) -> T:
    """A ``cls`` filled from YAML files or mappings, a later one over an earlier, then from overrides.

    Args:
        overrides: dotted keys and their values, or words such as ``"optim.lr=3e-4"``.
        source: what messages call all this; by default the names of the files.

    Raises:
        UserError: unreadable file, unknown or missing key, wrong type, or a check of the dataclass that fails.
    """
    parts = [sources] if isinstance(sources, (str, Path, Mapping)) else sources or []
    read = [part if isinstance(part, Mapping) else read_yaml(part) for part in parts]
    data: dict[str, Any] = {**read[0]} if read else {}
    for part in read[1:]:
        _merge(data, part)
    changes = overrides if isinstance(overrides, Mapping) else dict(map(read_override, overrides))
    for key, value in changes.items():
        *names, last = key.split(".")
        section = data
        for name in names:
            if section.get(name) is None:
                section[name] = {}
            section = section[name]
            if not isinstance(section, dict):
                raise UserError(f"override of {key}: {name!r} is not a section of keys")
        section[last] = value
    return build(cls, data, "", " with ".join(map(str, parts)) or "config" if source is None else source)


def to_yaml(config: Any) -> str:
    """The dataclass as YAML that ``load`` reads back to an equal one, fields in their written order."""
    import yaml

    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def recipe_folder() -> Path | None:
    """The recipes that come with hyptree: in the package when it was installed from a wheel, else in the checkout."""
    package = Path(__file__).resolve().parent
    folders = (package / "recipes", package.parents[1] / "recipes")
    return next((folder for folder in folders if (folder / "demo.yaml").is_file()), None)


def find_yaml(path: Path | str) -> Path:
    """``path``; where there is no such file, the recipe of hyptree it names.

    So ``recipes/world_classify.yaml``, and ``world_classify`` for short, mean the same from any folder.

    Raises:
        UserError: neither is there; with the nearest name beside it, or of a recipe.
    """
    path = Path(path)
    if path.exists():
        return path
    own = recipe_folder()
    if own is not None and path.parent in (Path(), Path("recipes")):
        for name in (path.name, f"{path.name}.yaml"):
            if (own / name).is_file():
                return own / name
    beside = [str(file) for file in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    shipped = [f"recipes/{file.name}" for file in sorted(own.glob("*.yaml"))] if own is not None else []
    hint = suggest(path.stem, [*shipped, *beside], part=lambda choice: Path(choice).stem)  # of two alike the last
    raise UserError(f"cannot read {path}: No such file or directory{hint and f'; {hint}'}")


def read_yaml(path: Path | str) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping, a key given twice is an error."""
    with open_packed(find_yaml(path)) as file:
        data = parse_yaml(file.read(), str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of keys to values, got {shown(data)}")
    return data


def build(cls: type[T], data: Any, prefix: str, source: str) -> T:
    """``cls`` from a mapping, which a class method ``fill_in(data, source)`` of ``cls`` may add keys to beforehand."""
    dot, place = f"{prefix}." if prefix else "", f"{source}: " if source else ""
    if data is None:  # a section whose lines are all commented out
        data = {}
    if not isinstance(data, Mapping):
        raise UserError(f"{place}{prefix or 'the file'} must be a section of keys, got {shown(data)}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            hint = suggest(str(key), fields)
            hint = hint.replace("'", f"'{dot}", 1)
            raise UserError(f"{place}unknown key {f'{dot}{key}'!r}; {hint or 'expected one of ' + ', '.join(fields)}")
    fill_in: Any = getattr(cls, "fill_in", None)
    data = data if fill_in is None else fill_in(data, source)

    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            kind = section_class(field, hints[name]) | None if "section" in field.metadata else hints[name]
            values[name] = coerce(data[name], kind, dot + name, source)
        elif field.default is not dataclasses.MISSING:
            values[name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[name] = field.default_factory()
        else:
            raise UserError(f"{place}{dot + name!r} is required, expected {expected(hints[name])}")

    try:
        return cls(**values)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place}{prefix and f'{prefix}: '}{error}") from error


def section_class(field: dataclasses.Field[Any], kind: Any) -> Any:
    """The dataclass of a section, also of one that may be absent; None for a field of another kind.

    The class of a field with ``metadata={"section": "module:Class"}`` is imported here, for those who use it alone.
    """
    if "section" in field.metadata:
        module, _, name = field.metadata["section"].partition(":")
        return getattr(import_module(module), name)
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


def coerce(value: Any, kind: Any, key: str, source: str) -> Any:
    """The value as the annotated type, or a ``UserError`` that names the key."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    container = origin or kind
    is_fixed = container is tuple and arguments and arguments[-1] is not Ellipsis
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return build(kind, value, key, source)
    if origin in (typing.Union, types.UnionType):
        section: Any = next((option for option in arguments if dataclasses.is_dataclass(option)), None)
        if section is not None and value is not None:  # what is wrong within it is told, not that it is no null
            return build(section, value, key, source)
        # An alternative that fits as it is goes before one that would convert: 3 stays int in `float | int`.
        for option in [*(type(value),) * (type(value) in arguments), *arguments]:
            with contextlib.suppress(UserError):
                return coerce(value, option, key, source)
    elif origin is typing.Literal:
        for choice in arguments:
            if value == choice and type(value) is type(choice):
                return choice
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        if isinstance(value, str) and value in kind.__members__:
            return kind[value]
    elif kind is None or kind is types.NoneType:
        if value is None:
            return None
    elif kind is float:
        # YAML reads 3e-4 (no dot) as text; people write it for a number all the time.
        is_text = isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value)
        if is_text or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return float(value)
    elif kind in (bool, int, str):
        if type(value) is kind:
            return value
    elif kind is Path:
        if isinstance(value, str):
            return Path(value)
    elif container in (list, tuple, Sequence):
        if isinstance(value, list) and not (is_fixed and len(value) != len(arguments)):
            kinds = arguments if is_fixed else [arguments[0] if arguments else Any] * len(value)
            items = [
                coerce(item, item_kind, f"{key}[{i}]", source)
                for i, (item, item_kind) in enumerate(zip(value, kinds, strict=True))
            ]
            return items if container is list else tuple(items)
    elif container in (dict, Mapping):
        if isinstance(value, dict):
            key_kind, value_kind = arguments or (Any, Any)
            return {
                coerce(name, key_kind, f"key of {key}", source): coerce(item, value_kind, f"{key}.{name}", source)
                for name, item in value.items()
            }
    else:
        raise TypeError(f"{key}: configurations cannot hold {kind}; see the types listed in hyptree.config")
    literals = [option for option in (kind, *arguments) if typing.get_origin(option) is typing.Literal]
    hint = suggest(str(value), [str(choice) for literal in literals for choice in typing.get_args(literal)])
    place = f"{source}: " if source else ""
    raise UserError(f"{place}{key} must be {expected(kind)}, got {shown(value)}{hint and f'; {hint}'}")


def expected(kind: Any) -> str:
    """A type in words, for messages."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(expected(option) for option in arguments)
    if origin is typing.Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(choice) for choice in arguments)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(kind.__members__)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)} values"
    container = origin or kind
    if container in (list, tuple) or container is Sequence:
        return f"a list of {expected(arguments[0]).removeprefix('a ')} values" if arguments else "a list"
    words: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    words |= {
        Path: "a path",
        None: "null",
        types.NoneType: "null",
        dict: "a section of keys",
        Mapping: "a section of keys",
    }
    return words.get(container, f"a {getattr(kind, '__name__', kind)}")


def _plain(value: Any) -> Any:
    """The value with only what YAML can write: dict, list, text, numbers, null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def read_override(word: str) -> tuple[str, Any]:
    """Key and value of a word such as ``optim.lr=3e-4``."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise UserError(f"override {word!r} must look like key=value, e.g. optim.lr=3e-4")
    return key, parse_yaml(text, f"override {word!r}")


def _merge(data: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Put the values of ``over`` into ``data``, key by key within sections; an empty section says nothing."""
    for key, value in over.items():
        if isinstance(data.get(key), dict) and (value is None or isinstance(value, dict)):
            _merge(data[key], value or {})
        else:
            data[key] = value


def parse_yaml(text: str, source: str) -> Any:
    """What YAML reads in a text; ``source`` is what messages call it."""
    import yaml

    try:
        return yaml.load(text, _loader())  # a SafeLoader: builds no Python objects
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UserError(f"{source}: not valid YAML: {getattr(error, 'problem', None) or error}{at}") from error


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice; YAML's own loader silently keeps the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                if isinstance(key, str) and key in seen:
                    twice = f"key {key!r} is given twice"
                    raise yaml.constructor.ConstructorError(problem=twice, problem_mark=key_node.start_mark)
                seen.add(key if isinstance(key, str) else None)
            return super().construct_mapping(node, deep)

    return Loader

"""Where adapters go: the attention layers of a model, found by how they are built and not by what they are called.

An attention layer is a module that holds a query, a key and a value projection: as one parameter
(``nn.MultiheadAttention``), as three linear layers (transformers, EVA), as one fused layer (timm), or as a query beside
a fused key and value (pooling by attention). Each projection is a range of rows of a weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any, NamedTuple

import torch
from torch import nn

from hyptree.errors import UserError
from hyptree.vlm.adapters.base import CHILD, device_of, own_weight

TARGETS = ("q", "k", "v", "out", "mlp")
TOWERS = ("text", "image")

# Linear layers by the names of their attributes: the three parts apart, all three fused, key and value fused.
_SEPARATE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("to_q", "to_k", "to_v"), ("q", "k", "v"))
_FUSED = ("qkv", "in_proj", "query_key_value", "Wqkv", "to_qkv")
_QUERY_APART = (("q", "kv"), ("q_proj", "kv_proj"))
_IMAGE_NAMES = ("visual", "vision", "image")
_UNREAD = {"text_decoder", "multimodal_decoder", "crossattention", "cross_attn"}
"""Parts of a text tower that write captions or look at pictures, and that no embedding of a text goes through."""
_NEITHER = "neither"


class Slot(NamedTuple):
    """One adapted matrix: these rows of a weight, which are q, k, v, out or mlp."""

    target: str
    start: int
    stop: int


@dataclass(eq=False)
class Site:
    """A weight of a model, and the parts of it that can be adapted, in the order of rows."""

    name: str
    module: nn.Module
    attribute: str
    tower: str
    layer: int
    """Number of the attention layer within its tower; layers that pool come after the blocks."""
    device: torch.device
    """Where it is when its layer runs."""
    slots: list[Slot] = field(default_factory=list)

    @property
    def base(self) -> nn.Parameter:
        """The weight that the model itself holds."""
        weight = self.module._parameters[self.attribute]
        assert weight is not None
        return weight

    @property
    def slot_shape(self) -> tuple[int, int]:
        """(rows, columns) of each of its parts."""
        return self.slots[0].stop - self.slots[0].start, self.base.shape[1]


def enclosing(model: nn.Module, sites: Sequence[Site]) -> str:
    """Name of the smallest module that runs the layers of all these weights; lists of modules are not run."""
    paths = [site.name.split(".")[:-1] for site in sites]
    path = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    while path and isinstance(model.get_submodule(".".join(path)), nn.ModuleList | nn.ModuleDict | nn.Sequential):
        path.pop()
    return ".".join(path)


def attachment_points(
    model: nn.Module,
    targets: Sequence[str] = TARGETS,
    towers: Sequence[str] = TOWERS,
    layers: str | Sequence[int] = "all",
) -> list[Site]:
    """The weights of a model that adapters can be put on, tower by tower and layer by layer.

    Args:
        targets: some of q, k, v, out, mlp.
        layers: "all", or numbers of attention layers, which count in each tower for itself; -1 is the last.
    """
    _check_is_unwrapped(model, targets)
    attentions = {
        name: parts
        for name, module in model.named_modules()
        if not _UNREAD.intersection(name.split(".")) and (parts := _projections(module))
    }
    tower_of = _Towers(model)
    by_tower: dict[str, list[str]] = {tower: [] for tower in TOWERS}
    in_neither: set[str] = set()
    for name in attentions:
        by_tower.get(tower_of(name), []).append(name)
        if tower_of(name) == _NEITHER:
            in_neither.add(name.removeprefix(tower_of.prefix).split(".")[0])
    chosen = {tower: _chosen_layers(layers, by_tower, tower) for tower in towers}
    sites: list[Site] = []
    for tower in towers:
        for layer in chosen[tower]:
            name = by_tower[tower][layer]
            sites += _sites(model, name, attentions, tower, layer, targets)
    if not sites:
        where = {tower: f"{len(names)} attention layers in {tower}" for tower, names in by_tower.items()}
        raise UserError(
            f"nothing to adapt in {type(model).__name__} for targets {', '.join(targets)} in {', '.join(towers)}: "
            f"found {', '.join(where.values())}; expected in_proj_weight, q_proj/k_proj/v_proj or qkv in its attention"
        )
    warn_of_towers_without(model, "attention", towers, [tower for tower in towers if by_tower[tower]])
    notes = [f"{', '.join(sorted(in_neither))} belong to neither tower"] if in_neither else []
    convolutions = [  # whose windows overlap, unlike those that cut a picture into patches
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
        and any(k > s for k, s in zip(module.kernel_size, module.stride, strict=True))
        and tower_of(name) == "image"
    ]
    if convolutions and any(site.tower == "image" for site in sites):
        notes.append(f"{len(convolutions)} convolutions of the image tower that mix its patches take no adapter")
    if notes:
        warnings.warn(f"{type(model).__name__}: {', and '.join(notes)}; they stay as they are", stacklevel=2)
    return sites


def warn_of_towers_without(model: nn.Module, what: str, towers: Sequence[str], adapted: Container[str]) -> None:
    """Say so where a tower that was asked for, and that the model has, holds nothing to adapt."""
    for tower in towers:
        if tower not in adapted and tower in _Towers(model).towers.values():
            warnings.warn(
                f"the {tower} tower of {type(model).__name__} has no {what} that can be adapted and stays as it is; "
                f"say towers={tuple(t for t in towers if t != tower)} if that is meant",
                stacklevel=3,
            )


def _projections(module: nn.Module) -> list[tuple[str, str, list[str]]]:
    """``(path, attribute, parts)`` of the weights that give q, k and v; empty where the module is no attention."""
    own = {name: weight for name, weight in module._parameters.items() if weight is not None}
    if "in_proj_weight" in own and own["in_proj_weight"].shape[0] % 3 == 0:
        return [("", "in_proj_weight", ["q", "k", "v"])]
    if {"q_proj_weight", "k_proj_weight", "v_proj_weight"} <= own.keys():
        return [("", f"{part}_proj_weight", [part]) for part in "qkv"]
    linears = {name for name, child in module.named_children() if _is_linear(child)}
    for triple in _SEPARATE:
        if set(triple) <= linears:
            return [(name, "weight", [part]) for name, part in zip(triple, "qkv", strict=True)]
    for query, both in _QUERY_APART:
        if {query, both} <= linears and own_weight(module, f"{both}.weight").shape[0] % 2 == 0:
            return [(query, "weight", ["q"]), (both, "weight", ["k", "v"])]
    for name in _FUSED:
        if name in linears and own_weight(module, f"{name}.weight").shape[0] % 3 == 0:
            return [(name, "weight", ["q", "k", "v"])]
    return []


def _check_is_unwrapped(model: nn.Module, targets: Sequence[str]) -> None:
    """Raises where a layer that is asked for lies in a layer of peft: its parts are linear layers themselves."""
    projections = {*chain(*_SEPARATE, *_QUERY_APART), *_FUSED}
    for name, module in model.named_modules():
        if isinstance(inner := module._modules.get("base_layer"), nn.Linear | nn.MultiheadAttention) and (
            isinstance(inner, nn.MultiheadAttention)
            or name.rpartition(".")[2] in projections
            or {"out", "mlp"}.intersection(targets)
        ):
            raise UserError(
                f"{name} has an adapter of another library ({type(module).__module__.split('.')[0]}): merge and unload "
                "that first, or attach before it is put on"
            )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module._parameters["weight"] is not None and module.weight.dim() == 2


class _Towers:
    """Says whether a module reads text or pictures, by the child of the model that it lies in."""

    def __init__(self, model: nn.Module):
        self.prefix = ""
        children = list(_children_with_weights(model))
        while len(children) == 1 and not _tower_by_name(children[0][0]):  # a wrapper around the model
            self.prefix += children[0][0] + "."
            children = list(_children_with_weights(children[0][1]))
        by_name = {name: tower for name, _ in children if (tower := _tower_by_name(name))}
        convolves = {name for name, child in children if any(isinstance(m, nn.Conv2d) for m in child.modules())}
        reads_words = any(
            isinstance(m, nn.Embedding) for name, child in children if name not in convolves for m in child.modules()
        )
        # Where nothing but the patches has an embedding, the whole model is a tower for pictures.
        everything = "image" if convolves and not reads_words and "text" not in by_name.values() else "text"
        # Where both towers have their names, what is called otherwise (X-CLIP's mit) is a part of neither.
        others = {name: "image" if name in convolves else everything for name, _ in children}
        if {*TOWERS} <= {*by_name.values()}:
            others = dict.fromkeys(others, _NEITHER)
        self.towers = others | by_name
        self.otherwise = everything

    def __call__(self, name: str) -> str:
        first = name.removeprefix(self.prefix).split(".")[0]
        return self.towers.get(first, self.otherwise)


def _children_with_weights(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if name != CHILD and next(child.parameters(), None) is not None:
            yield name, child


def _tower_by_name(name: str) -> str | None:
    if name.startswith(_IMAGE_NAMES):
        return "image"
    return "text" if name.startswith("text") else None


def _chosen_layers(layers: str | Sequence[int], by_tower: dict[str, list[str]], tower: str) -> list[int]:
    count = len(by_tower[tower])
    if isinstance(layers, str):
        return list(range(count))
    deepest = max(map(len, by_tower.values()))
    for layer in layers:
        if not -deepest <= layer < deepest:
            depths = ", ".join(f"{len(names)} in {name}" for name, names in by_tower.items())
            raise UserError(f"there is no layer {layer}: the model has attention layers {depths}, counted from 0")
    return sorted({layer % count for layer in layers if -count <= layer < count})


def _sites(
    model: nn.Module, name: str, attentions: dict[str, Any], tower: str, layer: int, targets: Sequence[str]
) -> Iterator[Site]:
    parts_of: dict[tuple[str, str], list[str]] = {}
    for path, attribute, parts in attentions[name]:
        parts_of[_join(name, path), attribute] = parts
    out = _output(model, name, attentions)
    if out:
        parts_of[out, "weight"] = ["out"]
    if "mlp" in targets:
        block = _block(model, name, attentions)
        for path, module in model.get_submodule(block).named_modules():
            full = _join(block, path)
            if _UNREAD.intersection(full.split(".")):
                continue
            if _is_linear(module) and (full, "weight") not in parts_of and not full.startswith(CHILD):
                parts_of[full, "weight"] = ["mlp"]
    for (path, attribute), parts in parts_of.items():
        full = _join(path, attribute)
        weight = own_weight(model, full)
        rows = weight.shape[0] // len(parts)
        slots = [Slot(part, i * rows, (i + 1) * rows) for i, part in enumerate(parts) if part in targets]
        if slots:
            if not weight.is_floating_point() or type(weight) is not nn.Parameter:
                raise UserError(
                    f"{full} is a {type(weight).__name__} of {weight.dtype}: adapters need plain floating-point "
                    "weights; attach before quantising or sharding"
                )
            yield Site(full, model.get_submodule(path), attribute, tower, layer, device_of(model, full), slots)


def _output(model: nn.Module, name: str, attentions: dict[str, Any]) -> str | None:
    """The linear layer that mixes the heads: the other one in the attention, or in the ``output`` beside it."""
    inside = {_join(name, path) for path, _, _ in attentions[name]}
    attention = model.get_submodule(name)
    others = [_join(name, n) for n, child in attention.named_children() if _is_linear(child)]
    others = [path for path in others if path not in inside]
    if not others and "." in name:
        output = _join(name.rpartition(".")[0], "output")
        if any(path == output for path, _ in model.named_modules()):
            linear = [n for n, child in model.get_submodule(output).named_modules() if _is_linear(child)]
            others = [_join(output, n) for n in linear]
    return others[0] if len(others) == 1 else None


def _block(model: nn.Module, name: str, attentions: dict[str, Any]) -> str:
    """The largest module around an attention layer that holds no other: its block."""
    block = name
    while "." in block and not block.rpartition(".")[2].isdigit():
        parent = block.rpartition(".")[0]
        is_tower = "." not in parent and parent.startswith(_IMAGE_NAMES)
        if is_tower or sum(f"{other}.".startswith(f"{parent}.") for other in attentions) > 1:
            break
        block = parent
    return block


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)

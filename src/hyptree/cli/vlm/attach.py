"""``hyptree vlm attach-info`` and ``merge``: what an adapter would go on, and a saved one written into the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hyptree.cli.config import AsJson
from hyptree.errors import UserError, as_user_error
from hyptree.files import require_path
from hyptree.vlm.encoders.spec import check_spec

if TYPE_CHECKING:
    from hyptree.vlm.adapters.adapter import AdapterConfig


@dataclass(kw_only=True)
class AttachInfoConfig(AsJson):
    """``hyptree vlm attach-info``."""

    model: Annotated[str, "MODEL"]
    """open_clip:NAME:PRETRAINED, or hf:FOLDER_OR_ID (CLIP, SigLIP, SigLIP2, or a sentence encoder)."""
    adapter: Path | None = None
    """Folder of a saved adapter to look at, instead of the settings below."""
    method: Literal["scale", "lora", "diagonal", "orthogonal", "full"] = "scale"
    """Which adapter."""
    block_size: int | None = None
    """Side of a block, of scale and orthogonal. [128]"""
    rank: int | None = None
    """Of lora. [8]"""
    share: Literal["none", "blocks", "layers"] | None = None
    """What shares parameters, of scale, diagonal and orthogonal. [none]"""
    targets: tuple[str, ...] | None = None
    """Some of q, k, v, out, mlp. [q k v; of lora and full q v]"""
    towers: tuple[str, ...] = ("text", "image")
    """text, image or both."""
    layers: tuple[int, ...] = ()
    """Numbers of layers, counted from 0 in each tower. [all]"""
    texts: tuple[str, ...] = ()
    """Texts whose norm and radius are reported, before and after the adapter."""
    names: bool = False
    """Also list every weight."""
    random_init: bool = False
    """Random weights, for smoke tests."""
    seed: int = 0
    """Of the random weights."""

    def settings(self) -> AdapterConfig:
        """The adapter's configuration; a setting that it does not have is an error."""
        from hyptree.vlm.adapters import adapter_config

        options: dict[str, Any] = {"block_size": self.block_size, "rank": self.rank, "share": self.share}
        options |= {"targets": self.targets, "towers": self.towers, "layers": self.layers or None}
        return adapter_config(self.method, {name: value for name, value in options.items() if value is not None})


@dataclass(kw_only=True)
class MergeConfig(AsJson):
    """``hyptree vlm merge``."""

    model: str
    """The model that the adapter was trained on: open_clip:NAME:PRETRAINED, or hf:FOLDER_OR_ID."""
    adapter: Path
    """Folder of the saved adapter."""
    out: Path
    """Folder for the merged model."""
    overwrite: bool = False
    """Write into a folder that has files already."""
    random_init: bool = False
    """Random weights, for smoke tests."""
    seed: int = 0
    """Of the random weights."""


def attach_info(config: AttachInfoConfig) -> None:
    """Say what an adapter would be attached to in a model, and how many parameters it would train."""
    check_spec(config.model)
    if config.adapter is not None:
        require_path(config.adapter, "folder")
    from hyptree.vlm import AdapterHandle, attach, load_encoder
    from hyptree.vlm.radii import radius_table

    with as_user_error():
        settings = None if config.adapter else config.settings()
        encoder = load_encoder(config.model, random_init=config.random_init, seed=config.seed)
        base = sum(parameter.numel() for parameter in encoder.model.parameters())
        handle = attach(encoder, settings) if settings else AdapterHandle.load(encoder, config.adapter or "")
        radii = handle.radius_report(texts=list(config.texts)) if config.texts else None
    lines = handle.describe()
    count = handle.num_parameters()
    weights = [[name, shape] for name, shape in handle._set.adapted_shapes()]
    if config.json:
        report: dict[str, Any] = {
            "model": config.model,
            "method": handle.config.method,
            "config": handle.config.as_dict(),
        }
        report |= {"parameters": count, "base_parameters": base, "stacks": lines, "weights": weights, "radius": radii}
        print(json.dumps(report))
        return
    shown = [
        {
            "tower": line["tower"],
            "targets": ", ".join(line["targets"]),
            "layers": f"{len(line['layers'])} ({line['layers'][0]} to {line['layers'][-1]})",
            "matrices": line["matrices"],
            "shape": " x ".join(map(str, line["shape"])),
            "parameters": f"{line['parameters']:,}",
        }
        for line in lines
    ]
    from hyptree.tables import show

    print("\n".join(show(shown, {name: f"{{{name}}}" for name in shown[0]})))
    share = f"{100 * count / base:.2f} % of the {base:,} of {config.model}"
    print(f"{handle.config.method}: {count:,} parameters, {share}")
    print(f"saved: {4 * count / 1e6:.2f} MB, {2 * count / 1e6:.2f} MB in float16")
    if config.names:
        print("\n".join(f"{name} {tuple(shape)}" for name, shape in weights))
    if radii:
        print("\n".join(radius_table(radii)))


def merge(config: MergeConfig) -> None:
    """Write a saved adapter into the weights of its model, as a model of its own that needs no adapter."""
    if config.out.exists() and not config.out.is_dir():
        raise UserError(f"{config.out} is a file; --out must name a folder")
    if config.out.is_dir() and any(config.out.iterdir()) and not config.overwrite:
        raise UserError(f"{config.out} has files already; give another --out, or --overwrite")
    check_spec(config.model)
    require_path(config.adapter, "folder")
    from hyptree.vlm import AdapterHandle, load_encoder

    with as_user_error():
        encoder = load_encoder(config.model, random_init=config.random_init, seed=config.seed)
        handle = AdapterHandle.load(encoder, config.adapter)
        count, method = handle.num_parameters(), handle.config.method
        handle.merge_and_unload()
        encoder.save(config.out)
    if config.json:
        print(json.dumps({"out": str(config.out), "model": config.model, "method": method, "parameters": count}))
    else:
        print(f"merged {count:,} parameters ({method}) into {config.model}: {config.out}")

"""``hyptree vlm eval-hierarchy``: measure the hierarchy in an encoder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyptree.cli.config import AsJson, OnDevice
from hyptree.errors import UserError
from hyptree.files import full_disk_is_one_line, read_json, require_path, write_text
from hyptree.progress import say
from hyptree.vlm.encoders.spec import check_spec


@dataclass(kw_only=True)
class EvalHierarchyConfig(AsJson, OnDevice):
    """``hyptree vlm eval-hierarchy``."""

    model: str
    """open_clip:NAME:PRETRAINED, or hf:FOLDER_OR_ID (CLIP, SigLIP, SigLIP2, or a sentence encoder), or the folder of a
    run of the task contrast or radial."""
    suite: tuple[str, ...] = ("hierarcaps-text", "hyperlex")
    """Some of hierarcaps-text, hyperlex, world-text, hierarcaps-images, world-images, tiny-imagenet, cifar10."""
    data: Path | None = None
    """Folder that holds hierarcaps/, hyperlex/, tiny-imagenet-wordnet/ and cifar10/; the world needs none."""
    images: Path | None = None
    """Pictures of the HierarCaps test set: an .npz file or a folder. [what lies beside the captions]"""
    geometry: str | None = None
    """chord, geodesic or lorentz. [lorentz for a hyperbolic encoder, chord for the others]"""
    curvature: float | None = None
    """The c of lorentz. [the encoder's own, else 1]"""
    limit: int | None = None
    """Only so many chains, pairs or pictures of each suite, for a quick look."""
    random_init: bool = False
    """Random weights, for smoke tests and as a control."""
    seed: int = 0
    """Of random weights."""
    out: Path | None = None
    """Folder for report.json and report.txt."""
    resume: bool = False
    """Keep what report.json in the folder has already, and measure the rest."""
    quiet: bool = False
    """Do not say what is measured."""


def eval_hierarchy(config: EvalHierarchyConfig) -> None:
    """Measure the hierarchy in an encoder: order, angles, HyperLex, retrieval, coarse classes, with their baselines."""
    check_spec(config.model)
    for path in filter(None, (config.data, config.images)):
        require_path(path)
    from hyptree.vlm.encoders.encoder import load_encoder
    from hyptree.vlm.radial.hierarchy_report import SUITES, check_request, hierarchy_report
    from hyptree.vlm.radial.report_lines import report_lines

    about = {
        "random_init": config.random_init,
        "seed": config.seed if config.random_init else None,
        "limit": config.limit,
    }
    # Whatever is missing is told before a model is loaded.
    earlier = _kept(config, about) if config.resume else {}
    kept: dict[str, Any] = earlier.get("suites", {})
    suite = check_request(
        config.suite or SUITES[:2], config.images, data=config.data, curvature=config.curvature, limit=config.limit
    )
    device = config.find_device()
    encoder = load_encoder(config.model, random_init=config.random_init, seed=config.seed, device=device)
    report: dict[str, Any] = {}
    for name in suite:
        images = config.images if name == "hierarcaps-images" else None
        new = hierarchy_report(
            encoder,
            [name] if name not in kept else [],
            images if name not in kept else None,
            data=config.data,
            geometry=config.geometry,
            curvature=config.curvature,
            limit=config.limit,
            say=lambda text: say(text, config.quiet),
        )
        if earlier and not math.isclose(new["root_norm"], earlier["root_norm"], rel_tol=1e-3):
            raise UserError(f"cannot resume in {config.out}: its report is of other weights of {config.model}")
        new["suites"] |= {name: kept[name]} if name in kept else {}
        report = new | about | {"suites": report.get("suites", {}) | new["suites"]}
        if config.out is not None:
            with full_disk_is_one_line(config.out):
                config.out.mkdir(parents=True, exist_ok=True)
                write_text(config.out / "report.json", json.dumps(report, indent=2) + "\n")
                write_text(config.out / "report.txt", "\n".join(report_lines(report)) + "\n")
    print(json.dumps(report) if config.json else "\n".join(report_lines(report)))


def _kept(config: EvalHierarchyConfig, about: dict[str, Any]) -> dict[str, Any]:
    """An earlier report in the folder, if it is of the same encoder and settings."""
    if config.out is None:
        raise UserError("--resume needs --out: the folder of the report to go on with")
    path = config.out / "report.json"
    if not path.is_file():
        return {}
    earlier = read_json(path)
    wanted = {"encoder": config.model, **about}
    if config.geometry is not None:
        wanted["geometry"] = config.geometry
    if config.curvature is not None and earlier.get("geometry") == "lorentz":
        wanted["curvature"] = config.curvature
    for key, value in wanted.items():
        if earlier.get(key) != value:
            raise UserError(f"cannot resume {path}: it was made with {key} = {earlier.get(key)}, now it is {value}")
    return earlier

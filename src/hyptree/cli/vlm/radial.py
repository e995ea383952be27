"""``hyptree vlm train-radial`` and ``eval-hierarchy``: align text with chains of captions, measure the hierarchy."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hyptree.errors import UserError
from hyptree.files import full_disk_is_one_line, read_json, require_path, write_text
from hyptree.progress import progress_bar, say
from hyptree.vlm.encoders.spec import check_spec
from hyptree.vlm.radial.settings import ADAPTER_LR, RadialSettings

if TYPE_CHECKING:
    from hyptree.data.hierarchies.hierarcaps import Chain
    from hyptree.vlm.encoders.encoder import Encoder

AdapterName = Literal["none", "scale", "lora", "diagonal", "orthogonal", "full"]


@dataclass(kw_only=True)
class TrainRadialConfig(RadialSettings):
    """``hyptree vlm train-radial``: the training, its data and where it goes."""

    model: str
    """open_clip:NAME:PRETRAINED, or hf:FOLDER_OR_ID (CLIP, SigLIP, SigLIP2, or a sentence encoder)."""
    random_init: bool = False
    """Random weights, for smoke tests."""
    chains: str = "world"
    """world (the built-in one), the folder of HierarCaps, or a CSV with the columns positive and negative."""
    part: str = "expanded"
    """In the folder of HierarCaps: expanded, train or sample. Chains of test pictures are left out."""
    held_out: Path | None = None
    """Another CSV whose pictures are left out."""
    num_chains: int | None = None
    """Only the first so many; for world, how many there are. [all; 2000 of the world]"""
    adapter: AdapterName = "none"
    """Train the whole text tower (none), or only an adapter on it, which is merged at the end."""
    block_size: int = 64
    """Of the adapters scale and orthogonal."""
    rank: int = 8
    """Of the adapter lora."""
    device: str = "cpu"
    """cpu, cuda, ..."""
    out: Path = Path("runs/radial")
    """Folder for the run."""
    resume: bool = False
    """Go on from the checkpoint in the folder."""
    overwrite: bool = False
    """Replace a run that is already in the folder."""
    checkpoint_seconds: float = 60.0
    """Time between checkpoints."""
    save_model: bool = True
    """At the end write the whole encoder too, for other programs."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print the result as JSON."""


@dataclass
class EvalHierarchyConfig:
    """``hyptree vlm eval-hierarchy``."""

    model: str
    """open_clip:NAME:PRETRAINED, or hf:FOLDER_OR_ID (CLIP, SigLIP, SigLIP2, or a sentence encoder)."""
    suite: tuple[str, ...] = ("hierarcaps-text", "hyperlex")
    """Some of hierarcaps-text, hyperlex, world-text, hierarcaps-images, world-images, tiny-imagenet, cifar10."""
    data: Path | None = None
    """Folder that holds hierarcaps/, hyperlex/, tiny-imagenet-wordnet/ and cifar10/; the world needs none."""
    images: Path | None = None
    """Pictures of the HierarCaps test set: an .npz file or a folder. [what lies beside the captions]"""
    weights: Path | None = None
    """Run of train-radial whose trained weights replace those of the model."""
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
    device: str = "cpu"
    """cpu, cuda, ..."""
    out: Path | None = None
    """Folder for report.json and report.txt."""
    resume: bool = False
    """Keep what report.json in the folder has already, and measure the rest."""
    quiet: bool = False
    """Do not say what is measured."""
    json: bool = False
    """Print JSON instead of the table."""


def train_radial(config: TrainRadialConfig) -> None:
    """Align the text of an encoder with chains of captions: general near the root, specific straight behind.

    Trains the text tower, or an adapter on it. Ctrl-C writes a checkpoint; --resume goes on bit for bit.
    """
    config.check()
    check_spec(config.model)
    chains = _chains(config, config.quiet)
    from hyptree.vlm.radial import trainer as radial

    out = config.out
    if (out / radial.CHECKPOINT).exists() and not (config.resume or config.overwrite):
        raise UserError(f"{out} holds a run already; go on with --resume, or replace it with --overwrite")
    encoder = _load(config.model, config.random_init, config.seed, config.device)
    handle: Any = None
    if config.adapter == "none":
        parameters = radial.trainable_text(encoder)
    else:
        from hyptree.vlm import attach
        from hyptree.vlm.adapters import adapter_config

        block, rank = {"block_size": config.block_size}, {"rank": config.rank}
        options = {"scale": block, "orthogonal": block, "lora": rank}.get(config.adapter, {})
        handle = attach(encoder, adapter_config(config.adapter, {**options, "towers": ["text"]}))
        parameters = dict(handle.named_parameters())
        config = replace(config, lr=ADAPTER_LR if config.lr is None else config.lr)
    settings = RadialSettings(**{field.name: getattr(config, field.name) for field in fields(RadialSettings)})
    if encoder.curvature is not None and settings.geometry == "lorentz":
        settings = replace(settings, curvature=encoder.curvature)
    trainer = radial.RadialTrainer(encoder.encode_text, parameters, chains, settings)
    num_parameters = sum(parameter.numel() for parameter in parameters.values())
    say(
        f"{len(chains):,} chains, {trainer.num_steps:,} steps of {settings.batch_size}, {num_parameters:,} parameters",
        config.quiet,
    )
    with full_disk_is_one_line(out):
        out.mkdir(parents=True, exist_ok=True)
        with progress_bar("embedding texts as they are now", 1 + len(trainer.texts()), quiet=config.quiet) as shown:
            trainer.remember(out / radial.FIRST, show=shown.advance)
        with progress_bar("train", trainer.num_steps, quiet=config.quiet) as shown:
            terms = radial.train(
                trainer,
                out,
                resume=config.resume,
                checkpoint_seconds=config.checkpoint_seconds,
                show=shown.reach,
            )
        if handle is not None:
            handle.save(out / "adapter")
            handle.merge_and_unload()
        if config.save_model:
            encoder.save(out / "model")
        result = {
            "model": config.model,
            "adapter": config.adapter,
            "chains": config.chains,
            "num_chains": len(chains),
            "num_parameters": num_parameters,
            "steps": trainer.step,
            "seconds": round(trainer.seconds, 3),
            "settings": asdict(settings),
            "last": terms,
        }
        write_text(out / "result.json", json.dumps(result, indent=2) + "\n")
    if config.json:
        print(json.dumps(result))
    else:
        print("  ".join(f"{name} {value:.4f}" for name, value in terms.items()) or "nothing was left to do")
        print(f"run in {out}" + (f", encoder in {out / 'model'}" if config.save_model else ""))


def eval_hierarchy(config: EvalHierarchyConfig) -> None:
    """Measure the hierarchy in an encoder: order, angles, HyperLex, retrieval, coarse classes, with their baselines."""
    check_spec(config.model)
    for path in filter(None, (config.data, config.images, config.weights)):
        require_path(path)
    from hyptree.vlm.radial.hierarchy_report import SUITES, check_request, hierarchy_report
    from hyptree.vlm.radial.report_lines import report_lines

    about = {
        "random_init": config.random_init,
        "seed": config.seed if config.random_init else None,
        "weights": str(config.weights or ""),
        "limit": config.limit,
    }
    # Whatever is missing is told before a model is loaded.
    earlier = _kept(config, about) if config.resume else {}
    kept: dict[str, Any] = earlier.get("suites", {})
    suite = check_request(
        config.suite or SUITES[:2], config.images, data=config.data, curvature=config.curvature, limit=config.limit
    )
    if config.weights is not None:
        _check_weights(config.weights)
    encoder = _load(config.model, config.random_init, config.seed, config.device)
    if config.weights is not None and (config.weights / "adapter").is_dir():
        from hyptree.vlm import AdapterHandle

        AdapterHandle.load(encoder, config.weights / "adapter")
    elif config.weights is not None:
        from hyptree.vlm.radial.trainer import load_trained

        load_trained(encoder, config.weights)
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


def _load(model: str, random_init: bool, seed: int, device: str) -> Encoder:
    from hyptree.devices import find_device
    from hyptree.vlm.encoders.encoder import load_encoder

    return load_encoder(model, random_init=random_init, seed=seed, device=find_device(device))


def _check_weights(path: Path) -> None:
    from hyptree.vlm.radial.trainer import TRAINED

    if path.is_dir() and not (path / "adapter").is_dir() and not (path / TRAINED).is_file():
        raise UserError(f"--weights {path} holds neither {TRAINED} nor adapter/; has that train-radial run ended?")


def _chains(config: TrainRadialConfig, quiet: bool) -> list[Chain]:
    """What to train on, without the pictures that are held out."""
    from hyptree.data.hierarchies.hierarcaps import read_hierarcaps, without_images_of

    if config.num_chains is not None and config.num_chains < 1:
        raise UserError(f"num_chains must be 1 or more, got {config.num_chains}")
    if config.chains == "world":
        from hyptree.vlm.radial.hierarchy_report import world_chains

        return world_chains("train", config.num_chains or 2000, config.seed)
    path = Path(config.chains)
    chains = read_hierarcaps(path, config.part)
    held_out = [read_hierarcaps(config.held_out)] if config.held_out is not None else []
    if path.is_dir() and config.part != "sample":  # the sample knows no pictures
        held_out.append(read_hierarcaps(path, "test"))
    for others in held_out:
        before = len(chains)
        chains = without_images_of(chains, others)
        say(f"{before - len(chains):,} of {before:,} chains describe a held-out picture and are left out", quiet)
    return chains[: config.num_chains]


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

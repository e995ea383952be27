"""A few-shot job from its settings to its table: data, features, every variant with every number of shots and seed."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hyptree.data import DataSettings, build_dataset
from hyptree.data.sample import PictureDataset
from hyptree.data.settings import read_data_flag
from hyptree.errors import UserError, as_user_error
from hyptree.files import full_disk_is_one_line, read_json, write_text
from hyptree.progress import progress_bar
from hyptree.vlm.encoders.encoder import Encoder, load_encoder
from hyptree.vlm.encoders.features import SHIFTS, PixelSet, encoder_fingerprint, labels_of, picture_features
from hyptree.vlm.encoders.texts import TextTable
from hyptree.vlm.lathadapter.fewshot import (
    Pictures,
    build_head,
    class_names,
    evaluate,
    freeze,
    harmonic_mean,
    sample_shots,
    split_base_new,
    train,
)
from hyptree.vlm.lathadapter.head_file import save_head
from hyptree.vlm.lathadapter.hosts import Host, JointHost, PromptHost
from hyptree.vlm.lathadapter.settings import ZERO_SHOT, FewShotJob

_NOT_OF_THE_RESULT = ("out", "cache", "resume", "overwrite", "quiet", "json", "device", "seeds", "shots", "ablate")
"""Settings that may differ when a run goes on: rows that are there stay right."""


@dataclass
class FewShotSetup:
    """Everything that rows share.

    Attributes:
        train, test: pictures to draw shots from, and to be right about.
        others: name to pictures and to the classes (places in theirs) they are tested on.
        names: of the classes.
        fingerprint: of the encoder.
        texts: features of texts, by the encoder, which stays as it is for the whole job.
    """

    encoder: Encoder
    train: Pictures
    test: Pictures
    others: dict[str, tuple[Pictures, list[int]]]
    names: tuple[str, ...]
    fingerprint: str = ""

    def __post_init__(self) -> None:
        self.texts = TextTable(self.encoder.encode_text)


def run_fewshot(job: FewShotJob) -> dict[str, Any]:
    """Everything that ``hyptree vlm train-fewshot`` does but printing; gives what is in ``results.json``."""
    path = job.out / "results.json"
    kept, of_encoder = _kept_rows(job)
    with full_disk_is_one_line(job.out):
        job.out.mkdir(parents=True, exist_ok=True)
        setup = prepare(job)
        if of_encoder not in (None, setup.fingerprint):
            raise UserError(
                f"{job.out} holds results of other weights of {job.model}; give another --out or --overwrite"
            )
        wanted = [
            (variant, parts, shots, job.seed + number)
            for variant, parts in job.variants().items()
            for shots in ((0,) if variant == ZERO_SHOT else job.shots)
            for number in range(1 if variant == ZERO_SHOT else job.seeds)
        ]
        keys = {(variant, shots, seed) for variant, _, shots, seed in wanted}
        earlier = [row for key, row in kept.items() if key not in keys]  # not asked for now, but never lost
        report: dict[str, Any] = {"settings": _plain(asdict(job)), "classes": len(setup.names)}
        report["encoder"] = setup.fingerprint
        rows: list[dict[str, Any]] = []
        with progress_bar("few-shot runs", len(wanted), quiet=job.quiet) as shown:
            for variant, parts, shots, seed in wanted:
                rows.append(kept.get((variant, shots, seed)) or run_one(job, setup, variant, parts, shots, seed))
                report |= {"rows": rows + earlier, "summary": summarise(rows + earlier)}
                write_text(path, json.dumps(report, indent=1) + "\n")
                shown.advance()
        write_text(job.out / "results.txt", "\n".join(table(report)) + "\n")
    return report


# ----------------------------------------------------------------------------------------------------------------- data


def prepare(job: FewShotJob) -> FewShotSetup:
    """The encoder, and the features of all pictures."""
    from hyptree.devices import find_device

    # What cannot be is told here, before the features are made, which may take long.
    datasets = {split: _dataset(job, job.data, split) for split in ("train", "val")}
    names, test_names = (class_names(dataset.classes) for dataset in datasets.values())
    if test_names != names:
        raise UserError(f"{job.data}: the classes of train and val differ, {len(names)} and {len(test_names)}")
    if hasattr(datasets["train"], "labels"):
        sample_shots(labels_of(datasets["train"]), max(job.shots), job.seed, _base_new(job, len(names))[0], names)
    others = _others(job, names)
    encoder = load_encoder(job.model, random_init=job.random_init, seed=job.seed, device=find_device(job.device))
    if encoder.image_tower is None:
        raise UserError(f"{job.model} reads text alone; few-shot learning needs a CLIP or SigLIP model")
    freeze(encoder.model)
    train_set, test_set = (_pictures(job, encoder, job.data, split) for split in datasets)
    tests = {
        name: (_pictures(job, encoder, data, "val", shift), classes) for name, (data, shift, classes) in others.items()
    }
    key = encoder_fingerprint(encoder)
    setup = FewShotSetup(encoder, train_set, test_set, tests, names, key)
    used = [names, *(class_names(pictures.classes) for pictures, _ in tests.values())]
    sentences = [job.template.format(name) for classes in used for name in classes]
    setup.texts.fill_from(job.cache / f"{key}-texts.safetensors", [*sentences, *class_names(job.attribute_words)], key)
    return setup


def _others(job: FewShotJob, names: Sequence[str]) -> dict[str, tuple[str, str, list[int]]]:
    """Other tests: the name of its column to the data, a shift of its pictures, and the classes tested on."""
    others: dict[str, tuple[str, str, list[int]]] = {}
    for data, short in short_names(job.transfer, "--transfer").items():
        classes = class_names(_dataset(job, data, "val").classes)
        others[f"transfer {short}"] = (data, "", list(range(len(classes))))
    for data, short in short_names(job.shift, "--shift").items():
        source, shift = (job.data, data) if data in SHIFTS else (data, "")
        classes = class_names(_dataset(job, source, "val").classes)
        shared = [i for i, name in enumerate(classes) if name in names]
        if not shared:
            raise UserError(f"--shift {data} has none of the {len(names)} classes of {job.data}; use --transfer")
        others[f"shift {short}"] = (source, shift, shared)
    return others


def _dataset(job: FewShotJob, data: str, split: str) -> PictureDataset:
    name, root = read_data_flag(data)
    with as_user_error(f"--data {data}"):
        settings = DataSettings(name=name, root=root, size=job.size, num_train=job.num_train, num_val=job.num_val)
    dataset = build_dataset(settings, split)
    if not dataset.classes:
        raise UserError(f"{data} has no class per picture; few-shot learning needs one, as pets or world have it")
    return dataset


def _pictures(job: FewShotJob, encoder: Encoder, data: str, split: str, shift: str = "") -> Pictures:
    dataset = _dataset(job, data, split)
    change = SHIFTS[shift] if shift else None
    if job.host == "joint":
        return PixelSet(encoder, dataset, change)
    name = f"features of {_short(data)} {split} {shift}".strip()
    with progress_bar(name, len(dataset), quiet=job.quiet) as shown:
        features = picture_features(encoder, dataset, job.cache, change=change, change_name=shift, progress=shown.reach)
    if features.num_bad and not job.quiet:
        print(f"{data}: {features.num_bad} pictures cannot be read and are left out", file=sys.stderr)
    return features


def _short(data: str, parts: int = 1) -> str:
    """``pets`` of ``pets:some/folder``, the last part of a path otherwise; with more parts, more of the path."""
    name, colon, root = data.partition(":")
    path = (root if colon else data).rstrip("/").split("/")
    if not colon:
        return "/".join(path[-parts:])
    return ":".join([name, "/".join(path[1 - parts :])]) if parts > 1 else name


def short_names(datas: Sequence[str], flag: str) -> dict[str, str]:
    """A short name for each of several data; where two have the same, as much more of the path as tells them apart."""
    names = {data: _short(data) for data in datas}
    if len({data.rstrip("/") for data in datas}) < len(datas):
        raise UserError(f"{flag} names the same data twice: {' '.join(datas)}; give each once")
    for parts in range(2, 2 + max((data.count("/") + 1 for data in datas), default=0)):
        taken = list(names.values())
        names = {data: _short(data, parts) if taken.count(name) > 1 else name for data, name in names.items()}
    return names


# ----------------------------------------------------------------------------------------------------------------- rows


def build_host(job: FewShotJob, setup: FewShotSetup, variant: str, seed: int) -> Host:
    """A fresh host; zero-shot is always the frozen one."""
    encoder = setup.encoder
    if job.host == "frozen" or variant == ZERO_SHOT:
        read_pixels = encoder.encode_pixels if job.host == "joint" else None
        return Host(setup.texts, job.template, read_pixels)
    if job.host == "prompt":
        return PromptHost(encoder, job.num_context, job.context, seed)
    return JointHost(encoder, 2 if job.num_context is None else job.num_context, job.context, job.depth, seed)


def run_one(
    job: FewShotJob, setup: FewShotSetup, variant: str, parts: Sequence[str], shots: int, seed: int
) -> dict[str, Any]:
    """Train and test one variant; one row of the results. The head and what the host learned are kept in the folder."""
    started = time.perf_counter()
    count = len(setup.names)
    base, new = _base_new(job, count)
    names = [setup.names[label] for label in base]
    host = build_host(job, setup, variant, seed)
    scale = float(setup.encoder.logit_scale.detach())
    head = build_head(host, names, scale, job, parts, seed)
    losses: dict[str, float] = {}
    if variant != ZERO_SHOT:
        index = sample_shots(setup.train.labels, shots, seed, base, setup.names)
        losses = train(head, host, setup.train, index, base, names, job, seed)
        heads = job.out / "heads"
        heads.mkdir(parents=True, exist_ok=True)
        about = {"classes": names, "variant": variant, "shots": shots, "seed": seed, "model": job.model}
        name = f"{variant.replace(' ', '-')}-{shots}-{seed}.safetensors"
        save_head(head, heads / name, host.state_dict(), about, setup.encoder)
    trained = time.perf_counter() - started
    score = evaluate(head, host, setup.test, base, names)
    row: dict[str, Any] = {
        "variant": variant,
        "parts": list(parts),
        "shots": shots,
        "seed": seed,
        "num_attributes": head.num_attributes,
        "base" if new else "top1": score.top1,
    }
    if new:
        on_new = evaluate(head, host, setup.test, new, [setup.names[label] for label in new])
        row |= {"new": on_new.top1, "h": harmonic_mean(score.top1, on_new.top1)}
    for name, (pictures, classes) in setup.others.items():
        row[name] = evaluate(head, host, pictures, classes).top1
    row |= {"cosine only": score.cosine, "slope_ratio": score.slope_ratio, "losses": losses}
    return row | {"train_seconds": trained, "seconds": time.perf_counter() - started}


def _base_new(job: FewShotJob, num_classes: int) -> tuple[list[int], list[int]]:
    """Classes to train on, and those that are tested apart."""
    return split_base_new(num_classes) if job.protocol == "base-to-new" else (list(range(num_classes)), [])


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, for every variant and number of shots."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["variant"], row["shots"]), []).append(row)
    return [
        {"variant": variant, "shots": shots, "seeds": len(group)}
        | {
            name: {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}
            for name in measured(group[0])
            if (values := [row[name] for row in group])
        }
        for (variant, shots), group in groups.items()
    ]


def measured(row: dict[str, Any]) -> list[str]:
    """Names of the accuracies in a row, in the order of the table."""
    fixed = [name for name in ("top1", "base", "new", "h") if name in row]
    return [*fixed, *(name for name in row if name.startswith(("transfer ", "shift "))), "cosine only", "slope_ratio"]


def table(report: dict[str, Any]) -> list[str]:
    """Lines for people: accuracies in percent, mean and spread over seeds, and what to keep in mind about them."""
    from hyptree.tables import show

    names = measured(report["rows"][0])
    # By number: a name may hold dots and colons, which mean something in a format.
    columns = {"variant": "{variant}", "shots": "{shots}", "seeds": "{seeds}"}
    columns |= {name.replace("_", " "): f"{{column{i}}}" for i, name in enumerate(names)}
    lines = show(
        [row | {f"column{i}": _format(name, row[name]) for i, name in enumerate(names)} for row in report["summary"]],
        columns,
    )
    ratios = [row["slope_ratio"] for row in report["rows"] if row["slope_ratio"]]
    if ratios:
        share = statistics.fmean(ratios)
        lines += [
            "",
            f"hyperbolic to cosine slope: {share:.4f}. The logits follow the hyperbolic distance {share:.1%} "
            "as much as the cosine; 'cosine only' leaves it out.",
        ]
    return lines


def _format(name: str, value: dict[str, Any]) -> str:
    factor, digits = (1, 4) if name == "slope_ratio" else (100, 1)
    spread = "" if value["sd"] is None else f" ± {value['sd'] * factor:.{digits}f}"
    return f"{value['mean'] * factor:.{digits}f}{spread}"


def _kept_rows(job: FewShotJob) -> tuple[dict[tuple[str, int, int], dict[str, Any]], str | None]:
    """Rows of an earlier run in the folder, by variant, shots and seed, and the fingerprint of its encoder."""
    path = job.out / "results.json"
    if not path.exists() or job.overwrite:
        return {}, None
    if not job.resume:
        raise UserError(f"{job.out} holds results already; go on with --resume, or replace them with --overwrite")
    earlier = read_json(path, "settings", "rows")
    for name, value in _plain(asdict(job)).items():
        if name not in _NOT_OF_THE_RESULT and earlier["settings"].get(name) != value:
            raise UserError(
                f"{job.out} holds results with {name} {earlier['settings'].get(name)}, now {value}; "
                "give another --out, or --overwrite"
            )
    rows = {(row["variant"], row["shots"], row["seed"]): row for row in earlier["rows"]}
    return rows, earlier.get("encoder")


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain

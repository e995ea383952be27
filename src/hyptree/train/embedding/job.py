"""Embedding a hierarchy: the loop, its folder, its numbers. A run resumes bit for bit after any interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hyptree.data.hierarchies.edges import Hierarchy
from hyptree.devices import cpu_threads
from hyptree.evaluate.hierarchy.embedding import CLOSURE, NAMES, POINTS, Embedding, measure
from hyptree.files import cut_log, open_log, save_tensors, write_text
from hyptree.steps import CHECKPOINT, run_steps
from hyptree.train.embedding.embedder import Batches, Embedder
from hyptree.train.parallel.determinism import deterministic
from hyptree.train.run.settings import EmbedSettings

__all__ = ["CHECKPOINT", "Batches", "Embedder", "embed", "measure_quickly", "measure_run", "sample_size", "save_points"]


def embed(
    hierarchy: Hierarchy,
    settings: EmbedSettings,
    out: Path,
    *,
    resume: bool = False,
    eval_every: int = 0,
    checkpoint_seconds: float = 60.0,
    max_seconds: float | None = None,
    show: Callable[..., None] | None = None,
) -> Embedder:
    """Embed a hierarchy and keep the run in a folder that can be resumed after any interruption.

    Ctrl-C (and SIGTERM) finishes the step, writes a checkpoint and raises ``KeyboardInterrupt``.

    Args:
        out: folder for names.txt, closure.safetensors, metrics.jsonl, checkpoint.safetensors, embedding.safetensors.
        resume: go on from the checkpoint in ``out``.
        eval_every: measure MAP each so many epochs; 0 for never.
        checkpoint_seconds: time between checkpoints.
        max_seconds: stop after this time of training, as if interrupted but without the exception.
        show: called after every step as ``show(steps done, note, total=steps)``, e.g. ``ProgressBar.reach``.
    """
    embedder = Embedder(hierarchy, settings)
    if resume:
        embedder.load(out / CHECKPOINT)
        cut_log(out / "metrics.jsonl", "epoch", embedder.epoch)
    else:
        out.mkdir(parents=True, exist_ok=True)
        for stale in (CHECKPOINT, POINTS, "metrics.jsonl", "metrics.json", "disk.png"):  # before new names stand there
            (out / stale).unlink(missing_ok=True)
        write_text(out / NAMES, "".join(f"{name}\n" for name in hierarchy.names))
        save_tensors(out / CLOSURE, {"pairs": torch.from_numpy(hierarchy.pairs).int()})

    before, pairs_done = embedder.seconds, 0
    # Small steps on one thread: waking others costs more than they give, and far more on a busy machine.
    is_small = settings.batch_size * settings.negatives < 1 << 20
    threads = settings.threads or (1 if is_small else torch.get_num_threads())
    around = partial(deterministic, True, strict=True)
    with cpu_threads(threads), open_log(out / "metrics.jsonl") as log:
        for lr, num_pairs in run_steps(embedder, out, checkpoint_seconds, max_seconds, around):
            pairs_done += num_pairs
            loss, pace = embedder.loss_sum / embedder.pair_count, pairs_done / (embedder.seconds - before)
            ends_epoch = embedder.step == 0
            if show is not None:
                epoch = f"epoch {embedder.epoch + (not ends_epoch)}/{settings.epochs}"
                done = embedder.epoch * embedder.num_steps + embedder.step
                show(done, f"{epoch}  loss {loss:.4f}  {pace:,.0f} pairs/s", total=settings.epochs * embedder.num_steps)
            if ends_epoch:
                record: dict[str, Any] = {"epoch": embedder.epoch, "loss": loss, "lr": lr}
                record |= {"seconds": round(embedder.seconds, 4), "pairs_per_second": round(pace, 1)}
                if eval_every and embedder.epoch % eval_every == 0:
                    record |= measure_quickly(embedder.embedding())
                log.write(json.dumps(record) + "\n")
                log.flush()
    save_points(embedder, out)
    return embedder


def save_points(embedder: Embedder, out: Path) -> None:
    """Write the points as the result of the run."""
    s = embedder.settings
    about = {"manifold": s.manifold, "curvature": s.curvature, "loss": s.loss, "epoch": embedder.epoch}
    save_tensors(out / POINTS, {"points": embedder.points.detach()}, about)


def measure_quickly(embedding: Embedding, num_samples: int = 2000) -> dict[str, Any]:
    """MAP and mean rank, from a sample of nodes if there are many."""
    from hyptree.evaluate.hierarchy.reconstruction import reconstruction

    scores = reconstruction(embedding.points, embedding.pairs, embedding.manifold, num_samples=num_samples)
    return {"map": scores.map, "mean_rank": scores.mean_rank}


def sample_size(num_nodes: int, asked: int | None) -> int | None:
    """How many nodes to rank: what was asked, or all up to 20,000 nodes and 2,000 of more."""
    if asked is not None:
        return asked or None
    return None if num_nodes <= 20_000 else 2000


def measure_run(embedder: Embedder, num_samples: int | None = None) -> dict[str, Any]:
    """The numbers that go into metrics.json."""
    scores = measure(embedder.embedding(), num_samples=sample_size(embedder.hierarchy.num_nodes, num_samples))
    return scores | {"epochs": embedder.epoch, "seconds": round(embedder.seconds, 3)}

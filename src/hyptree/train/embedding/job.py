"""Embedding a hierarchy: the loop, its folder, its numbers. A run resumes bit for bit after any interruption."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hyptree.data.hierarchies.edges import Hierarchy
from hyptree.devices import cpu_threads
from hyptree.evaluate.hierarchy.embedding import CLOSURE, NAMES, POINTS, Embedding, measure
from hyptree.files import cut_log, open_log, save_tensors, write_text
from hyptree.signals import Stopped, stop_signals
from hyptree.train.embedding.embedder import Batches, Embedder
from hyptree.train.parallel.determinism import deterministic
from hyptree.train.run.settings import EmbedSettings

__all__ = ["CHECKPOINT", "Batches", "Embedder", "embed", "measure_quickly", "measure_run", "sample_size", "save_points"]

CHECKPOINT = "checkpoint.safetensors"


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
        write_text(out / NAMES, "".join(f"{name}\n" for name in hierarchy.names))
        save_tensors(out / CLOSURE, {"pairs": torch.from_numpy(hierarchy.pairs).int()})
        for stale in (CHECKPOINT, POINTS, "metrics.jsonl", "metrics.json"):
            (out / stale).unlink(missing_ok=True)

    clock, before = time.perf_counter(), embedder.seconds
    saved_at = clock
    pairs_done, eval_seconds = 0, 0.0
    # Small steps on one thread: waking others costs more than they give, and far more on a busy machine.
    is_small = settings.batch_size * settings.negatives < 1 << 20
    threads = settings.threads or (1 if is_small else torch.get_num_threads())
    with stop_signals() as stopped, cpu_threads(threads), open_log(out / "metrics.jsonl") as log:
        while not embedder.is_done:
            epoch, step, lr = embedder.epoch, embedder.step, embedder.lr()
            pairs_before = embedder.pair_count if step else 0
            with deterministic(True, strict=True):
                embedder.advance()
            now = time.perf_counter()
            spent = now - clock - eval_seconds
            embedder.seconds = before + spent
            pairs_done += embedder.pair_count - pairs_before
            loss, pace = embedder.loss_sum / embedder.pair_count, pairs_done / spent
            if show is not None:
                note = f"epoch {epoch + 1}/{settings.epochs}  loss {loss:.4f}  {pace:,.0f} pairs/s"
                show(epoch * embedder.num_steps + step + 1, note, total=settings.epochs * embedder.num_steps)
            if embedder.epoch > epoch:
                record = {"epoch": embedder.epoch, "loss": loss, "lr": lr}
                record |= {"seconds": round(embedder.seconds, 4), "pairs_per_second": round(pace, 1)}
                if eval_every and embedder.epoch % eval_every == 0:
                    began = time.perf_counter()
                    record |= measure_quickly(embedder.embedding())
                    eval_seconds += time.perf_counter() - began
                log.write(json.dumps(record) + "\n")
                log.flush()
            out_of_time = max_seconds is not None and embedder.seconds >= max_seconds
            if stopped() or out_of_time or embedder.is_done or now - saved_at >= checkpoint_seconds:
                embedder.save(out / CHECKPOINT)
                saved_at = time.perf_counter()
            if stopped():
                raise Stopped
            if out_of_time:
                break
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

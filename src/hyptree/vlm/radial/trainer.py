"""Radial training of any text encoder: batches of chains, first embeddings kept, a folder that resumes.

    trainer = RadialTrainer(encoder.encode_text, trainable_text(encoder), chains, RadialSettings(steps=500))
    train(trainer, Path("runs/radial"))

The order of the chains follows from (seed, epoch) alone and nothing else is drawn, so that a run that was stopped goes
on bit for bit. Modes are left alone: an encoder in eval mode trains without dropout, which is what its first
embeddings were made with.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hyptree.data.hierarchies.hierarcaps import Chain, distinct_texts
from hyptree.errors import UserError, as_user_error
from hyptree.files import cut_log, full_disk_is_one_line, hash_tensors, load_tensors, open_log, save_tensors
from hyptree.geometry import lorentz
from hyptree.steps import CHECKPOINT, load_steps, run_steps, save_steps
from hyptree.vlm.encoders.texts import TextTable
from hyptree.vlm.radial.loss import ConeLoss, RadialLoss, RadialTerms
from hyptree.vlm.radial.settings import TOWER_LR, RadialSettings

if TYPE_CHECKING:
    from hyptree.vlm.encoders.encoder import Encoder

Encode = Callable[[list[str]], Tensor]
"""(n, d) embeddings of n texts, with gradients."""

FIRST, METRICS, TRAINED = "first.safetensors", "metrics.jsonl", "trained.safetensors"


def trainable_text(encoder: Encoder) -> dict[str, nn.Parameter]:
    """Parameters of the whole text tower by name; everything else is frozen."""
    wanted = {id(parameter) for parameter in encoder.text_parameters()}
    for parameter in encoder.model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
    return {name: parameter for name, parameter in encoder.model.named_parameters() if id(parameter) in wanted}


class RadialTrainer:
    """The state of one training run, and a step of it.

    Args:
        encode: the text encoder; the root is ``encode([""])``, computed anew in every step, with gradient.
        parameters: what is trained, by name. The full text tower (:func:`trainable_text`) or an adapter's.
        chains: with a negative for every caption.
        settings: of the run.

    Raises:
        UserError: no chains, chains of different lengths or without negatives, an empty caption, nothing to train.
    """

    def __init__(
        self,
        encode: Encode,
        parameters: Mapping[str, nn.Parameter],
        chains: Sequence[Chain],
        settings: RadialSettings | None = None,
    ):
        self.settings = settings or RadialSettings()
        self.settings.check()
        _check_chains(chains)
        if not parameters:
            raise UserError("nothing to train: parameters is empty; give the text tower's or an adapter's")
        self.encode, self.parameters, self.chains = encode, dict(parameters), list(chains)
        s = self.settings
        weights = (s.entail_weight, s.hard_weight, s.keep_weight)
        with as_user_error():
            self.loss: RadialLoss = (
                ConeLoss(weights, s.geometry, s.hard_weight > 0, s.curvature, size=s.cone_size, margin=s.cone_margin)
                if s.objective == "cones"
                else RadialLoss(weights, s.geometry, s.hard_weight > 0, s.curvature)
            )
        rate = TOWER_LR if s.lr is None else s.lr
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=rate, weight_decay=s.weight_decay)
        self.steps_per_epoch = math.ceil(len(self.chains) / s.batch_size)
        self.num_steps = s.steps if s.steps is not None else s.epochs * self.steps_per_epoch
        self.step, self.seconds = 0, 0.0
        self._first: TextTable | None = None
        self.base: list[float] | None = None
        """The root's embedding before the first step, by which one encoder is told from another."""
        self._order: tuple[int, np.ndarray] | None = None

    # --------------------------------------------------------------------------------------------------------- batches

    def batch(self, step: int) -> list[Chain]:
        """The chains of a step; the last batch of an epoch may be smaller."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng([self.settings.seed, epoch])
            self._order = (epoch, generator.permutation(len(self.chains)))
        size = self.settings.batch_size
        return [self.chains[i] for i in self._order[1][place * size : (place + 1) * size]]

    def texts(self) -> list[str]:
        """Every text that the run will see, once."""
        if self.num_steps >= self.steps_per_epoch:
            return distinct_texts(self.chains)
        return distinct_texts(chain for step in range(self.num_steps) for chain in self.batch(step))

    # ------------------------------------------------------------------------------------------------ first embeddings

    def remember(self, path: Path | None = None, block: int = 256, show: Callable[[int], None] | None = None) -> None:
        """Embed every text as the encoder is now: what ``keep`` holds on to. Do this before the first step.

        Args:
            path: file in which they are kept, and from which they are taken if it is of the same texts and encoder.
            show: told how many more are embedded.
        """
        table, texts = TextTable(self.encode, block), ["", *self.texts()]
        if path is None:
            table.fill(texts, show)
        else:
            weights = hashlib.sha256()
            hash_tensors(weights, self.parameters)
            table.fill_from(path, texts, weights.hexdigest(), show)
        self._first, self.base = table, table.rows([""])[0].tolist()

    @property
    def first(self) -> Tensor | None:
        """(n, d) embeddings of ``texts()`` before the first step."""
        return None if self._first is None else self._first.rows(self.texts())

    # ----------------------------------------------------------------------------------------------------------- steps

    def terms(self, chains: Sequence[Chain]) -> RadialTerms:
        """The loss of some chains, with gradients; ``keep`` is 0 before :meth:`remember`."""
        # Each text once, so that equal captions have equal embeddings to the bit, whatever they are padded to.
        texts = list(dict.fromkeys(["", *distinct_texts(chains)]))
        place = {text: i for i, text in enumerate(texts)}
        embedded = self.encode(texts)
        rows = torch.tensor([[place[text] for text in chain.texts] for chain in chains], device=embedded.device)
        all_texts = embedded[rows]  # (B, 2L, d)
        first: tuple[Tensor, ...] = (None, None)  # type: ignore[assignment]
        if self._first is not None:
            rows = self._first.rows([text for chain in chains for text in chain.texts])
            first = rows.view_as(all_texts).to(embedded.device).chunk(2, 1)
        if self.settings.geometry == "lorentz":
            all_texts = lorentz.expmap0(all_texts.float(), self.settings.curvature)
        positive, negative = all_texts.chunk(2, 1)
        return self.loss(positive, negative, embedded[0], *first)

    def advance(self) -> dict[str, float]:
        """One step; gives the numbers of its loss."""
        if self._first is None:
            self.remember()
        self.optimizer.zero_grad(set_to_none=True)
        terms = self.terms(self.batch(self.step))
        terms.total.backward()
        numbers = terms.numbers()
        if not math.isfinite(numbers["total"]):
            raise UserError(f"the loss is {numbers['total']} in step {self.step + 1}; lower --lr")
        self.optimizer.step()
        self.step += 1
        return numbers

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.num_steps

    # ------------------------------------------------------------------------------------------------- saving, loading

    def save(self, path: Path) -> None:
        """Write everything needed to go on from here."""
        save_steps(path, self.parameters, self.optimizer, self._state())

    def load(self, path: Path) -> None:
        """Go on from what :meth:`save` wrote; other chains, settings or encoders are refused."""
        before = load_tensors(path)[1].get("base")
        if _differ(before, self.base):
            raise UserError(f"cannot resume {path}: it was made from an encoder of other weights; use the same model")
        state = load_steps(path, self.parameters, self.optimizer, self._state(), "chains")
        self.step, self.seconds = state["step"], state["seconds"]

    def _state(self) -> dict[str, Any]:
        texts = "\n".join(text for chain in self.chains for text in chain.texts)
        digest = hashlib.sha256(texts.encode()).hexdigest()[:16]
        # More steps or epochs may be asked for later; everything else makes another run.
        settings = {key: value for key, value in asdict(self.settings).items() if key not in ("steps", "epochs")}
        return {"step": self.step, "seconds": self.seconds, "settings": settings, "digest": digest, "base": self.base}


def train(
    trainer: RadialTrainer,
    out: Path,
    *,
    resume: bool = False,
    checkpoint_seconds: float = 60.0,
    log_every: int = 10,
    show: Callable[[int, str], None] | None = None,
) -> dict[str, float]:
    """Train to the end and keep the run in a folder; gives the mean terms of the last lines of metrics.

    Ctrl-C (and SIGTERM) finishes the step, writes a checkpoint and raises ``KeyboardInterrupt``.

    Args:
        out: folder for first.safetensors, checkpoint.safetensors, metrics.jsonl and trained.safetensors.
        resume: go on from the checkpoint in ``out``. The encoder must be as it was before training: the first
            embeddings may have to be made again.
        log_every: steps per line of metrics.
        show: called after every step as ``show(steps done, note)``, e.g. ``ProgressBar.reach``.
    """
    with full_disk_is_one_line(out):
        out.mkdir(parents=True, exist_ok=True)
        trainer.remember(out / FIRST)
        if resume:
            trainer.load(out / CHECKPOINT)
            cut_log(out / METRICS, "step", trainer.step)
        else:
            for stale in (CHECKPOINT, METRICS, TRAINED):
                (out / stale).unlink(missing_ok=True)
        before, began = trainer.seconds, trainer.step
        lately: list[dict[str, float]] = []
        last: dict[str, float] = {}
        with open_log(out / METRICS) as log:
            for numbers in run_steps(trainer, out, checkpoint_seconds):
                lately.append(numbers)
                if trainer.step % log_every == 0 or trainer.is_done:
                    last = {name: sum(line[name] for line in lately) / len(lately) for name in lately[0]}
                    log.write(json.dumps({"step": trainer.step, **last, "seconds": round(trainer.seconds, 3)}) + "\n")
                    log.flush()
                    lately.clear()
                if show is not None:
                    rate = (trainer.step - began) / (trainer.seconds - before)
                    per_step = 2 * len(trainer.chains[0].captions) * trainer.settings.batch_size
                    terms = [f"{name} {last[name]:.4f}" for name in ("total", "entail", "keep") if name in last]
                    show(trainer.step, "  ".join([*terms, f"{rate * per_step:,.0f} texts/s"]))
        save_tensors(out / TRAINED, dict(trainer.parameters), {"step": trainer.step, "base": trainer.base})
        return last


def load_trained(encoder: Encoder, path: Path) -> None:
    """Put the weights of trained.safetensors (or of the run that holds it) into an encoder of the same model."""
    path = path / TRAINED if path.is_dir() else path
    tensors, state = load_tensors(path)
    mine = dict(encoder.model.named_parameters())
    wrong = [name for name, value in tensors.items() if name not in mine or mine[name].shape != value.shape]
    if wrong:
        raise UserError(f"{path} is for another model than {encoder.name}: {wrong[0]} is not there or of another shape")
    if _differ(state.get("base"), encoder.root().tolist()):
        says = "was trained from other weights than those of"
        warnings.warn(f"{path} {says} {encoder.name}: what it gives is not what was trained", stacklevel=2)
    with torch.no_grad():
        for name, value in tensors.items():
            mine[name].copy_(value)


def _differ(then: list[float] | None, now: list[float] | None) -> bool:
    """Whether two roots are of other weights, and not of one encoder on two machines or in half precision."""
    if not then or not now:
        return False
    before = torch.tensor(then)
    return len(then) != len(now) or bool((before - torch.tensor(now)).norm() > 0.05 * before.norm())


def _check_chains(chains: Sequence[Chain]) -> None:
    if not chains:
        raise UserError("no chains to train on")
    levels = len(chains[0].captions)
    for i, chain in enumerate(chains):
        if len(chain.captions) != levels or levels < 2:
            raise UserError(f"chain {i} has {len(chain.captions)} captions; expected {max(levels, 2)} in every chain")
        if len(chain.negatives) != levels:
            raise UserError(f"chain {i} has {len(chain.negatives)} negatives, expected {levels}, one for each caption")
        if not all(text.strip() for text in chain.texts):
            raise UserError(f"chain {i} has an empty caption; the empty text is the root: write it or drop the chain")

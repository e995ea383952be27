"""Multiple choice for language models: the likeliest answer is the model's, by its log-likelihood after the question.

``accuracy`` takes the answer with the largest log-likelihood, ``accuracy_norm`` the one with the largest per byte of
the answer, which does not punish long ones. The tasks and their prompts are in
:mod:`hyptree.evaluate.text.choices_tasks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hyptree.errors import UserError
from hyptree.evaluate.text.choices_tasks import Item, load_items
from hyptree.evaluate.text.likelihood import PairEncoder, context_length, is_too_long, log_likelihoods
from hyptree.progress import progress_bar
from hyptree.tables import aligned, without_nan


@dataclass(frozen=True)
class ChoiceScore:
    """How a model did on one task."""

    task: str
    num_items: int
    num_shots: int
    accuracy: float
    """Share of the items whose right answer is the likeliest."""
    accuracy_error: float
    """Standard error of it."""
    accuracy_norm: float
    """The same with log-likelihoods per byte of the answer."""
    accuracy_norm_error: float
    chance: float
    """What guessing gives."""
    num_truncated: int = 0
    """Questions with answer that were longer than the context and lost tokens on the left."""
    num_spanning: int = 0
    """Questions with answer where a token spans the boundary of the two."""
    groups: dict[str, float] = field(default_factory=dict)
    """Accuracy by group of items (subjects of MMLU)."""

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types; the error of a single item is None."""
        return without_nan(asdict(self))


def score_items(
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    *,
    name: str = "choices",
    num_shots: int = 0,
    context: int | None = None,
    batch_size: int = 16,
    advance: Callable[[int], None] | None = None,
) -> ChoiceScore:
    """The score on these items of a causal language model of transformers' kind, in eval mode.

    Args:
        name, num_shots: noted in the score.
        context: tokens that the model sees at once, by default as many as it can.
        advance: called with the number of answers that were done.
    """
    if not items:
        raise UserError(f"{name} has no items to answer")
    context = context_length(model, context)
    pairs = PairEncoder(tokenizer)([(item.query, text) for item in items for text in item.continuations])
    likelihoods = log_likelihoods(model, pairs, context=context, batch_size=batch_size, advance=advance)
    right, right_norm, start = [], [], 0
    for item in items:
        values = [likelihoods[start + k].value for k in range(len(item.choices))]
        if any(math.isnan(value) for value in values):  # the first choice would win
            raise UserError(
                f"{name}: the model gives NaN for the answers to {item.query[-60:]!r}; its weights are broken"
            )
        per_byte = [v / max(1, len(text.encode())) for v, text in zip(values, item.choices, strict=True)]
        right.append(values.index(max(values)) == item.gold)  # the first of equals
        right_norm.append(per_byte.index(max(per_byte)) == item.gold)
        start += len(values)
    names = list(dict.fromkeys(item.group for item in items if item.group))
    return ChoiceScore(
        name,
        len(items),
        num_shots,
        *_mean(right),
        *_mean(right_norm),
        chance=sum(1 / len(item.choices) for item in items) / len(items),
        num_truncated=sum(is_too_long(pair, context) for pair in pairs),
        num_spanning=sum(pair.spans for pair in pairs),
        groups={
            group: _mean([ok for ok, item in zip(right, items, strict=True) if item.group == group])[0]
            for group in names
        },
    )


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    root: Path | str | None = None,
    limit: int | None = None,
    shots: int | None = None,
    batch_size: int = 16,
    context: int | None = None,
    progress: TextIO | None = None,
) -> list[ChoiceScore]:
    """Scores of a model, task by task; the same for the same arguments.

    Args:
        tasks: names of :data:`hyptree.evaluate.text.choices_tasks.TASKS`, or files of JSON lines with ``query``,
            ``choices`` and ``gold``.
        root: folder of the tasks' files, see :func:`hyptree.evaluate.text.choices_tasks.load_items`.
        limit: at most so many items of each task, spread evenly over it.
        shots: solved examples before each question; by default as customary for the task.
        progress: where to show how far it is; nowhere by default.
    """
    loaded = [(task, *load_items(task, root=root, limit=limit, shots=shots)) for task in tasks]  # errors come at once
    scores = []
    for task, items, num_shots in loaded:
        name = Path(task).name if task.endswith((".jsonl", ".gz")) else task
        options: dict[str, Any] = {"num_shots": num_shots, "context": context, "batch_size": batch_size}
        count = sum(len(item.choices) for item in items)
        with progress_bar(task, count, quiet=progress is None, stream=progress) as shown:
            scores.append(score_items(model, tokenizer, items, name=name, advance=shown.advance, **options))
    return scores


def score_lines(scores: Sequence[ChoiceScore]) -> list[str]:
    """A table for a terminal."""
    lines = [("task", "items", "shots", "accuracy", "per byte", "chance")]
    for score in scores:
        plain = f"{score.accuracy:.4f} ± {score.accuracy_error:.4f}"
        norm = f"{score.accuracy_norm:.4f} ± {score.accuracy_norm_error:.4f}"
        lines.append((score.task, str(score.num_items), str(score.num_shots), plain, norm, f"{score.chance:.4f}"))
    lost = [
        f"{one.task}: {one.num_truncated} questions were longer than the context and lost their beginning"
        for one in scores
        if one.num_truncated
    ]
    return [*aligned(lines), *lost]


def _mean(right: Sequence[bool]) -> tuple[float, float]:
    """Share of what is right, and the standard error of it (NaN for a single item)."""
    n = len(right)
    share = sum(right) / n
    return share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else math.nan

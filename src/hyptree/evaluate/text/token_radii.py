"""Where a language model keeps its tokens: their distance from the origin, against frequency and depth in WordNet.

In a tree that is embedded into hyperbolic space, what is general lies near the origin and what is special far out.
Here is whether that holds for the tokens of a model, as rank correlations with intervals, for its table of embeddings
and for the points in the stream after each layer. How far the distances of the embeddings are from those of any tree is
Gromov's delta, beside that of random directions at the same distances from the origin, which shows what is not due to
learning. Euclidean models are measured alike, by norms.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.data.hierarchies.wordnet import HYPERNYMS, SYNSETS, find_table, read_table
from hyptree.errors import UserError
from hyptree.evaluate.text.residual_stream import hidden_state, reading
from hyptree.tables import without_nan
from hyptree.tree.measure import gromov_delta
from hyptree.vlm.radial.order import spearman

MIN_COUNT = 5
"""A token that the text has fewer times says little about frequency."""
MIN_SEEN = 3
"""A token counts for the stream where it was met so many times in the blocks that went through the model."""
MIN_LETTERS = 3
"""Shorter words are symbols of units and elements in WordNet, and something else in text."""
NUM_BLOCKS = 256
"""Blocks of text that go through a model, for the points in its stream."""
NUM_POINTS = 300
"""Embeddings whose mutual distances are taken, the most frequent ones."""


def space_of(model: Any) -> Any:
    """The manifold that a model's points lie on: Lorentz for a HELM, Euclidean for others."""
    from hyptree.geometry import Euclidean, Lorentz

    return Lorentz(model.config.curvature) if model.config.model_type == "helm" else Euclidean()


def embedding_radii(model: Any) -> np.ndarray:
    """(V,) distance of each token's embedding from the origin."""
    return space_of(model).dist0(model.get_input_embeddings().weight.detach().double()).cpu().numpy()


@torch.no_grad()
def stream_radii(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """(L, V) mean distance from the origin of each token's points after each layer, and (V,) how often it was met.

    Means are NaN for tokens that were not met.

    Args:
        batches: ``input_ids`` (B, N), perhaps ``position_ids`` and ``labels``; where those are -100 nothing counts.
    """
    space, size, layers = space_of(model), model.get_input_embeddings().weight.shape[0], model.base_model.layers
    device = next(model.parameters()).device
    sums = torch.zeros(len(layers), size, dtype=torch.float64, device=device)
    seen = torch.zeros(size, dtype=torch.float64, device=device)
    points: dict[int, Tensor] = {}

    with contextlib.ExitStack() as stack:
        for k, layer in enumerate(layers):
            stack.enter_context(reading(layer, points, k, hidden_state))
        for batch in batches:
            inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
            model.base_model(**inputs, use_cache=False)
            ids = inputs["input_ids"].reshape(-1)
            weight = torch.ones_like(ids, dtype=torch.float64)
            if "labels" in batch:
                weight = (batch["labels"].reshape(-1).to(device) != -100).double()
            seen.index_add_(0, ids, weight)
            for k in range(len(layers)):
                radius = space.dist0(points[k].double()).reshape(-1)
                sums[k].index_add_(0, ids, radius * weight)
    means = torch.where(seen > 0, sums / seen.clamp_min(1), math.nan)
    return means.cpu().numpy(), seen.cpu().numpy().astype(np.int64)


# --------------------------------------------------------------------------------------------------------- correlations


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation with its 95 % interval, over ``count`` tokens."""

    r: float
    low: float
    high: float
    count: int

    def as_dict(self) -> dict[str, float | int | None]:
        """In JSON's types; what cannot be had is None."""
        return without_nan(asdict(self))


def rank_correlation(x: np.ndarray, y: np.ndarray, control: np.ndarray | None = None) -> Correlation:
    """Spearman's correlation of x and y (n,), with ``control`` the partial one: what is left once that is known.

    The interval is Fisher's, with the variance of Bonett and Wright (2000) for ranks, ``(1 + r^2/2)/(n - 3)``.
    """
    if not len(x):
        return Correlation(math.nan, math.nan, math.nan, 0)
    r = spearman(x, y)
    if control is not None:
        rx, ry = spearman(x, control), spearman(y, control)
        rest = (1 - rx * rx) * (1 - ry * ry)
        r = (r - rx * ry) / math.sqrt(rest) if rest > 1e-12 else math.nan
    free = len(x) - 3 - (control is not None)
    if free < 1 or not abs(r) < 1:
        return Correlation(r, math.nan, math.nan, len(x))
    middle, half = math.atanh(r), 1.96 * math.sqrt((1 + r * r / 2) / free)
    return Correlation(r, math.tanh(middle - half), math.tanh(middle + half), len(x))


# -------------------------------------------------------------------------------------------------------------- WordNet


@dataclass(frozen=True)
class Nouns:
    """Nouns that are one token: their token, word and depth in WordNet (steps up to ``entity``)."""

    index: np.ndarray
    words: list[str]
    depth: np.ndarray


def read_depths(folder: Path | str) -> dict[str, int]:
    """Depth of every noun by its first sense, from noun_synsets.tsv.gz and noun_hypernyms.tsv.gz in ``folder``.

    The first sense of ``dog`` is the synset that WordNet names ``dog.n.01``; words whose first sense is named by
    another word are left out. Depth is the length of the shortest way to the root over hypernyms, instances left out.
    """
    names = {row[0]: row[1] for row in read_table(find_table(folder, SYNSETS), "wnid", "name")}
    below: dict[str, list[str]] = {}
    children = set()
    for child, parent, kind, *_ in read_table(find_table(folder, HYPERNYMS), "child", "parent", "kind"):
        if kind == "h":
            below.setdefault(parent, []).append(child)
            children.add(child)
    level = [node for node in below if node not in children]
    depth: dict[str, int] = {}
    at = 0
    while level:
        depth |= dict.fromkeys(level, at)
        following = (child for node in level for child in below.get(node, ()) if child not in depth)
        level, at = list(dict.fromkeys(following)), at + 1
    return {names[node].removesuffix(".n.01"): at for node, at in depth.items() if names[node].endswith(".n.01")}


def single_token_nouns(tokenizer: Any, depths: Mapping[str, int]) -> Nouns:
    """Tokens that are a space and a noun of WordNet in lower case: words, or beginnings of words."""
    nouns = []
    for token, index in tokenizer.get_vocab().items():
        word = token[1:]
        is_word = token[:1] in ("\u0120", "\u2581") and len(word) >= MIN_LETTERS and word.isascii() and word.isalpha()
        if is_word and word.islower() and word in depths:
            nouns.append((index, word, depths[word]))
    nouns.sort()
    index, words, depth = zip(*nouns, strict=True) if nouns else ((), (), ())
    return Nouns(np.array(index, np.int64), list(words), np.array(depth, np.int64))


# ---------------------------------------------------------------------------------------------------------- all of them


def measure_tokens(
    model: Any,
    tokenizer: Any,
    counts: np.ndarray,
    batches: Iterable[Mapping[str, Tensor]],
    depths: Mapping[str, int] | None = None,
    *,
    num_points: int = NUM_POINTS,
    seed: int = 0,
) -> dict[str, Any]:
    """All numbers about the tokens of a causal language model of transformers' kind, in eval mode, in JSON's types.

    Args:
        counts: (V,) how often the training text has each token.
        batches: text for the points in the stream, see :func:`stream_radii`.
        depths: of words in WordNet, see :func:`read_depths`.
        num_points: embeddings whose mutual distances are taken.
        seed: of the random directions that delta is compared with.
    """
    special = np.isin(np.arange(len(counts)), tokenizer.all_special_ids)
    counts = np.where(special, 0, counts)
    radii = embedding_radii(model)[: len(counts)]
    means, seen = stream_radii(model, batches)
    means, seen = means[:, : len(counts)], np.where(special, 0, seen[: len(counts)])
    nouns = single_token_nouns(tokenizer, depths or {})
    frequent = np.flatnonzero(counts >= MIN_COUNT)
    if len(frequent) < 4:
        raise UserError(f"the text has {len(frequent)} tokens that occur {MIN_COUNT} times or more; give more text")
    is_met = (counts >= MIN_COUNT) & (seen >= MIN_SEEN)
    rows = [_row("embedding", radii, counts, counts >= MIN_COUNT, nouns)]
    rows += [_row(f"layer {k}", mean, counts, is_met, nouns) for k, mean in enumerate(means)]
    order = frequent[np.argsort(-counts[frequent], kind="stable")]
    kept = nouns.index[counts[nouns.index] >= MIN_COUNT] if len(nouns.index) else nouns.index
    word = dict(zip(nouns.index.tolist(), zip(nouns.words, nouns.depth.tolist(), strict=True), strict=True))
    return {
        "space": f"Lorentz(c={model.config.curvature:g})" if model.config.model_type == "helm" else "Euclidean",
        "num_tokens": int(counts.sum()),
        "min_count": MIN_COUNT,
        "radius": rows,
        "gromov": _gromov(model, order[:num_points], seed),
        "points": {
            "log_count": np.log10(counts[order]).round(4).tolist(),
            "embedding": radii[order].round(5).tolist(),
            "last_layer": without_nan([round(v, 5) for v in means[-1][order].tolist()]),
        },
        "nouns": [
            {"word": word[i][0], "depth": word[i][1], "count": int(counts[i]), "radius": round(float(radii[i]), 5)}
            for i in kept[np.argsort(radii[kept], kind="stable")].tolist()
        ],
    }


def _row(where: str, radii: np.ndarray, counts: np.ndarray, use: np.ndarray, nouns: Nouns) -> dict[str, Any]:
    """Correlations of one set of radii (V,), over the tokens in ``use``."""
    chosen = use[nouns.index] if len(nouns.index) else np.zeros(0, bool)
    at, depth = nouns.index[chosen], nouns.depth[chosen]
    values = radii[use]
    quartiles = np.quantile(values, (0.25, 0.5, 0.75)).tolist() if len(values) else [math.nan] * 3
    return {
        "where": where,
        "quartiles": without_nan(quartiles),
        "frequency": rank_correlation(values, counts[use]).as_dict(),
        "depth": rank_correlation(radii[at], depth).as_dict(),
        "depth_given_frequency": rank_correlation(radii[at], depth, counts[at]).as_dict(),
    }


def _gromov(model: Any, tokens: np.ndarray, seed: int) -> dict[str, Any]:
    """Delta of the embeddings of these tokens, and of random directions at the same distances from the origin."""
    space = space_of(model)
    weight = model.get_input_embeddings().weight.detach().cpu()
    points = weight[torch.from_numpy(tokens)].double()
    gromov = gromov_delta(space.pairwise_dist(points, points))
    generator = torch.Generator().manual_seed(seed)
    control = []
    for _ in range(3):
        drawn = torch.randn(points.shape, dtype=torch.float64, generator=generator)
        drawn *= points.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)
        control.append(gromov_delta(space.pairwise_dist(drawn, drawn)).relative)
    return {
        "num_points": len(points),
        "delta": gromov.delta,
        "diameter": gromov.diameter,
        "relative": gromov.relative,
        "random_relative": float(np.mean(control)),
        "method": gromov.method,
    }


def curvatures(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Curvature K of each expert over training, from a run's metrics: ``{"01.3": {"step": [...], "value": [...]}}``."""
    curves: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("curvature/") and isinstance(value, int | float):
                line = curves.setdefault(key.removeprefix("curvature/"), {"step": [], "value": []})
                line["step"].append(row["step"])
                line["value"].append(value)
    return curves


def count_tokens(tokens: np.ndarray, size: int) -> np.ndarray:
    """(size,) how often each token is there; ``tokens`` may be a mapped file that is larger than the memory."""
    counts = np.zeros(size, np.int64)
    for start in range(0, len(tokens), 1 << 24):
        counts += np.bincount(tokens[start : start + (1 << 24)], minlength=size)
    return counts

"""How wrong wrong answers are, measured by the tree above the classes.

The first ``num_classes`` nodes of the tree are the classes. Where it is a forest, its roots count as children of one
node above them, so that every two classes meet somewhere.
"""

from __future__ import annotations

import numpy as np

from hyptree.tree import Tree

_CHUNK = 1 << 22
"""Pairs of classes that are looked at together, to bound the memory."""


def hierarchy_scores(tree: Tree, ranked: np.ndarray, label: np.ndarray, num_classes: int) -> dict[str, float]:
    """All numbers of this file, by the names they have in a run: (n, k) guesses, the best first, against (n,) labels.

    ``hierarchical_precision{k}`` says something only when there are more classes than guesses, and is left out else.
    """
    scores = hierarchical_accuracy(tree, ranked[:, 0], label)
    scores["mistake_distance"] = mistake_distance(tree, ranked[:, 0], label)
    num_guesses = ranked.shape[1]
    if num_guesses < num_classes:
        scores[f"hierarchical_precision{num_guesses}"] = hierarchical_precision(tree, ranked, label, num_classes)
    return scores


def hierarchical_accuracy(tree: Tree, guess: np.ndarray, label: np.ndarray) -> dict[str, float]:
    """How far up guess and label part: accuracy among the ancestors, and the severity of mistakes.

    ``top1_up{k}`` counts a guess as right when it lies below the label's k-th ancestor; a label that has fewer
    ancestors is asked for its highest one. A root that all classes share is left out. ``mistake_height`` is the mean
    number of edges from the label up to the lowest common ancestor, over the wrong guesses; 0 when there are none.
    """
    depth = _depth(tree)
    meet = depth[label] - depth[tree.lca(guess, label)]
    one_root = int((tree.parent < 0).sum() == 1)
    highest = np.maximum(depth[label] - one_root, 0)
    scores = {
        f"top1_up{k}": float((meet <= np.minimum(k, highest)).mean()) for k in range(1, int(highest.max(initial=0)) + 1)
    }
    wrong = meet > 0
    scores["mistake_height"] = float(meet[wrong].mean()) if wrong.any() else 0.0
    return scores


def mistake_distance(tree: Tree, guess: np.ndarray, label: np.ndarray) -> float:
    """Mean number of edges between guess and label on their path through the tree, over mistakes; 0 without any.

    The severity of mistakes of Deng et al. (2010) and Bertinetto et al. (2020), with the whole path in place of its
    height: the same but for a factor of two where all classes lie equally deep.
    """
    wrong = guess != label
    return float(class_distance(tree, guess[wrong], label[wrong]).mean()) if wrong.any() else 0.0


def hierarchical_precision(tree: Tree, ranked: np.ndarray, label: np.ndarray, num_classes: int) -> float:
    """Share of the k best guesses that lie in the right neighbourhood, mean over samples (Frome et al. 2013).

    The neighbourhood of a label is the smallest ball around it in the tree that holds at least k classes, the label
    among them: its radius grows edge by edge, and all classes at the last distance belong to it. Which of the guesses
    (n, k) comes first does not matter, and k = 1 is plain accuracy.
    """
    num_guesses = ranked.shape[1]
    if not 1 <= num_guesses <= num_classes:
        raise ValueError(f"expected 1 to {num_classes} guesses per sample, as many as classes, got {num_guesses}")
    known, row = np.unique(label, return_inverse=True)
    radius = np.empty(len(known), np.int64)
    step = max(1, _CHUNK // num_classes)
    for start in range(0, len(known), step):
        block = known[start : start + step]
        around = class_distance(tree, block[:, None], np.arange(num_classes))
        radius[start : start + step] = np.partition(around, num_guesses - 1, axis=1)[:, num_guesses - 1]
    inside = class_distance(tree, ranked, label[:, None]) <= radius[row][:, None]
    return float(inside.mean())


def class_distance(tree: Tree, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Edges between classes, arrays that broadcast; roots of a forest are two edges apart."""
    depth = _depth(tree)
    return depth[i] + depth[j] - 2 * depth[tree.lca(i, j)]


def _depth(tree: Tree) -> np.ndarray:
    """Depth by node; the answer for no common ancestor, -1, lies one edge above the roots."""
    return np.append(tree.depth, -1).astype(np.int64)

"""Numbers of a small CLIP on pictures whose captions are known: retrieval, zero-shot classes, order of levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.vlm.clip.contrast import similarity
from hyptree.vlm.clip.world_text import class_prompts
from hyptree.vlm.radial.order import order_of_levels
from hyptree.vlm.radial.retrieval import radii, recall_at


def score_embeddings(
    image: Tensor,
    captions: Tensor,
    texts: Sequence[str],
    embed: Callable[[Sequence[str]], Tensor],
    *,
    c: float | None = None,
) -> dict[str, float]:
    """Retrieval both ways, zero-shot classes, truth against contradiction, order of levels.

    Args:
        image: (n, d) embeddings of pictures of the built-in world.
        captions: (n, 2L) numbers of texts: L true ones from general to specific, then L contradictions.
        texts: the texts by number.
        embed: texts to embeddings (m, d) on the device of ``image``.
        c: curvature, where embeddings are points of the hyperboloid.

    Returns:
        ``i2t_r1``, ``i2t_r5``, ``t2i_r1``, ``t2i_r5`` among the most specific captions (any equal text counts),
        ``r1`` (their mean at 1), ``zero_shot`` and ``zero_shot_bare`` (classes by "a red truck" in every colour, the
        best one counts, and by "a truck"), ``truth1`` .. ``truthL`` (a true caption is nearer than its contradiction),
        ``tau_d`` with ``tau_words`` beside it and ``tau_first`` (levels 1 and 2 alone), ``radius1`` .. ``radiusL``.
    """
    levels = captions.shape[1] // 2
    used, number = captions.unique(return_inverse=True)  # (m,), (n, 2L): places in `used`
    embedded = embed([texts[i] for i in used.tolist()])
    scores: dict[str, float] = {}
    scores |= _retrieval(image, embedded, number[:, levels - 1], c)
    scores["r1"] = (scores["i2t_r1"] + scores["t2i_r1"]) / 2
    scores |= _zero_shot(image, [texts[i] for i in captions[:, 2].tolist()], embed, c)
    for level in range(levels):
        both = (embedded[number[:, level + part]] for part in (0, levels))
        true, wrong = (torch.cosine_similarity(image, x) if c is None else -lorentz.dist(image, x, c) for x in both)
        scores[f"truth{level + 1}"] = (true > wrong).double().mean().item()
    radius = lorentz.dist0(embedded, c) if c is not None else radii(embedded, embed([""])[0])
    by_level = radius[number[:, :levels]].cpu()
    order = order_of_levels(by_level.double().numpy())
    words = torch.tensor([len(texts[i].split()) for i in used.tolist()])[number[:, :levels].cpu()]
    scores |= {"tau_d": order.tau_a, "tau_first": order.first_two, "tau_words": order_of_levels(words.numpy()).tau_a}
    scores |= {f"radius{level + 1}": by_level[:, level].double().mean().item() for level in range(levels)}
    return scores


def _retrieval(image: Tensor, embedded: Tensor, specific: Tensor, c: float | None) -> dict[str, float]:
    """Recall at 1 and 5 between pictures (n, d) and the distinct ones among their captions."""
    pool, own = specific.unique(return_inverse=True)
    text, number = embedded[pool], torch.arange(len(pool), device=own.device)
    by_image, by_text = recall_at(image, text, own, number, (1, 5), c), recall_at(text, image, number, own, (1, 5), c)
    return {f"{name}_r{k}": hits[k] for name, hits in (("i2t", by_image), ("t2i", by_text)) for k in (1, 5)}


def _zero_shot(
    image: Tensor, coloured: Sequence[str], embed: Callable[[Sequence[str]], Tensor], c: float | None
) -> dict[str, float]:
    """Share of pictures whose class is found; the true class is read from the caption "a red truck"."""
    scores = {}
    full = class_prompts(coloured=True)
    class_of = {text: label for label, texts in enumerate(full) for text in texts}
    label = torch.tensor([class_of[text] for text in coloured], device=image.device)
    for name, prompts in (("zero_shot", full), ("zero_shot_bare", class_prompts(coloured=False))):
        flat = embed([text for texts in prompts for text in texts])
        best = similarity(image, flat, c).unflatten(1, (len(prompts), -1)).amax(2)
        scores[name] = (best.argmax(1) == label).double().mean().item()
    return scores

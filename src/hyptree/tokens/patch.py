"""Patch a vision transformer so that it goes on with fewer tokens, and take the patch away again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import nn

from hyptree.cluster.distance import Metric
from hyptree.errors import UserError, require_one_of
from hyptree.ops.agglomerate import BACKENDS, LINKAGES
from hyptree.tokens.families.adapter import FamilyAdapter, UnsupportedModel
from hyptree.tokens.handle import MODEL_ATTRIBUTE, Handle, Options
from hyptree.tokens.methods import check_metric
from hyptree.tokens.schedule import Removal, check_layers

FAMILIES = {"timm": "hyptree.tokens.families.timm", "transformers": "hyptree.tokens.families.transformers"}
"""Library that defines a model -> module of ours with ``sites(model)``."""


def patch(
    model: nn.Module,
    method: str = "atc",
    *,
    keep: float | None = None,
    r: Removal | None = None,
    threshold: float | None = None,
    counts: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    linkage: str = "average",
    metric: Metric = "cosine",
    features: str = "keys",
    prop_attn: bool | str = True,
    trace: bool = False,
    backend: str = "auto",
    pool: str = "weighted",
    check: bool = True,
    relative: bool = False,
    min_keep: float = 0.0,
    max_keep: float = 1.0,
    seed: int = 0,
) -> Handle:
    """Makes the model reduce its tokens inside some blocks, between attention and MLP, and returns the handle for it.

    The model object itself is patched, by hooks: parameters, ``state_dict`` and classes stay what they are. Patching
    again replaces the first patch. If the model or an argument does not fit, nothing has been changed.

    Args:
        model: a vision transformer of timm or transformers.
        method: "atc" (agglomerative clustering), "tome", "kmeans", "kmedoids", "dpcknn", "topk", "evit" or "random".
        keep: share of the tokens that stays, ``int(P keep^i)`` after the i-th of the layers. Give at most one of keep,
            r, threshold and counts; none of them is keep=1, which changes nothing.
        r: tokens to remove per layer: a number, ``(number, inflect)``, or a list.
        threshold: merge what is closer than this; images then keep different numbers of tokens and are padded.
        counts: tokens that stay after each of the layers.
        layers: 0-based blocks that reduce. Default: the blocks after each quarter of the depth, (3, 6, 9) of 12; with
            ``r`` every block.
        linkage: of "atc": "average", "complete", "single" or "ward".
        metric: "cosine", or a manifold of ``hyptree.geometry`` on which the features are compared.
        features: "keys" compares the keys of the block's attention, averaged over heads; "tokens" the tokens themselves
            where they are merged (with ``metric=Euclidean()`` as in the papers of k-medoids and density peaks).
        prop_attn: whether a token counts in attention as often as it has patches; "mask" and "channel" choose how.
        trace: keep ``sources`` and what ``dendrogram`` needs.
        backend: of the clustering, see ``hyptree.cluster.agglomerate``; a threshold is always searched in torch.
        pool: "weighted" averages tokens by their sizes where the model pools by a mean, "plain" does not.
        check: find NaN and infinity in what is clustered. The CPU raises at once, CUDA with the next forward pass (or
            from ``handle.check()``), so that it never waits.
        relative: ``keep`` is the share of the tokens that reach a layer, ``int(keep * now)``, not of the input.
        min_keep, max_keep: with a threshold, shares of the input tokens that every image stays between.
        seed: of "random", which draws anew in every forward pass.

    Raises:
        UnsupportedModel: The model is not built as needed; the message names the layer.
        UserError: An argument is wrong.
    """
    check_metric(metric, method)
    require_one_of("features", features, ("keys", "tokens"))
    require_one_of("prop_attn", prop_attn, (True, False, "mask", "channel"))
    require_one_of("pool", pool, ("weighted", "plain"))
    require_one_of("linkage", linkage, LINKAGES)
    require_one_of("backend", backend, BACKENDS)
    amounts = {
        name: value
        for name, value in {"keep": keep, "r": r, "threshold": threshold, "counts": counts}.items()
        if value is not None
    }
    if len(amounts) > 1:
        raise UserError(
            f"{' and '.join(amounts)} are given: they exclude each other, give one of keep, r, threshold, counts"
        )
    adapter = find_adapter(model)
    options = Options(
        method=method,
        layers=None if layers is None else check_layers(layers, len(adapter.blocks)),
        linkage=linkage,
        metric=metric,
        features=features,
        prop_attn=prop_attn,
        trace=trace,
        backend=backend,
        pool=pool,
        check=check,
        relative=relative,
        min_keep=min_keep,
        max_keep=max_keep,
        seed=seed,
    )
    handle = Handle(adapter, options)
    for name, value in (amounts or {"keep": 1.0}).items():
        setattr(handle, name, value)
    before = handle_of(model)
    if before is not None:
        before.unpatch()
    try:
        handle.attach()
    except BaseException:
        if before is not None:
            before.attach()
        raise
    return handle


@contextmanager
def patched(model: nn.Module, method: str = "atc", **options: Any) -> Iterator[Handle]:
    """Within the context the model is patched as by ``patch``; afterwards as it was, patched or not."""
    before = handle_of(model)
    handle = patch(model, method, **options)
    try:
        yield handle
    finally:
        handle.unpatch()
        if before is not None and handle_of(model) is None:
            before.attach()


def handle_of(model: nn.Module) -> Handle | None:
    """The handle of a patched model, also of a copy of one; None for a model that is not patched."""
    return model.__dict__.get(MODEL_ATTRIBUTE)


def find_adapter(model: nn.Module) -> FamilyAdapter:
    """What the family of the model says about it."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a model (torch.nn.Module), got {type(model).__name__}")
    kind = type(model).__name__
    for wrapper, inner in (
        ("OptimizedModule", "_orig_mod"),
        ("DataParallel", "module"),
        ("DistributedDataParallel", "module"),
    ):
        if kind == wrapper:
            raise UnsupportedModel(f"the model is wrapped in {kind}: patch model.{inner}, before or after wrapping it")
    for parent in type(model).__mro__:
        family = FAMILIES.get(parent.__module__.split(".")[0])
        if family is not None:
            return import_module(family).sites(model)
    raise UnsupportedModel(
        f"{kind} cannot be reduced: it is a model of neither {' nor '.join(FAMILIES)}; "
        "hyptree.tokens.matcher works on the tokens of any model"
    )

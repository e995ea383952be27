"""The handle of a patched model: switches that act at run time, what the last forward pass did, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from hyptree.cluster import Dendrogram, dendrogram, pairwise_distance
from hyptree.cluster.distance import Metric
from hyptree.errors import UserError
from hyptree.tokens.families.adapter import FamilyAdapter, Override
from hyptree.tokens.finite_check import FiniteCheck
from hyptree.tokens.flow import Flow, Record
from hyptree.tokens.hooks import BlockHooks, Work
from hyptree.tokens.methods import find_method
from hyptree.tokens.schedule import (
    Counts,
    KeepRate,
    Removal,
    Remove,
    Schedule,
    Threshold,
    check_layers,
    default_layers,
    removed_per_layer,
)

MODEL_ATTRIBUTE = "_hyptree_tokens"
_NOTHING = "nothing was there"  # a string, because copies of it are equal and even the same


@dataclass(frozen=True)
class Options:
    """What is fixed when a model is patched; see ``patch`` for the meaning."""

    method: str = "atc"
    layers: tuple[int, ...] | None = None
    linkage: str = "average"
    metric: Metric = "cosine"
    features: str = "keys"
    prop_attn: bool | str = True
    trace: bool = False
    backend: str = "auto"
    pool: str = "weighted"
    check: bool = True
    relative: bool = False
    min_keep: float = 0.0
    max_keep: float = 1.0
    seed: int = 0


class Handle:
    """What ``patch`` returns. It belongs to one model; a copy of the model has a handle of its own (``handle_of``).

    Exactly one of ``keep``, ``r``, ``threshold`` and ``counts`` is active; the others read as None. Setting one makes
    it the active one, from the next forward pass on.

    Attributes:
        enabled: False switches the reduction off without taking the hooks away.
        adapter: how the model is built.
        options: what was given to ``patch``.
    """

    def __init__(self, adapter: FamilyAdapter, options: Options):
        self.adapter = adapter
        self.options = options
        self.method = find_method(options.method)
        self.enabled = True
        self.finite_check = FiniteCheck()
        self.attention_way: str | None = "mask" if options.prop_attn is True else options.prop_attn or None
        self.merge_backend = options.backend if options.backend in ("torch", "triton") else "auto"
        self.schedule: Schedule = KeepRate((), 1.0)
        self._r: Removal | None = None
        self._hooks: list[RemovableHandle] = []
        self._overrides: list[tuple[Override, Any]] = []
        self._is_attached = False
        self._dense = 0
        self._step = 0
        self._forget()

    def _forget(self) -> None:
        """Drops what is known about tokens."""
        self._records: dict[int, Record] = {}
        # Tokens that a block is called with again bring their own flow along: blocks that are computed again for their
        # gradient, replicas of DataParallel, several forward passes before one backward pass. Not an attribute of the
        # tensor, because tensors are saved and copied with their attributes.
        self._flows = WeakTensorKeyDictionary()
        self._running: dict[torch.device, Flow] = {}  # of the last block that ran, by device for DataParallel
        # Of the block that runs, by device. One for all blocks: a block that is computed again for its gradient is left
        # as soon as that has all it needs, and what it held must not stay in memory while the others run.
        self.work: dict[torch.device, Work] = {}
        self._compiled: Flow | None = None  # the same for compiled blocks, if they were the last

    def __getstate__(self) -> dict[str, Any]:
        # Tensors of the last pass belong to that pass, and those with gradients cannot be copied.
        passing = ("_records", "_flows", "_running", "work", "_compiled")
        return {name: value for name, value in self.__dict__.items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __repr__(self) -> str:
        switches = {"keep": self.keep, "r": self.r, "threshold": self.threshold, "counts": self.counts}
        active = ", ".join(f"{name}={value}" for name, value in switches.items() if value is not None)
        state = "" if self._is_attached else ", unpatched"
        kind = type(self.adapter.model).__name__
        return f"Handle({kind}, {self.options.method!r}, {active}, layers={self.layers}{state})"

    # ------------------------------------------------------------------ switches
    @property
    def keep(self) -> float | None:
        """Share of the tokens that stays at each of the layers: ``int(P keep^i)`` after the i-th."""
        return self.schedule.rate if isinstance(self.schedule, KeepRate) else None

    @keep.setter
    def keep(self, rate: float) -> None:
        self._use(KeepRate(self._layers(), rate, self.options.relative))

    @property
    def r(self) -> Removal | None:
        """Tokens removed per layer: a number, ``(number, inflect)``, or a list. Every block unless layers are given."""
        return self._r if isinstance(self.schedule, Remove) else None

    @r.setter
    def r(self, r: Removal) -> None:
        depth = len(self.adapter.blocks)
        layers = tuple(range(depth)) if self.options.layers is None else self._layers()
        self._use(Remove(layers, removed_per_layer(r, len(layers))))
        self._r = r

    @property
    def threshold(self) -> float | None:
        """Distance up to which tokens are merged; images then keep different numbers of tokens."""
        return self.schedule.distance if isinstance(self.schedule, Threshold) else None

    @threshold.setter
    def threshold(self, distance: float) -> None:
        if not self.method.has_threshold:
            raise UserError(
                f"method {self.options.method!r} knows no threshold: use method='atc', or keep, r or counts"
            )
        self._use(Threshold(self._layers(), distance, self.options.min_keep, self.options.max_keep))

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Number of tokens that stay after each of the layers."""
        return self.schedule.num_tokens if isinstance(self.schedule, Counts) else None

    @counts.setter
    def counts(self, counts: Sequence[int]) -> None:
        self._use(Counts(self._layers(), tuple(counts)))

    @property
    def layers(self) -> tuple[int, ...]:
        """The blocks that reduce."""
        return self.schedule.layers

    def _layers(self) -> tuple[int, ...]:
        depth = len(self.adapter.blocks)
        return default_layers(depth) if self.options.layers is None else check_layers(self.options.layers, depth)

    def _use(self, schedule: Schedule) -> None:
        changes_layers = schedule.layers != self.schedule.layers
        self.schedule = schedule
        if self._is_attached and changes_layers:
            self.unpatch()
            self.attach()

    # ------------------------------------------------------------------ what the last forward pass did
    @property
    def num_tokens(self) -> list[int] | list[Tensor]:
        """Patch tokens after each of the layers of the last forward pass; with a threshold (B,) numbers for each."""
        return [record.num for record in self._last()]  # type: ignore[return-value]

    @property
    def sizes(self) -> list[Tensor]:
        """Patches that each token stands for, (B, K) after each of the layers; 0 in padding."""
        num_prefix = self.adapter.num_prefix
        return [
            torch.ones(record.shape, device=record.device) if record.size is None else record.size[:, num_prefix:]
            for record in self._last()
        ]

    @property
    def sources(self) -> list[Tensor]:
        """Token of every input patch, (B, P) after each of the layers; -1 where a patch was dropped. Needs trace."""
        self._require_trace("sources")
        return [record.source for record in self._last() if record.source is not None]

    def dendrogram(self, layer: int) -> Dendrogram:
        """The whole hierarchy of the tokens that were reduced in this block, by the linkage in use. Needs trace.

        Args:
            layer: a 0-based block, one of ``layers``.
        """
        self._require_trace("dendrogram")
        records = {record.layer: record for record in self._last()}
        features = records[layer].features if layer in records else None
        if features is None:
            reduced = [number for number, record in records.items() if record.features is not None]
            raise UserError(f"layer {layer} reduced no tokens in the last forward pass; these did: {reduced}")
        return dendrogram(pairwise_distance(features, self.options.metric), linkage=self.options.linkage)

    def check(self) -> None:
        """Raises if the last forward pass had NaN or infinity in a reducing layer; on CUDA it waits for the device.

        Not needed on the CPU, where the forward pass itself raises. On CUDA the next forward pass raises otherwise.
        """
        self.finite_check.report()

    def _last(self) -> list[Record]:
        return [self._records[layer] for layer in sorted(self._records)]

    def _require_trace(self, what: str) -> None:
        if not self.options.trace:
            raise UserError(f"{what} are kept only if asked for: patch the model with trace=True")

    # ------------------------------------------------------------------ for hooks and adapters
    def enter(self, x: Tensor, is_first: bool) -> Flow:
        """What is known about the tokens that a block is called with; nothing is where a new forward pass begins.

        Args:
            is_first: no block before it reduces. Others begin a pass only if they are called by themselves.
        """
        flow = self.flow_of(x, is_own=is_first)  # of a first block, known if it is computed again for its gradient
        if flow is None:
            step, num_patches = 0, x.shape[1] - self.adapter.num_prefix
            if not torch.compiler.is_compiling():  # a graph that reads a counter would be compiled for each number
                if not is_first and torch._C._current_graph_task_id() != -1:  # a gradient is being computed
                    raise UserError(
                        "a block with fewer tokens is computed again for its gradient from a copy of its tokens, whose "
                        "sizes are not known: checkpoint without moving what is saved elsewhere (save_on_cpu)"
                    )
                if x.is_cuda:
                    self.finite_check.report(wait=False)
                self._step += 1
                step = self._step
            source = None
            if self.options.trace or self._dense:
                source = torch.arange(num_patches, device=x.device).repeat(len(x), 1)
            flow = Flow(num_patches, step, {}, x.shape[1], source=source)
            self._records = flow.records
        self.pass_on(x, flow)
        return flow

    def flow_of(self, x: Tensor, num_cut: int = 0, is_own: bool = False) -> Flow | None:
        """What is known about these tokens: by the tensor itself, else by the last block that ran.

        Args:
            x: (B, L, C) tokens.
            num_cut: prefix tokens that were cut off before.
            is_own: ask the tensor alone.
        """
        if not self.enabled:
            return None
        flow = None
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            flow = self._flows.get(x)
            if flow is None and torch._C._current_graph_task_id() != -1:  # a gradient is being computed
                # Reentrant checkpointing detaches tokens, so the same memory counts as well.
                same = (known for y, known in self._flows.items() if y.device == x.device and y.is_set_to(x))
                flow = next(same, None)
        if flow is not None or is_own:
            return flow
        flow = self._compiled
        if flow is None and not is_compiling:
            flow = self._running.get(x.device)
        if flow is None or flow.length != x.shape[1] + num_cut or (flow.size is not None and len(flow.size) != len(x)):
            return None
        return flow

    def pass_on(self, x: Tensor, flow: Flow) -> None:
        """Notes that the flow describes these tokens.

        A compiled graph only ever overwrites what is noted: it would be compiled again for whatever it reads.
        """
        if torch.compiler.is_compiling():
            self._compiled = flow
        else:
            self._compiled = None
            self._running[x.device] = flow
            self._flows[x] = flow

    def carry(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """A forward hook for modules that change tokens one by one: the output is described as the input was."""
        flow = self.flow_of(args[0])
        if flow is not None:
            self.pass_on(output, flow)

    def token_weights(self, x: Tensor) -> Tensor | None:
        """Weights (B, N) for a mean over these tokens, prefix included: their sizes, or 0 and 1 with ``pool="plain"``.

        None where a plain mean is right.
        """
        flow = self.flow_of(x)
        if flow is None or flow.size is None:
            return None
        if self.options.pool == "weighted":
            return flow.size
        return None if flow.num is None else (flow.size > 0).to(flow.size.dtype)

    def source_after(self, layer: int) -> Tensor | None:
        """(B, P) token of every patch after this block, any block; None where nothing was reduced."""
        before = [record for record in self._last() if record.layer <= layer]
        return before[-1].source if before else None

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Forward passes in this context know where every patch went, with or without trace."""
        self._dense += 1
        try:
            yield
        finally:
            self._dense -= 1

    # ------------------------------------------------------------------ on and off
    def attach(self) -> None:
        """Puts the hooks on the model; all of them or, if one fails, none."""
        layers = self.schedule.layers
        devices = {str(p.device) for parts in self.adapter.blocks for p in parts.block.parameters()}
        if len(devices) > 1:
            raise UserError(
                f"the blocks lie on several devices ({', '.join(sorted(devices))}): patch a model on one device"
            )
        _forget_graphs()
        try:
            self._is_attached = True
            for index in range(layers[0], len(self.adapter.blocks)):
                hooks = BlockHooks(self, index)
                self._hooks += hooks.attach(index == layers[0], index in layers, self.method.needs_scores)
            self._hooks += self.adapter.hooks(self)
            for override in self.adapter.overrides(self):
                self._overrides.append((override, override.module.__dict__.get(override.name, _NOTHING)))
                setattr(override.module, override.name, override.value)
        except BaseException:
            self.unpatch()
            raise
        setattr(self.adapter.model, MODEL_ATTRIBUTE, self)

    def unpatch(self) -> None:
        """Makes the model what it was before: no hooks, its own methods. The last results can still be read."""
        _forget_graphs()
        for hook in self._hooks:
            hook.remove()
        for override, before in reversed(self._overrides):
            if before is _NOTHING:
                delattr(override.module, override.name)
            else:
                setattr(override.module, override.name, before)
        if self.adapter.model.__dict__.get(MODEL_ATTRIBUTE) is self:
            delattr(self.adapter.model, MODEL_ATTRIBUTE)
        self._hooks, self._overrides = [], []
        self._is_attached = False
        self._flows, self._running, self._compiled = WeakTensorKeyDictionary(), {}, None

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.unpatch()


def _forget_graphs() -> None:
    """Makes compiled models look at hooks: graphs of before would go on without ours, or with those that are gone.

    By default a graph is used again for every module of the same class, whatever hooks that one has.
    """
    import torch._dynamo  # late: a compiler is no part of importing a model

    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.reset()

"""The contenders of ``hyptree bench helm``: training steps and decoding steps of a HELM and of its Euclidean twin."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import launches
from benchmarks.options import Mode
from hyptree.lm.config import HelmConfig

_CACHE_HEADROOM = 64
"""Tokens that are decoded before the cache is set back."""


@dataclass(frozen=True)
class Setting:
    """What all contenders of a case share."""

    device: str
    dtype: str
    """"bf16": all of the model; "autocast": float32 weights; "float32"."""

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def tolerance(self) -> float:
        """How far a compiled model may be from the same model eager, in loss and norm of the gradient."""
        return 1e-3 if self.dtype == "float32" else 5e-2

    def autocast(self) -> torch.autocast:
        """Lower precision where the setting says so."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.dtype == "autocast")


def make_helm(config: HelmConfig, setting: Setting) -> Any:
    """A HELM with random weights."""
    from hyptree.lm.modeling import HelmForCausalLM

    torch.manual_seed(0)
    helm: Any = HelmForCausalLM(config)
    return helm.to(setting.device, setting.parameter_dtype)


def make_twin(config: HelmConfig, setting: Setting, experts: Any) -> Any:
    """Its Euclidean twin."""
    from hyptree.lm.twins import euclidean_twin

    torch.manual_seed(0)
    twin: Any = euclidean_twin(config, experts=experts)
    return twin.to(setting.device, setting.parameter_dtype)


def tokens(config: HelmConfig, batch: int, length: int, device: str) -> Tensor:
    """(batch, length) random tokens, always the same."""
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)


class TrainingStep:
    """Loss and gradients of one batch, and a step of fused AdamW where asked for; the gradients are dropped."""

    graph_breaks = 0
    peak_bytes: int | None = None

    def __init__(self, model: Any, ids: Tensor, setting: Setting, mode: Mode, optimizer: bool = False):
        self.model, self.ids, self.setting, self.mode = model.train(), ids, setting, mode
        self.module = launches.in_mode(model, mode)
        self.optimizer = launches.adamw(model) if optimizer else None

    def __call__(self) -> Tensor:
        loss = self._backward(self.module)
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss

    def _backward(self, module: Any) -> Tensor:
        if self.mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with self.setting.autocast():
            loss: Tensor = module(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach().float()

    def error(self) -> float:
        """Largest relative difference to the same step eager, of loss and gradient norm; NaN if one is not finite."""
        actual = self._measures(self.module)
        expected = actual if self.mode == "eager" else self._measures(self.model)
        if not bool(torch.isfinite(actual).all()):
            return float("nan")
        return float(((actual - expected) / expected).abs().max())

    def _measures(self, module: Any) -> Tensor:
        loss = self._backward(module)
        norms = [p.grad.float().norm() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return torch.stack([loss, torch.stack(norms).norm()])

    def see_peak(self) -> None:
        """See the most memory during a step, before anything else is called, as graphs allocate in their first calls.

        Without a GPU weights and what is kept for the backward pass; nothing for what is compiled there.
        """
        if self.setting.device == "cuda":
            self.peak_bytes = launches.peak_bytes(self, self.model, self.mode)
        elif self.mode == "eager":
            self.peak_bytes = launches.own_bytes(self.model) + self._kept()

    def _kept(self) -> int:
        known = {t.untyped_storage().data_ptr() for t in (*self.model.parameters(), *self.model.buffers(), self.ids)}
        kept: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), self.setting.autocast():
            self.model(input_ids=self.ids, labels=self.ids)
        return sum(kept.values())


class DecodingStep:
    """One more token for each sequence of a batch, whose ``context`` tokens are in a static cache."""

    graph_breaks = 0

    def __init__(self, model: Any, ids: Tensor, setting: Setting, mode: Mode):
        from transformers import StaticCache

        self.model, self.setting, self.mode = model.eval(), setting, mode
        self.prompt, self.last = ids[:, :-1], ids[:, -1:].contiguous()
        self.context = self.prompt.shape[1]
        self.cache: Any = StaticCache(config=model.config, max_cache_len=self.context + _CACHE_HEADROOM)
        self.position = torch.full_like(self.last, self.context)
        self.module = launches.in_mode(model, mode)
        self.used = 0
        self._call(self.model, self.prompt, None)

    @torch.no_grad()
    def _call(self, module: Any, ids: Tensor, position: Tensor | None) -> Tensor:
        with self.setting.autocast():
            arguments = {} if position is None else {"position_ids": position}
            output = module(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **arguments)
        return output.logits[:, -1]

    def __call__(self) -> Tensor:
        if self.used == _CACHE_HEADROOM:
            self._set_back()
        self.used += 1
        if self.mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        return self._call(self.module, self.last, self.position)

    def _set_back(self) -> None:
        for layer in self.cache.layers:
            if isinstance(layer.cumulative_length, Tensor):
                with torch.no_grad():
                    layer.cumulative_length.fill_(self.context)
            else:
                layer.cumulative_length = self.context
        self.used = 0

    @torch.no_grad()
    def error(self) -> float:
        """How far the logits are from those of a forward pass without cache, relative to their spread.

        Root mean squares over the vocabulary, the largest over sequences. With experts a quarter of the sequences is
        left out, those farthest off: where two experts are as good as each other the rounding decides which is asked,
        and one other expert in one layer moves the logits of that sequence by half of their spread. In bfloat16 with
        random weights it happens to one token in forty.
        """
        with self.setting.autocast():
            whole = torch.cat([self.prompt, self.last], 1)
            expected = self.model(input_ids=whole, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        has_experts = any("experts" in name or "routed" in name for name, _ in self.model.named_modules())
        return _distance(self().float(), expected, spared=0.25 if has_experts else 0.0)

    def cache_bytes(self) -> float:
        """Bytes of the cache for the context."""
        size = sum(t.untyped_storage().nbytes() for layer in self.cache.layers for t in (layer.keys, layer.values))
        return size * self.context / (self.context + _CACHE_HEADROOM)


def _distance(actual: Tensor, expected: Tensor, spared: float) -> float:
    """Relative distance of rows of logits (B, V), the largest but for a share ``spared``; NaN if any is not finite."""
    if not bool(torch.isfinite(actual).all()):
        return float("nan")
    spread = expected - expected.mean(-1, keepdim=True)
    errors = (actual - expected).norm(dim=-1) / spread.norm(dim=-1)
    return float(errors.sort().values[len(errors) - 1 - int(spared * len(errors))])


@dataclass(frozen=True)
class Kernel:
    """What one kernel takes per call of the profiled function."""

    name: str
    seconds: float
    calls: float

    @property
    def group(self) -> str:
        """What kind of kernel it is, by its name."""
        for group, pattern in _GROUPS.items():
            if re.search(pattern, self.name, re.IGNORECASE):
                return group
        return "other"


_GROUPS = {
    "kernels of hyptree": r"^_(residual_norm|(wide_)?swiglu|lift_heads|centroid|merge_points|dispatch_rows|"
    r"(un)?pack_weight|latent)_",
    "fused by the compiler": r"^triton_",
    "attention": r"flash|fmha|attention|sdpa|mha",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|::mm$|::bmm$|::addmm|splitk|grouped_mm|mkl|linear",
    "loss": r"cross_entropy|softmax",
    "copies": r"memcpy|memset|copy_|copy_kernel|fill",
}


def profile(call: Callable[[], object], device: str, steps: int = 3) -> list[Kernel]:
    """Kernels of ``call``, the longest in all first; on a CPU the operators, by the time spent in themselves."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    call()
    with record(activities=[activity], acc_events=True) as recorded:
        for _ in range(steps):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
    kernels = []
    for event in recorded.key_averages():
        microseconds = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if microseconds > 0:
            kernels.append(Kernel(event.key, microseconds / 1e6 / steps, event.count / steps))
    return sorted(kernels, key=lambda kernel: -kernel.seconds)

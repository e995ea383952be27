"""The hooks of one transformer block: sizes go into its attention, tokens are merged between attention and MLP.

The block itself stays as it is. It computes ``x = x + attention(...)`` and ``x = x + mlp(norm(x))``. A hook before
``norm`` sees the first sum, reduces it and hands the reduced tokens to the MLP branch; a hook behind that branch makes
the second sum use the reduced tokens as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hyptree.ops.backend import exporting
from hyptree.ops.merge import merge_mean
from hyptree.tokens.flow import Flow, Record
from hyptree.tokens.methods import Reduction, Site, merge_below
from hyptree.tokens.schedule import Threshold

if TYPE_CHECKING:
    from hyptree.tokens.handle import Handle


_FLOW = "hyptree_flow"  # the keyword argument by which a checkpointed block tells its attention where it is


@dataclass(eq=False)
class Work:
    """What the hooks of a block hand to each other during one call."""

    hooks: BlockHooks
    flow: Flow
    kwargs: dict[str, Any]  # of the block
    query: Tensor | None = None
    key: Tensor | None = None
    reduced: Any = None  # tokens, once there are fewer
    branch: Tensor | None = None  # output of the MLP branch, while compiling


@dataclass(eq=False)
class _Sum:
    """Stands for the output of the MLP branch: whatever the block adds it to, the sum is that of the reduced tokens."""

    reduced: Tensor
    branch: Tensor

    def __radd__(self, longer: Tensor) -> Tensor:
        return self.reduced + self.branch

    __add__ = __radd__


class BlockHooks:
    """All hooks of one block. They keep nothing between two calls of the block."""

    def __init__(self, handle: Handle, index: int):
        self.handle = handle
        self.index = index
        self.parts = handle.adapter.blocks[index]

    def attach(self, is_first: bool, is_active: bool, needs_scores: bool) -> list[RemovableHandle]:
        """Registers the hooks that this block needs.

        Args:
            is_first: no block before it reduces.
            is_active: it reduces.
            needs_scores: the method asks how much attention tokens receive.
        """
        parts, self.is_first = self.parts, is_first
        hooks = [
            parts.block.register_forward_pre_hook(self._enter, with_kwargs=True),
            parts.block.register_forward_hook(self._leave),
        ]
        if not is_first or parts.hands_on:
            hooks.append(parts.attention.register_forward_pre_hook(self._bias, with_kwargs=True))
        if is_active:
            hooks.append(parts.key.register_forward_hook(self._see_key))
            hooks.append(parts.norm.register_forward_pre_hook(self._reduce))
            hooks.append(parts.branch_end.register_forward_hook(self._end))
        if is_active and needs_scores:
            hooks.append(parts.query.register_forward_hook(self._see_query))
        return hooks

    # ------------------------------------------------------------------ in the order in which they run
    def _enter(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = (*args, *kwargs.values())[0]
        if not self.handle.enabled:
            self.handle.work.pop(x.device, None)
            return None
        flow = self.handle.enter(x, self.is_first)
        self.handle.work[x.device] = Work(self, flow, kwargs)
        if self.parts.hands_on and block.training and getattr(block, "gradient_checkpointing", False):
            # From 5.23 on, transformers computes the inside of a block again, without the hooks of the block itself.
            return args, {**kwargs, _FLOW: (flow, kwargs)}
        return None

    def _bias(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = (*args, *kwargs.values())[0]
        if _FLOW in kwargs:
            self.handle.work[x.device] = Work(self, *kwargs.pop(_FLOW))
        work = self.handle.work.get(x.device)
        if work is None or work.hooks is not self or work.flow.size is None:
            return None
        mask = work.flow.mask(self.handle.attention_way, x)
        return None if mask is None else self.handle.adapter.with_bias(self.index, args, kwargs, mask)

    def _see_query(self, module: nn.Module, args: Any, output: Tensor) -> None:
        work = self.handle.work.get(output.device)
        if work is not None and work.hooks is self:
            work.query = output.detach()

    def _see_key(self, module: nn.Module, args: Any, output: Tensor) -> None:
        work = self.handle.work.get(output.device)
        if work is not None and work.hooks is self:
            work.key = output.detach()

    def _reduce(self, norm: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        x = args[0]
        work = self.handle.work.get(x.device)
        if work is None or work.hooks is not self:
            return None
        handle, flow, features = self.handle, work.flow, None
        num_prefix = handle.adapter.num_prefix
        k = num_now = x.shape[1] - num_prefix
        threshold = handle.schedule if isinstance(handle.schedule, Threshold) else None
        if threshold is None:
            k = handle.schedule.count(self.index, flow.num_patches, num_now)
        if threshold is not None or k < num_now:
            handle.adapter.check_call(self.index, work.kwargs)
            with torch.no_grad():
                site = self._site(work, k, x)
                if threshold is not None:
                    is_token = None if flow.num is None or flow.size is None else flow.size[:, num_prefix:] > 0
                    reduction, k = merge_below(site, threshold, flow.num_patches, is_token)
                else:
                    reduction = handle.method.reduce(site)
            work.query = work.key = None
            work.reduced, flow = self._apply(reduction, k, x, flow)
            work.flow, features = flow, site.features
        if not exporting():  # the tensors of an export mean nothing outside of it
            flow.records[self.index] = Record(
                self.index,
                k if flow.num is None else flow.num,
                (x.shape[0], k),
                x.device,
                flow.size,
                flow.source,
                features if handle.options.trace else None,
            )
        return None if work.reduced is None else (work.reduced,)

    def _end(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        work = self.handle.work.get(output.device)
        if work is None or work.hooks is not self or work.reduced is None:
            return None
        if torch.compiler.is_compiling():
            # A compiler knows no stand-in for a tensor; it drops the useless sum with the full-length tokens itself.
            work.branch = output
            return output.new_zeros(1, 1, 1)
        return _Sum(work.reduced, output)

    def _leave(self, block: nn.Module, args: Any, output: Any) -> Any:
        x = output if isinstance(output, Tensor) else output[0]
        work = self.handle.work.get(x.device)
        if work is None or work.hooks is not self:
            return None
        del self.handle.work[x.device]
        if work.branch is not None:
            x = work.reduced + work.branch
        self.handle.pass_on(x, work.flow)
        if x.is_cuda and not torch.compiler.is_compiling() and self.index == self.handle.schedule.layers[-1]:
            self.handle.finite_check.submit(x.device)
        if work.branch is None:
            return None
        return x if isinstance(output, Tensor) else (x, *output[1:])

    # ------------------------------------------------------------------ what a reduction consists of
    def _site(self, work: Work, k: int, x: Tensor) -> Site:
        handle, adapter = self.handle, self.handle.adapter
        assert work.key is not None
        options = handle.options
        keys, queries = work.key, work.query
        if self.parts.num_heads is not None:
            split = (self.parts.num_heads, -1)
            keys = keys.unflatten(-1, split).transpose(1, 2)  # (B, H, L, d)
            queries = None if queries is None else queries.unflatten(-1, split).transpose(1, 2)
        wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
        if options.features == "keys":
            features = keys[:, :, adapter.num_prefix :].mean(1, dtype=wide)  # (B, N, d)
        else:
            features = x[:, adapter.num_prefix :].detach().to(wide)  # (B, N, C)
        if options.check:
            handle.finite_check.record(features, x, self.index, self.parts.name)
        scores = None if queries is None else self._scores(queries, keys, work.flow.size)
        # A seed for each layer of each forward pass.
        seed = (options.seed * 1_000_003 + work.flow.step) * 1009 + self.index
        return Site(features, k, scores, options.linkage, options.metric, options.backend, seed, adapter.num_prefix)

    def _scores(self, queries: Tensor, keys: Tensor, size: Tensor | None) -> Tensor:
        """(B, N) attention that patch tokens receive from the class token, or from all tokens if there is none."""
        adapter = self.handle.adapter
        if adapter.has_class_token:
            queries = queries[:, :, :1]
        with torch.autocast(keys.device.type, enabled=False):
            logits = (queries.float() @ keys.float().mT) * self.parts.scale  # (B, H, Q, L)
            if size is not None and self.handle.attention_way is not None:
                logits = logits + size.log()[:, None, None]
            return logits.softmax(-1).mean((1, 2))[:, adapter.num_prefix :]

    def _apply(self, reduction: Reduction, k: int, x: Tensor, flow: Flow) -> tuple[Tensor, Flow]:
        """The reduced tokens and the flow that describes them."""
        num_prefix = self.handle.adapter.num_prefix
        size: Tensor | None
        if reduction.keep is not None:
            index = _behind(num_prefix, reduction.keep)  # (B, num_prefix + K)
            reduced = x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
            size = None if flow.size is None else flow.size.gather(1, index)
            labels = reduction.keep.new_full((x.shape[0], x.shape[1] - num_prefix), -1)
            labels = labels.scatter(1, reduction.keep, torch.arange(k, device=x.device).expand_as(reduction.keep))
        else:
            assert reduction.labels is not None
            labels = reduction.labels
            if reduction.weight is not None:
                weight = torch.cat([reduction.weight.new_ones(len(x), num_prefix), reduction.weight], 1)
            else:
                weight = torch.ones(x.shape[:2], device=x.device) if flow.size is None else flow.size
            reduced, size = merge_mean(x, weight, labels, k, num_prefix=num_prefix, backend=self.handle.merge_backend)
            if reduction.weight is not None:
                size = None
        source = flow.source
        if source is not None:  # -1 stays, and is what dropped tokens lead to
            source = torch.where(source < 0, source, labels.gather(1, source.clamp_min(0)))
        return reduced, Flow(flow.num_patches, flow.step, flow.records, num_prefix + k, size, source, reduction.num)


def _behind(num_prefix: int, index: Tensor) -> Tensor:
    """Index of patch tokens (B, K) as index into all tokens, prefix tokens in front: (B, num_prefix + K)."""
    prefix = torch.arange(num_prefix, device=index.device).expand(len(index), -1)
    return torch.cat([prefix, index + num_prefix], 1)

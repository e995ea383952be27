"""The processes of a run: one on a laptop, several under torchrun. accelerate finds them and their devices.

With one process every function here is the identity, so the loop reads the same for one and for many. And sums are
taken in a fixed order, so that the same run gives the same bits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyptree.errors import UserError

T = TypeVar("T")

_SHARD_FROM = 1 << 17
"""Parameters from which a block of a model becomes a shard of its own under FSDP2."""


_num_closed = 0
"""Groups of several processes that this process has left."""


class Processes:
    """Who we are among the processes, and what they do together."""

    def __init__(self, device: str = "auto", parallel: str = "auto"):
        from accelerate import Accelerator  # type: ignore[import-untyped]

        if device not in ("auto", "cpu", "cuda"):
            raise UserError(f"run.device must be auto, cpu or cuda, got {device!r}")
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("run.device cuda cannot be used here: torch sees no GPU")
        # By torchrun, that is: clusters set WORLD_SIZE alone, for other programs.
        started = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
        # Without a GPU accelerate has to be told that processes meet on CPUs: else each would be alone and train the
        # whole run, all of them into one folder.
        on_cpu = device == "cpu" or (started > 1 and not torch.cuda.is_available())
        if _num_closed:
            _join_again("gloo" if on_cpu or not torch.cuda.is_available() else "nccl")
        self.accelerator = Accelerator(cpu=on_cpu)
        self.device: torch.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.is_main = self.rank == 0
        """Whether this process prints and writes."""
        self.size: int = self.accelerator.num_processes
        if self.size != started:
            raise UserError(
                f"{started} processes were started (WORLD_SIZE), accelerate sees {self.size}; start them by torchrun"
            )
        self.shards = parallel == "fsdp2" and self.size > 1
        self._whole: list[nn.Parameter] = []
        """Parameters of a sharded model that cannot be cut: single numbers."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as the training step calls it. Under FSDP2 the given model itself is sharded, in place.

        FSDP2 is torch's ``fully_shard``, called here because accelerate offers it for GPUs only: this way what two
        processes on a CPU test is what runs on many GPUs.
        """
        if not self.shards:
            return self.accelerator.prepare_model(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._whole = [p for p in model.parameters() if p.dim() == 0]
        options: dict[str, Any] = {"mesh": init_device_mesh(self.device.type, (self.size,))}
        options["ignored_params"] = set(self._whole)
        lists = (nn.ModuleList, nn.ModuleDict)  # whose forward nobody calls
        for module in reversed(list(model.modules())):  # children before their parents
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                for child in module:
                    if sum(p.numel() for p in child.parameters()) >= _SHARD_FROM and not isinstance(child, lists):
                        fully_shard(child, **options)
        fully_shard(model, **options)
        return model

    def no_sync(self, model: nn.Module, waits: bool) -> contextlib.AbstractContextManager[Any]:
        """Around a backward pass; while it ``waits`` the gradients stay with this process (accumulation)."""
        if self.shards:
            model.set_requires_gradient_sync(not waits)  # type: ignore[operator]
        elif waits:
            return model.no_sync()  # type: ignore[operator]
        return contextlib.nullcontext()

    def sync_rest(self, model: nn.Module) -> None:
        """After the backward pass of a sharded model: what DDP does and ``fully_shard`` leaves to us.

        Gradients of single numbers become their mean, buffers (running means of a batch norm) those of the first
        process.
        """
        self.sync_buffers(model)
        if self._whole:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._whole]
            for p, grad in zip(self._whole, self.mean(torch.stack(grads)), strict=True):
                p.grad = grad.clone()

    def sync_buffers(self, model: nn.Module) -> None:
        """Give every process the buffers of the first one, but those that count what each does: no part of a state."""
        kept = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in kept:
                dist.broadcast(buffer, 0)

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Inside, a sharded model is whole in every process: a forward pass needs nobody else."""
        from torch.distributed.fsdp import FSDPModule

        shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for shard in shards:
            shard.set_reshard_after_forward(False, recurse=False)
            shard.unshard()
        try:
            yield
        finally:
            for shard in shards:
                shard.reshard()
                shard.set_reshard_after_forward(shard is not model, recurse=False)

    def gather(self, tensor: Tensor) -> Tensor:
        """(n, ...) tensors of all processes, concatenated in their order; each may have another n."""
        if self.size == 1:
            return tensor
        tensor = tensor.to(self.device)
        counts = [torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(tensor)], device=self.device))
        longest = max(int(count) for count in counts)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over processes."""
        mean: Tensor = self.accelerator.reduce(tensor.to(self.device), "mean")
        return mean

    def together(self, work: Callable[..., T], *args: Any, on_main: bool = False) -> T:
        """Do ``work`` in every process, and stop all of them when it is a ``UserError`` in any: no one waits forever.

        The first process raises the error (and so prints it); the others leave with the same exit code in silence.

        Args:
            on_main: only the first process works, and gives what it got to the others.
        """
        if self.size == 1:
            return work(*args)
        result: T | None = None
        problem = None
        try:
            result = None if on_main and not self.is_main else work(*args)
        except UserError as error:
            problem = str(error)
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, (problem, result if on_main else None))
        problems = [problem for problem, _ in answers if problem is not None]
        if problems:
            if self.is_main:
                raise UserError(problems[0])
            raise SystemExit(2)
        return answers[0][1] if on_main else result  # type: ignore[return-value]

    def close(self) -> None:
        """Leave the group of processes; they may open another one afterwards, all of them."""
        if self.size > 1 and dist.is_initialized():
            global _num_closed
            _num_closed += 1
            dist.destroy_process_group()
            # accelerate keeps what it found in its class, and would go on with the group that is gone.
            type(self.accelerator.state)._reset_state(reset_partial_state=True)


def _join_again(backend: str) -> None:
    """A group after one that was left: it meets under another name, since what the first one wrote is still there."""
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group(backend, store=dist.PrefixStore(f"group{_num_closed}", store), rank=rank, world_size=size)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Sums in a fixed order wherever torch offers one: the same run gives the same bits on a GPU too.

    The gradient of fused attention is an exception, of which torch warns: it has a fixed order only where an operation
    without one is an error, which would end the runs of other models.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill, benchmark = options.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    options.fill_uninitialized_memory = False  # costs a pass over every new tensor
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        options.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark

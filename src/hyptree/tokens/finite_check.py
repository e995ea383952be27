"""Finds NaN and infinity in the features that are clustered, without making a GPU wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyptree.cluster import check_finite
from hyptree.errors import UserError


class FiniteCheck:
    """Looks at every reducing layer of a forward pass and names the first one that is not finite.

    On the CPU it raises where it looks. On CUDA a look would stop the host until the device has caught up, so the
    flags of a pass are copied in the background and the error comes with the next pass, or from ``report``.
    """

    def __init__(self) -> None:
        # By device, because replicas of DataParallel look at the same time.
        self._flags: dict[torch.device, list[tuple[str, Tensor]]] = {}
        self._pending: dict[torch.device, tuple[list[str], Tensor, torch.cuda.Event]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_flags": {}, "_pending": {}}

    def record(self, features: Tensor, x: Tensor, layer: int, name: str) -> None:
        """Notes or raises what is wrong with the features of a layer.

        One key that is not a number makes every output of attention one that is none, so on CUDA a single token tells.
        """
        if torch.compiler.is_compiling():
            return
        where = f"layer {layer} ({name})"
        if not x.is_cuda:
            check_finite(features, where)
        elif not torch.cuda.is_current_stream_capturing():
            self._flags.setdefault(x.device, []).append((where, x[:, 0].detach().sum(dtype=torch.float32)))

    def submit(self, device: torch.device) -> None:
        """At the end of a pass: starts to copy its flags to the host."""
        noted = self._flags.pop(device, [])
        if not noted:
            return
        flags = torch.stack([flag for _, flag in noted])
        host = torch.empty(flags.shape, pin_memory=True).copy_(flags, non_blocking=True)
        with torch.cuda.device(device):
            event = torch.cuda.Event()
            event.record()
        self._pending[device] = [where for where, _ in noted], host, event

    def report(self, wait: bool = True) -> None:
        """Raises if the last pass was not finite; without ``wait`` only if that is known already."""
        for device in list(self._flags) if wait else ():
            self.submit(device)
        for device, (names, host, event) in list(self._pending.items()):
            if wait:
                event.synchronize()
            elif torch.cuda.is_current_stream_capturing() or not event.query():
                continue
            del self._pending[device]
            bad = (~torch.isfinite(host)).nonzero().flatten().tolist()
            if bad:
                raise UserError(
                    f"{names[bad[0]]}: NaN or infinity in the tokens of the last forward pass; "
                    "look for it in the input and the weights before this place, tokens cannot be compared"
                )

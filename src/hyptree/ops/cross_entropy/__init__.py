"""Cross-entropy of rows of logits, whose gradient takes the place of the logits.

``cross_entropy_`` is the operation; ``reference`` holds its definition, ``triton`` its kernel. It works in place and is
no node of a graph: ``hyptree.lm.loss`` calls it within one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.ops.backend import choose
from hyptree.ops.cross_entropy import reference

__all__ = ["cross_entropy_", "reference"]


def cross_entropy_(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, with_gradient: bool = True, backend: str = "auto"
) -> Tensor:
    """``logsumexp(row) - row[label]`` of each row: (R, V), (R,) -> (R,), float32 for every dtype but float64.

    No autograd: where a gradient is wanted, ``logits`` are overwritten by it, ``softmax(row) - onehot(label)``, rounded
    once from float32. Rows whose label is ``ignore_index`` have loss and gradient 0. A label outside of 0 .. V - 1 is
    an error, which the kernel shows as a NaN.

    Args:
        logits: contiguous.
        labels: int64.
        backend: "auto", "torch" or "triton" (CUDA, not float64). Their last bits may differ.
    """
    unsupported = "logits are float64, the kernel needs float32" if logits.dtype == torch.float64 else None
    if choose(backend, logits, unsupported) == "torch":
        return reference.cross_entropy_(logits, labels, ignore_index, with_gradient)
    from hyptree.ops.cross_entropy import triton

    return triton.cross_entropy_(logits, labels, ignore_index, with_gradient)

"""Find where a NaN, an infinity or a saturation starts: ``HYPTREE_DEBUG=1`` or ``with hyptree.geometry.debug():``.

Off, it costs one test of a boolean per call. On, every geometry function checks what comes in, what goes out and what
flows back, and the first offender raises a :class:`GeometryError` that names the function, the tensor, its shape and
the first bad row. The checks read values, so they are skipped inside ``torch.compile`` and ``torch.func`` transforms.
"""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

_enabled = os.environ.get("HYPTREE_DEBUG", "0") not in ("", "0")


class GeometryError(ValueError):
    """A value left the set on which the geometry is defined."""


def is_enabled() -> bool:
    """True if the checks are on for this process or block."""
    return _enabled


@contextlib.contextmanager
def debug(enabled: bool = True) -> Iterator[None]:
    """Switch the checks on (or off) for a block, whatever ``HYPTREE_DEBUG`` says."""
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before


def can_read_values(*tensors: Tensor) -> bool:
    """True if Python may look at the values: not while tracing, not inside ``vmap``, ``grad`` or ``jacrev``."""
    if torch.compiler.is_compiling():
        return False
    return not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def first_bad_row(bad: Tensor) -> str:
    """Where the first true entry of ``bad`` (...,) is, in words."""
    index = bad.nonzero()[0].tolist()
    count = int(bad.sum())
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"row {index[0] if len(index) == 1 else tuple(index)}{more}" if index else "the only row"


def require_finite(where: str, name: str, value: Tensor, rowwise: bool = True) -> None:
    """Raise if ``value`` holds a NaN or an infinity, naming the row of its first one.

    Args:
        rowwise: the last axis is one point; otherwise each entry is a row of its own.
    """
    if not can_read_values(value):
        return
    bad = ~torch.isfinite(value.detach())
    if rowwise and value.dim() > 0:
        bad = bad.any(-1)
    if bool(bad.any()):
        what = "NaN" if bool(torch.isnan(value.detach()).any()) else "infinity"
        raise GeometryError(f"{where}: {what} in {name} of shape {tuple(value.shape)}, {first_bad_row(bad)}")


def watch_gradient(where: str, name: str, value: Tensor) -> None:
    """Raise during backward if the gradient of ``value`` is not finite."""
    if value.requires_grad and can_read_values(value):
        value.register_hook(lambda grad: require_finite(where, f"the gradient of {name}", grad))


def require_unsaturated(where: str, over: Tensor, advice: str) -> None:
    """Raise if any row of ``over`` (..., 1) reached the limit of its dtype; does nothing unless debugging."""
    if _enabled and can_read_values(over) and bool(over.any()):
        raise GeometryError(
            f"{where}: saturation, shape {tuple(over.shape[:-1])}, {first_bad_row(over[..., 0])}; {advice}"
        )

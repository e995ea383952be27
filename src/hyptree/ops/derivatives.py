"""What kernels with a gradient of their own leave to the definition: second derivatives, transforms of functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FIRST_ONLY = "kernels give first derivatives only; HYPTREE_BACKEND=torch allows create_graph=True"


def in_transform() -> bool:
    """Whether this is called below ``torch.func`` (vmap, jacrev, ...), which knows plain torch alone."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_plain_call(*inputs: Tensor | None) -> bool:
    """Whether nobody will ask for a gradient, so that a kernel may be called without autograd's way around it."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return False
    return not (torch.compiler.is_compiling() or in_transform())


def wants_graph() -> bool:
    """Whether a backward pass is itself recorded (``create_graph=True``); asked inside it."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass by kernels that refuses to be recorded: a second derivative would be a part of the true one.

    torch's ``once_differentiable`` says nothing where ``torch.autograd.grad`` goes past it, by way of the outputs.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        if wants_graph():
            raise RuntimeError(FIRST_ONLY)
        return backward(ctx, *grads)

    return run


def grads_with_graph(
    definition: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of ``definition(*inputs)`` that can be differentiated again; None for inputs nobody asks about.

    Args:
        inputs: as autograd saved them, with their history.
    """
    # views of their own: one input may have been made of another, whose gradient is not to go through it twice
    inputs = [None if x is None else x.view_as(x) for x in inputs]
    wanted = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed and x is not None]
    grads = iter(torch.autograd.grad(definition(*inputs), wanted, grad, create_graph=True))
    return tuple(
        next(grads) if is_needed and x is not None else None for x, is_needed in zip(inputs, needed, strict=True)
    )

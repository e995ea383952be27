"""The rules every public geometry function shares, and the list of all of them.

``@geometric`` gives a function its dtype policy (half precision is computed in float32; points come back in the dtype
they came in, scalars in float32), its input checks (one clear line), and the debug checks. It also enters the
function in :data:`FUNCTIONS`, over which the contract tests run: a new function cannot be forgotten by them.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor

from hyptree.geometry.core import debug, rows
from hyptree.geometry.core.numerics import cap_norm, root

Returns = Literal["point", "tangent", "ball", "scalar"]
P = ParamSpec("P")

_HALF = (torch.bfloat16, torch.float16)
_FP16_MAX = 65504.0


@dataclass(frozen=True)
class GeometryFunction:
    """One public function: how it is called and what it returns."""

    name: str
    """Module and function, as in ``lorentz.dist``."""
    fn: Callable[..., Tensor]
    args: tuple[str, ...]
    """Names of its positional arguments; ``c`` is among them unless the space is flat."""
    returns: Returns
    free: frozenset[str]
    """Tensor arguments whose last axis is not the manifold axis."""
    form: rows.RowForm | None = None
    """Its fast form."""


FUNCTIONS: dict[str, GeometryFunction] = {}


def geometric(
    returns: Returns, free: tuple[str, ...] = (), form: rows.RowForm | None = None
) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Decorate a public function of a geometry module.

    Args:
        returns: "point", "tangent" and "ball" (a point that must stay inside the ball when it is rounded) come back in
            the dtype of the input, "scalar" in float32 at least.
        free: names of tensor arguments with a last axis of their own (weights, matrices, steps).
        form: the same function in few passes, for the rows and the calls it fits.
    """

    def decorate(fn: Callable[P, Tensor]) -> Callable[P, Tensor]:
        name = f"{fn.__module__.rsplit('.', 1)[-1]}.{fn.__name__}"
        parameters = inspect.signature(fn).parameters.values()
        names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        free_names = frozenset(free)
        by_rows = functools.partial(_by_rows, form, fn, names, free_names)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            if not debug.is_enabled():
                out = by_rows(args, kwargs)
                if out is not None:
                    return out
            arguments = dict(zip(names, args, strict=False))
            arguments.update(kwargs)
            dtype = _check(name, arguments, free_names)
            compute = torch.float32 if dtype in _HALF else dtype
            cast: dict[int, Tensor] = {}  # one tensor passed twice stays one tensor: `x is y` means something below
            for key, value in arguments.items():
                if isinstance(value, Tensor) and value.dtype != compute:
                    arguments[key] = cast.setdefault(id(value), value.to(compute))
            if debug.is_enabled():
                arguments = _watch_inputs(name, arguments)
            out = by_rows((), arguments) if cast and not debug.is_enabled() else None
            if out is None:
                out = fn(**arguments)  # type: ignore[call-arg]
            if debug.is_enabled():
                debug.require_finite(name, "the result", out, rowwise=returns != "scalar")
                debug.watch_gradient(name, "its result", out)
            if returns == "scalar" or out.dtype == dtype:
                return out
            if returns == "ball":
                out = cap_norm(out, (1 - torch.finfo(dtype).eps) / root(arguments.get("c", 1.0)))
            return _store(out, dtype, name)

        FUNCTIONS[name] = GeometryFunction(name, call, names, returns, free_names, form)
        return call

    return decorate


def _by_rows(
    form: rows.RowForm | None,
    fn: Callable[..., Tensor],
    names: tuple[str, ...],
    free: frozenset[str],
    args: Any,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The result by the fast form or by kernels if the arguments, of which ``c`` may be missing, are what they take."""
    values = args
    if kwargs:
        values = (*args, *[kwargs[name] for name in names[len(args) :] if name in kwargs])
    points, c = (values[:-1], values[-1]) if len(values) == len(names) else (values, 1.0)
    if len(points) != len(names) - 1 or names[-1] != "c":
        return None
    if rows.on_gpu(points[0]) or rows.on_gpu(points[-1]):
        settings = {name: value for name, value in kwargs.items() if name not in names}
        fits = _fit_kernels(names, free, points, c)
        return rows.by_kernels(fn, *points, c, **settings) if fits else None
    if form is None or len(values) != len(args) + len(kwargs) or not rows.fits(points, c):
        return None
    return rows.apply(form, fn, points, c)


def _fit_kernels(names: tuple[str, ...], free: frozenset[str], points: tuple[Any, ...], c: Any) -> bool:
    """Whether these are float32 rows of one length, a curvature, and numbers where ``free`` allows them."""
    size = None
    for name, x in zip(names, (*points, c), strict=True):
        if isinstance(x, Tensor):
            width = x.shape[-1] if x.dim() else None
            if x.dtype is not torch.float32:
                return False
            if name == "c" or name in free:
                if width not in (None, 1):
                    return False
            elif width is None or size not in (None, width):
                return False
            else:
                size = width
        elif name == "c":
            if not isinstance(x, float | int) or not 0 < x < float("inf"):
                return False
        elif name not in free or type(x) not in (float, int):
            return False
    return True


def _check(name: str, arguments: dict[str, Any], free: frozenset[str]) -> torch.dtype:
    """The common dtype of the points, after checking types, last axes and the curvature."""
    dtype: torch.dtype | None = None
    first: tuple[str, int] | None = None
    for key, value in arguments.items():
        if key == "c":
            check_curvature(value, name)
        elif isinstance(value, Tensor):
            if not value.is_floating_point():
                raise ValueError(
                    f"{name}: {key} has dtype {value.dtype}, expected a floating dtype; call .float() on it"
                )
            dtype = value.dtype if dtype is None else torch.promote_types(dtype, value.dtype)
            if key in free:
                continue
            if value.dim() == 0:
                raise ValueError(f"{name}: {key} is a single number, expected at least one axis (..., n)")
            if first is None:
                first = (key, value.shape[-1])
            elif value.shape[-1] != first[1]:
                raise ValueError(
                    f"{name}: the last axis is the manifold axis, but {first[0]} has {first[1]} and {key} has "
                    f"{value.shape[-1]} components; both must agree"
                )
        elif key not in free and isinstance(value, (list, tuple)):
            raise ValueError(
                f"{name}: {key} is a {type(value).__name__}, expected a torch.Tensor; use torch.tensor({key})"
            )
    if dtype is None:
        raise ValueError(
            f"{name}: expected torch tensors, got {', '.join(type(v).__name__ for v in arguments.values())}"
        )
    return dtype


def check_curvature(c: Any, name: str = "curvature") -> None:
    """Raise unless ``c`` is a positive number or a floating tensor (whose values are checked in debug mode)."""
    if isinstance(c, Tensor):
        if not c.is_floating_point():
            raise ValueError(f"{name}: c has dtype {c.dtype}, expected a floating dtype; call .float() on it")
        if debug.is_enabled() and debug.can_read_values(c) and not bool((c.detach() > 0).all()):
            raise debug.GeometryError(
                f"{name}: c must be positive (the sectional curvature is -c), got {c.detach().min().item():.4g}"
            )
    elif not isinstance(c, (int, float)):
        raise ValueError(f"{name}: c must be a float or a tensor, got {type(c).__name__}")
    elif not 0 < c < float("inf"):
        raise ValueError(f"{name}: c must be positive and finite (the sectional curvature is -c), got {c}")


def _watch_inputs(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    watched = {}
    for key, value in arguments.items():
        if isinstance(value, Tensor):
            debug.require_finite(name, key, value)
            if value.requires_grad:
                value = value.view_as(value)  # a fresh node, so that the hook sees this function's share alone
                debug.watch_gradient(name, key, value)
        watched[key] = value
    return watched


def _store(out: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast a computed point to its storage dtype; a row too long for float16 is shortened, never infinite."""
    if dtype == torch.float16 and out.shape[-1]:
        largest = out.abs().amax(-1, keepdim=True)
        over = largest > _FP16_MAX
        if debug.is_enabled() and debug.can_read_values(out) and bool(over.any()):
            raise debug.GeometryError(
                f"{name}: the result does not fit float16, {debug.first_bad_row(over.squeeze(-1))}; use bfloat16"
            )
        out = torch.where(over, out * (_FP16_MAX / torch.where(over, largest, 1.0)), out)
    return out.to(dtype)

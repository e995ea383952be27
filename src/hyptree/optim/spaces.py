"""Point parameters seen by an optimiser: which spaces they are made of, their curvature, how they are stored."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hyptree.geometry import Euclidean, Lorentz, Manifold, Poincare, Product, Sphere
from hyptree.geometry.core.numerics import Scalar, ball_limit, cap_norm, root
from hyptree.optim.rows import Kind, Part

_KINDS: dict[type[Manifold], Kind] = {
    Lorentz: "lorentz",
    Poincare: "poincare",
    Euclidean: "euclidean",
    Sphere: "sphere",
}


def check_point(p: Tensor, manifold: Manifold) -> None:
    """Raise a ``ValueError`` if ``p`` cannot hold points of ``manifold``."""
    if p.dim() == 0 or not p.is_floating_point():
        raise ValueError(f"a point parameter is a floating tensor (..., n), got shape {tuple(p.shape)} and {p.dtype}")
    parts_of(manifold, p.shape[-1])
    if isinstance(p, DTensor):
        check_placements(p)


def check_placements(p: DTensor) -> None:
    """Raise a ``ValueError`` if the coordinates of one point are spread over ranks."""
    for placement in p.placements:
        if isinstance(placement, Shard) and placement.dim % p.dim() == p.dim() - 1:
            raise ValueError(
                f"a point parameter of shape {tuple(p.shape)} is sharded along its last axis, so no rank holds a whole "
                "point; shard its rows, or keep it replicated"
            )


def local(t: Tensor) -> Tensor:
    """The part of a distributed tensor that lives here; any other tensor itself."""
    return t.to_local() if isinstance(t, DTensor) else t


def parts_of(manifold: Manifold, n: int) -> tuple[tuple[Part, ...], list[Scalar]]:
    """The spaces a manifold is made of, nested products flattened, and the curvature of each."""
    if isinstance(manifold, Product):
        if sum(manifold.sizes) != n:
            raise ValueError(f"the point parameter has {n} coordinates, its Product has {sum(manifold.sizes)}")
        parts: list[Part] = []
        cs: list[Scalar] = []
        for part, size in zip(manifold.parts, manifold.sizes, strict=True):
            inner, inner_cs = parts_of(part, size)
            parts += inner
            cs += inner_cs
        return tuple(parts), cs
    for kind, name in _KINDS.items():
        if isinstance(manifold, kind):
            c = manifold.c
            return ((name, n),), [c.detach() if isinstance(c, Tensor) else c]
    raise ValueError(
        f"no update rule for points of {type(manifold).__name__}; "
        "expected Lorentz, Poincare, Sphere, Euclidean or Product"
    )


def shared_curvature(c: Scalar, dtype: torch.dtype) -> Scalar:
    """``c`` in the dtype of the computation; a tensor of one number as a 0-d tensor."""
    if not isinstance(c, Tensor):
        return c
    c = local(c).to(dtype)
    return c.reshape(()) if c.numel() == 1 else c


def row_curvature(c: Scalar, shape: torch.Size, index: Tensor | None) -> Scalar:
    """``c`` as it is, or one number per chosen row (R, 1) if it differs between rows of a parameter of this shape."""
    if not isinstance(c, Tensor) or c.dim() == 0:
        return c
    flat = c.expand(*shape[:-1], 1).reshape(-1, 1)
    return flat if index is None else flat.index_select(0, index)


def flat_index(indices: Tensor, shape: torch.Size) -> Tensor:
    """Row numbers of the flattened parameter from the (axes, nnz) indices of a sparse gradient."""
    index = indices[0]
    for axis in range(1, len(shape)):
        index = index * shape[axis] + indices[axis]
    return index


def round_points(x: Tensor, dtype: torch.dtype, parts: tuple[Part, ...], cs: list[Scalar]) -> Tensor:
    """Rows cast to half precision such that they stay points: inside the ball, and finite in float16."""
    pieces = []
    for xi, (kind, _), c in zip(x.split([size for _, size in parts], -1), parts, cs, strict=True):
        if kind == "poincare":
            xi = cap_norm(xi, min(ball_limit(x.dtype), 1 - torch.finfo(dtype).eps) / root(c))
        if dtype == torch.float16:
            xi = cap_norm(xi, torch.finfo(dtype).max)
        pieces.append(xi.to(dtype))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def is_learned(manifold: Manifold) -> bool:
    """True if any curvature of the manifold is a parameter."""
    parts = manifold.parts if isinstance(manifold, Product) else [manifold]
    return any(
        is_learned(p) if isinstance(p, Product) else p.curvature is not None and p.curvature.learnable for p in parts
    )


def curvature_of_coordinates(manifold: Manifold, p: Tensor) -> Tensor:
    """The curvature of each coordinate, in a shape that broadcasts against ``p``; 1 where the space is flat."""
    parts, cs = parts_of(manifold, p.shape[-1])
    tensors = [torch.as_tensor(c if c != 0.0 else 1.0) if not isinstance(c, Tensor) else local(c) for c in cs]
    tensors = [t.to(p.device, torch.float32) for t in tensors]
    if len(parts) == 1:
        return tensors[0].clone()
    lead = torch.broadcast_shapes(*(t.shape[:-1] for t in tensors))
    return torch.cat([t.expand(*lead, size) for t, (_, size) in zip(tensors, parts, strict=True)], -1)

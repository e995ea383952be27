"""Clustering of patches and of windows: the kernels against their definitions and against the layers they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyptree.nn import ClusterMixer
from hyptree.ops.cluster_map import kernels, reference
from hyptree.ops.windows import Cut

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of the difference to float64, relative to the size of the whole tensor."""

CUTS = {  # map, windows, window, margin, centres, heads, dim, cells
    "one window": Cut(8, 8, 1, 1, 8, 8, 0, 0, 4, 4, 2, 16, 1, 1),
    "four windows in a tile": Cut(12, 12, 3, 3, 4, 4, 0, 0, 2, 2, 2, 8, 2, 2),
    "overlapping centres": Cut(7, 7, 1, 1, 7, 7, 0, 0, 4, 4, 1, 20),
    "padding": Cut(5, 7, 2, 2, 3, 4, 0, 0, 2, 2, 3, 16),
    "shifted": Cut(7, 5, 3, 2, 4, 3, 2, 1, 3, 3, 1, 16),
    "wide": Cut(14, 14, 1, 1, 14, 14, 0, 0, 7, 7, 1, 16, 1, 1),
    "wide, parts": Cut(20, 24, 2, 2, 10, 12, 0, 0, 3, 7, 1, 8, 1, 2),
    "wide, padding": Cut(11, 13, 1, 2, 11, 7, 0, 0, 5, 7, 1, 16),
    "wide, few centres": Cut(20, 20, 1, 1, 20, 20, 0, 0, 3, 3, 1, 5, 1, 1),
    "wide, more centres than rows": Cut(3, 40, 1, 1, 3, 40, 0, 0, 4, 8, 1, 8),
    "oblong": Cut(6, 20, 2, 2, 3, 10, 0, 0, 3, 2, 1, 5, 1, 2),
}


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, or that in norm, relative to the size of ``wanted``; NaN fails every comparison."""
    if not expected.numel():
        return 0.0
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-6)).item()


def limit(dtype: torch.dtype, device: str) -> float:
    """The tolerance; Triton's interpreter cuts digits where a GPU rounds."""
    return TOLERANCE[dtype] * (2 if dtype == torch.bfloat16 and device == "cpu" else 1)


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Leave NaN in memory that the allocator will hand out next."""
    for _ in range(4):
        torch.full(shape, torch.nan, dtype=dtype, device=device)


def patch_input(cut: Cut, B: int, dtype: torch.dtype, device: str, with_bias: bool) -> list[Tensor | None]:
    both = torch.randn(B, cut.height, cut.width, 2 * cut.inner, device=device).to(dtype)
    bias = torch.randn(cut.num_windows, cut.num_heads, cut.centres, cut.window, device=device)
    return [both, torch.rand((), device=device) + 0.7, bias if with_bias else None]


def outcome(call: Any, leaves: list[Tensor | None], cotangents: list[Tensor] | None) -> tuple[Any, list[Tensor], Any]:
    """Results and gradients, and the cotangents that were drawn for them."""
    held = [None if x is None else x.detach().clone().requires_grad_() for x in leaves]
    built = [x for x in call(*held) if x.numel() or not x.shape[0]]
    if cotangents is None:
        cotangents = [torch.randn_like(x) * (0.05 if x.shape[1:] == (2,) else 1.0) for x in built]
    used = [x for x in held if x is not None]
    grads = torch.autograd.grad(built, used, [c.to(x.dtype) for c, x in zip(cotangents, built, strict=True)])
    return built, list(grads), cotangents


def compare(run: Any, leaves: list[Tensor | None], tolerance: float) -> None:
    """The kernel against the definition in float64."""
    built, grads, cotangents = outcome(lambda *x: run(kernels, *x), leaves, None)
    exact = [None if x is None else x.double() for x in leaves]
    expected, wanted_grads, _ = outcome(lambda *x: run(reference, *x), exact, cotangents)
    assert len(built) == len(expected)
    for one, other in zip([*built, *grads], [*expected, *wanted_grads], strict=True):
        assert one.shape == other.shape
        # a scalar is a sum of either sign over everything: as exact as its terms, not as itself
        assert error(one, other) < tolerance * (1 if other.dim() else 100), one.shape


def cases(names: Any, half: tuple[str, ...]) -> list[Any]:
    """Every cut in every precision; by default only some in half precision, as the interpreter is slow."""
    actual = []
    for name in names:
        for dtype in TOLERANCE:
            is_quick = dtype == torch.float32 or (name in half and dtype == torch.bfloat16)
            actual.append(pytest.param(name, dtype, marks=() if is_quick else pytest.mark.slow))
    return actual


@pytest.mark.parametrize(("name", "dtype"), cases(CUTS, ("one window", "wide, padding")))
def test_patches_equal_the_definition(name: str, dtype: torch.dtype, device: str, seed: int) -> None:
    cut = CUTS[name]
    B = 1 if name in ("wide", "wide, parts", "wide, few centres") else 2  # many tiles are slow to interpret
    leaves = patch_input(cut, B, dtype, device, with_bias=name != "shifted")
    poison((B, cut.height, cut.width, 2 * cut.inner), dtype, device)
    compare(lambda by, *x: by.cluster_patch(*x, cut), leaves, limit(dtype, device))


def test_several_images_of_a_program_and_none(device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyptree.ops.cluster_map import patch_kernel

    monkeypatch.setattr(patch_kernel, "PROGRAMS", 4)  # of 5 images, 2 or 1 a program
    cut = CUTS["one window"]
    for images in (5, 0):
        leaves = patch_input(cut, images, torch.float32, device, True)
        compare(lambda by, *x: by.cluster_patch(*x, cut), leaves, 2e-6)


def test_a_result_without_a_gradient_is_the_same(device: str, seed: int) -> None:
    """Up to the last digits: it is another kernel, in which a compiler joins other products and sums."""
    cut = CUTS["wide, padding"]  # whose kernel keeps something for the gradient
    both, alpha, bias = patch_input(cut, 2, torch.float32, device, True)
    assert both is not None and alpha is not None
    actual = kernels.cluster_patch(both, alpha, bias, cut)
    with_grad = kernels.cluster_patch(both.requires_grad_(), alpha, bias, cut)
    assert with_grad[0].requires_grad and not actual[0].requires_grad
    for one, other in zip(actual, with_grad, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()
    with torch.no_grad():
        assert torch.equal(kernels.cluster_patch(both, alpha, bias, cut)[0], actual[0])


def test_gradients_may_be_taken_twice(device: str, seed: int) -> None:
    cut = CUTS["wide, padding"]
    both, alpha, bias = patch_input(cut, 1, torch.float32, device, True)
    assert both is not None and alpha is not None
    out, _, moments = kernels.cluster_patch(both.requires_grad_(), alpha, bias, cut)
    loss = out.square().sum() + moments.sum()
    first, second = (torch.autograd.grad(loss, both, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_float32_that_shared_memory_does_not_hold_is_left_to_torch(device: str) -> None:
    cut = Cut(8, 8, 1, 1, 8, 8, 0, 0, 8, 8, 1, 64)
    both = torch.zeros(1, 8, 8, 128, device=device)
    reason = kernels.patch_unsupported(both, cut)
    assert reason is not None and reason.startswith("64 centres of a window and heads of 64 in float32")
    assert kernels.patch_unsupported(both.bfloat16(), cut) is None
    assert kernels.patch_unsupported(both, cut._replace(dim=32)) is None


def test_a_second_derivative_is_refused(device: str, seed: int) -> None:
    cut = CUTS["one window"]
    both, alpha, bias = patch_input(cut, 1, torch.float32, device, True)
    assert both is not None and alpha is not None
    out, _, _ = kernels.cluster_patch(both.requires_grad_(), alpha, bias, cut)
    (grad,) = torch.autograd.grad(out.square().sum(), both, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_a_map_that_is_not_contiguous(device: str, seed: int) -> None:
    cut = CUTS["four windows in a tile"]
    both, alpha, bias = patch_input(cut, 2, torch.float32, device, True)
    assert both is not None and alpha is not None
    other = both.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    actual = kernels.cluster_patch(other, alpha, bias, cut)
    for one, expected in zip(actual, kernels.cluster_patch(both, alpha, bias, cut), strict=True):
        assert torch.equal(one, expected)


def test_a_short_vector_has_a_bounded_gradient(device: str, seed: int) -> None:
    cut = CUTS["four windows in a tile"]
    leaves = patch_input(cut, 1, torch.float32, device, True)
    assert leaves[0] is not None
    leaves[0][0, 1, 2] = 0.0
    built, grads, _ = outcome(lambda *x: kernels.cluster_patch(*x, cut), leaves, None)
    assert all(x.isfinite().all() for x in (*built, *grads))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize("name", ["one window", "four windows in a tile"])
def test_a_bad_patch_spoils_its_window_alone(name: str, device: str, seed: int) -> None:
    cut = CUTS[name]
    for part in (0, cut.inner):  # a point, a value
        both, alpha, bias = patch_input(cut, 2, torch.float32, device, True)
        assert both is not None and alpha is not None and bias is not None
        both[0, 1, 2, part + 3] = torch.nan
        leaf = both.requires_grad_()
        out, _, _ = kernels.cluster_patch(leaf, alpha, bias, cut)
        (grad,) = torch.autograd.grad(out, leaf, torch.randn_like(out))
        for actual, width in ((out, cut.inner), (grad, 2 * cut.inner)):
            bad = actual.isnan().reshape(2, cut.height, cut.width, width // cut.inner, cut.num_heads, cut.dim)
            assert bad[0, : cut.wy, : cut.wx, :, 0].any()
            assert not bad[1].any() and not bad[0, cut.wy :].any() and not bad[0, :, cut.wx :].any()
            assert not bad[0, :, :, :, 1:].any(), "other heads"


def window_input(cut: Cut, B: int, dtype: torch.dtype, device: str, with_bias: bool) -> list[Tensor | None]:
    both = torch.randn(B, cut.height, cut.width, 2 * cut.inner, device=device).to(dtype)
    parts = reference.cluster_patch(both, torch.ones((), device=device), None, cut)[1]
    cells = cut.cells_y * cut.cells_x
    bias = torch.randn(1, cut.num_heads, cells, cut.num_windows, device=device)
    return [parts, torch.rand((), device=device) + 0.7, bias if with_bias else None]


WINDOWS = {
    "medium": (Cut(28, 28, 7, 7, 4, 4, 0, 0, 2, 2, 1, 32, 4, 4), 1.0, 1.0),
    "clipped": (Cut(12, 12, 3, 3, 4, 4, 0, 0, 2, 2, 2, 8, 2, 2), 2.5, 0.3),
    "flat": (Cut(12, 12, 3, 3, 4, 4, 0, 0, 2, 2, 1, 16, 3, 2), 1e-3, 1.0),
}


@pytest.mark.parametrize(("name", "dtype"), cases(WINDOWS, ("clipped",)))
def test_windows_equal_the_definition(name: str, dtype: torch.dtype, device: str, seed: int) -> None:
    cut, c, clip = WINDOWS[name]
    leaves = window_input(cut, 2, dtype, device, with_bias=name != "flat")
    poison((2, cut.num_windows, 4, 2 * cut.inner), dtype, device)
    # distances of nearby points lose half of their digits in the product, there and here
    tolerance = max(limit(dtype, device), 2e-5)
    compare(lambda by, *x: by.cluster_window(*x, cut, c, clip), leaves, tolerance)


def test_windows_around_one_centre(device: str, seed: int) -> None:
    cut = Cut(6, 6, 3, 3, 2, 2, 0, 0, 1, 1, 2, 8, 1, 1)
    for images in (2, 0):
        (parts, _, _) = window_input(cut, images, torch.float32, device, False)
        compare(lambda by, x: by.cluster_window(x, None, None, cut, 1.0, 1.0), [parts], 2e-6)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
def test_a_bad_window_spoils_its_image_and_head_alone(device: str, seed: int) -> None:
    cut, c, clip = WINDOWS["clipped"]
    parts, alpha, bias = window_input(cut, 2, torch.float32, device, True)
    assert parts is not None
    parts[0, 4, 0, 3] = torch.nan
    leaf = parts.requires_grad_()
    out, _ = kernels.cluster_window(leaf, alpha, bias, cut, c, clip)
    (grad,) = torch.autograd.grad(out, leaf, torch.randn_like(out))
    assert out[0, :, : cut.dim].isnan().any() and grad[0].isnan().any()
    assert out[1].isfinite().all() and out[0, :, cut.dim :].isfinite().all() and grad[1].isfinite().all()


# ------------------------------------------------------------------------------------------------------------ the layer

MIXERS: dict[str, tuple[Any, ...]] = {  # size of the map, fold, centres of patches and of windows, options
    "paper": ((8, 8), 4, 2, 2, {}),
    "no window level": ((6, 8), 2, 2, 0, {}),
    "one window": ((6, 6), 1, 2, 1, {}),
    "padding": ((7, 5), 2, 2, 1, {}),
    "shifted": ((8, 8), 2, 2, 0, {"shifted": True}),
    "no norm, no bias": ((12, 12), 3, 2, 2, {"norm": False, "position_bias": False}),
    "learned curvature": ((12, 12), 3, 2, 2, {"learnable_curvature": True}),
    "euclidean windows": ((12, 12), 3, 2, 2, {"window_geometry": "euclidean"}),
}


def make(name: str, device: str) -> ClusterMixer:
    *layout, options = MIXERS[name]
    mixer = ClusterMixer(6, 2, 8, *layout, **options)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer.to(device)


QUICK = ("paper", "one window", "padding")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MIXERS])
def test_the_layer_by_kernels_equals_the_plain_layer(
    name: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer = make(name, device)
    x = torch.randn(2, *MIXERS[name][0], 6, device=device, requires_grad=True)
    wanted_leaf = x.detach().double().requires_grad_()
    exact = make(name, device).double()
    exact.load_state_dict(mixer.state_dict())
    expected = exact(wanted_leaf)
    calls = []
    run = kernels.cluster_patch
    monkeypatch.setattr(kernels, "cluster_patch", lambda *a: calls.append(1) or run(*a))
    mixer.backend = "triton"
    out = mixer(x)
    assert calls
    cotangent = torch.randn_like(out)
    assert error(out, expected) < 1e-5
    grads = torch.autograd.grad(out, [x, *mixer.parameters()], cotangent)
    wanted_grads = torch.autograd.grad(expected, [wanted_leaf, *exact.parameters()], cotangent.double())
    for (key, _), one, other in zip([("x", x), *mixer.named_parameters()], grads, wanted_grads, strict=True):
        assert error(one, other) < (1e-5 if other.numel() > 1 else 1e-3), key


def test_on_a_cpu_the_layer_is_the_plain_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPTREE_BACKEND", raising=False)
    mixer = make("paper", "cpu")
    x = torch.randn(2, 8, 8, 6)
    auto = mixer(x)
    mixer.backend = "torch"
    assert torch.equal(auto, mixer(x))


def test_a_recorded_assignment_takes_the_plain_way(device: str, seed: int) -> None:
    mixer = make("paper", device)
    mixer.backend = "triton"
    x = torch.randn(2, 8, 8, 6, device=device)
    record: list[Any] = []
    assert error(mixer(x), mixer(x, record)) < 1e-5
    assert len(record) == 1


def test_unknown_backends_and_misfits_are_one_line() -> None:
    with pytest.raises(ValueError, match="backend 'tritn' is unknown; did you mean 'triton'"):
        ClusterMixer(6, 2, 8, (12, 12), backend="tritn")
    mixer = ClusterMixer(6, 2, 8, (40, 40), 1, 10, backend="triton")
    with pytest.raises(ValueError, match="100 centres of a window and heads of 8, the kernel takes up to 64 and 64"):
        mixer(torch.zeros(1, 40, 40, 6))
    wide = ClusterMixer(6, 1, 8, (8, 8), 8, 1, 8, clip=30.0, backend="triton")
    wide.patch.alpha = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="64 windows, 64 centres and heads of 8, the kernel takes up to 64, 16 and 64"):
        wide(torch.zeros(1, 8, 8, 6))

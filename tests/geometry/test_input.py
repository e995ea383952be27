"""Bad input gets one clear line; HYPTREE_DEBUG names the function, the shape and the row where trouble starts."""

import subprocess
import sys

import pytest
import torch

from hyptree.geometry import (
    Curvature,
    GeometryError,
    Lorentz,
    Poincare,
    Product,
    Sphere,
    curvature_from,
    debug,
    frechet_mean,
    lorentz,
    poincare,
)


def message(exception: pytest.ExceptionInfo) -> str:
    text = str(exception.value)
    assert "\n" not in text, "one line"
    return text


def test_wrong_dtype():
    with pytest.raises(ValueError, match="float") as e:
        lorentz.dist(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))
    assert message(e) == "lorentz.dist: x has dtype torch.int64, expected a floating dtype; call .float() on it"
    with pytest.raises(ValueError, match=r"torch\.tensor") as e:
        lorentz.dist([[0.0, 1.0]], torch.zeros(1, 2))
    assert "lorentz.dist: x is a list" in message(e)
    with pytest.raises(ValueError, match="expected torch tensors") as e:
        lorentz.dist(1.0, 2.0)
    assert "got float, float" in message(e)


def test_wrong_last_dimension():
    with pytest.raises(ValueError) as e:
        poincare.mobius_add(torch.zeros(5, 3), torch.zeros(5, 4))
    assert "x has 3 and y has 4 components" in message(e)
    with pytest.raises(ValueError) as e:
        poincare.mobius_matvec(torch.zeros(2, 3), torch.zeros(5, 4))
    assert "expected M (m, 4), got (2, 3)" in message(e)
    with pytest.raises(ValueError) as e:
        lorentz.dist0(torch.tensor(1.0))
    assert "single number" in message(e)
    with pytest.raises(ValueError) as e:
        Product([(Lorentz(), 2), (Sphere(), 3)]).dist(torch.zeros(1, 4), torch.zeros(1, 4))
    assert "2 + 3 = 5 coordinates, got a last axis of 4" in message(e)


@pytest.mark.parametrize("c", [0.0, -1.0, float("inf"), float("nan")])
def test_curvature_must_be_positive(c):
    with pytest.raises(ValueError) as e:
        lorentz.dist(torch.zeros(2, 2), torch.zeros(2, 2), c)
    assert "c must be positive" in message(e)
    with pytest.raises(ValueError) as e:
        Lorentz(c)
    assert "c must be positive" in message(e)
    with pytest.raises(ValueError) as e:
        Curvature(torch.tensor([1.0, c]))
    assert "c must be positive" in message(e)


def test_curvature_of_another_type():
    with pytest.raises(ValueError, match="got str") as e:
        lorentz.dist0(torch.zeros(2, 2), "1")
    message(e)
    with pytest.raises(ValueError, match=r"one c per pair of sets, shape \(..., 1, 1\), got \(3, 1\)") as e:
        lorentz.pairwise_dist(torch.zeros(3, 2), torch.zeros(3, 2), torch.ones(3, 1))
    message(e)
    with debug(), pytest.raises(GeometryError, match="c must be positive") as e:
        lorentz.dist0(torch.zeros(2, 2), torch.tensor(-1.0))
    message(e)


def test_empty_sets_have_no_mean():
    for mean in (lorentz.centroid, frechet_mean):
        with pytest.raises(ValueError, match=r"at least one point in x \(..., N, n\), got shape \(4, 0, 3\)") as e:
            mean(torch.zeros(4, 0, 3))
        message(e)
    with pytest.raises(ValueError, match=r"one weight per point, \(..., 5\), got weights of shape \(3,\)") as e:
        lorentz.centroid(torch.zeros(5, 2), torch.ones(3))
    message(e)


def test_unknown_mode_and_source():
    with pytest.raises(ValueError, match="mode must be 'exact' or 'matmul', got 'fast'"):
        lorentz.pairwise_dist(torch.zeros(3, 2), torch.zeros(3, 2), mode="fast")
    with pytest.raises(ValueError, match=r"did you mean 'geoopt\.lorentz'"):
        curvature_from("geoopt.lorenz", 1.0)
    with pytest.raises(ValueError, match="expected a positive curvature"):
        curvature_from("helm", 1.0)


def test_points_outside_the_ball_are_named():
    x = torch.zeros(4, 2)
    x[2] = torch.tensor([0.9, 0.9])
    with pytest.raises(GeometryError, match="Poincare: not a point of the space, row 2 of shape") as e:
        Poincare().check(x)
    assert "sqrt(c) |x| < 1" in message(e)
    with debug(), pytest.raises(GeometryError, match=r"poincare\.dist: saturation, shape .*row 2") as e:
        poincare.dist(x, torch.zeros(4, 2))
    message(e)
    assert torch.isfinite(poincare.dist(x, torch.zeros(4, 2))).all()  # without debug: moved to the limit, never NaN
    with pytest.raises(GeometryError, match="NaN in the points"):
        Lorentz().check(torch.full((2, 2), float("nan")))
    with pytest.raises(ValueError, match="floating dtype"):
        Lorentz().check(torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(GeometryError, match="not a point"):
        Sphere().check(torch.full((2, 2), 3.0))


def test_ambient_points_off_the_hyperboloid_are_named():
    x = lorentz.to_ambient(torch.randn(4, 3), 2.0)
    torch.testing.assert_close(lorentz.from_ambient(x, 2.0, check=True), x[:, 1:])
    with pytest.raises(GeometryError, match="geoopt's k is our 1/c"):
        lorentz.from_ambient(x, 0.5, check=True)


def test_debug_finds_the_first_nan():
    x = torch.randn(3, 4, 2)
    x[1, 2, 0] = float("nan")
    assert torch.isnan(lorentz.dist0(x)).sum() == 1
    with debug(), pytest.raises(GeometryError) as e:
        lorentz.dist0(x)
    assert message(e) == "lorentz.dist0: NaN in x of shape (3, 4, 2), row (1, 2)"
    with debug(), pytest.raises(GeometryError, match="infinity in v"):
        lorentz.expmap0(torch.full((1, 2), float("inf")))


def test_debug_finds_saturation():
    v = torch.zeros(5, 3)
    v[3] = 100.0
    assert lorentz.saturation(lorentz.expmap0(v)) == pytest.approx(0.2)
    with debug(), pytest.raises(GeometryError, match=r"lorentz.expmap0: saturation, shape \(5,\), row 3"):
        lorentz.expmap0(v)
    with debug(), pytest.raises(GeometryError, match=r"lorentz.expmap: saturation"):
        lorentz.expmap(torch.ones(5, 3), v)
    with debug(), pytest.raises(GeometryError, match=r"poincare.expmap0: saturation"):
        poincare.expmap0(v)
    with debug(), pytest.raises(GeometryError, match=r"does not fit float16"):
        lorentz.expmap0(torch.full((1, 2), 10.0, dtype=torch.float16))


def test_debug_finds_where_a_gradient_breaks():
    """The gradient that arrives at a function is checked apart from the one it hands on."""
    x = torch.randn(3, 2, requires_grad=True)
    with debug():
        d = lorentz.dist0(x)
        with pytest.raises(GeometryError, match=r"lorentz\.dist0: NaN in the gradient of its result"):
            (d * torch.tensor([1.0, float("nan"), 1.0])).sum().backward()


def test_debug_switch_in_the_environment():
    code = "import torch; from hyptree.geometry import lorentz; lorentz.dist0(torch.tensor([[float('nan')]]))"
    on = subprocess.run([sys.executable, "-c", code], env={"HYPTREE_DEBUG": "1", **environment()}, capture_output=True)
    off = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert off.returncode == 0
    assert b"GeometryError: lorentz.dist0: NaN in x of shape (1, 1), row 0" in on.stderr


def environment() -> dict[str, str]:
    import os

    return {k: v for k, v in os.environ.items() if k != "HYPTREE_DEBUG"}

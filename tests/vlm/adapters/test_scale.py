"""The scale adapter against its long way through the Poincaré ball, its parameter counts, and what curvature does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call

from hyptree.geometry import poincare
from hyptree.vlm import DiagonalConfig, LoraConfig, OrthogonalConfig, ScaleAdapterConfig, attach, reference_mobius
from hyptree.vlm.adapters.adapter import SlotStack, StackAdapter
from hyptree.vlm.adapters.kinds.scale import cap_rows, radius_cap
from tests.vlm.adapters.small_clips import CLIPS, encode, pixels, shake, tokens


def near_identity(blocks: int, n: int, size: float = 0.2) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64) + size * torch.randn(blocks, n, n, dtype=torch.float64)


def build(config: ScaleAdapterConfig, rows: int, columns: int, slots: int = 1) -> StackAdapter:
    names = tuple(f"layer{i}:q" for i in range(slots))
    cpu = torch.device("cpu")
    stack = SlotStack(names, ("q",) * slots, tuple(range(slots)), (rows, columns), "text", torch.float64, cpu)
    return config.build(stack)


@pytest.mark.parametrize("c", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_the_long_way_is_a_product_below_the_cap(c: float, strength: float):
    """Whatever the curvature, for rows up to 6.1 / sqrt(c) whose product is below the cap of 3.8 / sqrt(c)."""
    scale = strength * near_identity(3, 4)
    direction = torch.nn.functional.normalize(torch.randn(80, 12, dtype=torch.float64), dim=1)
    weight = direction * torch.rand(80, 1, dtype=torch.float64) * 6.1 / math.sqrt(c)
    product = weight @ torch.block_diag(*scale).mT
    below = product.norm(dim=1) < 0.999 * radius_cap(c)
    assert below.sum() > 30
    torch.testing.assert_close(reference_mobius(weight, scale, c)[below], product[below], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("c", [0.01, 1.0, 2.5])
def test_above_the_cap_the_length_is_cut_and_the_direction_kept(c: float):
    scale = near_identity(3, 4)
    weight = torch.nn.functional.normalize(torch.randn(50, 12, dtype=torch.float64), dim=1) * 5.5 / math.sqrt(c)
    product = weight @ torch.block_diag(*scale).mT
    above = product.norm(dim=1) > 1.01 * radius_cap(c)
    assert above.sum() > 25
    actual = reference_mobius(weight, scale, c)[above]
    assert (actual.norm(dim=1) - radius_cap(c)).abs().max() < 1e-9
    cosine = torch.nn.functional.cosine_similarity(actual, product[above], dim=1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=1e-12, atol=0)
    # The closed form with cap="paper" is the same, above and below.
    adapter = build(ScaleAdapterConfig(4, curvature=c, cap="paper"), 50, 12)
    with torch.no_grad():
        adapter.delta.copy_(scale - torch.eye(4))
        closed = adapter(weight[None])[0]
    torch.testing.assert_close(closed, reference_mobius(weight, scale, c), rtol=1e-9, atol=1e-12)


def test_defaults_are_those_of_the_paper():
    config = ScaleAdapterConfig()
    assert (config.block_size, config.targets, config.towers, config.layers) == (
        128,
        ("q", "k", "v"),
        ("text", "image"),
        "all",
    )
    assert (config.curvature, config.cap, config.share, config.space) == (0.01, "none", "none", "weight")
    assert ScaleAdapterConfig(curvature={"text": 1.0, "image": 0.01}).curvature_of("text") == 1.0


def test_cap_of_the_released_code():
    assert [round(radius_cap(c), 2) for c in (0.01, 0.1, 1.0, 2.5)] == [38.0, 12.02, 3.8, 2.4]


def test_capping_is_finite_for_rows_of_length_0():
    rows = torch.zeros(2, 3, requires_grad=True)
    cap_rows(rows, 1.0).sum().backward()
    assert torch.equal(rows.grad, torch.ones(2, 3))


def test_gradients_of_the_closed_form_are_those_of_the_long_way():
    c = 0.1
    weight = 0.5 * torch.randn(5, 8, dtype=torch.float64)
    adapter = build(ScaleAdapterConfig(4, curvature=c), 5, 8)
    delta = (0.1 * torch.randn(1, 2, 4, 4, dtype=torch.float64)).requires_grad_()

    def closed(delta: torch.Tensor) -> torch.Tensor:
        return functional_call(adapter, {"delta": delta}, (weight[None],))[0]

    def long_way(delta: torch.Tensor) -> torch.Tensor:
        return reference_mobius(weight, torch.eye(4) + delta[0], c)

    assert gradcheck(closed, (delta,)) and gradcheck(long_way, (delta,))
    probe = torch.randn(5, 8, dtype=torch.float64)
    (ours,) = torch.autograd.grad((closed(delta) * probe).sum(), delta)
    (theirs,) = torch.autograd.grad((long_way(delta) * probe).sum(), delta)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("c", [0.01, 0.1, 1.0])
def test_radius_is_twice_the_norm_and_scales_with_it(c: float):
    z = torch.randn(20, 6, dtype=torch.float64)
    lifted = poincare.dist0(poincare.expmap0(z, c), c)
    torch.testing.assert_close(lifted, 2 * z.norm(dim=1), rtol=1e-9, atol=0)
    stretched = poincare.dist0(poincare.mobius_scalar_mul(1.3, poincare.expmap0(z, c), c), c)
    torch.testing.assert_close(stretched, 1.3 * lifted, rtol=1e-9, atol=0)


def meta_clip(library: str) -> nn.Module:
    with torch.device("meta"):
        if library == "open_clip":
            open_clip = pytest.importorskip("open_clip")
            options = open_clip.get_model_config("ViT-B-16")
            vision, text = options.pop("vision_cfg"), options.pop("text_cfg")
            return open_clip.CLIP(vision_cfg=vision, text_cfg=text, **options)
        transformers = pytest.importorskip("transformers")
        config = transformers.CLIPConfig(vision_config={"patch_size": 16})
        return transformers.CLIPModel(config)


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
def test_parameter_counts_of_vit_b_16(library: str, capsys: pytest.CaptureFixture[str]):
    model = meta_clip(library)
    assert sum(p.numel() for p in model.parameters()) == 149_620_737
    for config, count in (
        (ScaleAdapterConfig(128), 5_898_240),
        (ScaleAdapterConfig(1), 46_080),
        (DiagonalConfig(), 46_080),
        (ScaleAdapterConfig(64), 2_949_120),
        (ScaleAdapterConfig(128, share="blocks"), 72 * 128 * 128),
        (ScaleAdapterConfig(128, share="layers"), 3 * (512 + 768) * 128),
        (LoraConfig(64, targets=("q", "k", "v")), 5_898_240),
        (OrthogonalConfig(128), 36 * (4 + 6) * 128 * 127 // 2),
    ):
        handle = attach(model, config)
        assert handle.num_parameters() == count, config
        handle.print_trainable_parameters()
        assert capsys.readouterr().out.startswith(f"trainable params: {count:,} || all params: {149_620_737 + count:,}")
        handle.detach()
    assert 5_898_240 == 5.625 * 2**20 and round(100 * 5_898_240 / 149_620_737, 2) == 3.94


def train(curvature: float, cap: str) -> list[float]:
    torch.manual_seed(5)
    model, words, pictures = CLIPS[2](), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16, curvature=curvature, cap=cap))
    optimizer = torch.optim.AdamW(handle.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = encode(model, words, pictures).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_curvature_changes_nothing_without_a_cap():
    """The negative control: bit for bit the same training at two curvatures, until the cap of the code cuts in."""
    assert train(0.01, "none") == train(30.0, "none")
    assert train(0.01, "paper") != train(30.0, "paper")


def test_orthogonal_blocks_keep_the_norms_of_rows():
    model = CLIPS[2]()
    handle = attach(model, OrthogonalConfig(8))
    shake(handle, 0.5)
    for group in handle._set.all_groups():
        for site, new in zip(group.sites, group.merged(), strict=True):
            assert (new - site.base).abs().max() > 0.05
            torch.testing.assert_close(new.norm(dim=1), site.base.norm(dim=1), rtol=1e-5, atol=0)

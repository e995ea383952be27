"""Token merging in U-Nets: identity at keep 1, attention of cluster means, exact restoring, errors in one line."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")

from hyptree.cluster import agglomerate, cosine_distance, manifold_distance  # noqa: E402
from hyptree.errors import UserError  # noqa: E402
from hyptree.geometry import Lorentz  # noqa: E402
from hyptree.tokens.families.diffusers import patch_unet  # noqa: E402

FINEST = {
    "down_blocks.0.attentions.0.transformer_blocks.0",
    "up_blocks.1.attentions.0.transformer_blocks.0",
    "up_blocks.1.attentions.1.transformer_blocks.0",
}


def tiny_unet(**changes: Any) -> nn.Module:
    """Two levels with attention on both, 0.3 million weights."""
    config: dict[str, Any] = {
        "sample_size": 8,
        "layers_per_block": 1,
        "block_out_channels": (16, 32),
        "norm_num_groups": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 12,
        "attention_head_dim": 4,
    }
    unet: nn.Module = diffusers.UNet2DConditionModel(**{**config, **changes})
    return unet.eval()


@pytest.fixture
def unet() -> nn.Module:
    return tiny_unet()


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Two images, as classifier-free guidance has them: the same latent, two prompts."""
    return torch.randn(1, 4, 8, 8).repeat(2, 1, 1, 1), torch.tensor(7), torch.randn(2, 5, 12)


def run(unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], **kwargs: Any) -> Tensor:
    with torch.no_grad():
        sample: Tensor = unet(*inputs, **kwargs).sample
    return sample


def hooks(model: nn.Module) -> list[tuple[int, int]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def test_keep_one_is_the_plain_model_bit_for_bit(unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    plain = run(unet, inputs)
    with patch_unet(unet, keep=1.0, cross_attention=True, mlp=True) as handle:
        assert torch.equal(run(unet, inputs), plain)
        assert handle.num_tokens == dict.fromkeys(FINEST, (64, 64))
        assert not handle.labels


@pytest.mark.parametrize("method", ["atc", "tome", "kmeans", "kmedoids", "dpcknn"])
def test_self_attention_sees_the_asked_number_of_tokens(
    unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], method: str
) -> None:
    seen: dict[str, list[int]] = {}
    with patch_unet(unet, keep=0.5, method=method) as handle:
        for name, module in unet.named_modules():
            if name.endswith(("attn1.to_k", "attn2.to_q", "ff.net.0.proj")):
                module.register_forward_hook(lambda m, a, y, name=name: seen.setdefault(name, []).append(y.shape[1]))
        run(unet, inputs)
        assert handle.num_tokens == dict.fromkeys(FINEST, (64, 32))
    attended = {name for name, count in seen.items() if count == [32]}
    assert attended == {f"{name}.attn1.to_k" for name in FINEST}
    # Everything else at full length: 64 tokens on the fine grid, 16 on the coarse one.
    assert {count[0] for name, count in seen.items() if name not in attended} == {64, 16}
    for labels in handle.labels.values():
        assert labels.shape == (2, 64)
        assert all(len(image.unique()) == 32 for image in labels)


def test_attention_is_that_of_the_means_and_constant_on_clusters(
    unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    name = "down_blocks.0.attentions.0.transformer_blocks.0"
    block = unet.get_submodule(name)
    plain = copy.deepcopy(block)
    caught: dict[str, Tensor] = {}
    with patch_unet(unet, keep=0.4) as handle:
        block.register_forward_pre_hook(lambda m, a: caught.update(x=a[0]))
        block.attn1.register_forward_hook(lambda m, a, y: caught.update(attention=y))
        block.register_forward_hook(lambda m, a, y: caught.update(y=y))
        run(unet, inputs)
        labels = handle.labels[name]
    assert labels.max() + 1 == 25  # int(64 * 0.4)
    one_hot = nn.functional.one_hot(labels, 25).float()  # (B, N, K)
    with torch.no_grad():
        means = one_hot.transpose(1, 2) @ plain.norm1(caught["x"]) / one_hot.sum(1).unsqueeze(-1)
        attention = one_hot @ plain.attn1(means)
        x = caught["x"] + attention
        x = x + plain.attn2(plain.norm2(x), encoder_hidden_states=inputs[2])
        x = x + plain.ff(plain.norm3(x))
    torch.testing.assert_close(caught["attention"], attention, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(caught["y"], x, rtol=1e-5, atol=1e-6)
    for b in range(2):
        for k in range(25):
            members = caught["attention"][b][labels[b] == k]
            assert torch.equal(members, members[:1].expand_as(members))


def test_cross_attention_and_mlp_are_merged_on_request(unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    lengths: dict[str, int] = {}
    block = unet.get_submodule("up_blocks.1.attentions.1.transformer_blocks.0")
    block.attn2.to_q.register_forward_hook(lambda m, a, y: lengths.update(cross=y.shape[1]))
    block.ff.net[0].register_forward_hook(lambda m, a, y: lengths.update(mlp=y.shape[1]))
    for cross, mlp in ((False, False), (True, False), (False, True), (True, True)):
        with patch_unet(unet, keep=0.25, cross_attention=cross, mlp=mlp):
            assert run(unet, inputs).isfinite().all()
        assert lengths == {"cross": 16 if cross else 64, "mlp": 16 if mlp else 64}


def test_two_images_are_clustered_each_for_itself(unet: nn.Module) -> None:
    # Not the copies of guidance: two different latents, the batch must equal one image at a time.
    latent, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)
    with patch_unet(unet, keep=0.5) as handle:
        both = run(unet, (latent, torch.tensor(3), text))
        labels = dict(handle.labels)
        for i in range(2):
            alone = run(unet, (latent[i : i + 1], torch.tensor(3), text[i : i + 1]))
            torch.testing.assert_close(alone[0], both[i], rtol=1e-4, atol=1e-5)
            assert all(torch.equal(handle.labels[name][0], labels[name][i]) for name in FINEST)


@pytest.mark.parametrize("linkage", ["average", "complete", "single"])
def test_clusters_are_those_of_the_input_of_the_block(
    unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], linkage: str
) -> None:
    settings: dict[str, Tensor] = {}
    with patch_unet(unet, keep=0.3, linkage=linkage) as handle:
        for name in FINEST:
            unet.get_submodule(name).register_forward_pre_hook(lambda m, a, name=name: settings.update({name: a[0]}))
        run(unet, inputs)
    for name in FINEST:
        expected = agglomerate(cosine_distance(settings[name]), 19, linkage=linkage)
        assert torch.equal(handle.labels[name], expected)


def test_clusters_in_hyperbolic_space(unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    name, settings = "down_blocks.0.attentions.0.transformer_blocks.0", []
    unet.get_submodule(name).register_forward_pre_hook(lambda m, a: settings.append(a[0]))
    with patch_unet(unet, keep=0.5, metric=Lorentz()) as handle:
        run(unet, inputs)
        hyperbolic = handle.labels[name]
    assert torch.equal(hyperbolic, agglomerate(manifold_distance(settings[0], Lorentz()), 32))
    assert not torch.equal(hyperbolic, agglomerate(cosine_distance(settings[0]), 32))


@pytest.mark.parametrize("size", [(8, 8), (8, 12), (16, 4)])
def test_any_picture_size(unet: nn.Module, size: tuple[int, int]) -> None:
    num_tokens = size[0] * size[1]
    with patch_unet(unet, keep=0.3, max_downsample=2) as handle:
        sample = run(unet, (torch.randn(1, 4, *size), torch.tensor(1), torch.randn(1, 5, 12)))
    assert sample.shape == (1, 4, *size) and sample.isfinite().all()
    for name, counts in handle.num_tokens.items():
        tokens = num_tokens if name in FINEST else num_tokens // 4
        assert counts == (tokens, int(tokens * 0.3))
    assert len(handle.num_tokens) == 7  # all transformer blocks of this U-Net


def test_unpatch_restores_outputs_hooks_and_state(unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    plain, before, keys = run(unet, inputs), hooks(unet), list(unet.state_dict())
    attributes = set(vars(unet))
    handle = patch_unet(unet, keep=0.5)
    assert list(unet.state_dict()) == keys
    assert not torch.allclose(run(unet, inputs), plain, atol=1e-4)
    handle.unpatch()
    handle.unpatch()
    assert torch.equal(run(unet, inputs), plain)
    assert hooks(unet) == before and set(vars(unet)) == attributes


def test_switches_act_on_the_next_forward(unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    plain = run(unet, inputs)
    handle = patch_unet(unet, keep=0.5)
    half = run(unet, inputs)
    handle.keep = 0.25
    quarter = run(unet, inputs)
    assert set(handle.num_tokens.values()) == {(64, 16)}
    assert not torch.allclose(half, quarter, atol=1e-5)
    handle.enabled = False
    assert torch.equal(run(unet, inputs), plain)
    handle.enabled, handle.keep = True, 0.5
    assert torch.equal(run(unet, inputs), half)
    # A second patch takes the place of the first.
    second = patch_unet(unet, keep=0.25)
    assert torch.equal(run(unet, inputs), quarter)
    second.unpatch()
    assert torch.equal(run(unet, inputs), plain)


def test_a_context_that_fails_still_unpatches(unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    before = hooks(unet)
    with pytest.raises(RuntimeError, match="inside"), patch_unet(unet, keep=0.5):
        raise RuntimeError("inside")
    assert hooks(unet) == before


def test_copy_of_a_patched_model_is_patched_for_itself(unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    plain = run(unet, inputs)
    handle = patch_unet(unet, keep=0.5)
    merged = run(unet, inputs)
    twin = copy.deepcopy(unet)
    handle.unpatch()
    assert torch.equal(run(unet, inputs), plain)
    assert torch.equal(run(twin, inputs), merged)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_input_and_weights(checkpointing: bool) -> None:
    unet = tiny_unet().train()
    if checkpointing:
        unet.enable_gradient_checkpointing()
    latent = torch.randn(2, 4, 8, 8, requires_grad=True)
    with patch_unet(unet, keep=0.5, cross_attention=True, mlp=True) as handle:
        unet(latent, torch.tensor(2), torch.randn(2, 5, 12)).sample.square().mean().backward()
        assert set(handle.num_tokens.values()) == {(64, 32)}
    assert latent.grad is not None and latent.grad.isfinite().all() and latent.grad.abs().sum() > 0
    query = unet.get_submodule("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q").weight.grad
    assert query is not None and query.isfinite().all() and query.abs().sum() > 0


def test_checkpointed_gradients_are_the_same(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    def gradient(checkpointing: bool) -> Tensor:
        torch.manual_seed(0)
        unet = tiny_unet().train()
        if checkpointing:
            unet.enable_gradient_checkpointing()
        latent = inputs[0].clone().requires_grad_()
        with patch_unet(unet, keep=0.5):
            unet(latent, *inputs[1:]).sample.square().mean().backward()
        assert latent.grad is not None
        return latent.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-5, atol=1e-7)


def test_half_precision_keeps_its_type(unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    half = unet.to(torch.bfloat16)
    with patch_unet(half, keep=0.5):
        sample = run(half, (inputs[0].bfloat16(), inputs[1], inputs[2].bfloat16()))
    assert sample.dtype == torch.bfloat16 and sample.isfinite().all()


def no_attention() -> Iterator[tuple[nn.Module, str]]:
    plain: dict[str, Any] = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    yield (
        diffusers.UNet2DModel(
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), **plain
        ),
        "UNet2DModel has no self-attention",
    )
    yield nn.Sequential(nn.Conv2d(3, 8, 3)), "Sequential has no self-attention"


def test_wrong_models_are_refused_in_one_line() -> None:
    for model, message in no_attention():
        before = hooks(model)
        with pytest.raises(UserError, match=message) as caught:
            patch_unet(model)
        assert "\n" not in str(caught.value) and "pipeline.unet" in str(caught.value)
        assert hooks(model) == before


def test_wrong_arguments_are_refused_before_anything_is_patched(unet: nn.Module) -> None:
    before = hooks(unet)
    with pytest.raises(UserError, match="did you mean 'atc'"):
        patch_unet(unet, method="act")
    with pytest.raises(UserError, match=r"a U-Net cannot use method 'topk'; expected one of atc, tome"):
        patch_unet(unet, method="topk")
    with pytest.raises(UserError, match=r"linkage must be .*'averge'.*did you mean 'average'"):
        patch_unet(unet, linkage="averge")
    for method in ("tome", "kmeans"):  # they compare by the angle, whatever is asked for
        with pytest.raises(UserError, match=rf"'{method}' cannot compare on it"):
            patch_unet(unet, method=method, metric=Lorentz())
    for keep in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(UserError, match=r"keep=.*expected a share"):
            patch_unet(unet, keep=keep)
    assert hooks(unet) == before


def test_level_without_attention_names_the_finest_that_has_it() -> None:
    unet = tiny_unet(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")
    )
    with pytest.raises(UserError, match="works at 1/2 of the input, pass max_downsample=2"):
        patch_unet(unet)
    with patch_unet(unet, keep=0.5, max_downsample=2) as handle:
        run(unet, (torch.randn(1, 4, 8, 8), torch.tensor(1), torch.randn(1, 5, 12)))
    assert set(handle.num_tokens.values()) == {(16, 8)}


def test_masks_chunks_and_bad_values_are_refused(unet: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    with patch_unet(unet, keep=0.5):
        with pytest.raises(UserError, match=r"down_blocks.0.*attention mask has no meaning"):
            run(unet, inputs, attention_mask=torch.ones(2, 64))
        with pytest.raises(ValueError, match=r"down_blocks.0"):
            run(unet, (inputs[0] * float("nan"), *inputs[1:]))
    plain = run(unet, inputs)
    with patch_unet(unet, keep=0.5, mlp=True) as handle:
        unet.get_submodule("down_blocks.0.attentions.0.transformer_blocks.0").set_chunk_feed_forward(16, dim=1)
        with pytest.raises(UserError, match=r"\(2, 16\) for clusters of \(2, 64\).*mlp=False"):
            run(unet, inputs)
        handle.enabled = False  # a forward pass that broke off leaves nothing behind
        torch.testing.assert_close(run(unet, inputs), plain, rtol=1e-5, atol=1e-6)


def test_missing_package_names_its_extra(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in list(sys.modules):
        if name.split(".")[0] == "diffusers":
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"this needs diffusers: pip install hyptree\[diffusion\]"):
        patch_unet(unet)

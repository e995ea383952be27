"""Token reduction in vision models of transformers: tiny random models, every family, both attention kernels."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

transformers = pytest.importorskip("transformers")

from hyptree.errors import UserError  # noqa: E402
from hyptree.tokens.families.adapter import UnsupportedModel  # noqa: E402
from hyptree.tokens.patch import handle_of, patch, patched  # noqa: E402
from hyptree.train.model import checkpoint_activations  # noqa: E402

NUM_PATCHES = 36
COUNTS = [18, 9, 4]  # int(36 * 0.5**i), after blocks 1, 2 and 3 of 4
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 48,
    "patch_size": 8,
    "num_labels": 5,
}


def clip_config() -> Any:
    vision = {**SMALL, "projection_dim": 16}
    text = {
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
        "max_position_embeddings": 8,
        "projection_dim": 16,
        "bos_token_id": 48,
        "eos_token_id": 49,
    }
    return transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=16, num_labels=5)


def dino_config(**more: Any) -> dict[str, Any]:
    return {**{key: value for key, value in SMALL.items() if key != "intermediate_size"}, "mlp_ratio": 2, **more}


@dataclass(frozen=True)
class Family:
    """How a family is built, what is compared, and where its blocks are."""

    build: Callable[[], Any]
    output: Callable[[Any, Tensor], Tensor]
    num_prefix: int
    blocks: str
    norm: str


def logits(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x).logits
    return y


def pooled(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x).pooler_output
    return y


FAMILIES = {
    "vit": Family(
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL)),
        logits,
        1,
        "vit.layers",
        "layernorm_after",
    ),
    "vit_model": Family(
        lambda: transformers.ViTModel(transformers.ViTConfig(**SMALL)), pooled, 1, "layers", "layernorm_after"
    ),
    "deit": Family(
        lambda: transformers.DeiTForImageClassification(transformers.DeiTConfig(**SMALL)),
        logits,
        2,
        "deit.layers",
        "layernorm_after",
    ),
    "deit_distilled": Family(
        lambda: transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**SMALL)),
        logits,
        2,
        "deit.layers",
        "layernorm_after",
    ),
    "dinov2": Family(
        lambda: transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**dino_config())),
        logits,
        1,
        "dinov2.encoder.layer",
        "norm2",
    ),
    "dinov2_swiglu": Family(
        lambda: transformers.Dinov2Model(transformers.Dinov2Config(**dino_config(use_swiglu_ffn=True))),
        pooled,
        1,
        "encoder.layer",
        "norm2",
    ),
    "dinov2_registers": Family(
        lambda: transformers.Dinov2WithRegistersForImageClassification(
            transformers.Dinov2WithRegistersConfig(**dino_config(num_register_tokens=3))
        ),
        logits,
        4,
        "dinov2_with_registers.encoder.layer",
        "norm2",
    ),
    "clip_vision": Family(
        lambda: transformers.CLIPVisionModel(clip_config().vision_config), pooled, 1, "encoder.layers", "layer_norm2"
    ),
    "clip_projection": Family(
        lambda: transformers.CLIPVisionModelWithProjection(clip_config().vision_config),
        lambda model, x: model(x).image_embeds,
        1,
        "vision_model.encoder.layers",
        "layer_norm2",
    ),
    "clip_classifier": Family(
        lambda: transformers.CLIPForImageClassification(clip_config()),
        logits,
        1,
        "vision_model.encoder.layers",
        "layer_norm2",
    ),
    "clip": Family(
        lambda: transformers.CLIPModel(clip_config()),
        lambda model, x: model.get_image_features(x).pooler_output,
        1,
        "vision_model.encoder.layers",
        "layer_norm2",
    ),
}
DINO_TAKES_SIZES = (
    "attention_mask" in inspect.signature(transformers.models.dinov2.modeling_dinov2.Dinov2Layer.forward).parameters
)
each_family = pytest.mark.parametrize("name", FAMILIES)


def build(name: str, kernel: str = "sdpa") -> Any:
    return shake(FAMILIES[name].build(), kernel)


def shake(model: Any, kernel: str = "sdpa") -> Any:
    """Fresh weights large enough that every token and every step matters (transformers starts near zero)."""
    if model.config.model_type.startswith("dinov2") and not DINO_TAKES_SIZES:
        pytest.skip("DINOv2 of transformers up to 5.17 is refused, see the test of that")
    model.set_attn_implementation(kernel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 48, 48)


def run(name: str, model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return FAMILIES[name].output(model, x)


def hooks(model: nn.Module) -> list[tuple[int, int]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


# ---------------------------------------------------------------------- what every family must do
@each_family
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_keep_one_is_the_plain_model_bit_for_bit(name: str, kernel: str, images: Tensor) -> None:
    model = build(name, kernel)
    plain = run(name, model, images)
    with patched(model, keep=1.0) as handle:
        assert torch.equal(run(name, model, images), plain)
        assert handle.num_tokens == [NUM_PATCHES] * 3


@each_family
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_tokens_per_block_sizes_and_prefix(name: str, kernel: str, images: Tensor) -> None:
    """Counts as asked, sizes add up to the patches, prefix tokens in front and untouched, means as defined."""
    family, model = FAMILIES[name], build(name, kernel)
    blocks = model.get_submodule(family.blocks)
    before: list[Tensor] = []
    norm = blocks[1].get_submodule(family.norm)
    spy = norm.register_forward_pre_hook(lambda m, args: before.append(args[0]))
    plain = run(name, model, images)
    spy.remove()

    lengths: list[int] = []
    with patched(model, keep=0.5, layers=(1, 2, 3), trace=True) as handle:
        norm.register_forward_pre_hook(lambda m, args: before.append(args[0]))
        for block in blocks:
            block.register_forward_hook(lambda m, args, y: lengths.append(y.shape[1]))
        merged = run(name, model, images)
    assert lengths == [family.num_prefix + count for count in [NUM_PATCHES, *COUNTS]]
    assert handle.num_tokens == COUNTS
    for size, source, count in zip(handle.sizes, handle.sources, COUNTS, strict=True):
        assert size.shape == (2, count) and source.shape == (2, NUM_PATCHES)
        assert torch.equal(size.sum(1), torch.full((2,), float(NUM_PATCHES)))
        assert torch.equal(size, nn.functional.one_hot(source, count).sum(1).float())

    # The first merge: until there both models compute the same.
    stream, reduced = before
    assert torch.equal(reduced[:, : family.num_prefix], stream[:, : family.num_prefix])
    one_hot = nn.functional.one_hot(handle.sources[0], COUNTS[0]).float()  # (B, P, K)
    means = one_hot.mT @ stream[:, family.num_prefix :] / handle.sizes[0].unsqueeze(-1)
    torch.testing.assert_close(reduced[:, family.num_prefix :], means, rtol=1e-5, atol=1e-5)
    assert merged.isfinite().all() and merged.shape == plain.shape
    assert not torch.allclose(merged, plain, atol=1e-3)


@each_family
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_attention_counts_every_token_as_often_as_its_size(name: str, kernel: str, images: Tensor) -> None:
    """Each block after a merge against ``softmax(scale q k^T + log s) v``, written out."""
    family, model = FAMILIES[name], build(name, kernel)
    caught: list[tuple[Any, Tensor, Tensor]] = []
    with patched(model, keep=0.4, layers=(0, 2)) as handle:
        for block in model.get_submodule(family.blocks)[1:]:
            attention = block.attention if hasattr(block, "attention") else block.self_attn
            attention.register_forward_hook(
                lambda m, args, kwargs, y: caught.append((m, args[0] if args else kwargs["hidden_states"], y[0])),
                with_kwargs=True,
            )
        run(name, model, images)
    sizes = [handle.sizes[0], handle.sizes[0], handle.sizes[1]]
    assert len(caught) == 3 and all(size.max() > 1 for size in sizes)
    for (module, x, y), size in zip(caught, sizes, strict=True):
        with torch.no_grad():
            q, k, v = (
                getattr(module, part)(x).unflatten(-1, (4, 8)).transpose(1, 2)
                for part in ("q_proj", "k_proj", "v_proj")
            )
            weight = torch.cat([torch.ones(2, family.num_prefix), size], 1)
            chance = (q @ k.mT / 8**0.5).exp() * weight[:, None, None]
            out = (chance / chance.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)
            expected = (module.o_proj if hasattr(module, "o_proj") else module.out_proj)(out)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@each_family
def test_unpatch_restores_outputs_hooks_and_state(name: str, images: Tensor) -> None:
    model = build(name)
    plain, before, keys = run(name, model, images), hooks(model), list(model.state_dict())
    attributes = [set(vars(module)) for module in model.modules()]
    handle = patch(model, keep=0.5)
    merged = run(name, model, images)
    assert list(model.state_dict()) == keys
    handle.enabled = False
    assert torch.equal(run(name, model, images), plain)
    handle.enabled = True
    assert torch.equal(run(name, model, images), merged)
    handle.unpatch()
    assert torch.equal(run(name, model, images), plain)
    assert hooks(model) == before
    assert [set(vars(module)) for module in model.modules()] == attributes


@each_family
def test_gradients_reach_the_first_layer(name: str, images: Tensor) -> None:
    model = build(name)
    x = images.requires_grad_()
    with patched(model, keep=0.5):
        FAMILIES[name].output(model, x).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    # Tokens are merged, not dropped: every patch of every picture still has a say.
    assert (x.grad.unfold(2, 8, 8).unfold(3, 8, 8).abs().sum((1, 4, 5)) > 0).all()


@each_family
def test_both_kernels_agree(name: str, images: Tensor) -> None:
    model = build(name)
    with patched(model, keep=0.5):
        fused = run(name, model, images)
        model.set_attn_implementation("eager")
        torch.testing.assert_close(run(name, model, images), fused, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- against timm
def test_same_weights_in_timm_give_the_same_logits(images: Tensor) -> None:
    timm = pytest.importorskip("timm")
    ours = build("vit")
    twin = timm.models.vision_transformer.VisionTransformer(
        img_size=48, patch_size=8, embed_dim=32, depth=4, num_heads=4, mlp_ratio=2, num_classes=5, norm_layer=None
    ).eval()
    source = ours.state_dict()
    state = {
        "cls_token": source["vit.embeddings.cls_token"],
        "pos_embed": source["vit.embeddings.position_embeddings"],
        "patch_embed.proj.weight": source["vit.embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": source["vit.embeddings.patch_embeddings.projection.bias"],
    }
    names = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj"}
    names |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    for kind in ("weight", "bias"):
        state |= {f"norm.{kind}": source[f"vit.layernorm.{kind}"], f"head.{kind}": source[f"classifier.{kind}"]}
        for i in range(4):
            state |= {f"blocks.{i}.{a}.{kind}": source[f"vit.layers.{i}.{b}.{kind}"] for a, b in names.items()}
            parts = [source[f"vit.layers.{i}.attention.{part}_proj.{kind}"] for part in "qkv"]
            state[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(parts)
    twin.load_state_dict(state)
    for block in (*twin.blocks, twin):  # the two libraries differ in the epsilon of their norms
        for module in block.children():
            if isinstance(module, nn.LayerNorm):
                module.eps = ours.config.layer_norm_eps
    with torch.no_grad():
        torch.testing.assert_close(twin(images), ours(images).logits, rtol=1e-4, atol=1e-4)
        for method in ("atc", "tome", "topk", "evit"):
            for linkage in ("average", "complete") if method == "atc" else ("average",):
                options: dict[str, Any] = {"method": method, "linkage": linkage, "keep": 0.5, "layers": (1, 2, 3)}
                a, b = patch(ours, **options, trace=True), patch(twin, **options, trace=True)
                torch.testing.assert_close(twin(images), ours(images).logits, rtol=1e-4, atol=1e-4)
                assert all(torch.equal(x, y) for x, y in zip(a.sources, b.sources, strict=True))


# ---------------------------------------------------------------------- heads
@pytest.mark.parametrize("name", ["dinov2", "dinov2_registers", "clip_classifier"])
def test_mean_heads_count_patches_not_tokens(name: str, images: Tensor) -> None:
    family, model = FAMILIES[name], build(name)
    tower = model.get_submodule(family.blocks.split(".")[0])
    for pool in ("weighted", "plain"):
        with patched(model, keep=0.5, layers=(1, 3), pool=pool) as handle, torch.no_grad():
            got = model(images).logits
            last = tower(images).last_hidden_state
            assert last.shape[1] == family.num_prefix + 9
            weight = handle.sizes[-1] if pool == "weighted" else torch.ones(2, 9)
        mean = (weight.unsqueeze(-1) * last[:, family.num_prefix :]).sum(1) / weight.sum(1, keepdim=True)
        head = mean if name == "clip_classifier" else torch.cat([last[:, 0], mean], 1)
        with torch.no_grad():
            torch.testing.assert_close(got, model.classifier(head), rtol=1e-5, atol=1e-5)


def test_clip_text_side_is_untouched(images: Tensor) -> None:
    model = build("clip")
    words = torch.tensor([[1, 5, 7, 49], [2, 9, 49, 0]])
    with torch.no_grad():
        plain = model(input_ids=words, pixel_values=images)
        with patched(model, keep=0.5) as handle:
            out = model(input_ids=words, pixel_values=images)
        assert torch.equal(out.text_embeds, plain.text_embeds)
        assert not torch.allclose(out.image_embeds, plain.image_embeds, atol=1e-4)
        assert handle.num_tokens == COUNTS
        norm = model.vision_model.post_layernorm
        # The pooled output is the class token behind the last norm, as without a patch.
        with patched(model, keep=0.5):
            vision = model.vision_model(images)
        assert torch.equal(norm(vision.last_hidden_state[:, 0]), vision.pooler_output)
        assert vision.last_hidden_state.shape == (2, 1 + 4, 32)


def test_whole_and_tower_share_one_patch(images: Tensor) -> None:
    model = build("clip")
    before = hooks(model)
    plain = run("clip", model, images)
    first = patch(model, keep=0.5)
    assert handle_of(model.vision_model) is first
    second = patch(model.vision_model, keep=0.5)  # takes the place of the first
    assert handle_of(model) is None and handle_of(model.vision_model) is second
    third = patch(model, keep=0.5)
    assert handle_of(model) is third and handle_of(model.vision_model) is third
    run("clip", model, images)
    assert third.num_tokens == COUNTS and not second.num_tokens
    third.unpatch()
    assert hooks(model) == before and torch.equal(run("clip", model, images), plain)
    assert handle_of(model) is None and handle_of(model.vision_model) is None


@pytest.mark.parametrize("registers", [0, 3])
def test_backbones_give_full_maps(images: Tensor, registers: int) -> None:
    names = ["stem", "stage1", "stage2", "stage3", "stage4"]
    if registers:
        config = transformers.Dinov2WithRegistersConfig(
            **dino_config(num_register_tokens=registers), out_features=names
        )
        model = shake(transformers.Dinov2WithRegistersBackbone(config))
    else:
        model = shake(transformers.Dinov2Backbone(transformers.Dinov2Config(**dino_config(), out_features=names)))
    with torch.no_grad():
        plain = model(images)
        with patched(model, keep=1.0):
            assert all(torch.equal(a, b) for a, b in zip(model(images).feature_maps, plain.feature_maps, strict=True))
        with patched(model, keep=0.5, trace=True) as handle:
            traced = model(images, output_hidden_states=True)
        with patched(model, keep=0.5):
            maps = model(images).feature_maps
    assert [tuple(y.shape) for y in maps] == [(2, 32, 6, 6)] * 5
    assert [x.shape[1] for x in traced.hidden_states] == [1 + registers + NUM_PATCHES] * 5
    for i in (0, 1):  # the input of block 0 and its output, before anything is merged
        assert torch.equal(maps[i], plain.feature_maps[i])
    for y, source, count in zip(maps[2:], handle.sources, COUNTS, strict=True):
        for b in range(2):
            patches = y[b].flatten(1)  # (C, P)
            assert len(patches.unique(dim=1).T) == count
            assert all(len(patches[:, source[b] == k].unique(dim=1).T) == 1 for k in range(count))
    assert all(torch.equal(a, b) for a, b in zip(maps, traced.feature_maps, strict=True))


def test_masked_image_modelling_gets_its_grid_back(images: Tensor) -> None:
    config = transformers.ViTConfig(**SMALL, encoder_stride=8)
    model = shake(transformers.ViTForMaskedImageModeling(config))
    masked = torch.zeros(2, NUM_PATCHES, dtype=torch.bool)
    masked[:, ::3] = True
    with torch.no_grad(), patched(model, keep=0.5) as handle:
        out = model(images, bool_masked_pos=masked)
        assert out.reconstruction.shape == (2, 3, 48, 48) and out.reconstruction.isfinite().all()
        assert handle.num_tokens == COUNTS
        patches = out.reconstruction[0].unfold(1, 8, 8).unfold(2, 8, 8).permute(1, 2, 0, 3, 4).reshape(NUM_PATCHES, -1)
        assert len(patches.unique(dim=0)) == 4  # one picture of a patch for each token that is left
        # The tower by itself is like any other.
        assert model.vit(images).last_hidden_state.shape[1] == 1 + COUNTS[-1]


# ---------------------------------------------------------------------- what else models are asked for
@pytest.mark.parametrize("name", ["vit", "dinov2", "clip_vision"])
@pytest.mark.parametrize("asked_before", [False, True])
def test_hidden_states_are_as_long_as_the_blocks_leave_them(name: str, asked_before: bool, images: Tensor) -> None:
    """Also where transformers hung its own recording hooks on the blocks before the model was patched."""
    family, model = FAMILIES[name], build(name)
    if asked_before:
        model(images, output_hidden_states=True)
    outputs: list[Tensor] = []
    with torch.no_grad(), patched(model, keep=0.5, layers=(1, 2, 3)):
        for block in model.get_submodule(family.blocks):
            block.register_forward_hook(lambda m, args, y: outputs.append(y))
        states = model(images, output_hidden_states=True).hidden_states
    assert [x.shape[1] - family.num_prefix for x in states] == [NUM_PATCHES, NUM_PATCHES, *COUNTS]
    assert len(outputs) == 4 and all(torch.equal(a, b) for a, b in zip(states[1:], outputs, strict=True))


@pytest.mark.parametrize("name", ["vit", "dinov2", "clip_vision"])
def test_attentions_are_those_of_the_tokens_a_block_receives(name: str, images: Tensor) -> None:
    prefix, model = FAMILIES[name].num_prefix, build(name, "eager")
    with torch.no_grad(), patched(model, keep=0.5, layers=(1, 2, 3)):
        attentions = model(images, output_attentions=True).attentions
    lengths = [prefix + count for count in [NUM_PATCHES, NUM_PATCHES, *COUNTS[:2]]]
    assert [tuple(a.shape) for a in attentions] == [(2, 4, n, n) for n in lengths]
    for a in attentions:
        torch.testing.assert_close(a.sum(-1), torch.ones(a.shape[:-1]))


@pytest.mark.parametrize("method", ["atc", "tome", "kmeans", "kmedoids", "dpcknn", "topk", "evit", "random"])
def test_every_method_reduces_as_asked(method: str, images: Tensor) -> None:
    model = build("deit_distilled")
    plain = run("deit_distilled", model, images)
    with patched(model, method, keep=0.5) as handle:
        y = run("deit_distilled", model, images)
    assert handle.num_tokens == COUNTS
    assert y.isfinite().all() and not torch.allclose(y, plain, atol=1e-3)


@pytest.mark.parametrize("name", ["vit", "dinov2_registers", "clip_classifier"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_threshold_in_a_batch_equals_one_by_one(name: str, kernel: str, images: Tensor) -> None:
    model = build(name, kernel)
    images[1] *= 0.2  # another picture, another number of clusters
    with patched(model, threshold=0.5) as handle:
        both = run(name, model, images)
        counts = [count.tolist() for count in handle.num_tokens]  # type: ignore[union-attr]
        assert any(a != b for a, b in counts) and all(count < [NUM_PATCHES] * 2 for count in counts)
        for i in range(2):
            alone = run(name, model, images[i : i + 1])
            assert [int(count) for count in handle.num_tokens] == [count[i] for count in counts]
            torch.testing.assert_close(alone[0], both[i], rtol=1e-4, atol=1e-4)


def test_channels_instead_of_a_mask(images: Tensor) -> None:
    for name in ("vit", "dinov2", "clip"):
        for kernel in ("sdpa", "eager"):
            model = build(name, kernel)
            with patched(model, keep=0.5):
                by_mask = run(name, model, images)
            with patched(model, keep=0.5, prop_attn="channel"):
                torch.testing.assert_close(run(name, model, images), by_mask, rtol=1e-4, atol=1e-5)
            with patched(model, keep=0.5, prop_attn=False):
                assert not torch.allclose(run(name, model, images), by_mask, atol=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["vit", "dinov2_registers", "clip_vision", "clip_classifier"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, use_reentrant: bool) -> None:
    model = build(name).train()  # dropout and drop path are zero here
    # Two passes in flight: the blocks of the first are computed again after the second one has run.
    first, second = torch.randn(3, 3, 48, 48, requires_grad=True), torch.randn(2, 3, 48, 48, requires_grad=True)

    def values_and_gradients() -> list[Tensor]:
        model.zero_grad()
        first.grad = second.grad = None
        outputs = [FAMILIES[name].output(model, x) for x in (first, second)]
        (outputs[0].square().sum() + outputs[1].sum()).backward()
        weights = (first, second, *model.parameters())
        return [*outputs, *(weight.grad.clone() for weight in weights if weight.grad is not None)]

    # Counts do not depend on what reaches a block, so that nothing but the sizes tells the passes apart.
    for options in ({"keep": 0.5}, {"counts": [20, 7], "layers": (0, 2)}):
        with patched(model, **options):
            model.apply(lambda module: setattr(module, "gradient_checkpointing", False))
            plain = values_and_gradients()
            checkpoint_activations(model, name, use_reentrant)
            again = values_and_gradients()
        assert len(plain) == len(again) > 20
        for a, b in zip(plain, again, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", CheckpointImpl)
@pytest.mark.parametrize("name", ["vit", "dinov2", "clip_vision"])
def test_blocks_in_wrappers_that_compute_them_again(name: str, way: CheckpointImpl) -> None:
    model = build(name).train()
    images = torch.randn(2, 3, 48, 48)
    kinds = {type(block) for block in model.get_submodule(FAMILIES[name].blocks)}
    gradients = []
    for is_wrapped in (False, True):
        x = images.clone().requires_grad_()
        if is_wrapped:  # before the patch, which has to find the blocks below their wrappers
            wrapper = partial(checkpoint_wrapper, checkpoint_impl=way)
            apply_activation_checkpointing(model, wrapper, check_fn=lambda module: type(module) in kinds)
        with patched(model, keep=0.5):
            FAMILIES[name].output(model, x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_blocks_computed_again_are_let_go(images: Tensor) -> None:
    """What one block made for its gradient must be gone when the next one is computed again, or nothing is saved."""
    model = build("vit").train()
    checkpoint_activations(model, "vit")
    reduced: list[weakref.ref[Tensor]] = []
    with patched(model, keep=0.5):
        for block in model.vit.layers[1:]:
            block.layernorm_after.register_forward_pre_hook(lambda _, args: reduced.append(weakref.ref(args[0])))
        logits(model, images).sum().backward()
        assert len(reduced) == 6 and sum(tokens() is not None for tokens in reduced) <= 1


def test_shared_dropout_and_drop_path_act_on_the_reduced_branch(images: Tensor) -> None:
    """ViT and DINOv2 use one module behind both branches; in training it must drop, and only where it should."""
    vit = shake(transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, hidden_dropout_prob=0.5)))
    dino = shake(transformers.Dinov2Model(transformers.Dinov2Config(**dino_config(drop_path_rate=0.5))))
    for model in (vit, dino):
        model.train()
        with torch.no_grad(), patched(model, keep=0.5) as handle:
            torch.manual_seed(3)
            first = model(images)[0]
            torch.manual_seed(3)
            second = model(images)[0]
            third = model(images)[0]
            assert handle.num_tokens == COUNTS
        assert torch.equal(first, second) and not torch.allclose(first, third)


def test_copy_of_a_patched_model_has_its_own_patch(images: Tensor) -> None:
    for name in ("dinov2", "clip"):
        model = build(name)
        plain = run(name, model, images)
        patch(model, keep=0.5)
        merged = run(name, model, images)
        twin = copy.deepcopy(model)
        handle = handle_of(model)
        assert handle is not None and handle_of(twin) not in (None, handle)
        handle.unpatch()
        assert torch.equal(run(name, model, images), plain)
        assert torch.equal(run(name, twin, images), merged)
        handle_of(twin).unpatch()  # type: ignore[union-attr]
        assert torch.equal(run(name, twin, images), plain)


def test_subclass_is_what_it_is_made_from(images: Tensor) -> None:
    class Mine(transformers.Dinov2ForImageClassification):
        """A user's own class, defined in a module that is not one of transformers."""

    torch.manual_seed(0)
    mine = shake(Mine(transformers.Dinov2Config(**dino_config())))
    theirs = build("dinov2")
    theirs.load_state_dict(mine.state_dict())
    with patched(mine, keep=0.5), patched(theirs, keep=0.5):
        assert torch.equal(run("dinov2", mine, images), run("dinov2", theirs, images))


def test_other_picture_sizes(images: Tensor) -> None:
    model = build("dinov2")
    with patched(model, keep=0.5) as handle, torch.no_grad():
        assert model(torch.randn(1, 3, 64, 40)).logits.isfinite().all()
        assert handle.num_tokens == [20, 10, 5]  # 8 x 5 patches
    vit = build("vit")
    with patched(vit, keep=0.5) as handle, torch.no_grad():
        assert vit(torch.randn(1, 3, 64, 64), interpolate_pos_encoding=True).logits.isfinite().all()
        assert handle.num_tokens == [32, 16, 8]


def test_bfloat16_keeps_its_type(images: Tensor) -> None:
    for name in ("vit", "dinov2", "clip"):
        for kernel in ("sdpa", "eager"):
            model = build(name, kernel).to(torch.bfloat16)
            with patched(model, keep=0.5):
                y = run(name, model, images.bfloat16())
            assert y.dtype == torch.bfloat16 and y.isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache.-wrapped function")
@pytest.mark.parametrize("name", ["vit", "dinov2", "clip_vision"])
def test_compiles_as_one_graph(name: str, images: Tensor) -> None:
    torch.compiler.reset()
    model = build(name)
    with patched(model, keep=0.5):
        plain = run(name, model, images)
        graph = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(run(name, graph, images), plain, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- what is refused
def refused(model: Any, match: str, **options: Any) -> None:
    before = hooks(model)
    with pytest.raises(UnsupportedModel, match=match) as caught:
        patch(model, keep=0.5, **options)
    assert "\n" not in str(caught.value)
    assert hooks(model) == before and handle_of(model) is None


def test_other_models_are_refused_in_one_line() -> None:
    small: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    bert = transformers.BertModel(transformers.BertConfig(**small, vocab_size=20))
    refused(bert, r"BertModel of transformers has no vision tower.*ViT, DeiT, DINOv2")
    siglip = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**small, image_size=16, patch_size=8))
    refused(siglip, r"SiglipVisionModel of transformers has no vision tower")
    swin = transformers.SwinModel(
        transformers.SwinConfig(embed_dim=8, depths=[1], num_heads=[1], window_size=2, image_size=16)
    )
    refused(swin, "SwinModel of transformers has no vision tower")

    class Unknown(transformers.PreTrainedModel):
        def __init__(self, config: Any):
            super().__init__(config)
            self.eyes = transformers.ViTModel(config)

    refused(Unknown(transformers.ViTConfig(**SMALL)), r"Unknown.*is not known here; patch its tower alone, model\.eyes")


def test_blocks_of_another_layout_are_named() -> None:
    model = build("vit")
    model.vit.layers[2].layernorm_later = model.vit.layers[2].layernorm_after
    del model.vit.layers[2].layernorm_after
    refused(model, r"vit\.layers\.2 \(ViTLayer\) has no known layout in the installed transformers")


def test_kernels_without_bias_are_refused_unless_sizes_are_not_wanted(images: Tensor) -> None:
    model = build("clip")
    model.vision_model.config._attn_implementation_internal = "flash_attention_2"
    refused(model, r"vision_model\.encoder\.layers\.0: attention 'flash_attention_2' takes no bias.*prop_attn=False")
    patch(model, keep=0.5, prop_attn=False).unpatch()
    # Changed behind our back: the error comes with the forward pass, and names the block.
    model.vision_model.config._attn_implementation_internal = "sdpa"
    with patched(model, keep=0.5, layers=(1,)):
        model.vision_model.config._attn_implementation_internal = "flex_attention"
        for block in model.vision_model.encoder.layers[:2]:  # only the block behind the merge asks for a bias
            block.self_attn.config = copy.deepcopy(block.self_attn.config)
            block.self_attn.config._attn_implementation_internal = "sdpa"
        with pytest.raises(UnsupportedModel, match=r"layers\.2: attention 'flex_attention' takes no bias"):
            run("clip", model, images)


def test_attention_without_mask_is_refused_unless_sizes_are_not_wanted() -> None:
    """The DINOv2 of transformers up to 5.17."""

    class Older(nn.Module):
        def __init__(self, attention: Any):
            super().__init__()
            self.config, self.scaling = attention.config, attention.scaling
            self.query, self.key = attention.q_proj, attention.k_proj

        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            return hidden_states

    model = FAMILIES["dinov2"].build()
    for layer in model.dinov2.encoder.layer if DINO_TAKES_SIZES else ():
        outer = nn.Module()
        outer.attention = Older(layer.attention)
        layer.attention = outer
    refused(model, r"dinov2\.encoder\.layer\.0: \w+ of the installed transformers takes no attention_mask")
    patch(model, keep=0.5, prop_attn=False).unpatch()


def test_attention_mask_is_refused_while_patched(images: Tensor) -> None:
    model = build("vit")
    mask = torch.ones(2, 1 + NUM_PATCHES, dtype=torch.bool)
    mask[:, -3:] = False
    plain = model(images, attention_mask=mask).logits
    with patched(model, keep=0.5) as handle:
        with pytest.raises(UserError, match=r"ViTModel: attention_mask hides single patches"):
            model(images, attention_mask=mask)
        handle.enabled = False
        assert torch.equal(model(images, attention_mask=mask).logits, plain)


def test_bad_values_name_the_layer(images: Tensor) -> None:
    model = build("clip")
    with (
        patched(model, keep=0.5, layers=(2,)),
        pytest.raises(UserError, match=r"vision_model\.encoder\.layers\.2.*NaN"),
    ):
        run("clip", model, images * float("nan"))

"""Attaching adapters, on every way in which models of both libraries hold their attention."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyptree.errors import UserError
from hyptree.vlm import (
    AdapterConfig,
    AdapterHandle,
    DiagonalConfig,
    FullConfig,
    LoraConfig,
    OrthogonalConfig,
    ScaleAdapterConfig,
    attach,
    attachment_points,
)
from hyptree.vlm.adapters.handle import handle_of
from tests.vlm.adapters.small_clips import (
    CLIPS,
    IMAGE,
    TEXT,
    VOCABULARY,
    SmallModel,
    encode,
    encode_image,
    encode_text,
    every_clip,
    pixels,
    shake,
    tokens,
)

METHODS: list[AdapterConfig] = [
    ScaleAdapterConfig(16),
    ScaleAdapterConfig(16, share="blocks"),
    ScaleAdapterConfig(16, share="layers"),
    ScaleAdapterConfig(8, curvature={"text": 14.0, "image": 26.0}, cap="paper"),
    ScaleAdapterConfig(8, targets=("q", "v")),
    DiagonalConfig(),
    OrthogonalConfig(8),
    LoraConfig(4),
    FullConfig(),
    ScaleAdapterConfig(16, targets=("out", "mlp")),
]
every_method = pytest.mark.parametrize("config", METHODS, ids=lambda c: f"{c.method}-{METHODS.index(c)}")


@every_clip
def test_fresh_adapter_changes_nothing_and_finds_every_matrix(small: SmallModel):
    model, words, pictures = small(), tokens(), pixels()
    keys, before = set(model.state_dict()), encode(model, words, pictures)
    handle = attach(model, ScaleAdapterConfig(16))
    assert torch.equal(encode(model, words, pictures), before)
    with torch.no_grad():  # attention has another way without gradients
        torch.testing.assert_close(encode(model, words, pictures), before, atol=1e-5, rtol=0)
    assert {line["tower"]: line["matrices"] for line in handle.describe()} == small.matrices
    assert handle.num_parameters() == small.matrices["text"] * _width(handle, "text") * 16 + (
        small.matrices["image"] * 48 * 16
    )
    added = set(model.state_dict()) - keys
    assert keys <= set(model.state_dict()) and all(key.startswith("hyptree_adapters.") for key in added)


def _width(handle: AdapterHandle, tower: str) -> int:
    return next(line["shape"][1] for line in handle.describe() if line["tower"] == tower)


@every_clip
def test_merge_is_exact_and_unmerge_restores_every_bit(small: SmallModel):
    model, words, pictures = small(), tokens(), pixels()
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        base = encode(model, words, pictures)
        handle = attach(model, ScaleAdapterConfig(16))
        shake(handle)
        adapted = encode(model, words, pictures)
        assert (adapted - base).abs().max() > 0.01
        handle.merge()
        assert torch.equal(encode(model, words, pictures), adapted)  # error 0, on both libraries
        changed = [name for name in state if not torch.equal(model.state_dict()[name], state[name])]
        assert len(changed) == len({site.name for site in attachment_points(model, ("q", "k", "v"))})
        handle.unmerge()
        assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)
        assert torch.equal(encode(model, words, pictures), adapted)
        bare = handle.merge_and_unload()
        assert bare is model and torch.equal(encode(bare, words, pictures), adapted)
    assert set(bare.state_dict()) == set(state)
    assert all(type(module).__module__ != "hyptree.vlm.adapters.intercept" for module in bare.modules())
    assert all(parameter.requires_grad for parameter in bare.parameters())  # as before attach


@every_clip
def test_a_step_moves_the_adapter_alone(small: SmallModel):
    model, words, pictures = small(), tokens(), pixels()
    state = copy.deepcopy(model.state_dict())
    handle = attach(model, ScaleAdapterConfig(16))
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert trained == {id(p) for p in handle.parameters()}
    optimizer = torch.optim.AdamW(handle.parameters(), lr=1e-2)
    encode(model, words, pictures).square().sum().backward()
    optimizer.step()
    assert all(p.detach().abs().amax(dim=(1, 2, 3)).min() > 0 for p in handle.parameters())  # each matrix has moved
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


@every_method
def test_methods_merge_detach_and_agree_with_their_definition(config: AdapterConfig):
    model, words, pictures = CLIPS[2](), tokens(), pixels()
    with torch.no_grad():
        base = encode(model, words, pictures)
        twin = copy.deepcopy(model)
        handle = attach(model, config)
        if getattr(config, "cap", "none") == "none":
            assert torch.equal(encode(model, words, pictures), base)
    shake(handle)
    adapted = encode(model, words, pictures)
    assert (adapted - base).abs().max() > 1e-3
    _apply_by_hand(twin, handle)
    torch.testing.assert_close(encode(twin, words, pictures), adapted, atol=2e-5, rtol=2e-5)
    with torch.no_grad():
        adapted = encode(model, words, pictures)
        handle.merge()
        assert torch.equal(encode(model, words, pictures), adapted)
        assert handle.detach() is model
        assert torch.equal(encode(model, words, pictures), base) and not handle.is_attached


@torch.no_grad()
def _apply_by_hand(model: nn.Module, handle: AdapterHandle) -> None:
    """The definition of every method, one matrix at a time."""
    config = handle.config
    for group in handle._set.all_groups():
        adapter, (_, columns) = group.adapter, group.stack.shape
        kinds = list(dict.fromkeys(group.stack.targets))
        number = 0
        for site in group.sites:
            weight = model.get_parameter(site.name)
            for slot in site.slots:
                rows = weight[slot.start : slot.stop]
                if config.method == "lora":
                    rows += config.alpha / config.rank * adapter.up[number] @ adapter.down[number]
                elif config.method == "full":
                    rows += adapter.delta[number]
                else:
                    n = config.block_size
                    index = kinds.index(slot.target) if config.share == "layers" else number
                    if config.method == "orthogonal":
                        skew = torch.zeros(len(adapter.skew[index]), n, n)
                        skew[:, *torch.tril_indices(n, n, -1)] = adapter.skew[index]
                        skew = skew - skew.mT
                        scales = (torch.eye(n) - skew) @ torch.linalg.inv(torch.eye(n) + skew)
                    else:
                        scales = torch.eye(n) + adapter.delta[index]
                    scales = scales.expand(columns // n, n, n)
                    new = rows @ torch.block_diag(*scales).mT
                    if getattr(config, "cap", "none") == "paper":
                        longest = 3.8002 / config.curvature_of(site.tower) ** 0.5
                        new = new * (longest / new.norm(dim=1, keepdim=True)).clamp(max=1)
                        assert (new.norm(dim=1) > 0.999 * longest).any() and (new.norm(dim=1) < 0.99 * longest).any()
                    rows.copy_(new)
                number += 1


def test_cap_of_the_paper_shortens_a_model_with_long_rows():
    model, words, pictures = CLIPS[0](), tokens(), pixels()
    before = encode(model, words, pictures)
    attach(model, ScaleAdapterConfig(16, cap="paper", curvature=1e-6))  # the cap is at 3800
    assert torch.equal(encode(model, words, pictures), before)
    model = CLIPS[0]()
    before = encode(model, words, pictures)
    attach(model, ScaleAdapterConfig(16, cap="paper", curvature=1e4))
    assert (encode(model, words, pictures) - before).abs().max() > 1e-3


@torch.no_grad()  # else frozen attention goes another way than trained attention, and last bits differ
def test_towers_layers_and_targets():
    model, words, pictures = CLIPS[2](), tokens(), pixels()
    text, image = encode_text(model, words), encode_image(model, pictures)
    handle = attach(model, ScaleAdapterConfig(16, towers=("text",), targets=("v",), layers=(-1,)))
    assert [site.name for group in handle._set.all_groups() for site in group.sites] == [
        "transformer.resblocks.1.attn.in_proj_weight"
    ]
    assert handle.num_parameters() == 2 * 16 * 16
    shake(handle)
    assert torch.equal(encode_image(model, pictures), image) and not torch.equal(encode_text(model, words), text)
    weight, base = model.transformer.resblocks[1].attn.in_proj_weight, handle.model.transformer.resblocks[1].attn
    assert torch.equal(weight[:64], base._parameters["in_proj_weight"][:64])  # q and k are the base's
    assert not torch.equal(weight[64:], base._parameters["in_proj_weight"][64:])
    handle.detach()
    handle = attach(model, ScaleAdapterConfig(16, layers=(2,)))  # only the image tower is so deep
    assert [line["tower"] for line in handle.describe()] == ["image"]


class Fused(nn.Module):
    """Attention that keeps its projections in the layers that are named, each three or two parts high."""

    def __init__(self, **rows: int):
        super().__init__()
        for name, parts in rows.items():
            self.add_module(name, nn.Linear(8, 8 * parts))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"qkv": 3, "proj": 1}, {"q": ("qkv", 0), "k": ("qkv", 8), "v": ("qkv", 16)}),
        ({"in_proj": 3}, {"q": ("in_proj", 0), "k": ("in_proj", 8), "v": ("in_proj", 16)}),
        ({"q": 1, "kv": 2, "proj": 1}, {"q": ("q", 0), "k": ("kv", 0), "v": ("kv", 8)}),
        ({"query": 1, "key": 1, "value": 1}, {"q": ("query", 0), "k": ("key", 0), "v": ("value", 0)}),
        ({"q": 1, "k": 1, "v": 1}, {"q": ("q", 0), "k": ("k", 0), "v": ("v", 0)}),
    ],
    ids=lambda value: "-".join(value),
)
def test_parts_of_fused_weights_stand_in_order(rows: dict[str, int], expected: dict[str, tuple[str, int]]):
    """Rows of q come first, then k, then v, in every library; k first where the query is apart."""
    model = nn.Sequential(Fused(**rows))
    actual = {
        slot.target: (site.name.split(".")[1], slot.start)
        for site in attachment_points(model, ("q", "k", "v"))
        for slot in site.slots
    }
    assert actual == expected


def test_towers_by_structure():
    timm = pytest.importorskip("timm")
    vit = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=0)
    assert {site.tower for site in attachment_points(vit, ("q",))} == {"image"}
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes))
    sites = attachment_points(bert)
    assert {site.tower for site in sites} == {"text"}
    assert [(site.name, site.slots[0].target) for site in sites if site.layer == 1] == [
        ("encoder.layer.1.attention.self.query.weight", "q"),
        ("encoder.layer.1.attention.self.key.weight", "k"),
        ("encoder.layer.1.attention.self.value.weight", "v"),
        ("encoder.layer.1.attention.output.dense.weight", "out"),
        ("encoder.layer.1.intermediate.dense.weight", "mlp"),
        ("encoder.layer.1.output.dense.weight", "mlp"),
    ]
    sizes |= {"num_patches": 4, "patch_size": 16}
    config = transformers.Siglip2Config(text_config={**sizes, "vocab_size": 50}, vision_config=sizes)
    siglip2 = transformers.Siglip2Model(config)  # its patches come in through a linear layer
    by_tower = {
        tower: [s for s in attachment_points(siglip2, ("q",)) if s.tower == tower] for tower in ("text", "image")
    }
    assert (len(by_tower["text"]), len(by_tower["image"])) == (2, 3)
    assert by_tower["image"][-1].name == "vision_model.head.attention.in_proj_weight"


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda m: attach(nn.Sequential(nn.Linear(4, 4)), ScaleAdapterConfig(2)), "nothing to adapt in Sequential"),
        (lambda m: attach("ViT-B-16", ScaleAdapterConfig(2)), "expected a model or an encoder"),
        (lambda m: attach(m, ScaleAdapterConfig(7)), "does not divide the width 32 of transformer.resblocks.0"),
        (lambda m: attach(m, ScaleAdapterConfig(7)), "the nearest that do: 4 and 8"),
        (
            lambda m: attach(m, ScaleAdapterConfig(16, layers=(5,))),
            "no layer 5: the model has attention layers 2 in text",
        ),
        (lambda m: attach(m, {"block_size": 2}), "config must be an adapter's configuration"),
        (lambda m: attach(m, ScaleAdapterConfig(16), name="a.b"), "a word without a dot"),
        (lambda m: attach(m, ScaleAdapterConfig(16), name="keys"), "that torch does not use, got 'keys'"),
        (lambda m: (attach(m, DiagonalConfig()), attach(m, DiagonalConfig())), "has an adapter 'default' already"),
        (lambda m: ScaleAdapterConfig(targets=("q", "w")), "unknown target 'w'"),
        (lambda m: ScaleAdapterConfig(towers=("txt",)), "did you mean 'text'?"),
        (lambda m: ScaleAdapterConfig(curvature=-1.0), "curvature must be above 0"),
        (lambda m: ScaleAdapterConfig(curvature={"text": 1.0}), "says nothing of the image tower"),
        (lambda m: ScaleAdapterConfig(cap="papr"), "cap must be one of none, paper"),
        (lambda m: ScaleAdapterConfig(layers="first"), 'layers must be "all" or numbers'),
        (lambda m: DiagonalConfig(2), "a diagonal scale has block_size 1"),
        (lambda m: LoraConfig(0), "rank must be 1 or more"),
        (lambda m: handle_of(m), "carries no adapter"),
    ],
)
def test_mistakes_are_one_line_and_leave_the_model_alone(action, words: str):
    model = CLIPS[2]()
    with pytest.raises(UserError, match=re.escape(words)) as error:
        action(model)
    assert "\n" not in str(error.value)
    if "already" not in words:
        assert not any("hyptree" in key for key in model.state_dict()) and all(
            p.requires_grad for p in model.parameters()
        )


# ------------------------------------------------------------------------------------------- what a tower does not have


def convnext_clip() -> nn.Module:
    import timm

    model = CLIPS[4]()
    model.visual.trunk = timm.create_model("convnext_atto", num_classes=0)
    return model


def coca() -> nn.Module:
    from open_clip.coca_model import CoCa, MultimodalCfg
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    image = CLIPVisionCfg(layers=2, width=48, head_width=24, patch_size=16, image_size=32, attentional_pool=True)
    text = CLIPTextCfg(context_length=8, vocab_size=VOCABULARY, width=32, heads=2, layers=2, embed_cls=True)
    return CoCa(24, MultimodalCfg(width=32, heads=2, layers=3, vocab_size=VOCABULARY), text, image).eval()


def blip() -> nn.Module:
    import transformers

    text = {**TEXT, "vocab_size": VOCABULARY, "max_position_embeddings": 8, "encoder_hidden_size": 48}
    config = transformers.BlipConfig(
        text_config={**text, "is_decoder": True}, vision_config={**IMAGE, "image_size": 32, "patch_size": 16}
    )
    return transformers.BlipForImageTextRetrieval(config).eval()


def test_a_tower_that_cannot_be_adapted_is_named() -> None:
    with pytest.warns(UserWarning, match=r"the image tower of CustomTextCLIP .* say towers=\('text',\)"):
        handle = attach(convnext_clip(), LoraConfig(2))
    assert {site.tower for _, site in handle._set.group_of.values()} == {"text"}
    attach(convnext_clip(), LoraConfig(2, towers=("text",)))  # warnings are errors here
    with pytest.raises(UserError, match=r"0 attention layers in image"):
        attach(convnext_clip(), LoraConfig(2, towers=("image",)))


def test_a_tower_whose_end_is_unknown_is_named() -> None:
    model = CLIPS[0]()
    model.visual_projection = nn.Sequential(model.visual_projection)
    with pytest.warns(UserWarning, match=r"the image tower of CLIPModel has no end .* say towers=\('text',\)"):
        handle = attach(model, ScaleAdapterConfig(8, space="embedding"))
    assert list(handle._set.embeddings) == ["text"]


def test_convolutions_beside_attention_are_named() -> None:
    import open_clip

    text = open_clip.model.CLIPTextCfg(context_length=8, vocab_size=VOCABULARY, width=32, heads=2, layers=2)
    image = open_clip.model.CLIPVisionCfg(layers=(1, 1, 1, 1), width=8, head_width=16, image_size=32)
    model = open_clip.CLIP(24, image, text)
    with pytest.warns(UserWarning, match=r"^CLIP: \d+ convolutions of the image tower .* take no adapter; they stay"):
        handle = attach(model, LoraConfig(2))
    assert "visual.attnpool.q_proj.weight" in handle._set.group_of


def test_parts_of_neither_tower_are_left_alone_and_named() -> None:
    """X-CLIP's mit mixes the frames of a film, FLAVA's multimodal model both towers: no text goes through them."""
    import transformers

    shape = {**IMAGE, "image_size": 32, "patch_size": 16}
    config = transformers.XCLIPConfig(
        text_config={**TEXT, "vocab_size": VOCABULARY, "max_position_embeddings": 8},
        vision_config={**shape, "mit_hidden_size": 24, "mit_intermediate_size": 24, "mit_num_attention_heads": 2},
        projection_dim=24,
    )
    model = transformers.XCLIPModel(config)
    with pytest.warns(UserWarning, match=r"^XCLIPModel: mit belong to neither tower; they stay as they are$"):
        sites = attachment_points(model, ("q", "v"))
    assert {site.name.split(".")[0] for site in sites} == {"text_model", "vision_model"}


@pytest.mark.parametrize("targets", [("q", "v"), ("q", "k", "v", "out", "mlp")])
@pytest.mark.parametrize(("build", "unread"), [(coca, "text_decoder"), (blip, "crossattention")])
def test_parts_that_no_embedding_reads_get_no_adapter(
    build: Callable[[], nn.Module], unread: str, targets: tuple[str, ...]
) -> None:
    model = build()
    assert any(unread in name for name, _ in model.named_modules())
    names = [site.name for site in attachment_points(model, targets)]
    assert names and not any(unread in name for name in names)
    assert {site.tower for site in attachment_points(model, targets)} == {"text", "image"}

"""The handle's verbs: several adapters, switching them off, copies, state dicts, and what is refused."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch

from hyptree.errors import UserError
from hyptree.vlm import DiagonalConfig, FullConfig, LoraConfig, ScaleAdapterConfig, attach
from hyptree.vlm.adapters.handle import handle_of
from tests.vlm.adapters.small_clips import CLIPS, SmallModel, encode, every_clip, pixels, shake, tokens

OPEN_CLIP, HF_CLIP = CLIPS[2], CLIPS[0]


@pytest.fixture(autouse=True)
def no_gradients():
    """Without gradients attention goes the same way whether its weights are trained or not."""
    with torch.no_grad():
        yield


def test_several_adapters_one_active():
    model, words, pictures = OPEN_CLIP(), tokens(), pixels()
    base = encode(model, words, pictures)
    first = attach(model, ScaleAdapterConfig(16), name="first")
    shake(first)
    with_first = encode(model, words, pictures)
    second = attach(model, LoraConfig(4, targets=("q", "out")), name="second")
    assert second.adapters == ["first", "second"] and second.active == "second"
    assert torch.equal(encode(model, words, pictures), base)  # the new one is active, and fresh
    assert all(p.requires_grad for p in second.parameters()) and not any(p.requires_grad for p in first.parameters())
    shake(second)
    with_second = encode(model, words, pictures)
    again = second.set_adapter("first")
    assert again.name == "first" and torch.equal(encode(model, words, pictures), with_first)
    assert all(p.requires_grad for p in first.parameters()) and not any(p.requires_grad for p in second.parameters())
    first.set_adapter("second")
    first.delete_adapter("first")
    assert not first.is_attached and second.adapters == ["second"]
    assert torch.equal(encode(model, words, pictures), with_second)
    k_only = attach(model, FullConfig(targets=("k",)), name="third")
    shake(k_only)
    k_only.detach()
    assert second.active == "second" and torch.equal(encode(model, words, pictures), with_second)
    second.detach()
    assert torch.equal(encode(model, words, pictures), base) and all(p.requires_grad for p in model.parameters())


def test_disable_adapter_gives_the_base_even_when_merged():
    model, words, pictures = HF_CLIP(), tokens(), pixels()
    base = encode(model, words, pictures)
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    adapted = encode(model, words, pictures)
    for _ in range(2):
        with handle.disable_adapter():
            assert torch.equal(encode(model, words, pictures), base)
            with handle.disable_adapter():
                assert torch.equal(encode(model, words, pictures), base)
            assert torch.equal(encode(model, words, pictures), base)
        assert torch.equal(encode(model, words, pictures), adapted)
        handle.merge()
    with pytest.raises(KeyError), handle.disable_adapter():
        raise KeyError
    assert handle.merged and torch.equal(encode(model, words, pictures), adapted)


@every_clip
def test_copies_are_independent(small: SmallModel):
    model, words, pictures = small(), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    with torch.enable_grad():
        adapted = encode(model, words, pictures).detach()  # what is kept for the pass must not be copied
    twin = copy.deepcopy(model)
    assert torch.equal(encode(twin, words, pictures), encode(model, words, pictures))
    other = handle_of(twin)
    shake(other)
    assert not torch.equal(encode(twin, words, pictures), adapted)
    with torch.enable_grad():
        assert torch.equal(encode(model, words, pictures), adapted)
    before = encode(twin, words, pictures)
    assert torch.equal(encode(other.merge_and_unload(), words, pictures), before) and handle.is_attached


def test_a_base_checkpoint_goes_into_an_attached_model():
    model, donor, words, pictures = OPEN_CLIP(), OPEN_CLIP(), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    encode(model, words, pictures)
    values = copy.deepcopy(handle.state_dict())
    assert model.load_state_dict(donor.state_dict()) == ([], [])
    assert all(torch.equal(handle.state_dict()[key], value) for key, value in values.items())
    twin = attach(donor, ScaleAdapterConfig(16))
    twin.load_state_dict(values)
    assert torch.equal(encode(model, words, pictures), encode(donor, words, pictures))
    # Tensors that take the place of the old ones, as often written to as those: told apart by where they lie.
    donors = [OPEN_CLIP(), OPEN_CLIP()]
    actual = []
    for other in donors:
        assert model.load_state_dict(other.state_dict(), assign=True) == ([], [])
        actual.append(encode(model, words, pictures))
    for other, ours in zip(donors, actual, strict=True):
        attach(other, ScaleAdapterConfig(16)).load_state_dict(values)
        assert torch.equal(encode(other, words, pictures), ours)
    # A checkpoint of the attached model brings its adapter along; half of one is an error.
    shake(twin)
    state = donor.state_dict()
    assert model.load_state_dict(state) == ([], [])
    assert torch.equal(encode(model, words, pictures), encode(donor, words, pictures))
    state.pop(next(key for key in state if key.startswith("hyptree_adapters")))
    with pytest.raises(RuntimeError, match=r"Missing key.*hyptree_adapters"):
        model.load_state_dict(state)


def test_written_weights_are_seen_at_once():
    model, words, pictures = OPEN_CLIP(), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    before = encode(model, words, pictures)
    model.transformer.resblocks[1].attn._parameters["in_proj_weight"].mul_(1.5)
    after = encode(model, words, pictures)
    assert not torch.equal(after[:, :24], before[:, :24]) and torch.equal(after[:, 24:], before[:, 24:])
    for parameter in handle.parameters():
        parameter.data.zero_()  # counts no version
    merged = encode(model, words, pictures)
    assert not torch.equal(merged, after)
    handle.merge()
    assert torch.equal(encode(model, words, pictures), merged)
    handle.unmerge()
    model.transformer.resblocks[1].attn._parameters["in_proj_weight"].data.mul_(2.0)
    assert not torch.equal(encode(model, words, pictures), merged)


def test_a_layer_alone_sees_steps_loading_and_moving():
    """No forward pass of the model or of a tower begins here: what is kept must be told apart by itself."""
    model = OPEN_CLIP()
    handle = attach(model, ScaleAdapterConfig(16))
    attention = model.transformer.resblocks[0].attn
    seen = [attention.in_proj_weight.clone()]
    shake(handle)  # as an optimiser's step does, in place
    seen.append(attention.in_proj_weight.clone())
    handle.load_state_dict({name: 0.3 * torch.randn_like(value) for name, value in handle.state_dict().items()})
    seen.append(attention.in_proj_weight.clone())
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items() if "hyptree" not in name})
    seen.append(attention.in_proj_weight.clone())
    torch.testing.assert_close(seen[3], 2 * seen[2])
    model.to(torch.float64)
    moved = attention.in_proj_weight
    assert moved.dtype == torch.float64
    torch.testing.assert_close(moved.float(), seen[3])
    for parameter in handle.parameters():
        parameter.zero_()
    assert torch.equal(attention.in_proj_weight, attention._parameters["in_proj_weight"])
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))


def test_a_child_alone_sees_writes_through_data_too():
    model, words = HF_CLIP(), tokens()
    handle = attach(model, ScaleAdapterConfig(16))
    before = model.text_model(words).last_hidden_state
    for parameter in handle.parameters():
        parameter.data.add_(0.3)
    assert not torch.equal(model.text_model(words).last_hidden_state, before)


def test_a_handle_speaks_for_its_own_adapter_while_another_is_active():
    model, words, pictures = HF_CLIP(), tokens(), pixels()
    base = encode(model, words, pictures)
    first = attach(model, ScaleAdapterConfig(16), name="first")
    shake(first, 0.3)
    alone = first.radius_report(texts=words)
    second = attach(model, DiagonalConfig(), name="second")
    assert first.radius_report(texts=words) == alone and first.active == "second"
    fresh = second.radius_report(texts=words)["text"]
    assert fresh["after"] == fresh["before"] == alone["text"]["before"] != alone["text"]["after"]
    second.merge()
    with pytest.raises(UserError, match="'second' is merged into the model; call unmerge"):
        first.radius_report(texts=words)
    second.unmerge()
    first.merge()
    second.delete_adapter("first")  # merged, and not the one whose handle is asked
    assert second.adapters == ["second"] and torch.equal(encode(model, words, pictures), base)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda m, h: h.unmerge(), "'default' is not merged; call merge"),
        (lambda m, h: (h.merge(), attach(m, DiagonalConfig(), "two")), "merged into the model; call unmerge"),
        (lambda m, h: (h.merge(), m.load_state_dict(m.state_dict())), "is merged into the weights"),
        (lambda m, h: h.set_adapter("defult"), "did you mean 'default'"),
        (lambda m, h: h.delete_adapter("x"), "no adapter 'x'"),
        (lambda m, h: (h.detach(), h.merge()), "no longer attached"),
        (lambda m, h: (attach(m, DiagonalConfig(), "two").merge(), h.set_adapter("default")), "before switching"),
        (
            lambda m, h: (attach(m, DiagonalConfig(), "two").merge(), h.merge()),
            "'two' is merged into the model; call unmerge",
        ),
        (lambda m, h: h.radius_report(), "needs texts, images or both"),
        (lambda m, h: h.radius_report(texts=["a cat"]), "which has no tokenizer"),
    ],
)
def test_mistakes_are_one_line(action, words: str):
    model = OPEN_CLIP()
    handle = attach(model, ScaleAdapterConfig(16))
    with pytest.raises(UserError, match=words) as error:
        action(model, handle)
    assert "\n" not in str(error.value)


def test_it_says_what_it_is():
    model = OPEN_CLIP()
    handle = attach(model, ScaleAdapterConfig(16))
    assert repr(handle) == "AdapterHandle(CLIP, 'default', scale, 9,984 parameters, active)"
    handle.merge()
    assert repr(handle).endswith("merged)")
    handle.detach()
    assert repr(handle) == "AdapterHandle(CLIP, 'default', detached)"

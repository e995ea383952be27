"""Adapters inside what torch does around models: autograd, autocast, half precision, checkpointing, compile, DDP."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyptree.train.model import checkpoint_activations
from hyptree.vlm import AdapterConfig, LoraConfig, ScaleAdapterConfig, attach
from hyptree.vlm.adapters.handle import handle_of
from tests.vlm.adapters.small_clips import (
    CLIPS,
    SmallModel,
    encode,
    encode_image,
    encode_text,
    every_clip,
    pixels,
    shake,
    tokens,
)

OPEN_CLIP, HF_CLIP = CLIPS[2], CLIPS[0]


def gradients(handle) -> list[Tensor]:
    actual = [parameter.grad.clone() for parameter in handle.parameters()]
    for parameter in handle.parameters():
        parameter.grad = None
    return actual


@pytest.mark.parametrize("config", [ScaleAdapterConfig(16, share="layers"), LoraConfig(4)], ids=["scale", "lora"])
@every_clip
def test_gradients_are_those_of_plain_autograd(small: SmallModel, config: AdapterConfig):
    """Against the weights of each layer computed by themselves, without anything kept."""
    model, words, pictures = small().double(), tokens(), pixels().double()
    handle = attach(model, config)
    shake(handle)
    encode(model, words, pictures).square().sum().backward()
    ours = gradients(handle)
    for group in handle._set.all_groups():
        group.weight = group.computed
    encode(model, words, pictures).square().sum().backward()
    for mine, plain in zip(ours, gradients(handle), strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-11)


def test_weights_are_computed_once_per_pass():
    model, words, pictures = OPEN_CLIP(), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16))
    calls: Counter[str] = Counter()
    for group in handle._set.all_groups():
        group.adapter.register_forward_hook(lambda *_, name=group.stack.tower: calls.update([name]))
    with torch.no_grad():
        encode_text(model, words)
        assert calls == {"text": 1}
        encode_image(model, pictures)
        assert calls == {"text": 1, "image": 1}
    encode(model, words, pictures).sum().backward()
    assert calls == {"text": 2, "image": 2}
    model.transformer.resblocks[0].attn.in_proj_weight
    assert calls == {"text": 3, "image": 2}


VIEWS = {"view", "_unsafe_view", "t", "transpose", "detach", "slice", "split", "split_with_sizes", "expand"}
VIEWS |= {"unbind", "select", "permute", "unsqueeze", "squeeze", "alias", "as_strided", "empty"}


class Launches(TorchDispatchMode):
    """Counts operations that compute; views launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


def launches(layers: int, attached: bool) -> int:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=16)
    model = transformers.CLIPVisionModel(config).requires_grad_(False)
    if attached:
        attach(model, ScaleAdapterConfig(16))
    pictures = pixels().requires_grad_()
    model(pictures).pooler_output.sum().backward()
    with Launches() as counter:
        model(pictures).pooler_output.sum().backward()
    return counter.count


def test_launches_do_not_grow_with_layers_but_for_the_gradient_of_each_weight():
    """Eight for a whole tower: the base in one piece, two copies around a product, and four for the gradient."""
    extra = {layers: launches(layers, True) - launches(layers, False) for layers in (2, 4)}
    matrices = {layers: 3 * layers for layers in extra}
    assert {layers: extra[layers] - matrices[layers] for layers in extra} == {2: 8, 4: 8}


def test_several_backward_passes_through_one_computation_of_the_weights():
    """As with ordinary parameters; the graph of an ordinary operation would have been freed by the first."""
    model = HF_CLIP()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    layers = model.text_model.encoder.layers
    losses = [layers[0].self_attn.q_proj.weight.square().sum(), layers[1].self_attn.v_proj.weight.sum()]
    losses.append(layers[0].self_attn.q_proj.weight.sum())
    for loss in losses:
        loss.backward()
    text = next(parameter for name, parameter in handle.named_parameters() if "text" in name)
    apart = text.grad.clone()
    text.grad = None
    (group,) = (group for group in handle._set.all_groups() if group.stack.tower == "text")
    weights = {site.name: group.computed(site) for site in group.sites}
    first = weights["text_model.encoder.layers.0.self_attn.q_proj.weight"]
    (
        first.square().sum() + first.sum() + weights["text_model.encoder.layers.1.self_attn.v_proj.weight"].sum()
    ).backward()
    torch.testing.assert_close(apart, text.grad, rtol=1e-5, atol=1e-6)
    assert [bool(slot.abs().max() > 0) for slot in text.grad] == [True, False, False, False, False, True]


def test_parameters_that_change_before_backward():
    """The gradient is that of the forward pass; where it needs the old values, autograd itself refuses."""
    model, words, pictures = OPEN_CLIP(), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16))
    encode(model, words, pictures).square().sum().backward()
    expected = gradients(handle)
    loss = encode(model, words, pictures).square().sum()
    shake(handle)
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(handle), strict=True))
    handle = attach(model, LoraConfig(2), "lora")
    loss = encode(model, words, pictures).sum()
    shake(handle)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_base_that_is_trained_gets_its_gradient():
    model, words, pictures = OPEN_CLIP(), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16))
    weight = model.transformer.resblocks[0].attn._parameters["in_proj_weight"].requires_grad_()
    encode(model, words, pictures).square().sum().backward()
    assert weight.grad.abs().max() > 0 and all(p.grad.abs().max() > 0 for p in handle.parameters())
    twin = OPEN_CLIP()
    twin.load_state_dict({k: v for k, v in model.state_dict().items() if "hyptree" not in k})
    encode(twin, words, pictures).square().sum().backward()  # the adapter is fresh, so the gradient is the bare model's
    torch.testing.assert_close(
        weight.grad, twin.transformer.resblocks[0].attn.in_proj_weight.grad, rtol=1e-4, atol=1e-4
    )


@every_clip
def test_autocast(small: SmallModel):
    model, words, pictures = small(), tokens(), pixels()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = encode(model, words, pictures)
        handle = attach(model, ScaleAdapterConfig(16))
        torch.testing.assert_close(encode(model, words, pictures), before, atol=0, rtol=0)
        shake(handle)
        adapted = encode(model, words, pictures)
    adapted.float().square().sum().backward()
    assert all(g.dtype == torch.float32 and g.abs().max() > 0 for g in gradients(handle))
    exact = encode(model, words, pictures)
    assert (adapted.float() - exact).abs().max() < 0.1 * (exact - before.float()).abs().max() + 0.05
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        handle.merge()
        merged = encode(model, words, pictures)
    # The sum of base and update is rounded to bfloat16 either way; one rounding of the base lies between.
    assert (merged.float() - adapted.float()).abs().max() < 0.1


def test_merging_inside_autocast_writes_float32():
    model = HF_CLIP()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    weights = {site.name: group.computed(site) for group in handle._set.all_groups() for site in group.sites}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        handle.merge()
    for group in handle._set.all_groups():
        for site in group.sites:
            torch.testing.assert_close(site.base, weights[site.name].detach(), rtol=1e-6, atol=1e-7)


def test_autocast_leaves_the_words_of_open_clip_in_float32():
    """open_clip reads the dtype of its activations off a weight of the MLP, which must not follow autocast."""
    model, words, pictures = OPEN_CLIP(), tokens(), pixels()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        before = encode(model, words, pictures)
        attach(model, ScaleAdapterConfig(16, targets=("mlp",)))
        assert model.transformer.get_cast_dtype() == torch.float32
        assert torch.equal(encode(model, words, pictures), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_base(dtype: torch.dtype):
    model, words, pictures = HF_CLIP().to(dtype), tokens(), pixels().to(dtype)
    with torch.no_grad():
        base = encode(model, words, pictures)
        handle = attach(model, ScaleAdapterConfig(16))
        assert torch.equal(encode(model, words, pictures), base)
    assert {p.dtype for p in handle.parameters()} == {torch.float32}  # small steps would vanish
    optimizer = torch.optim.SGD(handle.parameters(), lr=1e-3)
    encode(model, words, pictures).float().square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        adapted = encode(model, words, pictures)
        assert not torch.equal(adapted, base)
        handle.merge()
        assert torch.equal(encode(model, words, pictures), adapted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_transformers(reentrant: bool):
    model, words, pictures = HF_CLIP().train(), tokens(), pixels().requires_grad_()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    model.text_model.embeddings.token_embedding.register_forward_hook(lambda m, a, out: out.requires_grad_())
    encode(model, words, pictures).square().sum().backward()
    plain = gradients(handle)
    checkpoint_activations(model, "clip", reentrant)
    encode(model, words, pictures).square().sum().backward()
    for a, b in zip(plain, gradients(handle), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing_of_open_clip():
    model, words, pictures = OPEN_CLIP().train(), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    encode(model, words, pictures).square().sum().backward()
    plain = gradients(handle)
    model.set_grad_checkpointing(True)
    encode(model, words, pictures).square().sum().backward()
    for a, b in zip(plain, gradients(handle), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compile():
    torch.compiler.reset()
    block = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    base = block(x)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), base, rtol=1e-5, atol=1e-6)
    handle = attach(block, ScaleAdapterConfig(8, targets=("q", "k", "v", "out", "mlp")))
    shake(handle)
    eager = block(x)
    assert (eager - base).abs().max() > 0.01
    eager.square().sum().backward()
    expected = gradients(handle)
    actual = compiled(x)  # the graph of before is not used again
    torch.testing.assert_close(actual, eager, rtol=1e-5, atol=1e-6)
    actual.square().sum().backward()
    for a, b in zip(gradients(handle), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    shake(handle)  # new values need no new graph, and are used
    torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-6)
    with handle.disable_adapter():
        torch.testing.assert_close(compiled(x), base, rtol=1e-5, atol=1e-6)
    adapted = compiled(x)
    handle.merge_and_unload()
    torch.testing.assert_close(compiled(x), adapted, rtol=1e-5, atol=1e-6)


def test_distributed_data_parallel(tmp_path: Path):
    model, words, pictures = HF_CLIP(), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    model(input_ids=words, pixel_values=pictures, return_loss=True).loss.backward()
    plain = gradients(handle)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(input_ids=words, pixel_values=pictures, return_loss=True).loss.backward()
        for a, b in zip(plain, gradients(handle), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    finally:
        torch.distributed.destroy_process_group()


def test_inference_mode_then_training():
    model, words, pictures = OPEN_CLIP(), tokens(), pixels()
    with torch.inference_mode():
        handle = None
        before = encode(model, words, pictures)
    handle = attach(model, ScaleAdapterConfig(16))
    with torch.inference_mode():
        assert torch.equal(encode(model, words, pictures), before)
    encode(model, words, pictures).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in handle.parameters())
    twin = handle_of(copy.deepcopy(model))
    assert twin.num_parameters() == handle.num_parameters()


def test_a_pass_that_is_broken_off_leaves_nothing_behind():
    model, words = HF_CLIP(), tokens()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    layers = model.text_model.encoder.layers

    def stop(*_: object) -> None:
        raise KeyboardInterrupt  # no Exception: hooks that always run do not run for it

    hook = layers[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model.text_model(words)
    hook.remove()
    before = layers[0].self_attn.q_proj.weight
    for parameter in handle.parameters():
        parameter.data.mul_(2.0)
    weight, base = layers[0].self_attn.q_proj.weight, layers[0].self_attn.q_proj._parameters["weight"]
    torch.testing.assert_close(weight - base, 2 * (before - base), rtol=1e-4, atol=1e-6)


def test_passes_in_two_threads_that_overlap():
    """The one that began first ends first, and the other goes on with its own."""
    model, words = HF_CLIP(), tokens()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    expected = encode_text(model, words)
    meet = threading.Barrier(2, timeout=30)
    outputs: dict[str, Tensor] = {}

    def look(name: str) -> None:
        outputs[name] = encode_text(model, words)

    def wait(*_: object) -> None:
        meet.wait()

    hook = model.text_model.encoder.layers[0].register_forward_hook(wait)
    threads = [threading.Thread(target=look, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hook.remove()
    assert torch.equal(outputs["a"], expected) and torch.equal(outputs["b"], expected)


@pytest.mark.parametrize("small", [OPEN_CLIP, HF_CLIP], ids=lambda small: small.name)
def test_checkpointing_of_blocks_under_autocast(small: SmallModel):
    """The pass has its weights in bfloat16; blocks that run again in the backward pass make theirs alike."""
    model, words, pictures = small().train(), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    results = []
    for is_checkpointed in (False, True):
        if is_checkpointed and small is HF_CLIP:
            checkpoint_activations(model, "clip", False)
        elif is_checkpointed:
            model.set_grad_checkpointing(True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            encode(model, words, pictures).float().square().sum().backward()
        results.append(gradients(handle))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * a.abs().max().item())


def test_checkpointing_of_a_whole_tower():
    model, words = HF_CLIP(), tokens()
    handle = attach(model, LoraConfig(2))
    shake(handle)
    encode_text(model, words).square().sum().backward()
    plain = [p.grad.clone() for p in handle.parameters() if p.grad is not None]
    model.zero_grad()
    embeddings = model.text_model.embeddings(words)
    run = model.text_model.encoder
    output = torch.utils.checkpoint.checkpoint(
        lambda x: run(inputs_embeds=x, is_causal=True)[0], embeddings, use_reentrant=False
    )
    pooled = model.text_model.final_layer_norm(output)[:, -1]
    model.text_projection(pooled).square().sum().backward()
    again = [p.grad for p in handle.parameters() if p.grad is not None]
    assert len(plain) == len(again) > 0
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

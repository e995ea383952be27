"""Latent attention with caches: every way of feeding the tokens gives what one pass gives; what a token costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, StaticCache

from hyptree.lm.config import HelmConfig
from hyptree.lm.latent import attention
from hyptree.lm.latent.attention import LatentAttention
from hyptree.lm.latent.cache import cache_bytes_per_token, pack, split_high_low
from hyptree.lm.modeling import HelmForCausalLM, HelmModel
from hyptree.lm.presets import preset, presets
from hyptree.ops.centroid.reference import centroid_space
from hyptree.ops.latent_decode import latent_decode
from hyptree.ops.latent_decode.reference import unpack_times
from tests.lm.latent.test_attention import SMALL, make, run, tables

LENGTH = 12


def scalars_per_token(config: HelmConfig) -> dict[str, int]:
    """Numbers per token and layer by the paper's count: space components only, one number per time.

    ``full``: keys and values of all heads. ``latent``: the least from which they can be rebuilt. ``absorbed``: what
    attention needs that rebuilds nothing, two times per head more. Dense models have ``full`` alone.
    """
    heads = config.num_attention_heads
    if config.variant == "dense":
        return {"full": 2 * heads * int(config.head_dim or 0)}
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    return {"full": heads * (key_dim + config.v_head_dim), "latent": latent, "absorbed": latent + 2 * heads}


def new_cache(kind: str, layer: LatentAttention, length: int = LENGTH + 4) -> Any:
    return DynamicCache() if kind == "dynamic" else StaticCache(layer.config, max_cache_len=length)


def feed(layer: LatentAttention, s: Tensor, cache: Any, steps: list[int], mask: Tensor | None = None) -> Tensor:
    """The outputs for tokens that come in groups of the given sizes; rows of ``mask`` (B, 1, N, keys) go with them."""
    outputs, start = [], 0
    for size in steps:
        stop = start + size
        positions = torch.arange(start, stop).expand(s.shape[0], -1)
        rows = None if mask is None else mask[:, :, start:stop]
        if rows is not None and isinstance(cache, DynamicCache):
            rows = rows[..., :stop]
        outputs.append(run(layer, s[:, start:stop], positions, rows, cache))
        start = stop
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("mode", ["latent", "full"])
@pytest.mark.parametrize("prefill", [1, 7, LENGTH - 1])
@torch.no_grad()
def test_prefill_then_one_by_one_equals_one_pass(prefill: int, mode: str, kind: str) -> None:
    layer = make(cache_mode=mode)
    s = torch.randn(3, LENGTH, 20, dtype=torch.float64)
    steps = [prefill] + [1] * (LENGTH - prefill)
    inputs = feed(layer, s, new_cache(kind, layer), steps)
    assert torch.allclose(inputs, run(layer, s), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("mode", ["latent", "full"])
@torch.no_grad()
def test_groups_of_tokens_behind_a_filled_cache_are_causal(mode: str, kind: str) -> None:
    layer = make(cache_mode=mode, q_lora_rank=6)
    s = torch.randn(2, LENGTH, 20, dtype=torch.float64)
    inputs = feed(layer, s, new_cache(kind, layer), [4, 3, 1, 4])
    assert torch.allclose(inputs, run(layer, s), rtol=1e-12, atol=1e-12)
    changed = s.clone()
    changed[:, 6] += 1  # the last token of the second group
    again = feed(layer, changed, new_cache(kind, layer), [4, 3, 1, 4])
    assert torch.equal(inputs[:, :6], again[:, :6])
    assert not torch.allclose(inputs[:, 6], again[:, 6])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("mode", ["latent", "full"])
@torch.no_grad()
def test_mixed_lengths_with_padding_on_the_left(mode: str, kind: str) -> None:
    """Each sequence of a padded batch gives what it gives alone, whatever lies in the padding."""
    layer = make(cache_mode=mode)
    lengths = torch.tensor([LENGTH, 9, 5])
    s = torch.randn(3, LENGTH, 20, dtype=torch.float64)
    num_keys = LENGTH if kind == "dynamic" else LENGTH + 4
    real = torch.arange(LENGTH) >= LENGTH - lengths[:, None]
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & real[:, None]
    mask = torch.zeros(3, 1, LENGTH, num_keys, dtype=torch.bool)
    mask[..., :LENGTH] = allowed[:, None]
    cache, outputs = new_cache(kind, layer), []
    for start, stop in [(0, 8), (8, 10), (10, 11), (11, 12)]:
        positions = (torch.arange(start, stop) - (LENGTH - lengths)[:, None]).clamp_min(0)
        rows = mask[:, :, start:stop, : stop if kind == "dynamic" else num_keys]
        outputs.append(run(layer, s[:, start:stop], positions, rows, cache))
    inputs = torch.cat(outputs, 1)
    assert torch.isfinite(inputs).all()
    for sequence, length in enumerate(lengths.tolist()):
        alone = run(layer, s[sequence : sequence + 1, LENGTH - length :])
        assert torch.allclose(inputs[sequence, LENGTH - length :], alone[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": False}, {"curvature": 0.1}, {"curvature": 2.0, "v_head_dim": 4}]
)
def test_absorbed_equals_rebuilt_with_gradients(changes: dict[str, Any]) -> None:
    layer = make(**changes)
    if layer.kv_up.bias is not None:
        assert layer.kv_up.bias.abs().min() > 0
    s = torch.randn(2, LENGTH, 20, dtype=torch.float64, requires_grad=True)
    last = feed(layer, s, DynamicCache(), [LENGTH - 1, 1])[:, -1]  # absorbed
    pair = feed(layer, s, DynamicCache(), [LENGTH - 2, 2])[:, -1]  # rebuilt: two tokens at once
    assert torch.allclose(last, pair, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(last)
    leaves = [s, *layer.parameters()]
    absorbed = torch.autograd.grad((last * direction).sum(), leaves)
    rebuilt = torch.autograd.grad((pair * direction).sum(), leaves)
    for left, right in zip(absorbed, rebuilt, strict=True):
        assert (left - right).abs().max() <= 1e-12 * (1 + right.abs().max())


@torch.no_grad()
def test_absorbed_is_one_attention_with_a_single_key_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The derived form: keys [z, k_r, k_t of all heads], values [z, v_t of all heads], the heads are the queries."""
    layer, seen = make(), list[Tensor]()

    def catch(queries: Tensor, time: Tensor, keys: Tensor, times: Tensor, *rest: Any, **settings: Any) -> Tensor:
        seen[:] = queries, time, keys, times, latent_decode(queries, time, keys, times, *rest, **settings)
        return seen[-1]

    monkeypatch.setattr(attention, "latent_decode", catch)
    feed(layer, torch.randn(2, LENGTH, 20, dtype=torch.float64), DynamicCache(), [LENGTH - 1, 1])
    queries, time, keys, times, points = seen
    absorbed = layer.kv_up.weight[: 3 * 5].unflatten(0, (3, 5))  # (H, d_n, r), what took queries to latents
    assert torch.linalg.matrix_rank(absorbed).tolist() == [5, 5, 5] and queries.shape == (2, 3, 9 + 2 + 4)
    query = torch.cat([queries, -torch.diag_embed(time)], -1)[:, None]
    values = torch.cat([keys[..., :10], times[..., 3:]], -1)[:, None]
    both = torch.cat([keys, times[..., :3]], -1)[:, None]
    mean = torch.nn.functional.scaled_dot_product_attention(query, both, values, scale=1.0)
    weight = torch.cat([layer.kv_up.weight, layer.kv_up.weight_time[:, None]], 1)[3 * 5 :].unflatten(0, (3, 7))
    bias = layer.kv_up.bias[3 * 5 :].unflatten(0, (3, 7))  # type: ignore[index]
    space = (torch.einsum("bhr,hdr->bhd", mean[:, 0, :, :10], weight) + bias) * layer.config.value_scale
    excess = torch.stack([mean[:, 0, head, 10 + head] for head in range(3)], 1)[..., None]
    expected = centroid_space(torch.cat([space, excess], -1), 7)
    assert torch.allclose(points[..., :7], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["latent", "full"])
@torch.no_grad()
def test_crop_and_reorder_need_to_know_nothing(mode: str) -> None:
    layer = make(cache_mode=mode)
    s = torch.randn(2, LENGTH, 20, dtype=torch.float64)
    cache = DynamicCache()
    feed(layer, torch.cat([s[:, :8], torch.randn(2, 3, 20, dtype=torch.float64)], 1), cache, [11])
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([1, 1]))
    beams = s[[1, 1]]
    inputs = run(layer, beams[:, 8:9], torch.full((2, 1), 8), None, cache)
    assert torch.allclose(inputs[:, 0], run(layer, beams[:, :9])[:, -1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_times_keep_their_digits_in_half_precision(dtype: torch.dtype) -> None:
    times = torch.rand(2, 5, 4).exp() * 30
    keys = torch.randn(2, 5, 11).to(dtype)
    slots = pack(keys, times[..., :2], times[..., 2:])
    assert slots[0].dtype == slots[1].dtype == dtype
    assert slots[0].shape == (2, 1, 5, 11)
    assert slots[1].shape == (2, 1, 5, 8)
    assert torch.equal(slots[0][:, 0], keys)
    inputs = torch.cat(unpack_times(slots[1][:, 0], 2), -1)
    assert inputs.dtype == torch.float32
    error = ((inputs - times) / times).abs().max().item()
    assert 0 < error < torch.finfo(dtype).eps ** 2
    high, low = split_high_low(times, dtype)
    assert torch.equal(high, times.to(dtype))
    assert (low.abs() <= torch.finfo(dtype).eps * high.abs()).all()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("mode", ["latent", "full"])
@torch.no_grad()
def test_bfloat16_steps_stay_close_to_one_pass(mode: str, kind: str) -> None:
    layer = make(torch.float32, cache_mode=mode)
    s = torch.randn(2, LENGTH, 20)
    exact = run(layer, s)
    layer = layer.bfloat16()
    inputs = feed(layer, s.bfloat16(), new_cache(kind, layer), [6] + [1] * 6)
    assert inputs.dtype == torch.bfloat16
    assert (inputs.float() - exact).norm() < 2e-2 * exact.norm()


@pytest.mark.parametrize("mode", ["latent", "full"])
@torch.no_grad()
def test_autocast_fills_a_cache_of_half_precision(mode: str) -> None:
    layer = make(torch.float32, cache_mode=mode)
    s = torch.randn(2, LENGTH, 20)
    exact, cache = run(layer, s), DynamicCache()
    with torch.autocast("cpu", torch.bfloat16):
        inputs = feed(layer, s, cache, [6] + [1] * 6)
    assert cache.layers[0].keys.dtype == cache.layers[0].values.dtype == torch.bfloat16
    assert (inputs.float() - exact).norm() < 2e-2 * exact.norm()


@pytest.mark.parametrize("mode", ["latent", "full"])
@torch.no_grad()
def test_a_step_compiles_whole_with_a_static_cache(mode: str) -> None:
    """One graph, the same one for every step: nothing is read back from the device or depends on the length."""
    layer = make(cache_mode=mode)
    s = torch.randn(2, LENGTH, 20, dtype=torch.float64)
    cache = new_cache("static", layer)
    feed(layer, s[:, :7], cache, [7])
    counter = CompileCounter()
    torch._dynamo.reset()

    @torch.compile(backend=counter, fullgraph=True)
    def step(s: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = layer(layer.down(s), (cos, sin), None, cache)[0]
        return out

    outputs = []
    for token in range(7, LENGTH):
        cos, sin = tables(layer, torch.full((2, 1), token))
        outputs.append(step(s[:, token : token + 1], cos, sin))
    torch._dynamo.reset()
    assert counter.frame_count == 1
    assert torch.allclose(torch.cat(outputs, 1), run(layer, s)[:, 7:], rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["latent", "full"])
@torch.no_grad()
def test_bfloat16_steps_on_a_gpu(mode: str, no_waiting) -> None:
    """Compiled with a static cache, never waiting for the GPU, close to the same layer in float32 on a CPU."""
    layer = make(torch.float32, cache_mode=mode).eval()
    s = torch.randn(2, LENGTH, 20)
    exact = run(layer, s)
    layer = layer.to("cuda", torch.bfloat16)
    cache = new_cache("static", layer)
    steps = [(0, 7), *((token, token + 1) for token in range(7, LENGTH))]
    inputs = []
    for start, stop in steps:
        places = torch.arange(start, stop).expand(2, -1)
        cos, sin = tables(layer, places, torch.float32)
        mask = torch.arange(LENGTH + 4) <= torch.arange(start, stop)[:, None]
        inputs.append([x.cuda() for x in (s[:, start:stop].bfloat16(), cos, sin, mask.expand(2, 1, -1, -1))])

    def run_step(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = layer(layer.down(x), (cos, sin), mask, cache)[0]
        return out

    step = torch.compile(run_step, fullgraph=True)
    outputs = [run_step(*inputs[0]), step(*inputs[1])]
    with no_waiting():
        outputs += [step(*settings) for settings in inputs[2:]]
    assert (torch.cat(outputs, 1).float().cpu() - exact).norm() < 2e-2 * exact.norm()


SPEC_BYTES = {  # of helm.md, 5.3: bfloat16, all layers, one number per time and none for what pads
    "helm-d-115m-paper": {"full": 9216},
    "helm-mice-120m-paper": {"full": 5832, "latent": 972, "absorbed": 1116},
    "helm-mice-1b-paper": {"full": 86464, "latent": 10272, "absorbed": 11168},
}


@pytest.mark.parametrize("name", SPEC_BYTES)
def test_numbers_per_token_are_those_of_the_paper(name: str) -> None:
    config = preset(name)
    counted = {kind: 2 * count * config.num_hidden_layers for kind, count in scalars_per_token(config).items()}
    assert counted == SPEC_BYTES[name]


@pytest.mark.parametrize("name", [name for name in presets() if "mice" in name])
def test_bytes_of_presets(name: str) -> None:
    """Stored per layer beyond the paper's count: the lifted latent's time and one, and second halves of 2H times."""
    config = preset(name)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    stored = cache_bytes_per_token(config, torch.bfloat16)
    assert stored == 2 * layers * (scalars_per_token(config)["absorbed"] + 2 * heads + 2)
    assert cache_bytes_per_token(config, torch.float32) == 4 * layers * (scalars_per_token(config)["absorbed"] + 2)
    full = cache_bytes_per_token(preset(name, cache_mode="full"), torch.bfloat16)
    assert full >= 2 * layers * scalars_per_token(config)["full"]
    if "aligned" in name:
        assert 2 * layers * scalars_per_token(config)["full"] >= 5 * stored


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": False},
        {"cache_mode": "full"},
        {"cache_mode": "full", "time_columns": "split", "v_head_dim": 30},
        {"variant": "dense"},
        {"variant": "dense", "time_columns": "split"},
    ],
    ids=str,
)
@torch.no_grad()
def test_the_cache_holds_as_many_bytes_as_counted(changes: dict[str, Any], dtype: torch.dtype) -> None:
    config = HelmConfig(**{**SMALL, **changes})
    cache = DynamicCache()
    HelmModel(config).to(dtype).eval()(torch.randint(64, (1, 5)), past_key_values=cache)
    slots = [slot for layer in cache.layers for slot in (layer.keys, layer.values)]
    assert sum(slot.numel() * slot.element_size() for slot in slots) == 5 * cache_bytes_per_token(config, dtype)


def lively(**changes: Any) -> HelmForCausalLM:
    """A small model, float64, whose greedy text is no single token repeated."""
    model = HelmForCausalLM(preset("helm-mice-pico", **changes)).double().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
        model.lm_head.weight[:, -1] = 0  # times are almost equal, so that their part of the logits always wins
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(0.0, 0.1)
            elif "weight_time" in name and "attention" not in name:
                parameter.mul_(0.1)
    return model


@pytest.mark.parametrize("mode", ["latent", "full"])
@torch.no_grad()
def test_generate_gives_the_same_text_with_any_cache(mode: str) -> None:
    model = lively(cache_mode=mode)
    ids, mask = torch.randint(1024, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[2, :1] = 0  # padding on the left
    common: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
        "disable_compile": True,
    }
    plain = model.generate(ids, use_cache=False, **common)
    assert len(plain.sequences[:, 9:].unique()) > 8
    for cache in (None, "static"):
        inputs = model.generate(ids, use_cache=True, cache_implementation=cache, **common)
        assert torch.equal(inputs.sequences, plain.sequences)
        for step, logits in zip(inputs.logits, plain.logits, strict=True):
            assert (step - logits).abs().max() <= 1e-9 * (1 + logits.abs().max())
    kinds: list[dict[str, Any]] = [{"use_cache": False}, {"use_cache": True}, {"cache_implementation": "static"}]
    beams, *others = [model.generate(ids, num_beams=2, **kind, **common).sequences for kind in kinds]
    assert not torch.equal(beams, plain.sequences)
    for other in others:
        assert torch.equal(other, beams)
    # Alone, without padding, a sequence goes on as it did in the batch.
    common["attention_mask"] = torch.ones(1, 5, dtype=torch.long)
    alone = model.generate(ids[:1, 4:], use_cache=True, **common)
    assert torch.equal(alone.sequences[0], plain.sequences[0, 4:])


@torch.no_grad()
def test_both_caches_give_the_logits_of_one_pass() -> None:
    models = {mode: lively(cache_mode=mode) for mode in ("latent", "full")}
    models["full"].load_state_dict(models["latent"].state_dict())
    ids = torch.randint(1024, (2, 10))
    expected = models["latent"](ids, use_cache=False).logits
    for mode, model in models.items():
        cache = DynamicCache(config=model.config)
        parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in [(0, 4), (4, 5), (5, 9), (9, 10)]]
        inputs = torch.cat(parts, 1)
        assert (inputs - expected).abs().max() <= 1e-9 * (1 + expected.abs().max()), mode


@torch.no_grad()
def test_packed_documents_do_not_see_each_other() -> None:
    model = lively()
    ids = torch.randint(1024, (1, 12))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(part).logits for part in ids.split((5, 7), 1)], 1)
    assert (packed - alone).abs().max() <= 1e-9 * (1 + alone.abs().max())
    assert (packed - model(ids).logits).abs().max() > 1e-3


@torch.no_grad()
def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Also what is drawn in pieces: loading must not draw it again."""
    model = lively(q_lora_rank=24).float()
    model.save_pretrained(tmp_path)
    again = HelmForCausalLM.from_pretrained(tmp_path)
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, again.state_dict()[name]), name
    ids = torch.randint(1024, (1, 7))
    assert torch.equal(model(ids).logits, again.eval()(ids).logits)

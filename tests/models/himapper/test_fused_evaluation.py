"""Evaluation with few launches: the layers one by one, in values, in what it may stand for, and in compiled code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from hyptree.models import HiMapper, HiMapperOutput
from hyptree.models.himapper import Features
from hyptree.ops import backend, tree_reader
from tests.models.himapper.toy import ToyBackbone, mapper

pytest.importorskip("triton")

ARMS: dict[str, dict[str, object]] = {
    "defaults": {},
    "scaled": {"attention": "scaled"},
    "flat": {"geometry": "euclidean", "hyp_dim": 3, "probabilistic": False},
    "one level": {"num_leaves": 3, "depth": 1},
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU, or the CPU by Triton's interpreter."""
    if request.param == "cpu" and not backend.interpreted():
        pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    torch._dynamo.reset()
    return str(request.param)


def made(device: str, **options: object) -> HiMapper:
    """No gain or bias at its first value, and nothing added that is small."""
    model = mapper(**{"width": 32, "heads": 2, **options}).to(device).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(("backbone.", "tree.", "space.log", "decompose.log")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def can_evaluate(model: HiMapper, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    parts = model.decompose, model.space, model.encode
    return tree_reader._takes_layers(*parts, model.tree(len(tokens))[0], tokens, dtype, "auto")


def tensors(out: HiMapperOutput) -> list[Tensor]:
    assert out.pre_logits is not None
    return [out.logits, out.pre_logits, *out.nodes, *out.hyperbolic]


def error(actual: HiMapperOutput, expected: HiMapperOutput) -> float:
    pairs = zip(tensors(actual), tensors(expected), strict=True)
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("arm", list(ARMS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_it_is_as_exact_as_the_layers(
    arm: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64, beside the layers in the same precision."""
    model, x = made(device, **ARMS[arm]), torch.randn(3, 3, 36, 36, device=device)  # 81 tokens, one block and a bit
    exact = copy.deepcopy(model).double()
    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    expected = exact(x.double())
    with torch.autocast(device, dtype=dtype):
        layers = model(x)
        monkeypatch.setenv("HYPTREE_BACKEND", "triton")
        assert can_evaluate(model, torch.empty(3, 81, 24, device=device), dtype)
        actual, again = model(x), model(x)
    if device == "cuda":  # where autocast has norms in float32; the CPU's leaves them
        assert [t.dtype for t in tensors(actual)] == [t.dtype for t in tensors(layers)]
    assert all(torch.equal(a, b) for a, b in zip(tensors(actual), tensors(again), strict=True))  # bit by bit
    limit = 0.05 if dtype == torch.bfloat16 else 0.006
    assert error(actual, expected) < max(limit, 1.5 * error(layers, expected))
    assert actual.losses is None and actual.stats == {}


@torch.no_grad()
def test_half_weights_and_losses(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(device).bfloat16(), torch.randn(2, 3, 16, 16, device=device).bfloat16()
    actual = model(x, compute_losses=True)
    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    expected = model(x, compute_losses=True)
    assert [t.dtype for t in tensors(actual)] == [t.dtype for t in tensors(expected)]
    assert error(actual, expected) < 0.08
    assert actual.losses is not None and expected.losses is not None and actual.losses["kl"] == expected.losses["kl"]
    torch.testing.assert_close(actual.losses["contrastive"], expected.losses["contrastive"], rtol=0.05, atol=0.05)


@torch.no_grad()
def test_changed_weights_are_seen_at_once(device: str) -> None:
    model, x = made(device), torch.randn(2, 3, 16, 16, device=device)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.float16):
        before, first = run(x).logits.clone(), model(x).logits
        torch.testing.assert_close(before, first, rtol=1e-2, atol=1e-2)
        for name in ("tree.mu", "decompose.mlp.2.bias", "encode.layers.1.mlp_norm.weight", "encode.out_proj.weight"):
            model.get_parameter(name).data.mul_(-1.5)  # which no version counts
            after, now = run(x).logits.clone(), model(x).logits
            torch.testing.assert_close(after, now, rtol=1e-2, atol=1e-2)
            assert (after - before).abs().max() > 0.02, name
            before = after


@torch.no_grad()
def test_a_fresh_model_gives_the_backbones_logits(device: str) -> None:
    backbone = ToyBackbone().to(device).eval()
    model, x = HiMapper(backbone).eval(), torch.randn(2, 3, 16, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert can_evaluate(model, torch.empty(2, 16, 24, device=device))
        assert torch.equal(model(x).logits, backbone(x))


def compiled_graph(model: HiMapper, x: Tensor) -> torch.fx.GraphModule:
    """The one graph of a compiled call in half precision."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    with torch.inference_mode(), torch.autocast(x.device.type, dtype=torch.bfloat16):
        torch.compile(model, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep), fullgraph=True)(x)
    (graph,) = graphs
    return graph


def test_the_graph_has_few_products_and_two_kernels(device: str) -> None:
    """One cast of all weights, seven products and two kernels, where the layers are 29 products and twice the casts."""
    model, x = made(device), torch.randn(2, 3, 16, 16, device=device)
    graph = compiled_graph(model, x)
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    ours = [name for name in called if "hyptree" in name]
    assert ours == [
        "hyptree.read_tree.default",
        "hyptree.encode_tree.default",
    ]
    assert sum("mm.default" in name for name in called) == 7 + 1  # and the classifier
    assert not any("attention" in name for name in called)


PREFIX = 2


def in_a_row(backbone: nn.Module, x: Tensor) -> Features:
    """The map behind two tokens that stand for no place, as a transformer gives it."""
    f = backbone.forward_features(x).flatten(2).mT
    row = torch.cat([backbone.prefix.expand(f.shape[0], -1, -1).to(f.dtype), f], 1)
    return Features(row[:, PREFIX:], tuple(x.shape[-2] // 4 for _ in "HW"), f.mean(1), row=row)


def with_prefix(device: str) -> HiMapper:
    backbone = ToyBackbone()
    backbone.register_buffer("prefix", 5 * torch.randn(1, PREFIX, 24))
    return made(device, backbone=backbone, feature_fn=in_a_row)


@torch.no_grad()
def test_tokens_in_front_go_along_and_are_not_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = with_prefix(device), torch.randn(3, 3, 36, 36, device=device)
    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    exact = copy.deepcopy(model).double()
    expected = exact(x.double())
    with torch.autocast(device, dtype=torch.bfloat16):
        layers = model(x)
        monkeypatch.setenv("HYPTREE_BACKEND", "triton")
        actual = model(x)
        model.backbone.prefix.mul_(-3)
        again = model(x)
    assert error(actual, expected) < max(0.05, 1.5 * error(layers, expected))
    assert all(torch.equal(a, b) for a, b in zip(tensors(actual), tensors(again), strict=True))


def test_norms_of_a_row_follow_each_other_without_a_slice(device: str) -> None:
    """What a compiler needs to make the backbone's last norm and the plug-in's first in one kernel."""
    model, x = with_prefix(device), torch.randn(2, 3, 16, 16, device=device)
    graph = compiled_graph(model, x)
    norms = [n for n in graph.graph.nodes if n.op == "call_function" and "native_layer_norm" in str(n.target)]
    shapes = [tuple(n.args[0].meta["val"].shape) for n in norms]
    assert (2, 16 + PREFIX, 24) in shapes and (2, 16, 24) not in shapes  # on the row
    assert (2, 16, 32) in shapes  # behind the projection on the tokens alone
    (reading,) = (n for n in graph.graph.nodes if "read_tree" in str(n.target))
    assert reading.args[1].meta["val"].shape == (2, 16, 64)


class Wrapped(nn.Linear):
    """An adapter, say."""


@torch.no_grad()
def test_what_is_not_plain_is_called(device: str) -> None:
    model, tokens = made(device), torch.randn(2, 9, 24, device=device)

    def runs() -> bool:
        return can_evaluate(model, tokens)

    assert runs()
    with torch.enable_grad():
        assert not runs()
    model.train()
    assert not runs()
    model.eval()
    handle = model.encode.layers[1].mlp[0].register_forward_hook(lambda *_: None)
    assert not runs()
    handle.remove()
    assert runs()
    handle = model.encode.layers[1].register_forward_pre_hook(lambda *_: None)  # of a part, not of a layer
    assert not runs()
    handle.remove()
    handle = model.decompose.mlp[1].register_forward_hook(lambda *_: None)  # of what stands between two layers
    assert not runs()
    handle.remove()
    model.decompose.dropout.train()  # by itself
    assert not runs()
    model.eval()
    model.decompose.self_out = Wrapped(32, 32).to(device)
    assert not runs()
    model = made(device)
    model.encode.layers[0].mlp[1] = nn.ReLU()
    assert not runs()
    model = made(device)
    assert runs() and not can_evaluate(model, tokens, torch.float32)  # in float32 layers are called
    model = made(device, query_residual=True)
    assert not runs()
    model = made(device, num_leaves=64)
    assert not runs()

"""HCFormer with its kernels: one graph for a compiler, no waiting for the device, CUDA graphs, no copies of layout."""

from __future__ import annotations

import pytest
import timm
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import hyptree.models
from hyptree.models.hcformer.model import HCFormer
from hyptree.nn import ClusterMixer
from hyptree.ops import backend as backends

assert hyptree.models.HCFormer is HCFormer


def small(**options: object) -> HCFormer:
    """Two kinds of stage: several windows with a window level, and one window that holds the map."""
    sizes = {"img_size": 64, "dims": (16, 24, 32, 40), "depths": (1, 1, 1, 1), "num_heads": 2, "head_dim": 8}
    sizes |= {"num_heads": (2, 2, 2, 2), "folds": (4, 2, 1, 1), "patch_centres": (2, 2, 2, 2), "num_classes": 5}
    sizes |= {"window_centres": (2, 2, 1, 0), "mlp_ratios": (2, 2, 2, 2), "layer_scale": 1.0}
    return HCFormer(**{**sizes, **options})  # type: ignore[arg-type]


def test_graphs_hold_each_level_as_one_call(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing breaks the graph, and the compiler sees kernels in both directions."""
    pytest.importorskip("triton")
    if not backends.interpreted():
        pytest.skip("TRITON_INTERPRET=1 runs the kernels on the CPU")
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    mixer = ClusterMixer(6, 2, 8, (8, 8), 2, 2, 2)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 8, 8, 6, requires_grad=True)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return make_boxed_func(graph)

    compiled = torch.compile(mixer, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    results = []
    for run in (mixer, compiled):
        out = run(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    actual = {str(node.target) for graph in graphs for node in graph.graph.nodes if "hyptree" in str(node.target)}
    names = ("cluster_patch", "cluster_patch_grad", "cluster_window", "cluster_window_grad")
    assert actual == {f"hyptree.{name}.default" for name in names}


def test_compiled_kernels_take_maps_of_other_sizes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the compiler has seen to change are no numbers to it; kernels are compiled for numbers."""
    pytest.importorskip("triton")
    if not backends.interpreted():
        pytest.skip("TRITON_INTERPRET=1 runs the kernels on the CPU")
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    mixer = ClusterMixer(6, 2, 8, (8, 8), 2, 2, 2)
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    for size in ((8, 8), (16, 8), (8, 12)):
        x = torch.randn(1, *size, 6, requires_grad=True)
        results = []
        for run in (mixer, compiled):
            out = run(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()])])
        for one, other in zip(*results, strict=True):  # of sums in another order
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(1.0, float(other.detach().abs().max())))


def test_the_whole_network_is_one_graph(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPTREE_BACKEND", raising=False)
    torch.compiler.reset()
    model = small()
    explained = torch._dynamo.explain(model)(torch.randn(2, 3, 64, 64))
    assert explained.graph_count == 1 and explained.graph_break_count == 0, explained.break_reasons


def test_only_the_mlps_may_be_computed_again(seed: int) -> None:
    model = small(drop_path_rate=0.0)
    x = torch.randn(2, 3, 64, 64)
    kept, results = [], []
    for how in (False, "mlp"):
        model.set_grad_checkpointing(how)  # type: ignore[arg-type]
        held: dict[int, int] = {}

        def pack(t: Tensor, held: dict[int, int] = held) -> Tensor:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(x)
        kept.append(sum(held.values()))
        results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert kept[1] < 0.8 * kept[0]
    with pytest.raises(ValueError, match="True, False or 'mlp', got 'all'"):
        model.set_grad_checkpointing("all")  # type: ignore[arg-type]


class _Reads(TorchDispatchMode):
    """Raises where a value leaves the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
        assert func.overloadpacket is not torch.ops.aten.nonzero
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [64, 80])
def test_no_value_is_read_on_the_way(size: int, seed: int) -> None:
    model = small()
    x = torch.randn(2, 3, size, size)
    with _Reads():
        model(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_network_of_shapes_alone() -> None:
    """Built and run on the meta device: nothing is computed, every shape is known."""
    with torch.device("meta"):
        model = timm.create_model("hcformer_nano")
        out = model(torch.empty(2, 3, 224, 224))
    assert out.is_meta and out.shape == (2, 1000)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_maps_stay_channels_last(device: str, seed: int) -> None:
    """Every block gets and gives a map that lies in memory as its shape says: no product copies it first."""
    model = small().to(device)
    maps: list[Tensor] = []
    for stage in model.stages:
        stage.downsample.register_forward_hook(lambda module, args, out: maps.append(out))
        for block in stage.blocks:
            block.mixer.register_forward_hook(lambda module, args, out: maps.extend([args[0], out]))
            block.register_forward_hook(lambda module, args, out: maps.append(out))
    model(torch.randn(2, 3, 64, 64, device=device))
    assert len(maps) == 16 and all(x.is_contiguous() for x in maps)


def results_by(
    backend: str, model: nn.Module, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> dict[str, Tensor]:
    """Values and gradients for all batches, flat, by name, as the backend computes them.

    Parameters of one number are one vector: a single number may be right by chance.
    """
    monkeypatch.setenv("HYPTREE_BACKEND", backend)
    names, parameters = zip(*model.named_parameters(), strict=True)
    actual: dict[str, list[Tensor]] = {}
    for x in batches:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            out = model(x).float()
        actual.setdefault("values", []).append(out.detach().flatten())
        for name, grad in zip(names, torch.autograd.grad(out.square().sum(), parameters), strict=True):
            actual.setdefault(name if grad.numel() > 1 else "single numbers", []).append(grad.flatten())
    return {name: torch.cat(parts) for name, parts in actual.items()}


def assert_as_near(actual: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Each of ``found`` is at most 1.25 times as far from ``exact`` as ``plain`` is, and 1e-3 of the norm."""
    for name, expected in exact.items():
        error, allowed = ((inputs[name] - expected).norm().item() for inputs in (actual, plain))
        limit = 1.25 * allowed + 1e-3 * expected.norm().item()
        assert error <= limit, (
            f"{name}: {error:.3e} from float32, plain torch {allowed:.3e}, {expected.norm():.3e} long"
        )


@pytest.mark.gpu
def test_kernels_change_nothing_but_rounding(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = timm.create_model("hcformer_nano", num_classes=10, layer_scale=1.0).cuda()
    batches = [torch.randn(4, 3, 224, 224, device="cuda")]
    plain, actual = (results_by(backend, model, batches, monkeypatch, autocast=False) for backend in ("torch", "auto"))
    del plain["single numbers"]  # sums over all pairs of a map, which cancel
    for name, expected in plain.items():
        assert ((actual[name] - expected).norm() / expected.norm().clamp_min(1e-6)).item() < 1e-3, name


@pytest.mark.gpu
def test_kernels_round_no_more_than_plain_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 both are away from float32, and as far from one another: each is compared with float32.

    Several batches, because the errors of one are a few random numbers for a small parameter.
    """
    model = timm.create_model("hcformer_nano", num_classes=10, layer_scale=1.0).cuda()
    batches = [torch.randn(4, 3, 224, 224, device="cuda") for _ in range(8)]
    exact = results_by("torch", model, batches, monkeypatch, autocast=False)
    plain, actual = (results_by(backend, model, batches, monkeypatch, autocast=True) for backend in ("torch", "auto"))
    assert_as_near(actual, plain, exact)


def test_more_rounding_than_plain_torch_s_is_seen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above on a CPU: plain torch passes it, twice its rounding in one parameter does not."""
    model, batches = small(), [torch.randn(2, 3, 64, 64)]
    exact = results_by("torch", model, batches, monkeypatch, autocast=False)
    plain = results_by("torch", model, batches, monkeypatch, autocast=True)
    assert_as_near(plain, plain, exact)
    name = "stages.0.blocks.0.mixer.points_and_values.weight"
    worse = {**plain, name: exact[name] + 2 * (plain[name] - exact[name])}
    with pytest.raises(AssertionError, match=f"{name}: .* from float32"):
        assert_as_near(worse, plain, exact)


@pytest.mark.gpu
def test_nothing_waits_for_the_device_and_a_graph_replays_it(seed: int, no_waiting) -> None:
    model = timm.create_model("hcformer_nano", num_classes=10).cuda().eval()
    static = torch.randn(4, 3, 224, 224, device="cuda")

    def step() -> Tensor:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return model(static)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with no_waiting():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    static.copy_(torch.randn_like(static))
    out.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(out, step(), rtol=0, atol=0)


@pytest.mark.gpu
def test_a_training_step_replays_as_a_graph(seed: int) -> None:
    model = timm.create_model("hcformer_nano", num_classes=10, layer_scale=1.0).cuda()
    static = torch.randn(4, 3, 224, 224, device="cuda")
    parameters = list(model.parameters())

    def step() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(static).float().square().mean()
        return list(torch.autograd.grad(loss, parameters))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    static.copy_(torch.randn_like(static))
    for grad in grads:
        grad.fill_(float("nan"))
    graph.replay()
    for one, other in zip(grads, step(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-5)


@pytest.mark.gpu
def test_the_same_input_gives_the_same_bits(seed: int) -> None:
    model = timm.create_model("hcformer_nano", num_classes=10, layer_scale=1.0).cuda()
    x = torch.randn(4, 3, 224, 224, device="cuda")
    biases = [p for name, p in model.named_parameters() if "position" in name or "alpha" in name]
    runs = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x).float()
        runs.append([out, *torch.autograd.grad(out.square().sum(), biases)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))

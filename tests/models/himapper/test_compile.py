"""Compilers, half precision, many processes: one graph in training and evaluation, losses in float32."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.distributed as dist
from torch import nn

from hyptree.models import HiMapper
from tests.models.himapper.toy import ToyBackbone, mapper


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Every model is one more version of the same forward, and a compiler gives up after eight."""
    torch._dynamo.reset()


def check_compiled(model: HiMapper, x: torch.Tensor, backend: str, tolerance: float) -> None:
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    model.eval()
    with torch.no_grad():
        out, own = compiled(x), model(x)
        assert torch.allclose(out.logits, own.logits, atol=tolerance)
        for a, b in zip(out.nodes + out.hyperbolic, own.nodes + own.hyperbolic, strict=True):
            assert torch.allclose(a, b, atol=tolerance)

    model.train()
    gradients = []
    for call in (model, compiled):
        torch.manual_seed(3)
        model.zero_grad()
        out = call(x)
        (out.logits.square().sum() + out.losses["aux_total"]).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        assert all(torch.isfinite(g).all() for g in gradients[-1])
        assert {"image_dependence", "distance_ratio"} <= set(out.stats)
    if backend != "inductor":  # whose noise is its own
        for name, a, b in zip(dict(model.named_parameters()), *gradients, strict=True):
            assert torch.allclose(a, b, atol=tolerance * a.abs().max().clamp_min(1)), name


@pytest.mark.parametrize("geometry", ["lorentz", "euclidean"])
def test_one_graph(geometry: str) -> None:
    check_compiled(mapper(geometry=geometry), torch.randn(2, 3, 16, 16), "eager", 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [("test_resnet", "aot_eager"), ("deit_tiny_distilled_patch16_224", "aot_eager"), ("test_vit", "inductor")],
)
def test_one_graph_with_a_real_backbone(name: str, backend: str) -> None:
    options = {} if name == "test_resnet" else {"img_size": 64}
    options |= {"depth": 2} if "distilled" in name else {}
    backbone = timm.create_model(name, num_classes=5, **options)
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0  # both passes see the same statistics
    check_compiled(mapper(backbone), torch.randn(2, 3, 64, 64), backend, 2e-3)


@torch.no_grad()
def test_exported_programs_take_any_number_of_pictures(tmp_path) -> None:
    model = mapper().eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    example = torch.randn(2, 3, 16, 16), False, True  # with losses
    program = torch.export.export(model, example, dynamic_shapes=({0: batch}, None, None))
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    x = torch.randn(5, 3, 16, 16)
    out, own = again(x, False, True), model(x, False, True)
    assert type(out) is type(own) and torch.allclose(out.logits, own.logits, atol=1e-5)
    assert torch.allclose(out.losses["aux_total"], own.losses["aux_total"], atol=1e-5)
    for name, buffer in model.named_buffers():  # a part of a larger tensor would be saved with all of it
        assert buffer.untyped_storage().nbytes() == buffer.nbytes, name


@pytest.mark.slow
def test_one_graph_with_maps() -> None:
    model = mapper().eval()
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        out = torch.compile(model, fullgraph=True, backend="aot_eager")(x, return_maps=True)
        own = model(x, return_maps=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(out.maps, own.maps, strict=True))
    assert torch.allclose(out.stats["map_entropy"], own.stats["map_entropy"], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"attention": "scaled", "query_residual": True}, {"geometry": "euclidean"}])
def test_half_precision(dtype: torch.dtype, options: dict[str, object]) -> None:
    model = mapper(**options).train()
    x = torch.randn(4, 3, 32, 32)
    torch.manual_seed(5)
    own = model(x)
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=dtype):
        out = model(x, return_maps=True)
        loss = out.logits.float().square().mean() + out.losses["aux_total"]
    assert all(value.dtype == torch.float32 for value in out.losses.values())
    assert all(level.dtype == torch.float32 for level in out.hyperbolic)
    assert all(level.dtype == torch.float32 for level in out.maps)
    assert all((level.sum((-1, -2)) - 1).abs().max() < 1e-5 for level in out.maps)
    assert torch.allclose(out.losses["contrastive"], own.losses["contrastive"], rtol=0.05)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_starts_at_the_backbone_too(dtype: torch.dtype) -> None:
    backbone = ToyBackbone().eval()
    model = HiMapper(backbone, num_leaves=8, depth=3, width=16).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(model(x).logits, backbone(x))


def test_tensors_are_found_inside_the_output() -> None:
    model = mapper().train()
    out = model(torch.randn(2, 3, 16, 16))
    leaves, spec = torch.utils._pytree.tree_flatten(out)
    actual = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert len(actual) == 2 + 3 + 3 + 3 + 1 + 6  # logits, pre_logits, losses, nodes, points, curvature, stats
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert type(again) is type(out) and again.losses["kl"] is out.losses["kl"]


@pytest.mark.slow
def test_distributed_training_misses_no_parameter(tmp_path) -> None:
    """DDP waits for ever for a parameter without gradient; the second step would say so."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(mapper().train())
        for _ in range(2):
            out = wrapped(torch.randn(2, 3, 16, 16))
            (out.logits.square().sum() + out.losses["aux_total"]).backward()
        assert all(p.grad is not None for p in wrapped.parameters())
    finally:
        dist.destroy_process_group()

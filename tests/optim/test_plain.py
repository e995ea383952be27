"""Ordinary parameters: bit for bit what torch.optim does, whatever the options."""

import copy
import itertools

import pytest
import torch
from torch import nn

from hyptree.optim import RiemannianAdam, RiemannianAdamW, RiemannianSGD
from hyptree.optim.optimizer import RiemannianOptimizer

SHAPES = [(7, 5), (5,), (3, 2, 4), ()]
STEPS = 50


def run(make, dtype=torch.float32):
    generator = torch.Generator().manual_seed(torch.initial_seed())
    params = [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in SHAPES]
    optimizer = make(params)
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = None if (step + i) % 7 == 0 else torch.randn(p.shape, generator=generator, dtype=dtype)
        optimizer.step()
    return params, optimizer


def assert_same_bits(ours, theirs):
    (params, optimizer), (expected, reference) = ours, theirs
    for p, q in zip(params, expected, strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == reference.state[q].keys()
        for key, value in reference.state[q].items():
            assert torch.equal(optimizer.state[p][key], value), key


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0, 0, False), (0.9, 0, False), (0.9, 0.3, False), (0.9, 0, True)]
)
def test_sgd(momentum, dampening, nesterov, foreach):
    for wd, maximize in itertools.product([0.0, 0.05], [False, True]):
        options = {"lr": 0.07, "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": wd}
        options |= {"maximize": maximize, "foreach": foreach}
        ours = run(lambda p, o=options: RiemannianSGD(p, **o))
        assert_same_bits(ours, run(lambda p, o=options: torch.optim.SGD(p, **o)))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("pair", [(RiemannianAdam, torch.optim.Adam), (RiemannianAdamW, torch.optim.AdamW)])
def test_adam(pair, amsgrad, foreach):
    ours, theirs = pair
    for wd, maximize in itertools.product([0.0, 0.05], [False, True]):
        options = {
            "lr": 0.01,
            "betas": (0.8, 0.99),
            "weight_decay": wd,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
        }
        assert_same_bits(run(lambda p, o=options: ours(p, **o)), run(lambda p, o=options: theirs(p, **o)))


def test_fused_and_float64():
    assert_same_bits(run(lambda p: RiemannianAdam(p, fused=True)), run(lambda p: torch.optim.Adam(p, fused=True)))
    make = (lambda p: RiemannianAdamW(p), lambda p: torch.optim.AdamW(p))
    assert_same_bits(run(make[0], torch.float64), run(make[1], torch.float64))


def test_defaults_are_those_of_torch():
    p = [nn.Parameter(torch.zeros(2))]
    for ours, theirs in [
        (RiemannianSGD(p), torch.optim.SGD(p)),
        (RiemannianAdam(p), torch.optim.Adam(p)),
        (RiemannianAdamW(p), torch.optim.AdamW(p)),
    ]:
        for key in ours.defaults.keys() & theirs.defaults.keys():
            assert ours.defaults[key] == theirs.defaults[key], key


def test_a_state_of_torch_optim_loads_and_continues():
    params, theirs = run(lambda p: torch.optim.Adam(p, lr=0.01))
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    ours = RiemannianAdam(copies)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # torch shares the tensors otherwise
    assert ours.param_groups[0]["lr"] == 0.01
    for p, q in zip(params, copies, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    theirs.step()
    ours.step()
    for p, q in zip(params, copies, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_gradients_come_back_untouched(foreach):
    for make in (
        lambda p: RiemannianSGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=foreach),
        lambda p: RiemannianAdamW(p, weight_decay=0.1, foreach=foreach),
    ):
        p = nn.Parameter(torch.randn(4, 3))
        optimizer = make([p])
        for _ in range(3):
            p.grad = torch.randn(4, 3)
            before = p.grad.clone()
            optimizer.step()
            assert torch.equal(p.grad, before)


def test_sparse_gradients_of_ordinary_parameters():
    def sparse(make):
        torch.manual_seed(3)
        layer = nn.Embedding(10, 3, sparse=True)
        optimizer = make(layer.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([1, 4, 4])).square().sum().backward()
            optimizer.step()
        return layer.weight

    assert torch.equal(sparse(lambda p: RiemannianSGD(p, lr=0.1)), sparse(lambda p: torch.optim.SGD(p, lr=0.1)))
    with pytest.raises(ValueError, match="sparse gradients for points only"):
        sparse(lambda p: RiemannianAdam(p))


@pytest.mark.parametrize(("make", "torch_make"), [
    (lambda p, **o: RiemannianAdam(p, lr=1e-3, **o), lambda p: torch.optim.Adam(p, lr=1e-3)),
    (lambda p, **o: RiemannianSGD(p, lr=1e-3, momentum=0.9, **o), lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
])  # fmt: skip
def test_master_weights_follow_a_float32_run(make, torch_make):
    start = torch.randn(6, 4).bfloat16()
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.float())
    ours, theirs = make([p], master_weights=True), torch_make([q])
    for _ in range(30):
        p.grad = torch.randn(6, 4).bfloat16()
        q.grad = p.grad.float()
        ours.step()
        theirs.step()
    assert p.dtype == torch.bfloat16
    assert torch.equal(ours.state[p]["master_param"], q)
    assert torch.equal(p, q.bfloat16())


@pytest.mark.parametrize(("options", "message"), [
    ({"lr": -1.0}, "lr must be"),
    ({"lr": float("nan")}, "lr must be"),
    ({"lr": float("inf")}, "lr must be"),
    ({"weight_decay": -0.1}, "weight_decay must be"),
    ({"max_step": 0.0}, "max_step must be"),
    ({"retraction": "exact"}, "retraction must be 'exp' or 'first_order'"),
    ({"foreach": True, "fused": True}, "cannot both"),
])  # fmt: skip
@pytest.mark.parametrize("kind", [RiemannianSGD, RiemannianAdam])
def test_bad_options(kind, options, message):
    p = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=message) as info:
        kind([p], **options)
    assert "\n" not in str(info.value)
    with pytest.raises(ValueError, match=message):  # and as an option of one group
        kind([dict(params=[p], **options)])


def test_bad_options_of_one_optimizer():
    p = nn.Parameter(torch.zeros(2, 2))
    for kind, options, message in [
        (RiemannianAdam, {"betas": (0.9, 1.0)}, r"betas\[1\] must be .* below 1, got 1.0"),
        (RiemannianAdam, {"betas": (-0.1, 0.9)}, r"betas\[0\] must be"),
        (RiemannianAdam, {"betas": 0.9}, "betas must be a pair"),
        (RiemannianAdam, {"eps": -1e-8}, "eps must be"),
        (RiemannianSGD, {"momentum": -0.5}, "momentum must be"),
        (RiemannianSGD, {"nesterov": True}, "nesterov needs momentum"),
    ]:
        with pytest.raises(ValueError, match=message):
            kind([p], **options)


def test_an_optimizer_without_its_steps_cannot_be_made():
    """The shared part is abstract: one that forgets a half is told so before it trains."""

    class Half(RiemannianOptimizer):
        def _step_plain(self, group, params):
            pass

    with pytest.raises(TypeError, match=r"abstract.*_step_points"):
        Half([nn.Parameter(torch.ones(2))], {"lr": 0.1})

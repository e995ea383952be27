"""Random sequences of what people do with a model: outputs must always be those of a fresh one of the same weights.

    def fresh(model):                        # another model, built anew, with the weights that `model` has now
        twin = build().to(next(model.parameters()).dtype).train(model.training)
        twin.load_state_dict(model.state_dict())
        return twin

    for seed in range(8):
        run_sequence(build, fresh, look, seed=seed)         # ACTIONS, or ACTIONS | {"merge": merge, ...}

``look(model)`` gives one tensor, from inputs that never change, in whatever mode gradients are. An action is a function
of a ``Bench``: it may change ``bench.model`` in place or put another in its place. After every action the model and its
twin are looked at in the same mode, and a failure names the seed and the actions that led to it.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import accelerate
import torch
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Of outputs, relative to the largest of them, by the dtype of the model."""
MODES: dict[str, Callable[[], Any]] = {
    "with gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class Wrapper(nn.Module):
    """A model inside another one, as in a training loop."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.training = inner, inner.training

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)


def bare(model: nn.Module) -> Any:
    """The model without wrappers."""
    return bare(model.inner) if isinstance(model, Wrapper) else model


def wrapped_like(model: nn.Module, twin: nn.Module) -> nn.Module:
    """A bare twin in as many wrappers as the model has, so that names agree."""
    return Wrapper(wrapped_like(model.inner, twin)) if isinstance(model, Wrapper) else twin


class Bench:
    """A model among the actions, the random numbers they draw, and the optimiser of the step that is under way."""

    def __init__(self, model: nn.Module, fresh: Callable[[Any], Any], look: Callable[[Any], Tensor], seed: int):
        self.model: Any = model
        self.fresh, self.look, self.random = fresh, look, random.Random(seed)
        self.history: list[str] = []

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def check(self, mode: str) -> None:
        """The model and a fresh one of the same weights give the same, in this mode of gradients."""
        with MODES[mode]():
            twin = self.fresh(self.model)
            expected = self.look(twin)
            self.compare(self.look(self.model), expected, mode, self._rounding(twin, expected))

    def _rounding(self, twin: nn.Module, expected: Tensor) -> float:
        """Slack for half precision, where fused and single operations round apart: twice what the fresh model itself is
        off the same weights in float32, as shares of the tolerance.
        """
        dtype = next(p.dtype for p in twin.parameters() if p.is_floating_point())
        if dtype not in (torch.bfloat16, torch.float16):
            return 1.0
        truth = self.look(copy.deepcopy(twin).float()).detach().double()
        off = (expected.detach().double() - truth).abs().max() / truth.abs().max().clamp_min(1e-6)
        return min(3.0, max(1.0, 2 * off.item() / TOLERANCE[dtype]))

    def compare(self, actual: Tensor, expected: Tensor, when: str, slack: float = 1.0) -> None:
        """These outputs are equal but for rounding, and ``slack`` times that where weights were rounded too."""
        actual, expected = actual.detach().double(), expected.detach().double()
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        assert bool(expected.isfinite().all()), f"not finite, {when}, after: {', '.join(self.history)}"
        scale = max(expected.abs().max().item(), 1e-6)
        worst = (actual - expected).abs().max().item() / scale
        assert worst <= slack * TOLERANCE[dtype], (
            f"{worst:.1e} off a fresh {dtype} model of the same weights, {when}, after: {', '.join(self.history)}"
        )


def step(bench: Bench, **options: Any) -> None:
    """Looks, backward, a look between, a step of the optimiser, and then a look: none may see weights of before."""
    kind, rate = bench.random.choice(((torch.optim.SGD, 0.5), (torch.optim.AdamW, 0.05)))
    parameters = bench.trained()
    if not parameters or next(iter(parameters)).dtype in (torch.bfloat16, torch.float16):
        return
    optimizer = kind(parameters, lr=rate, **options)
    bench.check(bench.random.choice(("no_grad", "inference_mode")))
    with torch.enable_grad():
        bench.look(bench.model).float().square().mean().backward()
    if bench.random.random() < 0.5:
        bench.check(bench.random.choice(list(MODES)))
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def plain_step(bench: Bench) -> None:
    step(bench, foreach=False)


def foreach_step(bench: Bench) -> None:
    step(bench, foreach=True)


def fused_step(bench: Bench) -> None:
    """The version of a parameter does not rise here."""
    step(bench, fused=True)


def _moved(bench: Bench, value: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(bench.random.randrange(2**31))
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.02
    return (value.double() * 1.05 + noise * value.double().std(correction=0)).to(value.dtype)


def load(bench: Bench) -> None:
    """``load_state_dict`` of other numbers, into the old tensors or in place of them."""
    moved = {id(p): _moved(bench, p.detach()) for p in bench.model.parameters()}  # one tensor for tied weights
    tensors = bench.model.state_dict(keep_vars=True).items()
    state = {name: moved[id(value)] if id(value) in moved else value.clone() for name, value in tensors}
    is_tied = len({id(value) for value in state.values()}) < len(state)  # torch assigns each name by itself
    bench.model.load_state_dict(state, assign=not is_tied and bench.random.random() < 0.3)


def write_data(bench: Bench) -> None:
    """Numbers written through ``.data``, which raises no version."""
    parameter = bench.random.choice(list(bench.model.parameters()))
    parameter.data.copy_(_moved(bench, parameter.data))


def replace_data(bench: Bench) -> None:
    """Other storage under the same parameter."""
    parameter = bench.random.choice(list(bench.model.parameters()))
    parameter.data = _moved(bench, parameter.data)


def to_dtype(bench: Bench) -> None:
    bench.model.to(bench.random.choice((torch.float32, torch.float64, torch.bfloat16)))


def deep_copy(bench: Bench) -> None:
    """A copy takes the model's place; the model that stays behind is written to, which must not show."""
    left, bench.model = bench.model, copy.deepcopy(bench.model)
    with torch.no_grad():
        for parameter in left.parameters():
            parameter.mul_(0.5)


def pickled(bench: Bench) -> None:
    """What comes back from a pickle takes the model's place."""
    bench.model = pickle.loads(pickle.dumps(bench.model))


def wrap(bench: Bench) -> None:
    """Into another module, or out of it again."""
    bench.model = bench.model.inner if isinstance(bench.model, Wrapper) else Wrapper(bench.model)


def offload(bench: Bench) -> None:
    """Weights lie elsewhere, come for the length of a call, and come back for good as other parameters."""
    device = next(bench.model.parameters()).device
    trained = {name: p.requires_grad for name, p in bench.model.named_parameters()}
    with torch.no_grad():
        expected = bench.look(bench.model)
        # What stands at two places under both names, where an ordinary state_dict has one.
        accelerate.cpu_offload(bench.model, device, state_dict=bench.model.state_dict(destination={}))
        bench.compare(bench.look(bench.model), expected, "offloaded")
    accelerate.hooks.remove_hook_from_submodules(bench.model)
    for name, parameter in bench.model.named_parameters():
        parameter.requires_grad_(trained[name])


def functional(bench: Bench) -> None:
    """Other weights for one call alone, by ``torch.func.functional_call``."""
    looked = _Looked(bench)
    state = {f"model.{name}": _moved(bench, p.detach()) for name, p in bench.model.named_parameters()}
    with torch.no_grad():
        # torch takes what stands at two places out twice and puts it back once, unless it is told to leave names alone.
        stands_twice = len([*looked.named_modules(remove_duplicate=False)]) > len([*looked.modules()])
        actual = torch.func.functional_call(looked, state, tie_weights=not stands_twice)
        twin = _Looked(bench, wrapped_like(bench.model, bench.fresh(bench.model)))
        assert not twin.load_state_dict(state, strict=False).unexpected_keys
        bench.compare(actual, twin(), "other weights for one call")


class _Looked(nn.Module):
    def __init__(self, bench: Bench, model: nn.Module | None = None):
        super().__init__()
        self.model, self.look = bench.model if model is None else model, bench.look

    def forward(self) -> Tensor:
        return self.look(self.model)


def to_device(bench: Bench) -> None:
    """Where there is a GPU, to it or back."""
    bench.model.to(bench.random.choice(("cpu", "cuda")) if torch.cuda.is_available() else "cpu")


def switch_training(bench: Bench) -> None:
    bench.model.train(not bench.model.training)


def look_again(bench: Bench) -> None:
    """Nothing but looks, one after another in other modes."""
    for mode in MODES:
        bench.check(mode)


ACTIONS: dict[str, Callable[[Bench], None]] = {
    action.__name__: action
    for action in (
        plain_step,
        foreach_step,
        fused_step,
        load,
        write_data,
        replace_data,
        to_dtype,
        to_device,
        deep_copy,
        pickled,
        wrap,
        offload,
        functional,
        switch_training,
        look_again,
    )
}
"""What can be done with any model."""


def run_sequence(
    build: Callable[[], nn.Module],
    fresh: Callable[[Any], Any],
    look: Callable[[Any], Tensor],
    *,
    seed: int,
    length: int = 12,
    actions: Mapping[str, Callable[[Bench], None]] = ACTIONS,
) -> None:
    """One random sequence of actions, with a look after each of them in a random mode of gradients."""
    torch.manual_seed(seed)
    bench = Bench(build(), fresh, look, seed)
    for _ in range(length):
        name = bench.random.choice(list(actions))
        bench.history.append(name)
        actions[name](bench)
        bench.check(bench.random.choice(list(MODES)))

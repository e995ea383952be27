"""``run.compile``: what is compiled and how, and that a run stays the run it is without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyptree.config import load
from hyptree.errors import UserError
from hyptree.runs import RunFolder
from hyptree.train import loop
from hyptree.train.compiled import Compiled
from hyptree.train.loop import fit
from hyptree.train.run.recipe import Recipe
from tests.train import tiny
from tests.train.test_resume import assert_same_run, dying_before_step, tensors

GRAPHS = {"mode": "reduce-overhead", "dynamic": False}
CUDA = torch.device("cuda")


@pytest.fixture
def asked(monkeypatch) -> list[dict[str, Any]]:
    """What ``nn.Module.compile`` was asked for, which is not done."""
    actual: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: actual.append(options))
    return actual


@pytest.mark.parametrize(
    ("kind", "device", "expected", "note"),
    [
        (True, "cuda", [{}], []),
        ("graphs", "cuda", [GRAPHS], []),
        ("graphs", "cpu", [{}], ["run.compile graphs: cpu has no CUDA graphs, so the model is compiled without them"]),
    ],
)
def test_the_mode_reaches_torch(asked, kind, device, expected, note):
    compiled = Compiled(nn.Linear(2, 2), kind, torch.device(device))
    assert asked == expected and compiled.notes == note
    with compiled.evaluating():
        pass
    # Evaluation has batches of other sizes: no graphs there, and graphs again afterwards.
    assert asked == (expected + [{}, GRAPHS] if expected == [GRAPHS] else expected)


def test_graphs_come_back_after_an_evaluation_that_failed(asked):
    compiled = Compiled(nn.Linear(2, 2), "graphs", CUDA)
    with pytest.raises(RuntimeError), compiled.evaluating():
        raise RuntimeError
    assert asked[-1] == GRAPHS


def test_gradients_are_kept_from_what_the_graph_overwrites(asked):
    model = nn.Linear(2, 1)
    memory = torch.tensor([[1.0, 2.0]])  # where a graph leaves its gradients
    model.weight.grad = memory
    Compiled(model, "graphs", CUDA).keep_gradients()
    memory.fill_(float("nan"))
    assert model.weight.grad.tolist() == [[1.0, 2.0]] and model.bias.grad is None


@pytest.fixture
def pretended(monkeypatch) -> dict[str, int]:
    """CUDA graphs on a CPU: the loop believes in them, two backends stand for the two modes. Gives what was called."""
    calls = {"graphs": 0, "plain": 0, "passes": 0}
    compile_module = nn.Module.compile

    def backend(kind: str, graph: Any, inputs: Any) -> Any:
        calls[kind] += 1
        return graph.forward

    backends = {kind: partial(backend, kind) for kind in ("graphs", "plain")}

    def compile_as_told(self: nn.Module, mode: str | None = None, dynamic: bool | None = None) -> None:
        compile_module(self, backend=backends["graphs" if mode == "reduce-overhead" else "plain"], dynamic=dynamic)

    def begin() -> None:
        calls["passes"] += 1

    monkeypatch.setattr(nn.Module, "compile", compile_as_told)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", begin)
    monkeypatch.setattr(loop, "Compiled", lambda model, kind, device, **rest: Compiled(model, kind, CUDA, **rest))
    torch.compiler.reset()
    yield calls
    torch.compiler.reset()


OPTIONS = ("run.accumulate=2", "run.save_steps=4", "optim.clip=0.5", "schedule.epochs=3", "data.eval_batch_size=32")


def test_a_run_with_graphs_is_the_run_without(tmp_path, pretended):
    """Accumulation, clipping, averages, evaluation with a last batch of nine: the same bits under the same names."""
    fit(tiny.recipe(*OPTIONS), tmp_path / "eager", quiet=True)
    assert pretended == {"graphs": 0, "plain": 0, "passes": 0}
    fit(tiny.recipe(*OPTIONS, "run.compile=graphs"), tmp_path / "graphs", quiet=True)
    assert_same_run(tmp_path / "eager", tmp_path / "graphs")
    assert pretended["passes"] == 36  # 18 steps of two parts
    assert pretended["graphs"] == 1  # three evaluations between them made nobody compile the step again
    assert pretended["plain"] in (1, 2)  # for any number of samples, perhaps after one for 32


def test_a_run_with_graphs_resumes(tmp_path, pretended):
    inputs = tiny.recipe(*OPTIONS, "run.compile=graphs")
    fit(inputs, tmp_path / "whole", quiet=True)
    with dying_before_step(7):
        fit(inputs, tmp_path / "parts", quiet=True)
    fit(inputs, tmp_path / "parts", resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_without_a_gpu_graphs_are_plain_and_the_log_says_so(tmp_path, asked):
    fit(tiny.recipe("run.compile=graphs", "schedule.epochs=1"), tmp_path / "run", quiet=True)
    assert asked == [{}]
    assert "compiled without them" in (tmp_path / "run/log.txt").read_text()
    assert RunFolder(tmp_path / "run").recipe(Recipe).run.compile == "graphs"
    assert not [key for key in tensors(tmp_path / "run") if "_orig_mod" in key]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.compile=graph"], "run.compile must be true or false or graphs, got 'graph'"),
        (["run.compile=1"], "run.compile must be true or false or graphs, got 1"),
        (
            ["run.compile=graphs", "run.parallel=fsdp2"],
            "compile graphs needs weights that stay in their place.*use ddp",
        ),
    ],
)
def test_what_cannot_be_is_one_line(overrides, message):
    with pytest.raises(UserError, match=message):
        load(Recipe, None, overrides)


LANGUAGE = (
    "task=language",
    "model.args.num_hidden_layers=2",  # a compiler takes as long for each of them; MICE has experts from the second on
    "text.num_documents=8",
    "text.vocab_size=320",
    "text.block_length=64",
    "data.batch_size=8",
    "data.eval_batch_size=39",  # three batches of one size: one more graph to compile, not two
    "optim.lr=1e-3",
    "schedule.steps=5",
    "run.accumulate=2",
    "run.eval_every=0.05",
    "run.log_steps=1",
    "run.tensorboard=false",
)


def losses(out: Path, *overrides: str) -> list[float]:
    """Of five steps, and of the evaluations among them and after the last; how many depends on the built-in text."""
    torch.compiler.reset()
    fit(load(Recipe, None, [*LANGUAGE, *overrides]), out, quiet=True)
    lines = RunFolder(out).read_metrics()
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 3, 4, 5]
    evaluated = [line["step"] for line in lines if line["split"] == "val"]
    assert len(evaluated) >= 3 and evaluated[-1] == 5
    return [line["loss"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["helm-d-pico", "helm-mice-pico"])
def test_compiled_language_models_train_as_eager_ones(tmp_path, name):
    pytest.importorskip("transformers")
    inputs = (f"text.cache={tmp_path}/text", f"model.name={name}", "run.device=cpu")
    eager = losses(tmp_path / "eager", *inputs)
    graphs = losses(tmp_path / "graphs", *inputs, "run.compile=graphs")  # which a CPU compiles plainly
    torch.testing.assert_close(torch.tensor(graphs), torch.tensor(eager), rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # a part of a compiled step that launches nothing
@pytest.mark.parametrize(("precision", "rtol"), [("fp32", 1e-5), ("bf16", 1e-3)])
@pytest.mark.parametrize("name", ["helm-d-pico", "helm-mice-pico", "twin:helm-d-pico"])
def test_graphs_train_as_plainly_compiled_models_do(tmp_path, name, precision, rtol):
    """Five steps of two parts with evaluations between them. Nothing was too hard for a graph.

    Without ``run.deterministic``, as GPU recipes have it: with it torch warns that the gradient of attention is added
    up in any order all the same, and some versions leave out the graph. The order of a sum, and evaluation compiled for
    one size or for all, change the last digits, which bfloat16 has far earlier.
    """
    pytest.importorskip("transformers")
    from torch._dynamo.utils import counters

    inputs = (f"text.cache={tmp_path}/text", f"model.name={name}", "run.device=cuda", f"run.precision={precision}")
    inputs += ("run.deterministic=false",)
    plain = losses(tmp_path / "plain", *inputs, "run.compile=true")
    counters.clear()
    graphs = losses(tmp_path / "graphs", *inputs, "run.compile=graphs")
    assert counters["inductor"]["cudagraph_skips"] == 0
    torch.testing.assert_close(torch.tensor(graphs), torch.tensor(plain), rtol=rtol, atol=0)

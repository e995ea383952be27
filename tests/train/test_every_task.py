"""Every task by the same road: train, kill -9, resume to the same bits, eval, the page, two processes equal one.

Each part has tests of its own for the tasks where it is hard; here a task that is added without them is seen.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hyptree.cli import main
from hyptree.config import load
from hyptree.runs import RunFolder
from hyptree.train.loop import Trainer, fit
from hyptree.train.run.recipe import Recipe
from hyptree.train.tasks import TASKS
from tests.processes import forkserver
from tests.train.fewshot_world import save_world_clip
from tests.train.test_distributed import _be_rank, in_two

COMMON = (
    *("schedule.steps=4", "schedule.warmup=0", "run.device=cpu", "run.threads=1", "run.tensorboard=false"),
    *("run.log_steps=1", "run.eval_every=0", "run.save_steps=2", "run.save_every=0"),
)
PICTURES = ("data.size=32", "data.num_train=16", "data.num_val=8", "data.batch_size=4", "data.cache=null")
HEAD = "model.head.pyramid_channels=32"
BOXES = (
    *(*PICTURES[2:], "data.size=64", "data.num_train=8", HEAD, "model.head.head_channels=32"),
    *("model.head.num_proposals=30", "model.head.num_learned=16", "model.head.max_detections=5"),
)
COST = ("channels=16", "guide=8", "num_heads=2", "window=4", "decoder=[8, 8]")
SMALL: dict[str, tuple[str, tuple[str, ...]]] = {
    "classify": ("world_classify", (*PICTURES, "run.ema=0.5")),
    "segment": ("world_segment", (*PICTURES, HEAD)),
    "detect": ("world_detect", BOXES),
    "openvocab_detect": ("openvocab_detect_world", BOXES),
    "language": ("helm_builtin", ("text.num_documents=30", "text.vocab_size=320", "text.block_length=32")),
    "contrast": ("clip_world_tiny", (*PICTURES, "model.head.prompted=0")),  # each process draws its own prompts
    "openvocab": (
        "openvocab_world",
        (
            *(*PICTURES, "model.name=CLIP", "model.args.eval_size=null", "model.args.adapter.block_size=8"),
            *("run.ema=null", *(f"model.head.{word}" for word in COST)),
        ),
    ),
    "radial": ("radial_world", ("model.name=CLIP", "data.batch_size=4", "data.num_train=16", "data.num_val=6")),
    "fewshot": ("fewshot_world", ("model.name=CLIP", "data.size=32", "data.num_train=300", "data.num_val=60")),
    "embed": ("embed_world", ()),
}
"""By task: a recipe of ours, and what makes it small."""
TINY_LM = "model.args={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 56}"
PAGES = {"classify", "contrast", "embed", "fewshot", "language", "radial"}
"""Tasks whose runs ``hyptree explain`` draws; of the others it says in a line that it cannot."""
ALONE = {"fewshot"}
"""Tasks that several processes cannot share, which they say."""


DRAWS = {"detect", "openvocab_detect"}
"""Tasks whose library draws in each process what is learned from: two processes then equal one only on average."""


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_world_clip(tmp_path_factory.mktemp("clip") / "clip")


def words_of(task: str, clip: Path) -> list[str]:
    """The recipe's keys, caches beside the encoder."""
    words = [*COMMON, *SMALL[task][1]]
    if task == "language":
        words += [TINY_LM, f"text.cache={clip.parent / 'text'}", "data.batch_size=8", "data.eval_batch_size=8"]
    if task == "fewshot":
        words += [f"fewshot.cache={clip.parent / 'features'}", "fewshot.shots=2", "data.cache=null"]
    return [word.replace("=CLIP", f"=hf:{clip}") for word in words]


def train(task: str, words: list[str], out: Path) -> dict[str, float]:
    recipe = load(Recipe, f"recipes/{SMALL[task][0]}.yaml", words)
    assert recipe.task == task
    return fit(recipe, out, resume=True, quiet=True).numbers


def _killed(task: str, words: list[str], out: str) -> None:
    """Trains, and is killed in the fourth step, after a checkpoint of the second."""
    step = Trainer.train_step

    def dies(trainer: Trainer, batches: Any) -> None:
        if trainer.progress.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        step(trainer, batches)

    Trainer.train_step = dies  # type: ignore[method-assign]
    train(task, words, Path(out))


def _rank(rank: int, port: int, log: str, task: str, words: list[str], out: str) -> None:
    _be_rank(rank, port)
    ended = ""
    try:
        train(task, words, Path(out))
    except (Exception, SystemExit) as error:
        ended = f"{type(error).__name__}: {error}"
    Path(f"{log}.{rank}").write_text(json.dumps(ended))


def test_no_task_is_forgotten() -> None:
    own = {name for name, place in TASKS.items() if place.startswith("hyptree.")}
    assert own == set(SMALL) and own > PAGES | ALONE | DRAWS


@pytest.mark.slow  # its parts are in the tests of each task
@pytest.mark.parametrize("task", SMALL)
def test_it_goes_the_whole_road(task: str, clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(task, clip)
    numbers = train(task, words, tmp_path / "whole")
    assert numbers

    process = forkserver().Process(target=_killed, args=(task, words, str(tmp_path / "killed")))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert json.loads((tmp_path / "killed/checkpoints/last/manifest.json").read_text())["step"] == 2
    assert train(task, words, tmp_path / "killed") == numbers
    for name in ("model", "training"):
        one, other = (load_file(tmp_path / run / f"checkpoints/last/{name}.safetensors") for run in ("whole", "killed"))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    capsys.readouterr()
    assert main(["eval", str(tmp_path / "killed"), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    for name, value in numbers.items():
        assert evaluated[name] == pytest.approx(value, rel=1e-6, nan_ok=True), name

    code = main(["explain", str(tmp_path / "killed")])
    said = capsys.readouterr()
    if task in PAGES:
        assert code == 0 and "<html" in Path(said.out.strip().splitlines()[-1]).read_text()[:500]
    else:
        assert (code, said.out) == (2, "") and said.err.count("\n") == 1

    ended = in_two(tmp_path, _rank, task, words, str(tmp_path / "two"))
    if task in ALONE:
        assert "cannot share" in ended[0]
        return
    assert ended == ["", ""]
    one, two = (
        [line["loss"] for line in RunFolder(tmp_path / run).read_metrics() if line["split"] == "train"]
        for run in ("whole", "two")
    )
    assert two == pytest.approx(one, rel=0.1 if task in DRAWS else 2e-3)

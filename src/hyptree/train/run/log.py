"""What a run tells: a progress bar or plain lines, log.txt, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from importlib.util import find_spec
from typing import Any

from hyptree.files import open_log
from hyptree.progress import ProgressBar, progress_bar
from hyptree.runs import RunFolder


class Reporter:
    """Shows and writes the numbers of a run.

    Args:
        writes: whether this process writes the files; only the first one does.
        quiet: whether nothing is shown.
        step: where the run is when it begins.
    """

    def __init__(
        self,
        folder: RunFolder,
        num_steps: int,
        unit: str,
        *,
        writes: bool = True,
        quiet: bool = False,
        tensorboard: bool = False,
        step: int = 0,
    ):
        self.folder, self.num_steps, self.unit = folder, num_steps, unit
        self.writes, self.shows = writes, writes and not quiet
        self._stack = contextlib.ExitStack()
        self._bar: ProgressBar | None = None
        self._note = ""
        self._board: Any = None
        if not writes:
            return
        with contextlib.ExitStack() as opened:  # where the second is refused, the first is closed
            self._log = opened.enter_context(open_log(folder.log))
            self._metrics = opened.enter_context(open_log(folder.metrics))
            self._stack = opened.pop_all()
        with contextlib.suppress(ImportError, OSError):  # says that somebody trains here, see RunFolder.is_running
            import fcntl

            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if tensorboard and find_spec("tensorboard") is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # third parties' own deprecations
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1)
            self._stack.callback(self._board.close)
        if self.shows and sys.stdout.isatty() and find_spec("rich") is not None:
            self._bar = self._stack.enter_context(progress_bar("train", num_steps, stream=sys.stdout, done=step))

    def say(self, text: str) -> None:
        """A line for people, above the bar, and in log.txt."""
        if not self.writes:
            return
        self._log.write(text + "\n")
        self._log.flush()
        if self._bar is not None:
            self._bar.say(text)
        elif self.shows:
            print(text, flush=True)

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.reach(step, self._note)

    def write(self, line: dict[str, Any], left: float | None = None) -> None:
        """Write one line of metrics, and show it.

        Args:
            line: step, epoch, split, time and the numbers.
            left: seconds to the end of the run, if known.
        """
        if not self.writes:
            return
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        if self._board is not None:
            for name, value in line.items():
                if name not in ("step", "split", "time"):
                    self._board.add_scalar(f"{line['split']}/{name}", value, line["step"])
        text = describe(line, self.unit)
        if line["split"] == "train" and self._bar is not None:
            self._note = text
            self._bar.reach(line["step"], text)
            self._log.write(text + "\n")
        elif line["split"] == "train":
            self.say(f"step {line['step']}/{self.num_steps}  {text}" + (f"  eta {_clock(left)}" if left else ""))
        else:
            self.say(f"step {line['step']}/{self.num_steps}  {line['split']}: {text}")

    def close(self) -> None:
        """Close every file."""
        self._stack.close()


def headline(numbers: dict[str, Any]) -> dict[str, Any]:
    """The numbers without those of single classes (``iou/cat``), which are for files: there may be hundreds."""
    return {name: value for name, value in numbers.items() if "/" not in name}


def describe(line: dict[str, Any], unit: str) -> str:
    """The numbers of a line of metrics for people: ``epoch 1.50  loss 2.3026  lr 0.001  812 img/s``."""
    parts = []
    for name, value in headline(line).items():
        if name in ("step", "split", "time"):
            continue
        if name == "epoch":
            parts.append(f"epoch {value:.2f}")
        elif name == "per_second":
            parts.append(f"{value:,.0f} {unit}/s")
        elif name == "lr":
            parts.append(f"lr {value:.3g}")
        else:
            parts.append(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

"""Multiple-choice tasks: their files, and the prompts that are customary for them.

Files are JSON lines, plain or compressed by gzip: ``q``, ``choices``, ``answer`` (place of the right choice), and
``passage`` (BoolQ), ``support`` (SciQ) or ``subject`` (MMLU). A file of one's own has ``query``, ``choices``, ``gold``,
and the query is the prompt as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyptree.errors import UserError, suggest
from hyptree.files import data_folder, json_lines, open_packed

Row = Mapping[str, Any]

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Item:
    """A question as the model sees it, possible answers, and the place of the right one."""

    query: str
    choices: tuple[str, ...]
    gold: int
    group: str = ""
    """Items of a group are also counted apart."""

    @property
    def continuations(self) -> tuple[str, ...]:
        """What may follow the query: the choices, after a space where the query does not end in one."""
        space = " " if self.query and not self.query[-1].isspace() else ""
        return tuple(space + choice for choice in self.choices)


@dataclass(frozen=True)
class Task:
    """Where a task's questions are, and how they are asked."""

    about: str
    file: str
    """Which questions, without ``.jsonl.gz``."""
    shots_file: str
    """Where solved examples come from; the question itself never is one."""
    prompt: Callable[[Row], str]
    choices: Callable[[Row], Sequence[str]] = lambda row: row["choices"]
    num_shots: int = 0
    """Customary number of solved examples."""
    title: Callable[[Row], str] = lambda row: ""
    """What stands above everything."""


def _question(row: Row) -> str:
    return f"Question: {row['q']}\nAnswer:"


def _boolq(row: Row) -> str:
    return f"{row['passage']}\nQuestion: {row['q'].rstrip('?')}?\nAnswer:"


def _sciq(row: Row) -> str:
    return f"{row['support'].lstrip()}\n{_question(row)}".lstrip()


def _lettered(row: Row) -> str:
    """The choices are listed, the answer is a letter."""
    listed = "".join(f"{letter}. {text}\n" for letter, text in zip(LETTERS, row["choices"], strict=False))
    return f"{row['q'].strip()}\n{listed}Answer:"


def _letters(row: Row) -> Sequence[str]:
    return LETTERS[: len(row["choices"])]


def _subject(row: Row) -> str:
    about = row["subject"].replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {about}.\n\n"


def _plain(text: str) -> str:
    """HellaSwag without the marks of its how-to articles: titles become sentences, the others vanish."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return re.sub(r" {2,}", " ", text).strip()


_MMLU = "57 school and university subjects"
_CSQA = "commonsense questions, five choices"

TASKS: dict[str, Task] = {
    "arc_easy": Task("school science, easier part", "arc_easy_test", "arc_easy_val", _question),
    "arc_challenge": Task("school science, harder part", "arc_challenge_test", "arc_challenge_val", _question),
    "openbookqa": Task("elementary science facts", "openbookqa_test", "openbookqa_val", lambda row: row["q"]),
    "commonsenseqa": Task(
        _CSQA + ", answered by a letter",
        "commonsenseqa_val",
        "commonsenseqa_val",
        lambda row: f"Question: {_lettered(row)}",
        _letters,
    ),
    "commonsenseqa_cloze": Task(_CSQA + ", answered in words", "commonsenseqa_val", "commonsenseqa_val", _question),
    "hellaswag": Task(
        "how an everyday situation goes on",
        "hellaswag_val",
        "hellaswag_val",
        lambda row: _plain(row["q"]),
        lambda row: [_plain(text) for text in row["choices"]],
    ),
    "mmlu": Task(
        _MMLU + ", answered by a letter", "mmlu_test", "mmlu_dev", _lettered, _letters, num_shots=5, title=_subject
    ),
    "mmlu_cloze": Task(_MMLU + ", answered in words", "mmlu_test", "mmlu_dev", _question),
    "piqa": Task("everyday physics, two choices", "piqa_val", "piqa_val", _question),
    "sciq": Task("science exams with a passage", "sciq_val", "sciq_val", _sciq),
    "boolq": Task("yes or no, from a passage", "boolq_val", "boolq_val", _boolq),
}


def find_root(root: Path | str | None = None) -> Path:
    """Folder of the tasks' files: as given, or ``lm-eval`` in :func:`hyptree.files.data_folder`."""
    folder = Path(root) if root is not None else data_folder() / "lm-eval"
    if not folder.is_dir():
        raise UserError(f"no task files at {folder}: no such folder; say where they are (root, or HYPTREE_DATA)")
    return folder


def load_items(
    task: str, *, root: Path | str | None = None, limit: int | None = None, shots: int | None = None
) -> tuple[list[Item], int]:
    """The items of a task, and how many solved examples stand before each question.

    Args:
        task: a name of :data:`TASKS`, or a file of JSON lines with ``query``, ``choices`` and ``gold``.
        root: folder of the tasks' files, see :func:`find_root`.
        limit: at most so many items, spread evenly over the task.
        shots: solved examples; by default as customary. They are the first ones of their file (of the same subject).
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}")
    if shots is not None and shots < 0:
        raise UserError(f"shots must be at least 0, got {shots}")
    if task not in TASKS:
        if not Path(task).name.endswith((".jsonl", ".jsonl.gz")):
            hint = suggest(task, TASKS) or f"there are {', '.join(TASKS)}, and files that end in .jsonl or .jsonl.gz"
            raise UserError(f"unknown task {task!r}; {hint}")
        if shots:
            raise UserError(f"{task}: a file of one's own has its examples in its queries; leave shots out")
        own = []
        for where, row in _rows(Path(task), ("query", "choices", "gold")):
            if not isinstance(row["query"], str):
                raise UserError(f"{where}: query must be a text")
            own.append(Item(row["query"], tuple(row["choices"]), row["gold"], str(row.get("group", ""))))
        return _spread(own, limit), 0
    folder, how = find_root(root), TASKS[task]
    needed = ("q", "choices", "answer")
    rows = [row for _, row in _rows(folder / f"{how.file}.jsonl.gz", needed)]
    num_shots = how.num_shots if shots is None else shots
    solved: dict[str, list[Row]] = {}
    if num_shots:
        same = how.shots_file == how.file
        for row in rows if same else (row for _, row in _rows(folder / f"{how.shots_file}.jsonl.gz", needed)):
            examples = solved.setdefault(row.get("subject", ""), [])
            if len(examples) <= num_shots:  # one more than needed, for the question that is one itself
                examples.append(row)
    return [_item(how, row, solved, num_shots, task) for row in _spread(rows, limit)], num_shots


def _item(how: Task, row: Row, solved: Mapping[str, list[Row]], num_shots: int, name: str) -> Item:
    group = row.get("subject", "")
    examples = [other for other in solved.get(group, []) if other != row][:num_shots]
    if len(examples) < num_shots:
        raise UserError(f"{name}: {num_shots} solved examples were asked for, there are {len(examples)}; ask for fewer")
    shots = "".join(f"{how.prompt(one)} {how.choices(one)[one['answer']]}\n\n" for one in examples)
    return Item(how.title(row) + shots + how.prompt(row), tuple(how.choices(row)), row["answer"], group)


def _spread(rows: Sequence[Any], limit: int | None) -> list[Any]:
    """At most ``limit`` rows at equal steps: files may be sorted by subject."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[k * len(rows) // limit] for k in range(limit)]


def _rows(path: Path, fields: tuple[str, str, str]) -> Iterator[tuple[str, Row]]:
    """Where each line is, and what it holds; ``fields`` are checked: the question, its choices, the right one."""
    with open_packed(path) as file:
        for where, row in json_lines(file, path):
            _check(row, fields, where)
            yield where, row


def _check(row: Row, fields: tuple[str, str, str], where: str) -> None:
    missing = [name for name in fields if name not in row]
    if missing:
        raise UserError(f"{where} has no {' and no '.join(missing)}; expected {', '.join(fields)}")
    choices, right = row[fields[1]], row[fields[2]]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(text, str) for text in choices):
        raise UserError(f"{where}: {fields[1]} must be a list of two texts or more")
    if not isinstance(right, int) or isinstance(right, bool) or not 0 <= right < len(choices):
        raise UserError(
            f"{where}: {fields[2]} must be the place of the right choice, from 0 to {len(choices) - 1}, got {right!r}"
        )

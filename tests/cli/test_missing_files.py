"""A missing file is named at once: before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_print_config import every_verb

ROOT = Path(__file__).resolve().parents[2]

CASES = """
train nope.yaml
train --config nope.yaml
train runs/nope --resume
train radial_world --model.name hf:runs/nope
eval nope
eval nope --tasks piqa
compare nope.yaml
demo --recipe nope.yaml
generate nope text
runs nope
export nope
explain runs/nope
explain hf:runs/nope
explain hcformer_pico nope.png
explain hcformer_pico --rival runs/nope --table
reduce runs/nope
reduce vit_tiny_patch16_224 --image nope.png
reduce vit_tiny_patch16_224 --weights nope
reduce vit_tiny_patch16_224 --data nope/a
reduce vit_tiny_patch16_224 --data pets:nope
tree draw nope
tree show nope.tsv
lab sweep --resume --out nope
lab fit nope
lab plot nope
lab overlap nope.safetensors
lab llm-fit nope.csv
vlm attach-info hf:runs/nope
vlm attach-info hf:a/b --adapter nope
vlm merge --model hf:a/b --adapter nope --out out
vlm eval-openvocab --detector nope --segmenter nope
vlm eval-hierarchy --model hf:runs/nope
vlm eval-hierarchy --model hf:a/b --data nope
vlm build-chains nope.txt --wordnet wordnet
""".strip().splitlines()

READS_NOTHING = {"models", "tree demo", "lab theory"}

# Stands in the way of torch, so that each command of the one process is judged by itself.
CODE = """
import contextlib, io, json, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise RuntimeError("torch was imported")

sys.meta_path.insert(0, NoTorch())
from hyptree.cli import main

found = {}
for words in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words.split())
        except RuntimeError as error:
            code = str(error)
    found[words] = code, err.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[int | str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        input=json.dumps(CASES),
        cwd=tmp_path_factory.mktemp("empty"),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", CASES)
def test_it_is_named_in_one_line_before_torch_is_imported(words, answers):
    code, error = answers[words]
    assert code == 2
    assert error.startswith("hyptree: error: ") and error.count("\n") == 1
    assert re.search(r"\bnope\b.*no such (file|folder|picture)|nothing to resume in nope", error, re.IGNORECASE)


def test_every_verb_that_reads_a_path_is_here():
    named = {" ".join(words.split()[: 2 if words.split()[0] in ("tree", "lab", "vlm") else 1]) for words in CASES}
    verbs = {verb for verb in [*every_verb(), "eval"] if not verb.startswith("bench ")}
    assert named == verbs - READS_NOTHING

"""Every verb prints its settings, and every command of the benchmark scripts is one that the verbs understand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from hyptree import cli
from hyptree.train.compare import read_table

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.sh") if path.name != "common.sh")

# What a verb cannot do without; a verb that is not here needs nothing.
NEEDED = {
    "train": ["world_classify"],
    "generate": ["runs/helm", "The"],
    "compare": ["table.yaml"],
    "explain": ["hcformer_pico"],
    "reduce": ["vit_tiny_patch16_224"],
    "export": ["runs/x"],
    "tree draw": ["runs/x"],
    "tree show": ["edges.tsv"],
    "lab fit": ["runs/x"],
    "lab plot": ["runs/x"],
    "lab overlap": ["model.safetensors"],
    "lab llm-fit": ["losses.csv"],
    "vlm attach-info": ["hf:x"],
    "vlm merge": ["--model", "hf:x", "--adapter", "a", "--out", "b"],
    "vlm eval-openvocab": ["--detector", "a", "--segmenter", "b"],
    "vlm eval-hierarchy": ["--model", "hf:x"],
    "vlm build-chains": ["captions.txt", "--wordnet", "wordnet"],
    "bench kernels": ["--quick"],
}
NOT_HERE = {"eval"}  # its settings are those of a run, tested where there is one


def every_verb() -> list[str]:
    names = []
    for verb in cli.VERBS:
        subverbs = getattr(import_module(f"hyptree.cli.{verb}"), "SUBVERBS", None)
        names += [f"{verb} {name}" for name in subverbs] if subverbs else [verb]
    return [name for name in names if name not in NOT_HERE]


@pytest.mark.parametrize("verb", every_verb())
def test_settings_are_yaml(verb: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([*verb.split(), *NEEDED.get(verb, []), "--print-config"]) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert isinstance(settings, dict)
    assert settings


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A command in the place of ``hyptree`` that writes its words down, one call per line, and does nothing else."""
    script, calls = tmp_path / "recorder.py", str(tmp_path / "calls")
    script.write_text(f"import json, sys\nprint(json.dumps(sys.argv[1:]), file=open({calls!r}, 'a'))\n")
    return script


@pytest.mark.parametrize("quick", ["", "1"], ids=["full", "quick"])
@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
@pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts are for bash")
def test_benchmark_scripts_say_what_verbs_understand(
    script: Path, quick: str, recorder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    out = tmp_path / "out"
    settings = {"HYPTREE": f"{sys.executable} {recorder}", "OUT": str(out), "DATA": "data", "QUICK": quick, "ONLY": ""}
    run = subprocess.run(
        ["bash", str(script)], env={**os.environ, **settings}, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls
    monkeypatch.chdir(ROOT)  # where the scripts go themselves
    for words in calls:
        assert cli.main([*words, "--print-config"]) == 0, (words, capsys.readouterr().err)
        if words[0] == "compare":  # its overrides are those of the recipe, which checks them
            read_table(words[1], yaml.safe_load(capsys.readouterr().out)["overrides"])
    steps = [line.split()[1] for line in script.read_text().splitlines() if line.startswith("step ")]
    assert {path.stem for path in out.glob("*.done")} == set(steps)


@pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts are for bash")
def test_a_failed_step_is_named_and_repeated(tmp_path: Path):
    failing = tmp_path / "failing.py"
    failing.write_text("import sys\nsys.exit('the disk is on fire' if 'curvature-grid' in sys.argv else 0)\n")
    settings = {"HYPTREE": f"{sys.executable} {failing}", "OUT": str(tmp_path / "out"), "QUICK": "1", "ONLY": ""}
    script = str(ROOT / "benchmarks" / "lab.sh")
    for _ in range(2):
        run = subprocess.run(["bash", script], env={**os.environ, **settings}, capture_output=True, text=True)
        assert run.returncode == 1
        assert "the disk is on fire" in run.stdout
        assert "failed: curvature" in run.stderr
    assert "density: done before" in run.stdout

"""``hyptree vlm eval-hierarchy`` as people call it, on tiny models and made-up data."""

import json
import shutil

import pytest

from hyptree.cli import main
from tests.vlm.small_models import save_dual

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return f"hf:{save_dual(tmp_path_factory.mktemp('models') / 'clip', 'clip')}"


def test_a_hyperbolic_encoder_is_measured_on_its_own_hyperboloid(tmp_path, capsys):
    folder = save_dual(tmp_path / "curved", "clip")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hyperbolic_curvature": 0.5}))
    suites = ["--suite", "world-text", "world-images", "--limit", "6", "--quiet", "--json"]
    assert main(["vlm", "eval-hierarchy", "--model", f"hf:{folder}", *suites]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["geometry"] == "lorentz" and report["curvature"] == 0.5
    level = report["suites"]["world-text"]["levels"][0]
    assert level["distance"] == pytest.approx(level["norm"], abs=1e-4)  # of the lifted tangent vector
    assert set(report["suites"]["world-images"]["retrieval"]) == {"chord", "one_minus_cos", "lorentz"}


def test_report_goes_into_a_folder_and_resumes(clip, tmp_path, capsys):
    out = tmp_path / "report"
    evaluate = ["vlm", "eval-hierarchy", "--model", clip, "--limit", "8", "--out", str(out)]
    assert main([*evaluate, "--suite", "world-text", "--quiet"]) == 0
    assert capsys.readouterr().out == (out / "report.txt").read_text()
    assert main([*evaluate, "--suite", "world-text", "world-images", "--resume"]) == 0
    text = capsys.readouterr()
    assert text.err == "measuring world-images\n"
    report = json.loads((out / "report.json").read_text())
    assert list(report["suites"]) == ["world-text", "world-images"] and report["limit"] == 8
    assert "baseline: words" in text.out and "coarse classes: groups" in text.out
    with_other = [*evaluate[:4], "--limit", "9", "--out", str(out), "--suite", "world-text", "--resume"]
    assert main(with_other) == 2
    assert "it was made with limit = 8, now it is 9" in capsys.readouterr().err


def test_a_report_knows_the_weights_it_is_of(clip, tmp_path, capsys):
    """The folder of the model holds other weights the next time."""
    model = tmp_path / "model"
    shutil.copytree(clip.removeprefix("hf:"), model)
    evaluate = ["vlm", "eval-hierarchy", "--model", f"hf:{model}", "--suite", "world-text", "--limit", "8", "--quiet"]
    assert main([*evaluate, "--out", str(tmp_path / "report")]) == 0
    save_dual(model, "clip", seed=1)
    assert main([*evaluate, "--out", str(tmp_path / "report"), "--resume"]) == 2
    assert "its report is of other weights" in capsys.readouterr().err


def test_random_weights_only_when_asked_for(tmp_path, capsys):
    folder = save_dual(tmp_path / "clip", "clip")
    (folder / "model.safetensors").unlink()
    options = ["vlm", "eval-hierarchy", "--model", f"hf:{folder}", "--suite", "world-text", "--limit", "4", "--json"]
    assert main(options) == 2
    assert "--random-init" in capsys.readouterr().err
    numbers = []
    for seed in ("0", "0", "1"):
        assert main([*options, "--random-init", "--seed", seed, "--quiet"]) == 0
        numbers.append(json.loads(capsys.readouterr().out)["suites"])
    assert numbers[0] == numbers[1] != numbers[2]
    kept = [
        "--random-init",
        "--geometry",
        "lorentz",
        "--curvature",
        "0.5",
        "--out",
        str(tmp_path / "report"),
        "--quiet",
    ]
    assert main([*options, *kept]) == 0
    for other, message in ((["--seed", "1"], "seed = 0, now it is 1"), (["--curvature", "2"], "curvature = 0.5, now")):
        assert main([*options, *kept, *other, "--resume"]) == 2
        assert message in capsys.readouterr().err


def test_evaluation_of_missing_things(tmp_path, capsys):
    """Everything but the model itself is looked at before a model is loaded, so none is needed here."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "hyperlex").mkdir()
    world = ["--suite", "world-text"]
    for options, message in (
        (["--suite", "hyperlx"], "did you mean 'hyperlex'?"),
        ([], "hierarcaps needs its files"),
        (["--data", str(tmp_path / "none")], "none: no such file or folder"),
        (["--data", str(empty)], "has no hierarcaps_test.csv"),
        (["--data", str(tmp_path), "--suite", "hyperlex"], "has no hyperlex-all.txt"),
        (["--data", str(empty), "--suite", "cifar10"], "holds no .npz file"),
        (["--data", str(empty), "--suite", "tiny-imagenet"], "expected the folder tiny-imagenet-200"),
        (["--resume"], "--resume needs --out"),
        ([*world, "--limit", "0"], "limit must be 1 or more"),
        (world, "no model here"),
    ):
        assert main(["vlm", "eval-hierarchy", "--model", f"hf:{empty}", *options]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error and len(error.splitlines()) == 1

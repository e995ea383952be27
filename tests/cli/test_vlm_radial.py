"""``hyptree vlm train-radial`` and ``eval-hierarchy`` as people call them, on tiny models and made-up data."""

import json
import shutil

import pytest
import torch

from hyptree.cli import main
from hyptree.vlm.encoders.encoder import load_encoder
from tests.vlm.small_models import register_open_clip, save_bert, save_dual

pytest.importorskip("transformers")

HEADER = "positive,negative,image_url\n"
ROWS = [
    f"vehicle => {kind} => a {kind} at night => a red {kind} on the road {i},"
    f"road => night => a road => three wheels,u/{i}.jpg\n"
    for i, kind in enumerate(["car", "truck"] * 6)
]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return f"hf:{save_dual(tmp_path_factory.mktemp('models') / 'clip', 'clip')}"


@pytest.fixture
def chains(tmp_path):
    path = tmp_path / "chains.csv"
    path.write_text(HEADER + "".join(ROWS))
    return path


def train(clip, chains, out, *more):
    return main(["vlm", "train-radial", "--model", clip, "--chains", str(chains), "--out", str(out), "--quiet", *more])


def test_train_save_resume_and_evaluate(clip, chains, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(clip, chains, out, "--steps", "6", "--lr", "1e-3", "--batch-size", "4", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 6 and result["num_chains"] == 12 and result["last"]["keep"] > 0
    base, trained = load_encoder(clip), load_encoder(f"hf:{out / 'model'}")
    texts = ["a red car", ""]
    assert not torch.allclose(base.encode_text(texts), trained.encode_text(texts), atol=1e-4)
    frozen = dict(base.model.named_parameters())
    for name, value in trained.model.named_parameters():
        same = torch.equal(value, frozen[name])
        assert same or name.startswith("text"), name  # the image tower and the scale of logits are as before

    assert train(clip, chains, out, "--steps", "8", "--lr", "1e-3", "--batch-size", "4", "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 8
    straight = tmp_path / "straight"
    assert train(clip, chains, straight, "--steps", "8", "--lr", "1e-3", "--batch-size", "4") == 0
    a, b = (load_encoder(f"hf:{folder / 'model'}").encode_text(texts) for folder in (out, straight))
    assert torch.equal(a, b)
    assert "run in" in capsys.readouterr().out

    evaluate = ["vlm", "eval-hierarchy", "--suite", "world-text", "--limit", "10", "--quiet", "--json"]
    assert main([*evaluate, "--model", f"hf:{out / 'model'}"]) == 0
    from_model = json.loads(capsys.readouterr().out)["suites"]
    assert main([*evaluate, "--model", clip, "--weights", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["suites"] == from_model
    assert main([*evaluate, "--model", clip]) == 0
    assert json.loads(capsys.readouterr().out)["suites"] != from_model


@pytest.mark.parametrize("adapter", ["lora", "scale", "diagonal"])
def test_an_adapter_is_trained_and_merged(clip, chains, tmp_path, capsys, adapter):
    out = tmp_path / "run"
    more = ["--steps", "5", "--adapter", adapter, "--block-size", "16", "--rank", "2", "--lr", "0.01", "--json"]
    assert train(clip, chains, out, *more) == 0
    result = json.loads(capsys.readouterr().out)
    merged, base = load_encoder(f"hf:{out / 'model'}"), load_encoder(clip)
    assert 0 < result["num_parameters"] < sum(p.numel() for p in base.text_parameters()) / 2
    texts = ["a red car", "truck"]
    assert not torch.allclose(base.encode_text(texts), merged.encode_text(texts), atol=1e-3)
    assert list(dict(merged.model.named_parameters())) == list(dict(base.model.named_parameters()))
    evaluate = ["vlm", "eval-hierarchy", "--suite", "world-text", "--limit", "5", "--quiet", "--json"]
    numbers = []
    for options in (["--model", f"hf:{out / 'model'}"], ["--model", clip, "--weights", str(out)]):
        assert main([*evaluate, *options]) == 0
        numbers.append(json.loads(capsys.readouterr().out)["suites"]["world-text"]["levels"][0]["distance"])
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)


def test_default_rate_is_the_towers_or_the_adapters(clip, chains, tmp_path, capsys):
    for adapter, rate in (("none", None), ("lora", 1e-4)):
        assert train(clip, chains, tmp_path / adapter, "--steps", "1", "--adapter", adapter, "--json") == 0
        assert json.loads(capsys.readouterr().out)["settings"]["lr"] == rate


def test_sentence_encoders_train_too(chains, tmp_path, capsys):
    bert = f"hf:{save_bert(tmp_path / 'bert', None)}"
    assert train(bert, chains, tmp_path / "run", "--steps", "3", "--geometry", "geodesic", "--no-save-model") == 0
    assert "keep" in capsys.readouterr().out and not (tmp_path / "run" / "model").exists()


def test_open_clip_trains_and_reads_its_file_back(chains, tmp_path, capsys):
    pytest.importorskip("open_clip")
    name = register_open_clip(tmp_path)
    options = ["--steps", "3", "--lr", "1e-3", "--random-init", "--json"]
    assert train(f"open_clip:{name}", chains, tmp_path / "run", *options) == 0
    assert json.loads(capsys.readouterr().out)["last"]["keep"] > 0
    saved = tmp_path / "run" / "model" / "open_clip_model.safetensors"
    evaluate = ["vlm", "eval-hierarchy", "--suite", "world-text", "--limit", "5", "--quiet", "--json", "--model"]
    assert main([*evaluate, f"open_clip:{name}:{saved}"]) == 0
    from_file = json.loads(capsys.readouterr().out)["suites"]
    assert main([*evaluate, f"open_clip:{name}", "--random-init", "--weights", str(tmp_path / "run")]) == 0
    assert json.loads(capsys.readouterr().out)["suites"] == from_file
    assert main([*evaluate, f"open_clip:{name}"]) == 2
    assert "--random-init" in capsys.readouterr().err


def test_a_hyperbolic_encoder_is_measured_and_trained_on_its_own_hyperboloid(chains, tmp_path, capsys):
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
    more = ["--steps", "2", "--lr", "1e-3", "--geometry", "lorentz", "--json"]
    assert train(f"hf:{folder}", chains, tmp_path / "run", *more) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["curvature"] == 0.5
    assert load_encoder(f"hf:{tmp_path / 'run' / 'model'}").curvature == 0.5


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


def test_reports_and_trained_weights_know_the_weights_they_are_of(clip, chains, tmp_path, capsys):
    """The folder of the model holds other weights the next time."""
    model = tmp_path / "model"
    shutil.copytree(clip.removeprefix("hf:"), model)
    evaluate = ["vlm", "eval-hierarchy", "--model", f"hf:{model}", "--suite", "world-text", "--limit", "8", "--quiet"]
    assert main([*evaluate, "--out", str(tmp_path / "report")]) == 0
    assert train(f"hf:{model}", chains, tmp_path / "run", "--steps", "2", "--lr", "1e-3", "--no-save-model") == 0
    assert main([*evaluate, "--weights", str(tmp_path / "run")]) == 0  # warnings are errors here
    save_dual(model, "clip", seed=1)
    assert main([*evaluate, "--out", str(tmp_path / "report"), "--resume"]) == 2
    assert "its report is of other weights" in capsys.readouterr().err
    assert train(f"hf:{model}", chains, tmp_path / "run", "--steps", "4", "--lr", "1e-3", "--resume") == 2
    assert "made from an encoder of other weights" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="trained from other weights than those of hf:"):
        assert main([*evaluate, "--weights", str(tmp_path / "run")]) == 0


def test_chains_of_held_out_pictures_are_left_out(clip, chains, tmp_path, capsys):
    other = tmp_path / "test.csv"
    other.write_text("id,captions,image_url\n0,a => b => c => d,v/3.jpg\n1,a => b => c => d,v/5.jpg\n")
    options = ["--model", clip, "--chains", str(chains), "--out", str(tmp_path / "run"), "--steps", "1", "--json"]
    assert main(["vlm", "train-radial", *options, "--held-out", str(other)]) == 0
    text = capsys.readouterr()
    assert json.loads(text.out)["num_chains"] == 10
    assert "2 of 12 chains describe a held-out picture and are left out" in text.err
    # In a folder of HierarCaps the pictures of its test set are held out without asking.
    folder = tmp_path / "hierarcaps"
    folder.mkdir()
    (folder / "hierarcaps_test.csv").write_text(other.read_text())
    (folder / "hierarcaps_test_expanded.csv").write_text(chains.read_text())
    options = ["--model", clip, "--chains", str(folder), "--out", str(tmp_path / "other"), "--steps", "1", "--json"]
    assert main(["vlm", "train-radial", *options]) == 0
    assert json.loads(capsys.readouterr().out)["num_chains"] == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chains", "none.csv"], "cannot read none.csv: no such file"),
        (["--objective", "cone"], "objective must be one of radial, cones"),
        (["--lr", "0"], "lr must be positive"),
        (["--geometry", "flat"], "geometry must be one of"),
        (["--num-chains", "0"], "num_chains must be 1 or more"),
        (["--device", "gpu"], "device 'gpu' cannot be used here"),
        (["--adapter", "scale", "--block-size", "7"], "block_size"),
        (["--resume"], "no such file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(clip, chains, tmp_path, capsys, options, message):
    assert train(clip, chains, tmp_path / "run", "--steps", "1", *options) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1


def test_random_weights_only_when_asked_for(tmp_path, chains, capsys):
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


def test_bad_captions_and_an_existing_run(clip, tmp_path, capsys):
    for rows, message in (
        ("a => b => c => d,a => b =>  => d,u\n", "the caption of level 3 is empty"),
        ("a => b => c => d => e,a => b => c => d,u\n", "a chain has 4 captions"),
    ):
        path = tmp_path / "bad.csv"
        path.write_text(HEADER + rows)
        assert train(clip, path, tmp_path / "run") == 2
        assert message in capsys.readouterr().err
    path.write_text("x,y\n1,2\n")
    assert train(clip, path, tmp_path / "run") == 2
    assert "expected HierarCaps" in capsys.readouterr().err
    path.write_text("captions\na => b => c => d\n")
    assert train(clip, path, tmp_path / "run") == 2
    assert "chain 0 has 0 negatives, expected 4" in capsys.readouterr().err
    path.write_text(HEADER + ROWS[0])
    assert train(clip, path, tmp_path / "run", "--steps", "1") == 0
    assert train(clip, path, tmp_path / "run", "--steps", "1") == 2
    assert "holds a run already; go on with --resume, or replace it with --overwrite" in capsys.readouterr().err
    assert train(clip, path, tmp_path / "run", "--steps", "1", "--overwrite") == 0


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
        ([*world, "--weights", str(tmp_path / "none")], "no such file or folder"),
        ([*world, "--weights", str(empty)], "has that train-radial run ended?"),
        (world, "no model here"),
    ):
        assert main(["vlm", "eval-hierarchy", "--model", f"hf:{empty}", *options]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error and len(error.splitlines()) == 1

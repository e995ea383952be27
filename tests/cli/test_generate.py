"""``hyptree generate``: text from runs and from folders of transformers, the same for the same seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyptree.cli import main
from hyptree.config import load
from hyptree.errors import UserError
from tests.stderr import own

pytest.importorskip("transformers")

RECIPE = (
    "task=language",
    "text.num_documents=30",
    "text.vocab_size=320",
    "text.block_length=32",
    "model.args={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 56, "
    "max_position_embeddings: 48}",
    "data.batch_size=8",
    "optim.lr=0.01",
    "schedule.steps=4",
    "run.device=cpu",
    "run.eval_every=0",
    "run.tensorboard=false",
)


@pytest.fixture(scope="module", params=["helm-d-pico", "twin:helm-d-pico"])
def run(request, tmp_path_factory) -> Path:
    """A run of a model of two layers, hardly trained."""
    from hyptree.train import Recipe, fit

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    name = request.param
    fit(
        load(Recipe, None, [*RECIPE, f"model.name={name}", f"text.cache={folder / 'text'}"]), folder / "run", quiet=True
    )
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    """The same model as a folder of transformers."""
    from hyptree.train.export import export

    path, difference = export(run, "hf", tmp_path_factory.mktemp("hf") / "model")
    assert difference is None
    return path


def generate(capsys, *args: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    code = main(["generate", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_greedy_text_is_the_likeliest_token_by_token(run, capsys):
    from hyptree.train.language import load_language_model

    code, out, _ = generate(capsys, run, "The class", "--greedy", "--max-new-tokens", 12)
    model, tokenizer = load_language_model(run)
    ids = tokenizer("The class", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == tokenizer.bos_token_id
    for _ in range(12):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        if ids[0, -1] == tokenizer.eos_token_id:
            break
    assert code == 0 and out == tokenizer.decode(ids[0], skip_special_tokens=True) + "\n"
    assert out.startswith("The class") and len(out) > len("The class\n")


def test_same_seed_same_text_from_run_and_folder(run, exported, capsys):
    flags = ("A tree", "--max-new-tokens", 15, "--top-k", 40, "--json")
    code, out, _ = generate(capsys, run, *flags, "--num", 3, "--seed", 5)
    actual = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["seed"] for line in actual] == [5, 6, 7]
    assert len({line["text"] for line in actual}) == 3
    code, out, err = generate(capsys, exported, *flags, "--seed", 6)
    assert (code, err) == (0, "")
    assert json.loads(out) == actual[1]


def test_folder_is_one_of_transformers(run, exported):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hyptree.lm  # noqa: F401
    from hyptree.train import load_model

    ours, _ = load_model(run)
    theirs = AutoModelForCausalLM.from_pretrained(exported).eval()
    ids = AutoTokenizer.from_pretrained(exported)("if x is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_a_fresh_process_can_read_the_folder(run, exported):
    """transformers reads config.json beside the tokenizer: what is a helm must be known by then."""
    if json.loads((exported / "config.json").read_text())["model_type"] != "helm":
        return  # the twin is one of transformers' own
    command = [
        sys.executable,
        "-m",
        "hyptree",
        "generate",
        str(exported),
        "The class",
        "--greedy",
        "--max-new-tokens",
        "3",
    ]
    actual = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (actual.returncode, own(actual.stderr)) == (0, "") and actual.stdout.startswith("The class")


def test_text_comes_in_whole_pieces_and_leaves_the_generators_alone(run):
    from hyptree.lm.generate import generate_text
    from hyptree.train.language import load_language_model

    model, tokenizer = load_language_model(run)
    pieces: list[str] = []
    before = torch.random.get_rng_state()
    text = generate_text(model, tokenizer, "for i in", pieces.append, max_new_tokens=30, temperature=5.0, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert "".join(pieces) == text and len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces[:-1]) or "\ufffd" in text
    other = generate_text(model, tokenizer, "for i in", max_new_tokens=30, temperature=5.0, seed=4)
    assert other != text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("",), "the prompt is empty; give the beginning of a text"),
        ((" \n",), "the prompt is empty"),
        (("x", "--max-new-tokens", 47), "2 tokens, 47 new ones would make 49, the model's context is 48; "),
        (("for x in " * 30, "--max-new-tokens", 3), "the model's context is 48; shorten the prompt\n"),
        (("x", "--temperature", 0), "temperature must be positive, got 0"),
        (("x", "--top-p", 1.5), "top_p must be in (0, 1], got 1.5"),
        (("x", "--num", 0), "--num must be at least 1, got 0"),
        (("x", "--device", "tpu7"), "device 'tpu7' cannot be used here"),
    ],
)
def test_a_mistake_is_one_line(run, capsys, flags, message):
    code, out, err = generate(capsys, run, *flags)
    assert (code, out) == (2, "") and err.count("\n") == 1 and message in err


def test_what_is_no_language_model_is_said(run, exported, capsys, tmp_path):
    assert "no such folder" in generate(capsys, tmp_path / "none", "x")[2]
    assert "holds no model, it has none of recipe.yaml" in generate(capsys, tmp_path, "x")[2]
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(exported, bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    code, _, err = generate(capsys, bare, "x")
    assert code == 2 and "holds no tokenizer" in err and err.count("\n") == 1


def test_export_refuses_what_it_cannot_do(run, exported):
    from hyptree.train.export import export

    with pytest.raises(UserError, match="already there and not empty; choose another --out"):
        export(run, "hf", exported)
    with pytest.raises(UserError, match=r"exported as hf .* or safetensors, not onnx|needs onnx"):
        export(run, "onnx")
    with pytest.raises(UserError, match=r"exported as hf .* or safetensors, not torch-export"):
        export(run, "torch-export")


def test_perplexity_of_a_text_is_that_of_the_definition(run, exported, capsys, tmp_path, monkeypatch):
    """Block by block, of a run and of the same model as ``hf:FOLDER``; bytes are those of the predicted tokens."""
    from hyptree.train.language import load_language_model

    monkeypatch.setenv("HYPTREE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("The statement is a compound one, and so is its name. " * 6)
    model, tokenizer = load_language_model(run)
    ids = [tokenizer.bos_token_id, *tokenizer(text.read_text(), add_special_tokens=False).input_ids]
    ids = torch.tensor([*ids, tokenizer.eos_token_id])
    losses, num_bytes = [], 0
    with torch.no_grad():
        for block in ids.split(48):  # the model's context
            logs = model(block[None]).logits[0, :-1].double().log_softmax(-1)
            losses.append(-logs.gather(1, block[1:, None]))
            num_bytes += len(tokenizer.decode(block[1:], skip_special_tokens=True).encode())
    nats = torch.cat(losses).sum().item()
    answers = []
    for name in (str(run), f"hf:{exported}", str(exported)):
        assert main(["eval", name, "--text", str(text), "--device", "cpu", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == pytest.approx(answers[1], rel=1e-6) and answers[1] == answers[2]
    assert (answers[0]["tokens"], answers[0]["bytes"]) == (sum(map(len, losses)), num_bytes)
    assert answers[0]["bits_per_byte"] == pytest.approx(nats / num_bytes / 0.6931471805599453, rel=1e-5)
    assert answers[0]["perplexity"] == pytest.approx(2.718281828459045 ** (nats / answers[0]["tokens"]), rel=1e-5)
    for words, told in (
        ([str(exported)], "not used here; give a run"),
        ([str(run), "--text", "no.txt"], "no such file"),
    ):
        assert main(["eval", *words]) == 2
        assert told in capsys.readouterr().err

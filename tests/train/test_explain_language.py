"""Numbers about a model's tokens equal their definitions, and the page shows them and stands alone."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hyptree.cli import main
from hyptree.errors import UserError
from hyptree.evaluate.text.token_radii import (
    count_tokens,
    curvatures,
    embedding_radii,
    measure_tokens,
    rank_correlation,
    read_depths,
    single_token_nouns,
    space_of,
    stream_radii,
)
from hyptree.explore.draw.charts import dot_chart
from hyptree.explore.pages.language import _dots, curvature_section, language_sections
from hyptree.train.explain import page_of_tokens
from hyptree.train.language import measure_run
from tests.explore.html import read

pytest.importorskip("transformers")

MODELS = {"helm": "helm-mice-pico", "twin": "twin:helm-mice-pico"}
SHAPE = (
    "{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 56, "
    "max_position_embeddings: 48, curvature: 0.5}"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A HELM with experts and its twin, hardly trained."""
    from hyptree.config import load
    from hyptree.train import Recipe, fit

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    for name, preset in MODELS.items():
        settings = [
            "task=language",
            "text.num_documents=40",
            "text.vocab_size=700",
            "text.block_length=32",
            f"text.cache={folder / 'text'}",
            f"model.name={preset}",
            f"model.args={SHAPE}",
            "data.batch_size=8",
            "optim.lr=0.01",
            "schedule.steps=6",
            "run.log_steps=2",
            "run.device=cpu",
            "run.eval_every=0",
            "run.tensorboard=false",
        ]
        fit(load(Recipe, None, settings), folder / name, quiet=True)
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory) -> Path:
    """A small WordNet: two ways lead to dog, an instance, a word that is named by another one."""
    folder = tmp_path_factory.mktemp("wordnet")
    names = {"n1": "entity.n.01", "n2": "thing.n.01", "n3": "object.n.01", "n4": "class.n.01", "n5": "value.n.01"}
    names |= {"n6": "function.n.01", "n7": "name.n.02", "n8": "module.n.01", "n9": "type.n.01", "n10": "list.n.01"}
    edges = [("n2", "n1"), ("n3", "n2"), ("n4", "n3"), ("n5", "n4"), ("n6", "n5"), ("n6", "n2"), ("n7", "n1")]
    edges += [("n8", "n6"), ("n9", "n4")]
    lines = ["wnid\tname\tlemmas\tgloss"] + [f"{i}\t{name}\t-\t-" for i, name in names.items()]
    _write(folder / "noun_synsets.tsv.gz", lines)
    lines = ["child\tparent\tkind"] + [f"{a}\t{b}\th" for a, b in edges] + ["n10\tn1\ti"]
    _write(folder / "noun_hypernyms.tsv.gz", lines)
    return folder


def _write(path: Path, lines: list[str]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


# -------------------------------------------------------------------------------------------------------------- numbers


def test_rank_correlation_is_scipys(seed):
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(seed)
    x = rng.normal(size=200)
    y = x + rng.normal(size=200)
    ties = rng.integers(0, 6, 200)
    for a, b in ((x, y), (x, ties), (ties, np.round(y))):
        actual = rank_correlation(a, b)
        assert actual.r == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
        assert actual.low < actual.r < actual.high and actual.count == 200
    assert rank_correlation(x, -x).r == pytest.approx(-1, abs=1e-12)
    assert math.isnan(rank_correlation(x, np.ones(200)).r) and rank_correlation(x[:1], y[:1]).as_dict()["r"] is None


def test_partial_correlation_takes_away_what_is_known(seed):
    """The definition: correlation of the ranks' residuals after a regression on the ranks of what is known."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(seed)
    common = rng.normal(size=2000)
    x, y = common + rng.normal(size=2000), common + rng.normal(size=2000)
    a, b, g = (stats.rankdata(v) for v in (x, y, common))
    rest = [v - np.polyval(np.polyfit(g, v, 1), g) for v in (a, b)]
    actual = rank_correlation(x, y, common)
    assert actual.r == pytest.approx(np.corrcoef(*rest)[0, 1], abs=1e-9)
    assert abs(actual.r) < 0.12 and rank_correlation(x, y).r > 0.4
    assert math.isnan(rank_correlation(x, y, x).r)


def test_interval_covers_what_is_true(seed):
    rng = np.random.default_rng(seed)
    truth = 6 / math.pi * math.asin(0.6 / 2)  # Spearman's of normal pairs with Pearson's 0.6
    inside = 0
    for _ in range(400):
        x = rng.normal(size=80)
        actual = rank_correlation(x, 0.6 * x + 0.8 * rng.normal(size=80))
        inside += actual.low < truth < actual.high
    assert 0.91 < inside / 400 < 0.985


def load(run: Path):
    from hyptree.train.language import load_language_model

    return load_language_model(run)


def test_radii_are_distances_from_the_origin(runs):
    helm, _ = load(runs["helm"])
    weight = helm.model.embed_tokens.weight.detach().double()
    expected = torch.asinh(math.sqrt(0.5) * weight.norm(dim=-1)) / math.sqrt(0.5)
    assert np.allclose(embedding_radii(helm), expected, atol=1e-12)
    twin, _ = load(runs["twin"])
    assert np.allclose(embedding_radii(twin), twin.model.embed_tokens.weight.detach().double().norm(dim=-1), atol=1e-12)
    assert "Lorentz" in repr(space_of(helm)) and "Euclidean" in repr(space_of(twin))


@pytest.mark.parametrize("name", list(MODELS))
def test_stream_is_the_mean_over_where_a_token_stands(runs, name):
    model, _ = load(runs[name])
    ids = torch.randint(5, 40, (6, 12))
    labels = ids.clone()
    labels[:, 0] = -100
    means, seen = stream_radii(
        model, [{"input_ids": ids[k : k + 2], "labels": labels[k : k + 2]} for k in range(0, 6, 2)]
    )
    assert not model.base_model.layers[0]._forward_hooks  # none is left behind
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states  # of transformers: before each layer
    space = space_of(model)
    radius = space.dist0(states[1].double())[:, 1:]  # after the first layer
    for token in ids[:, 1:].unique().tolist()[:10]:
        at = ids[:, 1:] == token
        assert seen[token] == int(at.sum())
        assert means[0, token] == pytest.approx(radius[at].mean().item(), rel=1e-5)
    assert np.isnan(means[:, 100:]).all() and means.shape == (2, model.config.vocab_size)


def test_depths_are_shortest_ways(wordnet, shared_data):
    actual = read_depths(wordnet)
    assert actual == {
        "entity": 0,
        "thing": 1,
        "object": 2,
        "class": 3,
        "value": 4,
        "function": 2,
        "module": 3,
        "type": 4,
    }
    real = read_depths(shared_data / "wordnet")
    assert (real["entity"], real["animal"], real["mammal"], real["dog"]) == (0, 6, 9, 8)
    with pytest.raises(UserError, match=r"has no noun_synsets\.tsv\.gz; it must be the folder of WordNet"):
        read_depths(wordnet / "none")


def test_nouns_are_whole_words_in_lower_case():
    vocabulary = {"Ġclass": 3, "class": 4, "Ġof": 5, "ĠClass": 6, "▁value": 9, "Ġobject": 1, "Ġzebra": 7, "Ġcl": 8}
    depths = {"class": 3, "value": 4, "object": 2, "of": 1, "cl": 2}
    actual = single_token_nouns(SimpleNamespace(get_vocab=lambda: vocabulary), depths)
    assert actual.words == ["object", "class", "value"]
    assert actual.index.tolist() == [1, 3, 9] and actual.depth.tolist() == [2, 3, 4]


def test_planted_order_is_found(runs, seed):
    """Embeddings whose radius falls with frequency and grows with depth: correlations are what was put in."""
    model, tokenizer = load(runs["helm"])
    rng = np.random.default_rng(seed)
    size = model.config.vocab_size
    counts = rng.permutation(size) + 10
    special = tokenizer.all_special_ids
    vocabulary = tokenizer.get_vocab()
    words = [t[1:] for t in vocabulary if t[0] == "Ġ" and len(t) > 3 and t[1:].isalpha() and t[1:].islower()]
    radius = 3.0 - counts / counts.max()
    with torch.no_grad():
        direction = torch.nn.functional.normalize(torch.randn(size, 32, dtype=torch.float64), dim=-1)
        model.model.embed_tokens.weight.copy_(space_of(model).expmap0(direction * torch.tensor(radius)[:, None]))
    order = sorted(words, key=lambda word: radius[vocabulary["Ġ" + word]])
    depths = {word: k // 4 for k, word in enumerate(order)}
    batch = {"input_ids": torch.randint(3, size, (4, 40))}
    actual = measure_tokens(model, tokenizer, counts, [batch], depths, num_points=60)
    first = actual["radius"][0]
    assert first["frequency"]["r"] == pytest.approx(-1, abs=1e-9) and first["frequency"]["count"] == size - len(special)
    assert first["depth"]["r"] > 0.99 and first["depth"]["count"] == len(words) > 20
    assert [noun["word"] for noun in actual["nouns"]] == order
    assert actual["num_tokens"] == counts.sum() - counts[special].sum()
    assert len(actual["radius"]) == 3 and actual["gromov"]["num_points"] == 60
    # Random directions are what was planted, so nothing was learned beyond them; hyperbolic space is tree-like.
    assert actual["gromov"]["relative"] == pytest.approx(actual["gromov"]["random_relative"], rel=0.25)
    assert actual["gromov"]["delta"] < math.log(1 + math.sqrt(2)) / math.sqrt(0.5)
    json.dumps(actual, allow_nan=False)


def test_counts_and_curvatures(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 9, 1000).astype(np.uint16)
    assert count_tokens(ids, 12).tolist() == [int((ids == k).sum()) for k in range(12)]
    rows = [{"step": 5, "split": "train", "curvature/01.0": 0.1, "load/01.0": 1}, {"step": 9, "split": "val"}]
    rows.append({"step": 10, "split": "train", "curvature/01.0": 0.2})
    assert curvatures(rows) == {"01.0": {"step": [5, 10], "value": [0.1, 0.2]}}


def test_curves_of_curvatures_are_what_was_logged():
    """Nine layers of ten experts: six layers and eight lines in a chart, those that moved most; all in the table."""
    steps, rng = [5, 10, 15], np.random.default_rng(0)
    moved = {f"{i:02}.{j}": (i + 1) * (j + 1) / 100 for i in range(9) for j in range(10)}
    actual = {name: {"step": steps, "value": [1.0, 1 + by / 2, 1 + by]} for name, by in moved.items()}
    keys = list(actual)
    rng.shuffle(keys)  # the order in a log says nothing
    html = curvature_section({key: actual[key] for key in keys})
    assert html == curvature_section(actual)
    labels = [v for tag, k, v in read(html).attributes if tag == "svg" and k == "aria-label"]
    mean = 1 + np.mean(list(moved.values()))
    assert labels[0] == f"All experts: largest K ends at 1.900, mean ends at {mean:.3f}, smallest ends at 1.010"
    assert [label.partition(":")[0] for label in labels[1:]] == [f"Layer {i}" for i in range(3, 9)]
    assert [label.count("ends at") for label in labels[1:]] == [8] * 6
    assert "expert 9 ends at +90.00" in labels[-1] and "expert 1 " not in labels[-1]
    text = " ".join(read(html).text)
    assert "the other 3 are in the table" in text
    assert all(f"layer {i}, expert {j}" in text for i in range(9) for j in range(10)) and "+1.00%" in text
    (only,) = [{"step": [3], "value": [0.5]}]
    assert "the other" not in curvature_section({"01.0": only})


def test_too_little_text(runs):
    model, tokenizer = load(runs["helm"])
    with pytest.raises(UserError, match="0 tokens that occur 5 times or more"):
        measure_tokens(model, tokenizer, np.ones(700, int), [{"input_ids": torch.zeros(1, 4, dtype=torch.long)}])


# ----------------------------------------------------------------------------------------------------------------- page


def test_page_says_what_the_numbers_say(runs, wordnet, tmp_path):
    path = page_of_tokens(runs["helm"], runs["twin"], out=tmp_path / "page.html", wordnet=wordnet, num_blocks=8)
    html = path.read_text(encoding="utf-8")
    reader = read(html)
    text = " ".join(reader.text)
    helm, twin = json.loads((tmp_path / "page.json").read_text(encoding="utf-8"))
    assert (helm["model"], twin["model"]) == tuple(MODELS.values())
    assert len(helm["radius"]) == 3 and helm["num_tokens"] == twin["num_tokens"] > 1000
    assert set(helm["curvatures"]) == {f"01.{k}" for k in range(4)} and not twin["curvatures"]
    assert helm["curvatures"]["01.0"]["step"] == [2, 4, 6]
    for numbers in (helm, twin):
        assert f"{round(numbers['radius'][0]['frequency']['r'], 2) + 0:+.2f}" in text
        assert f"{numbers['gromov']['relative']:.3f}" in text and numbers["nouns"]
    assert {noun["word"] for noun in helm["nouns"]} <= set(read_depths(wordnet))
    assert "Curvature of experts over training" in text and f"{helm['curvatures']['01.3']['value'][-1]:.4f}" in text
    assert html.count("<svg") == 2 * 3 + 2
    assert not re.search(r'(src|href)="(?!data:)', html) and "http" not in html  # needs nothing from elsewhere
    again = page_of_tokens(runs["helm"], runs["twin"], out=tmp_path / "again.html", wordnet=wordnet, num_blocks=8)
    assert again.read_text(encoding="utf-8").replace("again.json", "page.json") == html


def test_page_of_one_run_without_wordnet(runs, monkeypatch, capsys):
    monkeypatch.setenv("HYPTREE_DATA", str(runs["twin"]))
    assert main(["explain", str(runs["twin"]), "--samples", "4"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == runs["twin"] / "tokens.html" and path.with_suffix(".json").is_file()
    text = " ".join(read(path.read_text(encoding="utf-8")).text)
    assert "there is no WordNet here" in text and "Curvature of experts" not in text


def test_mistakes_are_one_line(runs, tmp_path, capsys):
    for arguments, message in (
        ([str(runs["helm"]), "--wordnet", str(tmp_path / "none")], "none: no such folder; leave --wordnet out"),
        ([str(runs["helm"]), "--rival", str(tmp_path / "none")], "no such folder"),
        ([str(runs["helm"]), "--rival", str(tmp_path)], "holds no model"),
        ([str(runs["helm"]), "--size", "32"], "--size is for tables of clusters and pages of pictures"),
        (["test_vit", "--wordnet", str(tmp_path)], "--wordnet is for language models, not for pages of pictures"),
    ):
        assert main(["explain", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_scatter_places_dots_and_medians(seed):
    rng = np.random.default_rng(seed)
    x = np.repeat([1.0, 2.0, 3.0], 20)
    y = x + rng.normal(0, 0.01, 60)
    reader = read(dot_chart("depth", x.tolist(), y.tolist(), "depth"))
    dots = [(float(v), k) for tag, k, v in reader.attributes if tag == "circle" and k == "cy"]
    (line,) = [v for tag, k, v in reader.attributes if tag == "polyline" and k == "points"]
    heights = [float(point.split(",")[1]) for point in line.split()]
    assert len(dots) == 60 and len(heights) == 3 and heights[0] > heights[1] > heights[2]
    assert abs((heights[0] - heights[1]) - (heights[1] - heights[2])) < 3
    assert "No token" in _dots("none", [1.0], [None], "count")
    many = rng.normal(size=5000)
    assert read(dot_chart("many", many, many, "count", bins=12)).attributes.count(("circle", "class", "dot")) <= 1500


def test_sections_can_be_had_alone(runs):
    numbers = measure_run(runs["helm"], num_blocks=2)
    titles = [section.title for section in language_sections(numbers)]
    assert "Radius and frequency" in titles and "Curvature of experts over training" not in titles

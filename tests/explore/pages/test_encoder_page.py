"""The page of an encoder, from Python and by ``hyptree explain``: what is on it, and one line for each mistake."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hyptree import cli
from hyptree.data.hierarchies.hierarcaps import Chain
from hyptree.data.hierarchies.hyperlex import WordPair
from hyptree.errors import UserError
from hyptree.explore.pages import encoder_page as vlm_page
from hyptree.explore.pages import encoder_subject as vlm_subject
from hyptree.explore.pages.encoder_page import EncodedPicture
from tests.explore.html import read
from tests.vlm.small_models import register_open_clip, save_bert, save_dual

pytest.importorskip("transformers")

CHAINS = ("vehicle => red car => a red car on the road", "vehicle => truck => a truck with three wheels at night")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dual(tmp_path_factory.mktemp("clip") / "clip", "clip", seed=3)


def picture(folder: Path, seed: int) -> Path:
    path = folder / "a <picture>.png"
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(path)
    return path


def explain(*args: object) -> int:
    return cli.main(["explain", *map(str, args)])


def rows_by_text(seed: int):  # type: ignore[no-untyped-def]
    """An encoder of 8 numbers per text, the same for the same text; longer texts lie farther out."""

    def encode(texts: list[str]) -> torch.Tensor:
        rows = []
        for text in texts:
            generator = torch.Generator().manual_seed(seed + sum(map(ord, text)))
            rows.append(torch.tensor([4.0] + 7 * [0.0]) + 0.2 * len(text) * torch.randn(8, generator=generator))
        return torch.stack(rows)

    return encode


def test_page_of_a_function(tmp_path: Path, seed: int) -> None:
    chains = [Chain(("a", f"a b{k}", f"a b{k} c<d>"), ("x", f"x{k}", "x y z")) for k in range(12)]
    pairs = [WordPair(f"word{k}", f"w{k % 5}", "NV"[k % 2], "hyp-1", float(k % 11)) for k in range(30)]
    path = vlm_page.write(rows_by_text(seed), tmp_path / "new" / "p.html", chains=chains, pairs=pairs)
    html = path.read_text(encoding="utf-8")
    text = read(html).text
    assert set(re.findall(r"https?://[^\"' <]+", html)) == {"http://www.w3.org/2000/svg"}
    for title in (
        "Captions around the root",
        "Distance by level",
        "Best and worst chains",
        "Is X a type of Y?",
        "All numbers, with their baselines",
    ):
        assert title in text
    assert "From a picture to a chain of captions" not in text and "Random weights." not in text

    from hyptree.vlm.radial.suites import Texts, chain_angles, chain_order, graded_entailment

    texts = Texts(rows_by_text(seed))
    order = chain_order(texts, [chain.captions for chain in chains])
    joined = "".join(text)
    assert f"tau_d {order['tau_d']['tau_a']:.3f} · word count alone 1.000" in joined
    cells = set(text)
    assert f"{order['tau_d']['tau_b']:.3f} ± {order['tau_d']['error']:.3f}" in cells and "baseline: words" in cells
    assert f"{chain_angles(texts, chains)['negative']['cosine_accuracy']:.3f}" in cells
    rho = graded_entailment(texts, pairs)["all"]
    assert f"Angle at Y on the way to X: rho {rho['angle']:.3f}" in cells
    assert f"Baseline: cosine: rho {rho['cosine']:.3f}" in cells
    assert f"{rho['reversed']:.3f}" in cells


def test_best_and_worst_chains(tmp_path: Path) -> None:
    lengths = {"": 0.0, "a": 0.2, "a b": 0.5, "a b c": 0.9, "d": 0.3, "d e": 0.8, "d e f": 0.4}

    def encode(texts: list[str]) -> torch.Tensor:
        return torch.tensor([[np.cos(lengths[t]), np.sin(lengths[t])] for t in texts], dtype=torch.float32)

    chains = [Chain(("a", "a b", "a b c")), Chain(("d", "d e", "d e f"))]
    html = vlm_page.write(encode, tmp_path / "p.html", chains=chains, geometry="geodesic").read_text(encoding="utf-8")
    best, _, worst = html.partition("<h3>Best</h3>")[2].partition("<h3>Worst</h3>")
    worst = worst.partition("</section>")[0]
    assert re.findall(r"<div>([^<]*)</div></li>", best) == ["a", "a b", "a b c"]
    assert re.findall(r"<div>([^<]*)</div></li>", worst) == ["d", "d e", "d e f"]
    assert '<span class="falls">0.400</span>' in worst and "falls" not in best


def test_pictures_find_chains(tmp_path: Path, clip: Path, seed: int) -> None:
    from hyptree.vlm import load_encoder
    from hyptree.vlm.radial.retrieval import hierarchical_retrieval
    from hyptree.vlm.radial.suites import Texts

    encoder = load_encoder(f"hf:{clip}")
    chains = vlm_subject.read_texts(CHAINS)
    shown = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    looked = EncodedPicture(shown, "mine", frozenset(chains[0].captions))
    html = vlm_page.write(encoder, tmp_path / "p.html", chains=chains, pictures=[looked]).read_text(encoding="utf-8")
    part = html.partition("From a picture to a chain")[2].partition("</section>")[0]
    texts = Texts(encoder.encode_text)
    pool = list(dict.fromkeys(caption for chain in chains for caption in chain.captions))
    with torch.no_grad():
        image = encoder.encode_images([shown])
    actual = hierarchical_retrieval(image, texts.raw(pool), pool, texts.root)[0]
    message = re.findall(r"<div>([^<]*)</div></li>", part)
    assert [caption.replace("&nbsp;✓", "") for caption in message] == actual
    assert [caption.endswith("✓") for caption in message] == [caption in looked.true for caption in actual]
    assert f"out of {len(pool)}" in part
    with pytest.raises(UserError, match="reads text alone; leave the pictures out"):
        vlm_page.write(encoder.encode_text, tmp_path / "q.html", chains=chains, pictures=[looked])
    assert not (tmp_path / "q.html").exists()


def test_explain_an_encoder_with_texts_picture_and_head(
    tmp_path: Path, clip: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    for place in ("train/car", "train/truck", "val/car", "val/truck"):
        (tmp_path / "data" / place).mkdir(parents=True)
        Image.new("RGB", (40, 40), (len(place), 90, 10)).save(tmp_path / "data" / place / "1.png")
    train = ["train", "fewshot_world", "--model.name", f"hf:{clip}", "--data.name", "folder", "--data.root"]
    train += [str(tmp_path / "data"), "--fewshot.shots", "1", "--fewshot.num_attributes", "2", "--schedule.steps", "1"]
    train += ["--fewshot.shift", "[]", "--fewshot.cache", str(tmp_path / "cache"), "--run.device", "cpu"]
    assert cli.main([*train, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    mine, out = picture(tmp_path, seed), tmp_path / "p.html"
    assert explain(f"hf:{clip}", mine, "--texts", *CHAINS, "--head", tmp_path / "run", "--out", out) == 0
    assert capsys.readouterr().out.strip() == str(out)
    reader = read(out.read_text(encoding="utf-8"))
    assert ("img", "alt", "a <picture>.png") in reader.attributes
    assert "Classes, attributes, pictures" in reader.text and "a <picture>.png" in reader.text
    assert any("2 classes, 2 learned attributes, 1 pictures" in text for text in reader.text)


def test_explain_an_encoder_of_text_alone_on_files(tmp_path: Path, seed: int) -> None:
    bert = save_bert(tmp_path / "bert", None, seed=seed)
    (tmp_path / "chains.txt").write_text("\n".join([CHAINS[0], "", CHAINS[1]]), encoding="utf-8")
    (tmp_path / "chains.csv").write_text("captions\na => a car => a red car => the red car\n", encoding="utf-8")
    out = tmp_path / "p.html"
    assert explain(f"hf:{bert}", "--texts", tmp_path / "chains.txt", "--geometry", "geodesic", "--out", out) == 0
    text = "".join(read(out.read_text(encoding="utf-8")).text)
    assert "geometry geodesic" in text and "along all 2 chains" in text
    assert [len(chain.captions) for chain in vlm_subject.read_texts([str(tmp_path / "chains.csv")])] == [4]


def test_random_weights_need_the_flag_and_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("open_clip")
    name, out = register_open_clip(tmp_path, "hyptree-test-explain"), tmp_path / "p.html"
    assert explain(f"open_clip:{name}", "--texts", *CHAINS, "--out", out) == 2
    assert "--random-init" in capsys.readouterr().err and not out.exists()
    assert explain(f"open_clip:{name}", "--texts", *CHAINS, "--random-init", "--out", out) == 0
    assert "Random weights." in read(out.read_text(encoding="utf-8")).text


@pytest.mark.parametrize("geometry", ["chord", "lorentz"])
def test_the_built_in_world_needs_no_data(tmp_path: Path, seed: int, geometry: str) -> None:
    from hyptree.data.world import World
    from hyptree.vlm.clip.world_clip import WorldClip, as_encoder, build_clip, preset
    from hyptree.vlm.clip.world_text import world_tokenizer
    from hyptree.vlm.encoders.pixels import PixelFormat

    torch.manual_seed(seed)
    tokenizer = world_tokenizer()
    model = WorldClip(build_clip(preset("clip-world-tiny"), len(tokenizer)), *(["lorentz"] * (geometry == "lorentz")))
    encoder = as_encoder(model, tokenizer, PixelFormat(32))
    encoder.model.eval()
    looked = vlm_subject.world_pictures(2)
    sample = World("val", num_images=2, size=128)[1]
    assert np.array_equal(looked[1].picture, sample.image.permute(1, 2, 0).numpy())
    assert looked[1].true == set(sample.captions) and looked[1].name == sample.captions[2]
    path = vlm_page.write(encoder, tmp_path / "p.html", pictures=looked)
    text = "".join(read(path.read_text(encoding="utf-8")).text)
    assert (
        f"distance from it is true ({geometry})" in text.lower()
        and "of 500 chains" in text
        and "of the true ones are found" in text
    )


def test_a_head_is_trained_where_nothing_is_given_to_look_at(tmp_path: Path, clip: Path) -> None:
    out = tmp_path / "p.html"
    assert explain(f"hf:{clip}", "--out", out) == 0
    text = "".join(read(out.read_text(encoding="utf-8")).text)
    assert "learned (the built-in world) from 4 pictures of each of 30 classes" in text
    assert "30 classes, 11 learned attributes, 40 pictures" in text
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]


def test_a_curvature_that_would_do_nothing_is_refused(tmp_path: Path, seed: int) -> None:
    for geometry, c in (("chord", 2.0), ("lorentz", 0.0), ("lorentz", -1.0)):
        with pytest.raises(UserError, match="a curvature is for geometry lorentz and positive"):
            vlm_page.write(rows_by_text(seed), tmp_path / "p.html", geometry=geometry, curvature=c)
    assert not (tmp_path / "p.html").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["hf:CLIP", "--texts", "nowhere.csv"], "no such file; give one, or a chain"),
        (["hf:CLIP", "--texts", "a => "], "caption 2 is empty"),
        (["hf:CLIP", "--texts", "a => b", "a => b => c"], "same number of captions"),
        (["hf:CLIP", "nowhere.png"], "nowhere.png: no such picture"),
        (["hf:CLIP", "--geometry", "flat", "--texts", "a => b"], "geometry must be one of"),
        (["hf:CLIP", "--table"], "--table is for tables of clusters, not for encoders"),
        (["hf:CLIP", "--pairs", "nowhere"], "nowhere: no such file or folder"),
        (["hf:CLIP/nowhere"], "nowhere: no such folder"),
        (["hcformer_nano", "--texts", "a => b"], "--texts is for encoders"),
        (["hcformer_nano", "--random-init"], "--random-init is for encoders"),
        (["hf:BERT", "--head", "BERT/model.safetensors"], "reads text alone; leave --head out"),
        (["hf:BERT", "--pictures", "3"], "--pictures counts pictures of the built-in world"),
        (["hf:CLIP", "--texts", "a => b", "--pictures", "3"], "--pictures counts pictures of the built-in world"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, tmp_path: Path, clip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bert = save_bert(tmp_path / "bert", None) if "hf:BERT" in args else None
    capsys.readouterr()  # what saving said
    inputs = [arg.replace("CLIP", str(clip)).replace("BERT", str(bert)) for arg in args]
    assert explain(*inputs, "--out", tmp_path / "p.html") == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert not (tmp_path / "p.html").exists()

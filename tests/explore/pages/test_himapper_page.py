"""The page of a Hi-Mapper, and ``hyptree.explain`` on one: what is shown is what the model says; it stands alone."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import hyptree
from hyptree.data.pictures.single import model_input
from hyptree.errors import UserError
from hyptree.explore.draw.nodes import read_nodes
from hyptree.explore.draw.scenes import Answer, Scene
from hyptree.explore.pages import himapper_page
from hyptree.explore.pages.himapper_page import find_himapper, mapper_sections, without_tree
from hyptree.explore.pages.run_pictures import Subject, page_of_pictures
from hyptree.models import HiMapper
from tests.explore.html import Reader, read

pytest.importorskip("matplotlib")


def small(seed: int, **options: Any) -> HiMapper:
    """A transformer of one block over 4 x 4 patches, with a tree of 8, 4 and 2 nodes."""
    torch.manual_seed(seed)
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, embed_dim=24, num_heads=2, num_classes=5
    )
    return HiMapper(vit, **{"num_leaves": 8, "depth": 3, "width": 16, "heads": 2, **options}).eval()


def pictures(seed: int, count: int = 2) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))


def html_of(parts: Any) -> tuple[str, Reader]:
    html = "".join(f"<section>{part.html}</section>" for part in parts)
    return html, read(html)


def test_explain_gives_the_forest_with_maps_and_points(seed: int) -> None:
    model, (picture,) = small(seed), pictures(seed, 1)
    tree = hyptree.explain(model, picture, size=32)
    assert tree.parent.tolist() == [8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, -1, -1]
    with torch.no_grad():
        out = model(model_input(model, [picture]), return_maps=True)
    assert tree.support is not None and tree.support.shape == (14, 4, 4)
    np.testing.assert_allclose(tree.support[8:12], out.maps[1][0].numpy(), atol=1e-6)
    np.testing.assert_allclose(tree.embedding[12:], out.hyperbolic[2][0].numpy(), atol=1e-6)
    assert float(tree.manifold.c) == pytest.approx(float(out.curvature))
    with pytest.raises(UserError, match="cannot be chosen"):
        hyptree.explain(model, picture, size=32, head=1)


def test_looking_leaves_the_model_as_it_was(seed: int) -> None:
    model = small(seed).train()
    x = model_input(model, pictures(seed))
    first, again = model.inspect(x), model.inspect(x)
    assert model.training and not first.logits.requires_grad
    assert torch.equal(first.logits, again.logits) and torch.equal(first.maps[0], again.maps[0])


def test_who_is_a_himapper(seed: int) -> None:
    model = small(seed)
    assert find_himapper(model) is model and find_himapper(torch.nn.Sequential(model)) is model
    assert find_himapper(model.to_plain()) is None and find_himapper("a name") is None
    model.enabled = False
    assert find_himapper(model) is None


def test_every_picture_has_its_three_views(seed: int) -> None:
    model, shown = small(seed), pictures(seed, 3)
    out = model.inspect(model_input(model, shown))
    answer = Answer([("plant", "oak"), ("car",)], [0.7, 0.2], ("plant", "pine"))
    scenes = [Scene(one, f"a <b> {k}", [], answer if k else None) for k, one in enumerate(shown)]
    sections = mapper_sections(scenes, out)
    assert [section.title for section in sections] == ["Where its tree looks", "The tree in numbers"]
    html, reader = html_of(sections)
    tags = [tag for tag, name, _ in reader.attributes if name == "class"]
    assert tags.count("details") == 3 and html.count('<details class="mapped" open>') == 1
    alts = [value for tag, name, value in reader.attributes if (tag, name) == ("img", "alt")]
    for k in range(3):
        assert f"maps of the nodes on a <b> {k}" in alts and f"patches of a <b> {k} by node" in alts
    assert html.count('<svg class="disk"') == 3 and html.count('class="node"') == 3 * 14
    assert html.count('class="edge"') == 3 * 12
    assert html.count("What the picture is called") == 2
    assert "level 3 node 1 › level 2 node 2 › level 1 node 5" in reader.text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)


def test_figures_are_there_for_light_and_for_dark(seed: int) -> None:
    model, shown = small(seed), pictures(seed, 1)
    html, _ = html_of(mapper_sections([Scene(shown[0], "p", [])], model.inspect(model_input(model, shown))))
    actual = re.findall(r'<img class="(sheet[^"]*)" alt="([^"]*)" src="data:image/\w+;base64,([^"]*)"', html)
    assert [kind for kind, *_ in actual] == 2 * ["sheet", "sheet dark"]
    assert actual[0][1] == actual[1][1] and actual[2][1] == actual[3][1]
    css = (Path(himapper_page.__file__).parent / "page.css").read_text(encoding="utf-8")
    surface = re.findall(r"--surface: #(\w{6})", css)[:2]  # of light, of dark
    for k, (_, _, data) in enumerate(actual):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), int)
        ground = list(bytes.fromhex(surface[k % 2]))
        assert np.abs(pixels[:4, :4] - ground).max() <= 2  # JPEG
        caption = pixels[-40:].mean(2)  # nothing but text, which stands out from its ground
        assert np.abs(caption - np.mean(ground)).max() > 80


def test_numbers_are_the_means_of_the_pictures(seed: int) -> None:
    model, shown = small(seed), pictures(seed, 3)
    out = model.inspect(model_input(model, shown))
    _, reader = html_of(mapper_sections([Scene(one, "p", []) for one in shown], out)[1:])
    for k in range(3):
        numbers = [read_nodes(out, b).level_maps()[k] for b in range(3)]
        assert f"{np.mean([one.entropy for one in numbers]):.3f}" in reader.text
        assert f"{np.mean([one.from_even for one in numbers]):.2f}" in reader.text
        assert f"{np.mean([one.num_winners for one in numbers]):.1f}" in reader.text
    assert f"{float(out.stats['image_dependence']):.2f}" in reader.text
    assert f"{float(out.stats['distance_ratio']):.2f}" in reader.text


def test_even_maps_are_warned_of_on_the_page(seed: int) -> None:
    model, shown = small(seed), pictures(seed, 1)
    out = model.inspect(model_input(model, shown))
    scenes = [Scene(shown[0], "p", [])]
    for level in out.maps:
        level.fill_(1 / 16)
    text = "".join(html_of(mapper_sections(scenes, out))[1].text)
    assert "the maps of level 1, 2, 3 are close to uniform" in text
    for level in out.maps:
        level.zero_()[..., 0, 0] = 1
    assert "close to uniform" not in "".join(html_of(mapper_sections(scenes, out))[1].text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "angles are a projection: the two main axes of 16"),
        ({"hyp_dim": 2}, "The space has two dimensions: the picture is exact"),
        ({"geometry": "euclidean"}, "Flat space, seen along its main axes"),
    ],
)
def test_captions_say_what_is_true_and_claim_no_parts(seed: int, options: dict[str, Any], words: str) -> None:
    model, shown = small(seed, **options), pictures(seed, 1)
    out = model.inspect(model_input(model, shown))
    html, reader = html_of(mapper_sections([Scene(shown[0], "p", [])], out))
    text = "".join(reader.text)
    assert words in text and ('class="rim"' in html) == ("geometry" not in options)
    assert "Nothing in the method makes a map an object or a part of one" in text
    assert not re.search(r"discover|finds? (the )?(parts|objects)|segment", text, re.IGNORECASE)


def test_log_becomes_curves_and_leaves_the_accuracies_alone(seed: int) -> None:
    model, shown = small(seed), pictures(seed, 1)
    out = model.inspect(model_input(model, shown))
    log = [{"step": s, "split": "train", "loss": 1.0, "kl": 0.1 * s, "image_dependence": 0.2} for s in range(1, 4)]
    sections = mapper_sections([Scene(shown[0], "p", [])], out, log)
    assert sections[-1].title == "How its tree came about"
    assert "KL of the top level: training ends at 0.3" in sections[-1].html
    assert without_tree(log) == [{"step": s, "split": "train", "loss": 1.0} for s in range(1, 4)]


def test_page_of_pictures_of_ones_own(seed: int, tmp_path: Path) -> None:
    model = small(seed)
    subject = Subject(model, "Hi-Mapper on vit", 32, classes=("a", "b", "c", "d", "e"))
    html = page_of_pictures(subject, pictures(seed), tmp_path / "p.html").read_text(encoding="utf-8")
    reader = read(html)
    assert "Where its tree looks" in reader.text and "What it clustered" not in reader.text
    assert 'id="explorer"' not in html and "What the picture is called" in reader.text
    assert any("How Hi-Mapper on vit read 2 pictures." in text for text in reader.text)
    loads = [value or "" for _, name, value in reader.attributes if name in ("src", "href")]
    assert loads and all(value.startswith("data:image/") for value in loads)
    with pytest.raises(UserError, match="vit cannot be explained"):
        page_of_pictures(Subject(model.to_plain(), "vit", 32), pictures(seed), tmp_path / "q.html")

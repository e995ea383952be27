"""The radial picture and the charts beside it: true radii, projected angles, lines, names, counts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hyptree.errors import UserError
from hyptree.explore.draw import charts
from hyptree.explore.draw.radial import HEIGHT, REACH, WIDTH, X, Y, axis_of, radial_picture, scale_of, svg_radial
from hyptree.explore.draw.style import level_colours
from hyptree.vlm.radial.order import order_of_levels
from hyptree.vlm.radial.suites import Texts
from tests.explore.html import read

Places = dict[str, tuple[float, float]]


def on_sphere(places: Places) -> Callable[[list[str]], Tensor]:
    """An encoder that puts captions at an arc from the root (the north pole) and an azimuth; lengths are not 1."""

    def encode(texts: list[str]) -> Tensor:
        rows = []
        for text in texts:
            arc, around = places.get(text, (0.0, 0.0))
            rows.append([math.sin(arc) * math.cos(around), math.sin(arc) * math.sin(around), math.cos(arc)])
        return 3 * torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)

    return encode


def three_chains(seed: int) -> tuple[Places, list[list[str]]]:
    """Chains in three directions that add up to nothing, the last of which falls at its end."""
    rng = np.random.default_rng(seed)
    arcs = np.sort(rng.uniform(0.2, 1.4, (3, 3)), 1)
    arcs[2, 1:] = arcs[2, :0:-1]
    turn = rng.uniform(0, 2 * math.pi)
    chains = [[f"{name}", f"{name} two", f"{name} two three"] for name in "abc"]
    places = {
        chains[k][level]: (float(arcs[k, level]), turn + 2 * math.pi * k / 3) for k in range(3) for level in range(3)
    }
    return places, chains


def apart(angle: np.ndarray) -> np.ndarray:
    return np.abs(np.angle(np.exp(1j * (angle[:, None] - angle[None, :]))))


@pytest.mark.parametrize("geometry", ["chord", "geodesic"])
def test_radii_are_distances_and_angles_are_directions(seed: int, geometry: str) -> None:
    places, chains = three_chains(seed)
    picture = radial_picture(Texts(on_sphere(places), geometry), chains)
    assert sorted(picture.captions) == sorted(places)
    arcs = np.array([places[caption][0] for caption in picture.captions])
    around = np.array([places[caption][1] for caption in picture.captions])
    np.testing.assert_allclose(picture.radius, arcs if geometry == "geodesic" else 2 * np.sin(arcs / 2), atol=2e-6)
    np.testing.assert_allclose(apart(picture.angle), apart(around), atol=1e-5)  # two dimensions: nothing is lost
    assert picture.kept == pytest.approx(1.0, abs=1e-6)
    assert picture.agreement > 0.8  # ties of three directions are broken by rounding, in the true angles as well


def test_radius_on_the_hyperboloid_is_the_length_of_what_is_lifted(seed: int) -> None:
    torch.manual_seed(seed)
    rows = {text: torch.randn(5) for text in ("", "a", "a b", "a c")}
    texts = Texts(lambda asked: torch.stack([rows[text] for text in asked]), "lorentz", 0.7)
    picture = radial_picture(texts, [["a", "a b"], ["a", "a c"]])
    lengths = [float(rows[caption].norm()) for caption in picture.captions]
    np.testing.assert_allclose(picture.radius, lengths, rtol=1e-5)
    assert 0 < picture.kept <= 1 + 1e-9


def test_lines_go_from_general_to_specific_and_count_what_falls(seed: int) -> None:
    places, chains = three_chains(seed)
    picture = radial_picture(Texts(on_sphere(places)), [*chains, chains[0]])
    message = {(picture.captions[a], picture.captions[b]) for a, b in picture.lines.tolist()}
    assert message == {(chain[k], chain[k + 1]) for chain in chains for k in range(2)}
    assert picture.level.tolist() == [len(caption.split()) - 1 for caption in picture.captions]
    assert (picture.num_inward, picture.num_chains, picture.num_shown) == (1, 4, 3)
    assert picture.tau == pytest.approx((3 * 1 + 1 / 3) / 4) and picture.tau_words == 1.0
    assert picture.title == f"tau_d {10 / 12:.3f} · word count alone 1.000"
    assert "1 of 6 lead inwards" in picture.caption and "3 of 4 chains" in picture.caption


def test_svg_shows_every_caption_where_it_is(seed: int) -> None:
    places, chains = three_chains(seed)
    picture = radial_picture(Texts(on_sphere(places), "geodesic"), chains)
    svg = svg_radial(picture)
    dots = re.findall(r'<circle class="caption" cx="([\d.]+)" cy="([\d.]+)".*?<title>(.*?) \(', svg)
    assert len(dots) == 9
    far = max(arc for arc, _ in places.values())
    start, hole = axis_of(picture)[0], scale_of(picture)[0]
    for x, y, caption in dots:
        away = math.hypot(float(x) - X, float(y) - Y)
        expected = hole + (places[caption][0] - start) / (far - start) * (REACH - hole)
        assert away == pytest.approx(expected, abs=0.2)
    assert svg.count('stroke="#d1242f"') == picture.num_inward == 1
    assert {f"level {k}" for k in (1, 2, 3)} <= {text[:7] for text in read(svg).text}


def test_colours_of_a_white_page_can_be_changed_by_a_dark_one(seed: int) -> None:
    from hyptree.explore.pages.encoder_page import STYLE

    places, chains = three_chains(seed)
    svg = svg_radial(radial_picture(Texts(on_sphere(places), "geodesic"), chains))
    levels = set(level_colours(3))
    for tag in re.findall(r"<(?:g|circle|text|rect) [^>]*>", svg):
        painted = set(re.findall(r'(?:fill|stroke)="([^"]*)"', tag)) - levels - {"none"}
        kind = re.search(r'class="([^"]*)"', tag)
        if painted:
            assert kind and all(re.search(rf"\.{name}\b", STYLE + ".rim") for name in kind[1].split()), tag


def test_names_stay_inside_and_apart(seed: int) -> None:
    rng = np.random.default_rng(seed)
    places = {
        f"caption {i}{' more' * (i % 3)}": (float(rng.uniform(0.2, 1)), float(rng.uniform(0, 6))) for i in range(80)
    }
    names = list(places)
    picture = radial_picture(Texts(on_sphere(places)), [[names[i], names[i + 1]] for i in range(0, 80, 2)])
    names_of = svg_radial(picture).partition('<g class="names"')[2].partition("</g>")[0]
    labels = re.findall(
        r'<text x="(.*?)" y="(.*?)" dy=".34em" text-anchor="(.*?)" font-size="(.*?)".*?>(.*?)<', names_of
    )
    assert len(labels) > 8
    boxes = []
    for x, line, anchor, letters, text in labels:
        size, y, wide = float(letters), float(line), 0.5 * float(letters) * len(text)
        left = float(x) - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * wide
        boxes.append((left, y - size / 2, left + wide, y + size / 2))
        assert left > 0 and left + wide < WIDTH and 0 < y < HEIGHT
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3])


def test_only_as_many_chains_as_can_be_read(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chains = [["root word", f"b {i}", f"c {i} d", f"e {i} f g"] for i in range(60)]
    places = {text: (float(rng.uniform(0.1, 1)), float(rng.uniform(0, 6))) for chain in chains for text in chain}
    texts = Texts(on_sphere(places))
    picture = radial_picture(texts, chains)
    assert len(picture.captions) == 1 + 3 * 29 and picture.num_shown == 29  # 88 captions; one more chain makes 91
    every = texts.distance([text for chain in chains for text in chain]).view(60, 4).double().numpy()
    assert picture.num_chains == 60 and picture.tau == order_of_levels(every).tau_a


def test_what_is_not_a_set_of_chains_is_told() -> None:
    texts = Texts(on_sphere({}))
    for chains in ([], [["a"]], [["a", "b"], ["a", "b", "c"]]):
        with pytest.raises(UserError, match="same number of captions"):
            radial_picture(texts, chains)


def test_captions_at_the_root_and_markup_do_no_harm() -> None:
    places = {"<b>": (0.0, 0.0), "<b> & more": (0.5, 1.0)}
    picture = radial_picture(Texts(on_sphere(places)), [["<b>", "<b> & more"]])
    assert math.isnan(picture.agreement) and np.isfinite(picture.angle).all()
    svg = svg_radial(picture)
    assert "<b>" not in svg and "&lt;b&gt; &amp; more" in svg
    assert "rho" not in picture.caption


def test_a_colour_for_each_level() -> None:
    for count in (1, 2, 4, 7):
        colours = level_colours(count)
        assert len(set(colours)) == count and all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
    assert level_colours(4)[0] == "#3157c9"


def test_charts_hold_the_numbers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    distance = rng.uniform(0.5, 1.5, (40, 3)) + np.arange(3)
    svg = charts.level_chart(distance, [1.0, 2.5, 7.0])
    read(svg)
    for k in range(3):
        assert f"level {k + 1}: mean {distance[:, k].mean():.3f}" in svg
    assert "3 (7.0)" in svg
    tau = np.array([1.0, 1.0, 1 / 3, -1.0, np.nan])
    svg = charts.tau_chart(tau, np.ones(5))
    read(svg)
    assert "distance: 2 chains with tau 1.00" in svg and "distance: 1 chains with tau -1.00" in svg
    assert "word count: 5 chains with tau 1.00" in svg
    svg = charts.dot_chart("dots", rng.normal(size=3000), rng.normal(size=3000), "x", bins=12)
    read(svg)
    assert svg.count('class="dot"') == 1500  # every second: more than 1500 cannot be seen

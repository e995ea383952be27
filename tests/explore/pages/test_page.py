"""The page every other page is made with: one file, whole or not there, for light and for dark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hyptree import files
from hyptree.errors import UserError
from hyptree.explore.draw import reduced_pictures
from hyptree.explore.pages import encoder_page, himapper_page, language
from hyptree.explore.pages.page import STYLE, Section, page, table


def test_a_page_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = page(tmp_path / "deep" / "index.html", "A < B", "first & only", [Section("x > y", "<p>as it is</p>")])
    first = path.read_text(encoding="utf-8")
    assert "<h1>A &lt; B</h1>" in first and "first &amp; only" in first and "<h2>x &gt; y</h2><p>as it is</p>" in first

    def full(temporary: Path, text: str) -> None:
        temporary.write_text(text[: len(text) // 2], encoding="utf-8")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_text", full)
    with pytest.raises(UserError, match=r"disk of .* is full.*write the page again"):
        page(path, "second", "", [])
    assert path.read_text(encoding="utf-8") == first
    assert [file.name for file in path.parent.iterdir()] == ["index.html"]


def test_the_style_has_every_colour_in_light_and_in_dark() -> None:
    light, by_scheme, by_button = re.findall(r":root[^{]*{([^}]*)}", STYLE)
    assert by_scheme.split() == by_button.split()
    names = set(re.findall(r"(--[a-z0-9]+):", light))
    assert names and names == set(re.findall(r"(--[a-z0-9]+):", by_button))
    own = {"--tone", "--p", "--dot"}  # set where they are used
    for css in (STYLE, encoder_page.STYLE, himapper_page.STYLE, language._STYLE):
        assert set(re.findall(r"var\((--[a-z0-9]+)[,)]", css)) <= names | own


@pytest.mark.parametrize(
    "css", [STYLE, encoder_page.STYLE, himapper_page.STYLE, language._STYLE, reduced_pictures.STYLE]
)
def test_no_ground_stays_light_in_the_dark(css: str) -> None:
    on_screen = re.sub(r"@media print {.*", "", re.sub(r":root[^{]*{[^}]*}", "", css))
    grounds = re.findall(r"(?<![\w-])(?:background(?:-color)?|fill):([^;}]*)", on_screen)
    assert [ground for ground in grounds if re.search(r"#|\brgb|\bhsl|white", ground)] == []


def test_tables_scroll_by_themselves_and_escape() -> None:
    html = table(["a", "b"], [["<1>", "2"]], {0: "best"})
    assert html.startswith('<div class="wide">') and "&lt;1&gt;" in html and '<tr class="best">' in html

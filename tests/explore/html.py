"""A reader of pages for the tests: every tag must be closed in order."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Reader(HTMLParser):
    """Keeps attributes and text; fails where a tag is not closed in order."""

    void = frozenset({"meta", "img", "br", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open
    return reader


def explorer_data(html: str) -> dict[str, Any]:
    """What the page hands to its explorer."""
    _, _, rest = html.partition('<script type="application/json" id="explorer-data">')
    actual: dict[str, Any] = json.loads(rest.partition("</script>")[0])
    return actual

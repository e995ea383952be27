"""The public surface of hyptree.vlm: every name it lists is there, and nothing is imported before it is asked for."""

from __future__ import annotations

import pytest

import hyptree.vlm


@pytest.mark.parametrize("name", hyptree.vlm.__all__)
def test_every_name_is_there(name: str):
    assert getattr(hyptree.vlm, name).__name__ == name and name in dir(hyptree.vlm)


def test_nothing_is_imported_early(run_python):
    code = "import sys, hyptree.vlm; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert run_python(code) == "False False\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'atach'"):
        _ = hyptree.vlm.atach

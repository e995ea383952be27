"""Where the tests of kernels run."""

from __future__ import annotations

import pytest

from hyptree.ops import backend


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A GPU, or the CPU by Triton's interpreter."""
    if request.param == "cpu" and not backend.interpreted():
        pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
    return str(request.param)

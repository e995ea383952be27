"""What every test shares: one thread, a seed of its own, hypothesis profiles, real data when it is there."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests import interpreter

# Before torch is imported by a test module: two test processes on two cores must not start pools of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# The message of a user's mistake must not depend on who runs the tests; HYPTREE_DEBUG also switches NaN checks on.
os.environ.pop("HYPTREE_DEBUG", None)

# Without a GPU, Triton's interpreter runs the kernels' own code; Triton reads this when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[1]

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # machines that only run the GPU tests
    pass
else:
    # `ci` draws the same examples each time, so that a failure belongs to the change that caused it;
    # HYPOTHESIS_PROFILE=explore draws new and many ones, to go looking for trouble.
    settings.register_profile(
        "ci", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile(
        "explore", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips GPU tests that were asked for (``-m gpu``) on a machine without enough GPUs."""
    needed = {"gpu": 1, "multigpu": 2}
    gpu_items = [(item, needed[name]) for item in items for name in needed if item.get_closest_marker(name)]
    if not gpu_items:
        return
    torch = sys.modules.get("torch")
    num_gpus = torch.cuda.device_count() if torch is not None else 0
    for item, num_needed in gpu_items:
        if num_gpus < num_needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {num_needed} CUDA devices, found {num_gpus}"))


def pytest_collection_finish() -> None:
    """What imports left is not looked at again by the collections of garbage that benchmarks and tests ask for."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """An interpreter that ends wants to look at everything."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """A seed made from the test's own name: stable from run to run, different from test to test.

    HYPTREE_TEST_SEED=n shifts all of them, to see whether a test passes by luck.
    """
    value = zlib.crc32(request.node.nodeid.encode()) ^ int(os.environ.get("HYPTREE_TEST_SEED", "0"))
    random.seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
        torch.manual_seed(value)
        dtype = torch.get_default_dtype()
        yield value
        torch.set_default_dtype(dtype)  # a test that changes it must not change its neighbours
    else:
        yield value


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Kernels that are interpreted are slow; what can be spared is."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.stop_repeating()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data: HYPTREE_DATA, or shared/data beside the checkout. Skips where there is none."""
    path = Path(os.environ.get("HYPTREE_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no real data at {path}; set HYPTREE_DATA")
    return path


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """``run_python(code, NAME=value)``: what a fresh interpreter prints, which must not fail; with more environment."""

    def run(code: str, **environment: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """``with no_waiting():`` is an error where the host waits for the GPU."""
    import torch

    @contextmanager
    def watch() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watch

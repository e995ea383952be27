"""Several runs at once, each in a process of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

from hyptree.errors import UserError


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of fresh processes: forked ones could not use the GPU. What is not begun when one fails never is."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            raise UserError(
                f"one of {jobs} processes was killed, most likely for want of memory; the same command with fewer "
                f"--jobs goes on with what is finished"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def end_with_parent() -> None:
    """Watch the process that started this one, and end when it is gone: a killed table leaves nothing running.

    What was trained is in the run's checkpoint, from which the next call goes on.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

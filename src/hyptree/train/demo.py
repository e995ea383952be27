"""``hyptree demo``: train an HCFormer on the built-in world, measure it, and write a page on what it clustered."""

from __future__ import annotations

import json
import time
from pathlib import Path

from hyptree.errors import require
from hyptree.files import write_text

LEAD = (
    "A small vision model, trained a moment ago on pictures that this machine drew. It works by clustering: here is "
    "every cluster it made of pictures it had not seen, the tree they form, and where they lie in hyperbolic space."
)


def run(out: Path, seed: int = 0, recipe: Path | None = None, device: str = "auto", threads: int | None = None) -> None:
    """Trains, measures, explains; prints the numbers and ends with the path of ``index.html``.

    Args:
        out: folder of the run, made when absent; an earlier demo in it is replaced.
        seed: of the weights, the order of the pictures and the pictures themselves.
        recipe: another recipe than the demo's own.
        device, threads: of the run.
    """
    from hyptree.config import load
    from hyptree.devices import cpu_threads
    from hyptree.explore.pages.run_pictures import clock, page_of_run
    from hyptree.train import Recipe, fit
    from hyptree.train.explain import subject_of_run

    began = time.perf_counter()
    out = Path(out)
    settings = load(Recipe, recipe or "recipes/demo.yaml")
    settings.run.seed = settings.data.seed = seed
    settings.run.device, settings.run.threads = device, threads
    if settings.data.cache is None:
        settings.data.cache = True  # drawn once: for training, for the page, for the next demo
    if settings.model.plugin is not None:
        require("matplotlib", "plot")  # its page is drawn with it
    if settings.data.name == "world":
        print("drawing the pictures of the built-in world (kept for the next time) ...", flush=True)
    fit(settings, out, overwrite=True)
    trained = time.perf_counter()
    print("looking into the model ...", flush=True)
    footer = (
        f"Written by hyptree demo --seed {seed}. Recipe, metrics and weights lie beside this page; "
        f"hyptree explain {out} writes it again."
    )
    with cpu_threads():
        path, numbers = page_of_run(
            subject_of_run(out), out, out / "index.html", title="What an HCFormer sees", lead=LEAD, footer=footer
        )
    done = time.perf_counter()
    numbers |= {"training seconds": round(trained - began, 1), "page seconds": round(done - trained, 1)}
    write_text(out / "numbers.json", json.dumps(numbers, indent=1) + "\n")
    print()
    for name, value in numbers.items():
        if name.endswith("accuracy"):
            print(f"{name:<16} {value:6.1%}")
    print(f"{'time':<16} {clock(done - began)}  (training {clock(trained - began)}, page {clock(done - trained)})")
    print(f"\nOpen this page:\n{path}", flush=True)

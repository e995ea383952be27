"""Train a small HCFormer on the built-in world from Python, then measure and use the model that was kept."""

import tempfile
from pathlib import Path

import torch

from hyptree.data import DataSettings, World
from hyptree.train import Recipe, evaluate_run, fit, load_model
from hyptree.train.run.recipe import OptimSettings, RunSettings, ScheduleSettings

# The fields of a recipe are those of the YAML files in recipes/. These are toy settings: 12 steps teach it little.
recipe = Recipe(
    data=DataSettings(name="world", size=32, num_train=128, num_val=64, batch_size=32),
    optim=OptimSettings(lr=2e-3),
    schedule=ScheduleSettings(epochs=3, warmup=1),
    run=RunSettings(device="cpu", ema=0.9, log_steps=4, tensorboard=False),
)

with tempfile.TemporaryDirectory() as folder:
    run = Path(folder) / "run"
    result = fit(recipe, run, quiet=True)
    print(f"{result.step} steps, best top1 {result.best:.2f} at step {result.best_step}; in the folder:")
    print(*sorted(path.name for path in run.iterdir()), sep=", ")

    # A finished run has nothing left to do; an interrupted one would go on from its newest whole checkpoint.
    again = fit(recipe, run, resume=True, quiet=True)
    assert (again.step, again.best) == (result.step, result.best)

    numbers = evaluate_run(run)
    assert numbers["top1"] == result.best  # the best weights, kept on disk, give the number they were chosen by

    model, _ = load_model(run)
    picture = World("test", num_images=1, size=32)[0]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (recipe.data.mean, recipe.data.std))
    with torch.no_grad():
        logits = model(((picture.image / 255 - mean) / std)[None])
    print(f"a {World.classes[picture.label]} looks to it like: {World.classes[int(logits.argmax())]}")

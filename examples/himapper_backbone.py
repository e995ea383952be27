"""A tree of queries on a backbone: the same logits at the start, two losses to train with, a Tree of each picture."""

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import timm
import torch
import torch.nn.functional as F

from hyptree import explain
from hyptree.data import World
from hyptree.explore.draw.himapper import plot_poincare, plot_tree_maps
from hyptree.models import HiMapper

torch.manual_seed(0)

# Any timm model or vision model of transformers; a small one with fresh weights here, pretrained=True in earnest.
backbone = timm.create_model("resnet18", channels=(8, 16, 32, 64), output_stride=8, num_classes=30)
model = HiMapper(backbone, num_leaves=8, depth=3, width=32, heads=2)
world = World("train", num_images=16, size=64)
x, labels = (world.images() / 255 - 0.45) / 0.225, world.labels()

# What is added starts at zero: a wrapped model answers as its backbone does, until it is trained.
model.eval()
with torch.no_grad():
    assert torch.allclose(model(x).logits, backbone(x), atol=1e-5)

# Training: two more losses beside the task's own, already weighted in aux_total.
model.train()
optimiser = torch.optim.AdamW(model.param_groups(lr=1e-3, plugin_lr=3e-3, weight_decay=0.05))
for step in range(5):
    out = model(x)
    loss = F.cross_entropy(out.logits, labels) + out.losses["aux_total"]
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    answer = ", ".join(f"{name} {float(out.stats[name]):.2f}" for name in ("distance_ratio", "image_dependence"))
    print(f"step {step}: loss {loss.item():.2f}, contrastive {out.losses['contrastive'].item():.2f}, {answer}")

# In evaluation the tree uses its means: two looks at a picture are the same to the last bit.
model.eval()
with torch.no_grad():
    out = model(x, return_maps=True)
    assert torch.equal(out.logits, model(x, return_maps=True).logits)
print("maps by level, leaves first:", [tuple(level.shape) for level in out.maps])
assert all(torch.allclose(level.sum((-2, -1)), torch.ones(())) for level in out.maps)

# The tree of one picture: points of hyperbolic space, and where each query looked (which is no part of an object).
tree = explain(model, world[0].image, size=64)
print(tree)
assert tree.support.shape == (14, 8, 8)

# Pictures, where matplotlib is installed (pip install hyptree[plot]).
with TemporaryDirectory() as folder, warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # after five steps maps may be close to uniform; the picture says so
    plot_tree_maps(world[0].image, out, b=0).savefig(Path(folder) / "maps.png")
    plot_poincare(out, b=0).savefig(Path(folder) / "disk.png")
    print("drawn:", ", ".join(sorted(path.name for path in Path(folder).iterdir())))

# Back to the backbone alone.
assert model.to_plain() is backbone

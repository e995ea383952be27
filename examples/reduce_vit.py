"""A vision transformer with fewer tokens: patch it, see what was merged, what it saves, and take the patch away."""

import timm
import torch

from hyptree import tokens
from hyptree.data import World
from hyptree.train.reduction.reduce import vit_flops

torch.manual_seed(0)

# Fresh weights, to show how it works; a run's model (hyptree.train.load_model) or pretrained=True are patched alike.
model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, depth=6, num_classes=30).eval()
world = World("val", num_images=4, size=64)
images = torch.stack([world[k].image for k in range(4)])
x = (images / 255 - 0.45) / 0.225

with torch.no_grad():
    plain = model(x)
    handle = tokens.patch(model, method="atc", linkage="average", keep=0.5, layers=(1, 3, 4), trace=True)
    reduced = model(x)
print(f"64 patches, then {handle.num_tokens} tokens after blocks {handle.layers}")
assert handle.num_tokens == [32, 16, 8]

# Every token stands for some patches, and every patch is in one token.
assert all((size.sum(1) == 64).all() for size in handle.sizes)
source = handle.sources[-1]  # (4, 64): token of every patch after the last layer
assert all(len(row.unique()) == 8 for row in source)

# Switches act at once; one of keep, r, threshold and counts is active.
costs = {}
for keep in (1.0, 0.7, 0.5, 0.25):
    handle.keep = keep
    costs[keep] = vit_flops(handle.adapter, x[:1]) / 1e9
print("GFLOPs by keep:", ", ".join(f"{keep:g}: {cost:.3f}" for keep, cost in costs.items()))
assert sorted(costs.values(), reverse=True) == list(costs.values())

handle.keep = 0.5
with torch.no_grad():
    assert torch.equal(model(x), reduced)

# What was merged, as a hierarchy and as a picture.
tree = handle.dendrogram(3).tree(0)
print(f"block 3 merged {tree.num_leaves} tokens of the first picture; the tree of all its merges is {tree}")
picture = tokens.draw(images[0].permute(1, 2, 0).numpy(), source[0], (8, 8), side=256)
print(f"a drawing of the clusters, {picture.width} x {picture.height}: picture.save('clusters.png') keeps it")

# The model is what it was, bit for bit.
handle.unpatch()
with torch.no_grad():
    assert torch.equal(model(x), plain)

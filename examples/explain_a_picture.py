"""Ask an HCFormer what it clustered in a picture: a Tree with supports, and numbers against the true masks."""

import numpy as np
import timm
import torch

import hyptree.models  # noqa: F401  (registers the hcformer names with timm)
from hyptree import explain
from hyptree.data import World
from hyptree.evaluate.pictures.superpixels import superpixel_scores

torch.manual_seed(0)

# Fresh weights, to show the structure; of a trained run take what hyptree.train.load_model(run) gives.
model = timm.create_model("hcformer_pico", num_classes=30).eval()
sample = World("val", num_images=1, size=64)[0]

tree = explain(model, sample.image, size=64)
print(tree)
print(f"{int((tree.depth == 1).sum())} groups of windows, {tree.num_leaves} clusters of patches")

# Leaves are the model's soft assignments: at every pixel they add up to one, and a parent is the sum of its children.
assert np.allclose(tree.support[tree.is_leaf].sum(0), 1, atol=1e-5)
for node in np.flatnonzero(tree.depth == 1):
    assert np.allclose(tree.support[node], tree.support[tree.children(node)].sum(0), atol=1e-5)

# Did it find the objects? For each true mask the best overlap with any node.
agreement = tree.mask_agreement(sample.masks)
for label, iou, node in zip(sample.box_labels, agreement.iou, agreement.node, strict=True):
    print(f"{World.box_classes[int(label) - 1]}: best IoU {iou:.2f}, with {tree.label[node]!r}")
    assert 0 < iou <= 1

# Clusters by where their support is highest, as superpixels: how much of the true map they could give.
scores = superpixel_scores(np.flatnonzero(tree.is_leaf)[tree.support[tree.is_leaf].argmax(0)], sample.semantic)
print(f"achievable segmentation accuracy {scores.asa:.2f} with {scores.num_clusters:.0f} clusters")
print(f"hyperbolic distances against path lengths: average distortion {tree.distortion(scale='best').average:.2f}")

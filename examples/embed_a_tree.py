"""Learn the distances of a small tree in the hyperbolic plane, and measure how well it went."""

import numpy as np
import torch

from hyptree.geometry import Lorentz, mark_manifold, poincare
from hyptree.optim import RiemannianAdam
from hyptree.tree import Tree

torch.manual_seed(0)

# A binary tree of 31 nodes: the parent of node i is (i - 1) // 2.
tree = Tree([-1] + [(i - 1) // 2 for i in range(1, 31)])
node = np.arange(len(tree))
wanted = torch.from_numpy(tree.distance(node[:, None], node[None, :]))

# Sarkar's construction needs no training; here it gives the starting points, in Lorentz coordinates.
space = Lorentz()
start = poincare.to_lorentz(torch.from_numpy(tree.sarkar(tau=1.0)))
points = mark_manifold(torch.nn.Parameter(start.clone()), space)

optimizer = RiemannianAdam([points], lr=0.02)
i, j = torch.triu_indices(len(tree), len(tree), 1)
for _ in range(150):
    optimizer.zero_grad()
    loss = (space.dist(points[i], points[j]) / wanted[i, j] - 1).square().mean()
    loss.backward()
    optimizer.step()

before = tree.distortion(embedding=start, manifold=space, scale="best")
after = tree.distortion(embedding=points, manifold=space, scale="best")
print(f"average distortion: {before.average:.3f} by construction, {after.average:.3f} after training")
assert after.average < before.average

"""Entailment cones: teach points which word is more general, then ask about pairs that were never shown."""

import torch

from hyptree.geometry import Lorentz, mark_manifold
from hyptree.optim import RiemannianAdam

torch.manual_seed(0)

words = ["animal", "dog", "beagle", "bird", "robin"]
shown = torch.tensor([[0, 1], [1, 2], [0, 3], [3, 4]])  # (general, specific)
wrong = torch.tensor([[1, 3], [3, 1], [1, 4], [3, 2], [2, 1], [4, 3], [1, 0], [3, 0]])

space = Lorentz()
points = mark_manifold(torch.nn.Parameter(space.random(len(words), 5, std=0.5)), space)
optimizer = RiemannianAdam([points], lr=0.05)
for _ in range(300):
    optimizer.zero_grad()
    # Trained on cones of 0.8 times the aperture, so that the whole cone holds with room to spare.
    inside = space.cone_energy(points[shown[:, 0]], points[shown[:, 1]], eta=0.8)
    outside = space.cone_energy(points[wrong[:, 0]], points[wrong[:, 1]])
    loss = inside.sum() + torch.relu(0.2 - outside).sum()
    loss.backward()
    optimizer.step()

# Cones nest: what lies in the cone of a dog, which lies in the cone of an animal, lies in that one too.
for general, specific in ((0, 2), (0, 4), (2, 4)):
    energy = space.cone_energy(points[general], points[specific]).item()
    answer = "yes" if energy == 0 else f"no, it misses the cone by {energy:.2f} rad"
    print(f"Is a {words[specific]} a kind of {words[general]}? {answer}")
    assert (energy == 0) == (general == 0)

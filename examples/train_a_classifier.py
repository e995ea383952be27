"""A hyperbolic classifier: ordinary features in, hyperplanes as classes, one optimiser for everything."""

import torch
from torch import nn

from hyptree.geometry import Lorentz
from hyptree.nn import LorentzLinear, LorentzMLR
from hyptree.optim import RiemannianAdam, param_groups

torch.manual_seed(0)


class Classifier(nn.Module):
    """(B, 8) ordinary features -> (B, 3) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.space = Lorentz(c=1.0, learnable=True, min=0.1, max=10.0)
        self.hidden = LorentzLinear(8, 32, self.space)
        self.head = LorentzMLR(32, 3, self.space)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        points = self.space.expmap0(features)  # onto the hyperboloid
        return self.head(torch.relu(self.hidden(points)))  # space components: activations apply as they are


centres = 1.5 * torch.randn(3, 8)
label = torch.randint(3, (512,))
features = centres[label] + torch.randn(512, 8)

model = Classifier()
optimizer = RiemannianAdam(param_groups(model, lr=1e-2, curvature_lr=1e-3))
for _ in range(60):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), label)
    loss.backward()
    optimizer.step()

accuracy = (model(features).argmax(-1) == label).float().mean().item()
print(f"loss {loss.item():.3f}, accuracy {accuracy:.3f}, curvature -{model.space.c.item():.3f}")
assert accuracy > 0.95

"""A few pictures learned by heart: both losses fall and the nodes depend on the image."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.models import HiMapper
from tests.models.himapper.toy import ToyBackbone


def digits(count: int = 64) -> tuple[Tensor, Tensor]:
    """(B, 1, 32, 32) handwritten digits and their classes."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.from_numpy(data.images[:count]).float()[:, None] / 8 - 1
    return F.interpolate(x, size=32, mode="bilinear"), torch.from_numpy(data.target[:count])


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"num_leaves": 16, "depth": 3, "width": 48}, 70),
        pytest.param({}, 200, marks=pytest.mark.slow),  # the defaults: the same, and longer
    ],
)
def test_64_digits_by_heart(options: dict[str, int], steps: int) -> None:
    x, y = digits()
    model = HiMapper(ToyBackbone(classes=10, in_chans=1), **options).train()
    optimiser = torch.optim.AdamW(model.param_groups(3e-3, weight_decay=1e-4))
    history = []
    for _ in range(steps):
        out = model(x)
        entropy = F.cross_entropy(out.logits, y)
        optimiser.zero_grad()
        (entropy + out.losses["aux_total"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        history.append(torch.stack([entropy, out.losses["contrastive"]]).detach())
    start, end = history[0], torch.stack(history[-10:]).mean(0)
    assert end[0] < 0.7 * start[0]  # each step has its own noise, which a tenth of the steps average out
    assert end[1] < 0.5 * start[1]
    with torch.no_grad():
        out = model.eval()(x, compute_losses=True)
    assert F.cross_entropy(out.logits, y) < start[0]
    assert out.losses["contrastive"] < 0.5 * start[1]
    assert out.stats["image_dependence"] >= 0.15
    assert out.stats["parent_retrieval"] > 0.9 and out.stats["distance_ratio"] < 0.5

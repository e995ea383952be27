"""The Tree of a ``LatentHierarchyHead``: classes above attributes above pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hyptree.geometry import Poincare, poincare
from hyptree.tree import Tree

if TYPE_CHECKING:
    from hyptree.vlm.lathadapter.head import LatentHierarchyHead


def latent_tree(
    head: LatentHierarchyHead,
    text_features: Tensor,
    image_features: Tensor,
    class_names: Sequence[str] | None = None,
    image_names: Sequence[str] | None = None,
) -> Tree:
    """A forest whose roots are the classes: every attribute under its nearest class, every picture under its attribute.

    Nodes are the C classes (height 2), the N attributes (1), the B pictures (0), in this order; their embedding is
    where they lie in the ball. With N < C some classes have nothing below them. Without attributes pictures hang under
    classes.

    Args:
        text_features: (C, D).
        image_features: (B, D).
        class_names, image_names: labels of the nodes; running numbers by default.
    """
    classes, attributes, images = head.lifted_points(text_features, image_features)
    num_classes, num_attributes = len(classes), len(attributes)
    for what, names, count in (("class", class_names, num_classes), ("image", image_names, len(images))):
        if names is not None and len(names) != count:
            raise ValueError(f"expected {count} {what} names, one per row of the features, got {len(names)}")
    above = classes if num_attributes == 0 else attributes
    first = 0 if num_attributes == 0 else num_classes
    to_class = poincare.pairwise_dist(attributes, classes, head.c).argmin(1) if num_attributes else classes.new_zeros(0)
    to_above = first + poincare.pairwise_dist(images, above, head.c).argmin(1)
    parent = torch.cat([torch.full((num_classes,), -1), to_class.cpu().long(), to_above.cpu()])
    return Tree(
        parent.numpy(),
        [2] * num_classes + [1] * num_attributes + [0] * len(images),
        embedding=torch.cat([classes, attributes.to(classes), images.to(classes)]).cpu().numpy(),
        manifold=Poincare(head.c),
        label=[
            *(class_names or (f"class {i}" for i in range(num_classes))),
            *head.attribute_names,
            *(image_names or (f"image {i}" for i in range(len(images)))),
        ],
    )

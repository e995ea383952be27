"""``LatentHierarchyHead``: learned attributes between classes and pictures, on top of any pair of encoders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.errors import require_one_of
from hyptree.geometry import Poincare, poincare
from hyptree.geometry.core.numerics import ball_limit
from hyptree.geometry.sets import accurate_cdist
from hyptree.vlm.lathadapter.hierarchy_loss import (
    Affinity,
    HierarchyTerm,
    Sampling,
    hierarchy_loss,
    mine_triplets,
    refine,
)

if TYPE_CHECKING:
    from hyptree.tree import Tree

Lift = Literal["unit", "raw", "learned_scale"]
Baked = tuple[Tensor, Tensor]
"""Refined class vectors (C, D), which are all that ``classify`` reads, and the same lifted into the ball."""

_NOISE = 0.02  # standard deviation around the mean class vector where attributes begin
_CLASS, _ATTRIBUTE, _IMAGE = range(3)  # places in log_scale


def default_num_attributes(num_classes: int) -> int:
    """``2 sqrt(C)`` attributes, from 4 to 24: what suits the sizes of which the paper tells."""
    return min(24, max(4, round(2 * math.sqrt(num_classes))))


def polar_distances(directions: tuple[Tensor, Tensor], lengths: tuple[Tensor, Tensor], c: float) -> Tensor:
    """``poincare.pairwise_dist(expmap0(u), expmap0(v))``, (B, C), by the directions and lengths of ``u`` and ``v``.

    The hyperbolic law of cosines for the radii ``a = 2s|u|`` and ``b = 2s|v|``, in a form without cancellation:
    ``sinh^2(s d/2) = sinh^2((a - b)/2) + sinh(a) sinh(b) |u^ - v^|^2 / 4``. No point of the ball is made, so none is
    rounded near the boundary, and 18 operations take the place of 120: on a GPU each of the small ones is a launch.
    Radii end where those of ``expmap0`` end, which leaves the sinh of each finite.

    Args:
        directions: ``u / |u|`` (B, D) and ``v / |v|`` (C, D).
        lengths: ``|u|`` (B, 1) and ``|v|`` (C, 1), by which the directions were divided; positive.
        c: curvature is -c.
    """
    s = math.sqrt(c)
    farthest = 2 * math.atanh(ball_limit(lengths[0].dtype))
    a, b = ((2 * s * length).clamp_max(farthest) for length in lengths)
    radial = torch.sinh((a - b.T) / 2)
    across = accurate_cdist(*directions) * torch.sqrt(torch.sinh(a) * torch.sinh(b).T) / 2
    # A norm and not a hypot, whose gradient is NaN where a picture lies on its class. It is at most 1 / (4 eps).
    return torch.asinh(torch.linalg.vector_norm(torch.stack([radial, across]), dim=0)) * (2 / s)


def _length(vectors: Tensor) -> Tensor:
    """(n, 1) lengths to divide by: at least 1e-12, as in ``F.normalize``."""
    return torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(1e-12)


class LatentHierarchyHead(nn.Module):
    """Classifies pictures by class vectors that learned attributes refine, in cosine and in hyperbolic distance.

    ``logits, losses = head(image_features, text_features, labels)`` while training; ``losses["total"]`` is what to
    minimise. The head never touches the encoders: they may be frozen, or be learned through it. Parameters are the N
    attributes (and three scales with ``lift="learned_scale"``). Class vectors are an input at every call, so a head
    trained on some classes can be asked about others. Everything is computed in float32 at least, also in autocast.

    Args:
        d: width of the features.
        num_attributes: N; 0 refines classes by each other alone.
        c: curvature is -c.
        beta: how much of the neighbourhood is added to a class; 0 switches the refinement off.
        margin, k: of the hierarchy loss, and neighbours per anchor.
        affinity: "relu" or "softmax", see ``refine``.
        lca_sampling: "default", "paper" or "argmin", see ``choose_ancestors``.
        temperature: of the default sampling.
        hyp_weight: how much the distance counts in the logits beside the cosine; 1 as in the paper.
        lift: "unit" normalises the features of both encoders, so pictures and classes as they come sit at radius 2;
            "raw" keeps their lengths; "learned_scale" normalises and learns one factor each for classes, attributes and
            pictures.
        logit_scale: what multiplies the cosine, ``exp(logit_scale)`` of the encoder, 100 for CLIP.
        weight_h, weight_va, weight_at: of the loss parts; 0 switches one off.
        queue_size: features of earlier batches among which neighbours and strangers are found.
        max_triplets: at most so many are compared in a step.
        seed: of the attributes and of every choice.
    """

    def __init__(
        self,
        d: int,
        num_attributes: int,
        c: float = 0.1,
        beta: float = 0.1,
        *,
        margin: float = 0.1,
        k: int = 3,
        affinity: Affinity = "relu",
        lca_sampling: Sampling = "default",
        temperature: float = 0.1,
        hyp_weight: float = 1.0,
        lift: Lift = "unit",
        logit_scale: float = 100.0,
        weight_h: float = 1.0,
        weight_va: float = 1.0,
        weight_at: float = 1.0,
        queue_size: int = 256,
        max_triplets: int = 256,
        seed: int = 0,
    ):
        super().__init__()
        require_one_of("affinity", affinity, get_args(Affinity))
        require_one_of("lca_sampling", lca_sampling, get_args(Sampling))
        require_one_of("lift", lift, get_args(Lift))
        if d < 1 or num_attributes < 0:
            raise ValueError(f"expected d >= 1 and num_attributes >= 0, got {d} and {num_attributes}")
        if k < 1 or max_triplets < 1 or queue_size < 0:
            raise ValueError(
                f"expected k and max_triplets >= 1, queue_size >= 0, got {k}, {max_triplets}, {queue_size}"
            )
        for name, value in {"c": c, "temperature": temperature, "logit_scale": logit_scale}.items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number, got {value}")
        self.d, self.num_attributes, self.c, self.beta = d, num_attributes, c, beta
        self.margin, self.k, self.affinity, self.lift = margin, k, affinity, lift
        self.lca_sampling, self.temperature, self.hyp_weight = lca_sampling, temperature, hyp_weight
        self.logit_scale, self.max_triplets, self.seed = float(logit_scale), max_triplets, seed
        self.weights = {"L_e": 1.0, "L_h": weight_h, "L_va": weight_va, "L_at": weight_at}
        self.attribute_names: tuple[str, ...] = tuple(f"attribute {i}" for i in range(num_attributes))
        chance = torch.randn(num_attributes, d, generator=torch.Generator().manual_seed(seed))
        self.attributes = nn.Parameter(chance * _NOISE)
        if lift == "learned_scale":
            self.log_scale = nn.Parameter(torch.zeros(3))
        self.queue: Tensor
        self.queue_seen: Tensor
        self.steps: Tensor
        self.register_buffer("queue", torch.zeros(queue_size, d))
        self.register_buffer("queue_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @classmethod
    def for_classes(
        cls,
        text_features: Tensor,
        num_attributes: int | None = None,
        *,
        attribute_features: Tensor | None = None,
        attribute_names: Sequence[str] = (),
        **options: Any,
    ) -> LatentHierarchyHead:
        """A head whose attributes begin around the mean class, or at the vectors of given words.

        Args:
            text_features: (C, D) of the classes to be trained on.
            num_attributes: by default ``default_num_attributes(C)``.
            attribute_features: (N, D) where attributes begin instead, and ``attribute_names`` in a Tree.
        """
        if text_features.dim() != 2 or len(text_features) == 0:
            raise ValueError(f"expected class vectors (C, D), got shape {tuple(text_features.shape)}")
        if attribute_features is not None:
            num_attributes = len(attribute_features)
        elif num_attributes is None:
            num_attributes = default_num_attributes(len(text_features))
        head = cls(text_features.shape[1], num_attributes, **options).to(text_features.device)
        with torch.no_grad():
            if attribute_features is None:
                head.attributes.add_(head._enter("class vectors", text_features).mean(0))
            else:
                head.attributes.copy_(head._enter("attributes", attribute_features))
                head.attribute_names = tuple(attribute_names) or head.attribute_names
        return head

    # ---------------------------------------------------------------------------------------------------- the forward

    def forward(
        self, image_features: Tensor, text_features: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (B, C) and the parts of the loss, of features (B, D) and (C, D) as the encoders give them.

        The parts are ``L_e`` and ``L_h`` where there are labels (B,); in training ``L_va``, ``L_at`` and the counts
        ``hhl/skipped``, ``hhl/triplets`` and ``hhl/same`` (share of triplets whose two ancestors coincide); ``total``.
        """
        with torch.autocast(image_features.device.type, enabled=False):
            images, text = self._enter("image features", image_features), self._enter("class vectors", text_features)
            baked = self._bake(text)
            cosine, distance = self._compare(images, baked[0])
            logits = self._join(cosine, distance)
            losses: dict[str, Tensor] = {}
            if labels is not None:
                losses["L_e"] = F.cross_entropy(self.logit_scale * cosine, labels)
                if self.weights["L_h"]:
                    losses["L_h"] = F.cross_entropy(-distance, labels)
            if self.training:
                losses |= self._hierarchy_losses(images, baked[1])
            if losses:
                parts = [self.weights[name] * value for name, value in losses.items() if name in self.weights]
                losses["total"] = torch.stack(parts).sum() if parts else logits.sum() * 0
        return logits, losses

    def bake(self, text_features: Tensor) -> Baked:
        """``(T^, exp0(T^))``, both (C, D): with them ``classify`` needs neither attributes nor the text encoder."""
        with torch.no_grad(), torch.autocast(text_features.device.type, enabled=False):
            return self._bake(self._enter("class vectors", text_features))

    def classify(self, image_features: Tensor, baked: Baked) -> Tensor:
        """Logits (B, C) of ``cos(v, t^) * logit_scale - hyp_weight * d(v, t^)`` by what ``bake`` gave."""
        return self._join(*self.compare(image_features, baked))

    def compare(self, image_features: Tensor, baked: Baked) -> tuple[Tensor, Tensor]:
        """Of which these are made: (B, C) cosines and (B, C) distances."""
        with torch.autocast(image_features.device.type, enabled=False):
            return self._compare(self._enter("image features", image_features), baked[0])

    def _enter(self, name: str, features: Tensor) -> Tensor:
        """Features as the head computes with them: float32 at least, and unit length unless lift is raw."""
        if features.dim() != 2 or features.shape[1] != self.d:
            raise ValueError(
                f"LatentHierarchyHead: {name} have shape {tuple(features.shape)}, expected (n, {self.d}); "
                f"make the head with d={features.shape[-1] if features.dim() else 1} or give features of its width"
            )
        if not features.is_floating_point():
            raise ValueError(f"LatentHierarchyHead: {name} are {features.dtype}, expected a floating dtype")
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        return features if self.lift == "raw" else F.normalize(features, dim=-1)

    def _bake(self, text: Tensor) -> Baked:
        refined = refine(text, self.attributes.to(text.dtype), self.beta, self.affinity)
        return refined, self._lifted(refined, _CLASS)

    def _lifted(self, points: Tensor, kind: int) -> Tensor:
        if self.lift == "learned_scale":
            points = points * self.log_scale[kind].exp()
        return poincare.expmap0(points, self.c)

    def _compare(self, images: Tensor, refined: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C) cosines and (B, C) distances of pictures to classes."""
        lengths = _length(images), _length(refined)
        directions = images / lengths[0], refined / lengths[1]
        if self.lift == "learned_scale":
            lengths = lengths[0] * self.log_scale[_IMAGE].exp(), lengths[1] * self.log_scale[_CLASS].exp()
        return directions[0] @ directions[1].T, polar_distances(directions, lengths, self.c)

    def _join(self, cosine: Tensor, distance: Tensor) -> Tensor:
        return torch.sub(self.logit_scale * cosine, distance, alpha=self.hyp_weight)

    # ------------------------------------------------------------------------------------------------- hierarchy loss

    def _hierarchy_losses(self, images: Tensor, classes: Tensor) -> dict[str, Tensor]:
        """Losses of pictures under attributes and of attributes under classes; the queue takes in the batch."""
        from hyptree.data.seeding import mix_bits

        generator = torch.Generator().manual_seed(mix_bits(self.seed, int(self.steps)) >> 1)
        self.steps += 1
        attributes = self._lifted(self.attributes.to(images.dtype), _ATTRIBUTE)
        earlier = self.queue[: min(int(self.queue_seen), len(self.queue))].to(images)
        pictures = self._lifted(torch.cat([images, earlier]), _IMAGE)
        terms: dict[str, HierarchyTerm] = {}
        if self.weights["L_va"]:
            among = poincare.pairwise_dist(pictures[: len(images)].detach(), pictures.detach(), self.c)
            terms["L_va"] = self._term(among, poincare.pairwise_dist(pictures, attributes, self.c), generator)
        if self.weights["L_at"]:
            among = poincare.pairwise_dist(attributes.detach(), attributes.detach(), self.c)
            terms["L_at"] = self._term(among, poincare.pairwise_dist(attributes, classes, self.c), generator)
        self._remember(images.detach())
        chosen = torch.cat([term.chosen for term in terms.values()]) if terms else images.new_zeros(0, 2)
        return {name: term.loss for name, term in terms.items()} | {
            "hhl/skipped": images.new_tensor(float(sum(term.is_skipped for term in terms.values()))),
            "hhl/triplets": images.new_tensor(float(len(chosen))),
            "hhl/same": (chosen[:, 0] == chosen[:, 1]).to(images).sum() / max(1, len(chosen)),
        }

    def _term(self, among: Tensor, to_ancestors: Tensor, generator: torch.Generator) -> HierarchyTerm:
        triplets = mine_triplets(among, self.k, self.max_triplets, generator)
        return hierarchy_loss(
            *(to_ancestors, triplets),
            margin=self.margin,
            sampling=self.lca_sampling,
            temperature=self.temperature,
            generator=generator,
        )

    def _remember(self, images: Tensor) -> None:
        size = len(self.queue)
        if size == 0:
            return
        images = images[-size:]
        place = (int(self.queue_seen) + torch.arange(len(images), device=images.device)) % size
        self.queue[place] = images.to(self.queue)
        self.queue_seen += len(images)

    # ------------------------------------------------------------------------------------------------ what it learned

    @torch.no_grad()
    def slope_ratio(self, image_features: Tensor, text_features: Tensor) -> float:
        """How much the logits follow the hyperbolic distance, as a share of how much they follow the cosine.

        The median over all pairs of ``|d distance / d cosine| * hyp_weight / logit_scale``, turning the picture at
        constant radius. About 0.016 with CLIP's scale: a gain of accuracy is hardly owed to the distance then.
        """
        images = self._enter("image features", image_features)
        lifted = self._bake(self._enter("class vectors", text_features))[1]
        lifted_images = self._lifted(images, _IMAGE)
        s = math.sqrt(self.c)
        distance = poincare.pairwise_dist(lifted_images, lifted, self.c).double()
        # Of acosh(1 + 2c|x - y|^2 / (gx gy)) / s with |x - y|^2 = |x|^2 + |y|^2 - 2|x||y| cos.
        reach = [points.double().norm(dim=1) for points in (lifted_images, lifted)]
        factor = [r / (1 - self.c * r.square()) for r in reach]
        slope = 4 * s * factor[0][:, None] * factor[1] / torch.sinh(s * distance).clamp_min(1e-12)
        return float(slope.median()) * self.hyp_weight / self.logit_scale

    def to_tree(
        self,
        text_features: Tensor,
        image_features: Tensor,
        class_names: Sequence[str] | None = None,
        image_names: Sequence[str] | None = None,
    ) -> Tree:
        """What the head learned: a forest of classes, attributes below their nearest class, pictures below attributes.

        Nodes are the C classes (height 2), the N attributes (1), the B pictures (0), in this order, named by running
        numbers by default; their embedding is where they lie in the ball. With N < C some classes have nothing below
        them. Without attributes pictures hang under classes.
        """
        from hyptree.tree import Tree

        classes, attributes, images = self.lifted_points(text_features, image_features)
        count, num_attributes = len(classes), len(attributes)
        labels = [*self.attribute_names]
        for what, names, rows in (("class", class_names, count), ("image", image_names, len(images))):
            if names is not None and len(names) != rows:
                raise ValueError(f"expected {rows} {what} names, one per row of the features, got {len(names)}")
            named = [*(names or (f"{what} {i}" for i in range(rows)))]
            labels = named + labels if what == "class" else labels + named
        above, first = (attributes, count) if num_attributes else (classes, 0)
        nearest = [
            poincare.pairwise_dist(x, y, self.c).argmin(1).cpu() for x, y in ((attributes, classes), (images, above))
        ]
        parent = torch.cat([torch.full((count,), -1), nearest[0], first + nearest[1]])
        return Tree(
            parent.numpy(),
            [2] * count + [1] * num_attributes + [0] * len(images),
            embedding=torch.cat([classes, attributes.to(classes), images.to(classes)]).cpu().numpy(),
            manifold=Poincare(self.c),
            label=labels,
        )

    @torch.no_grad()
    def lifted_points(self, text_features: Tensor, image_features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Classes (C, D), attributes (N, D) and pictures (B, D) as points of the ball."""
        classes = self._bake(self._enter("class vectors", text_features))[1]
        images = self._lifted(self._enter("image features", image_features), _IMAGE)
        return classes, self._lifted(self.attributes, _ATTRIBUTE), images

    def extra_repr(self) -> str:
        """The settings; the learned tensors are in ``state_dict``."""
        names: tuple[str, ...] = ("d", "num_attributes", "c", "beta", "margin", "k", "affinity", "lca_sampling")
        names += ("temperature", "hyp_weight", "lift", "logit_scale", "max_triplets", "seed", "weights")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

"""HiMapper: any pretrained backbone, read through a tree of queries."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from hyptree.errors import UserError, require_one_of
from hyptree.models.himapper.backbone import Features, make_reader
from hyptree.models.himapper.output import HiMapperOutput, tree_stats
from hyptree.models.himapper.plain import Attention, Decomposition, Encoding, Geometry, Sign, TreeLoss, TreeSpace
from hyptree.models.himapper.tree import Mixture, Noise, ProbabilisticTree, TreeShape
from hyptree.ops import tree_reader
from hyptree.tree import Tree


class HiMapper(nn.Module):
    """A backbone whose last feature map is read by a tree of queries; what they read is added to its global feature.

    Before training the logits are the backbone's own: the last layer of what is added starts at zero. Evaluation uses
    the means of the tree and is repeatable bit by bit; training samples it with torch's default generator, as dropout.

    Cost of one image in evaluation, with the defaults, over ``M`` tokens of ``C`` channels: ``M C w + 2 M w^2``
    multiplications for the memory, ``120 M w`` for reading it, 14 million for the 60 nodes, 10 million for the encoder.
    That is 44 million for DeiT-S (1.0 % of its own) and 41 million for ResNet-50 (1.0 %); training reads with 128 rows.
    That is little beside the launches it takes: evaluated without gradients in half precision on a GPU, two kernels
    stand for most of them (:func:`hyptree.ops.tree_reader.apply`).

    Args:
        backbone: a timm model, or a vision model of transformers. Anything else by ``feature_fn``.
        num_leaves: nodes of the lowest level, a multiple of ``2^(depth - 1)``. depth: number of levels.
        width: w inside. heads: of all attentions. hyp_dim: axes of the hyperbolic space, ``width`` by default.
        geometry: "lorentz" or "euclidean".
        probabilistic: sample the tree while training.
        sibling_std: spread of sibling leaves at the start. query_residual: nodes keep their query.
        tau: temperature of the contrastive loss. alpha: its weight in ``aux_total``. beta: that of the KL.
        enabled: False makes a forward exactly the backbone's. May be changed at any time.
        mixture, noise: see ProbabilisticTree. attention: see Decomposition.
        sign: "paper" for the loss as printed, which drives children from their parents. learn_tau: learn ``tau``.
        dropout: in the decoder layer and the encoder.
        feature_fn: ``feature_fn(backbone, x) -> Features`` where a backbone cannot be read otherwise.
        channels: C, where the backbone does not say it. pooled_channels: Cv likewise.
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_leaves: int = 32,
        depth: int = 4,
        width: int = 128,
        heads: int = 4,
        hyp_dim: int | None = None,
        geometry: Geometry = "lorentz",
        probabilistic: bool = True,
        sibling_std: float = 0.75,
        query_residual: bool = False,
        tau: float = 0.2,
        alpha: float = 0.1,
        beta: float = 0.01,
        enabled: bool = True,
        *,
        mixture: Mixture = "moment",
        noise: Noise = "shared",
        attention: Attention = "cosine",
        sign: Sign = "corrected",
        learn_tau: bool = False,
        dropout: float = 0.0,
        feature_fn: Callable[[nn.Module, Tensor], Features] | None = None,
        channels: int | None = None,
        pooled_channels: int | None = None,
    ):
        super().__init__()
        for name, value, kind in (
            ("geometry", geometry, Geometry),
            ("mixture", mixture, Mixture),
            ("noise", noise, Noise),
            ("attention", attention, Attention),
            ("sign", sign, Sign),
        ):
            require_one_of(name, value, get_args(kind))
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got width={width}, heads={heads}")
        if tau <= 0:
            raise ValueError(f"tau must be positive, got {tau}")
        if sign == "paper":
            warnings.warn(
                "sign='paper' trains the loss as printed, which drives children away from their parents; it is for "
                "reproduction only",
                stacklevel=2,
            )
        self.shape = TreeShape(num_leaves, depth)
        self.reader = make_reader(backbone, feature_fn, channels, pooled_channels)
        self.alpha, self.beta, self.enabled = alpha, beta, enabled
        self.grid: tuple[int, int] | None = None
        """(H, W) of the last map that was read outside compiled code."""
        self.backbone = backbone
        first = next((p for p in backbone.parameters() if p.is_floating_point()), torch.empty(0))
        self.tree = ProbabilisticTree(self.shape, width, probabilistic, sibling_std, mixture, noise)
        self.decompose = Decomposition(
            self.shape, self.reader.channels, width, heads, attention, query_residual, dropout
        )
        self.space = TreeSpace(width, hyp_dim or width, geometry)
        self.loss = TreeLoss(self.shape, tau, sign, learn_tau)
        self.encode = Encoding(self.shape, self.reader.pooled_channels, width, heads, dropout)
        for part in (self.tree, self.decompose, self.space, self.loss, self.encode):
            part.to(first.device, first.dtype)

    # ---------------------------------------------------------------------------------------------------- the tree

    @property
    def levels(self) -> tuple[int, ...]:
        """Number of nodes per level, leaves first."""
        return self.shape.sizes

    # ----------------------------------------------------------------------------------------------------- forward

    def forward(self, x: Tensor, return_maps: bool = False, compute_losses: bool | None = None) -> HiMapperOutput:
        """Logits and the tree of each picture.

        Args:
            x: (B, 3, H, W). return_maps: also where each node looked, by an explicit softmax.
            compute_losses: by default while training.
        """
        if not self.enabled:
            return HiMapperOutput(self.reader.plain(self.backbone, x))
        features = self.reader.checked(self.backbone, x)
        if not torch.compiler.is_compiling():
            self.grid = features.grid
        compute_losses = self.training if compute_losses is None else compute_losses
        dtype = self.tree.mu.dtype
        tokens, pooled = features.tokens.to(dtype), features.pooled.to(dtype)
        queries, kl = self.tree(x.shape[0], compute_losses)
        row = None if features.row is None else features.row.to(dtype)
        nodes, maps, points, c, delta = tree_reader.apply(
            self.decompose, self.space, self.encode, queries, tokens, pooled, row, return_maps
        )
        delta = delta.to(features.pooled.dtype)
        enriched = features.pooled + delta

        assert features.classify is not None  # the reader sees to it
        losses, stats = None, {}
        if compute_losses or return_maps:
            distances = self.space.distances(points, c, self.loss.num_children)
            stats = tree_stats(self.loss, nodes, distances, maps) | {"curvature": c.detach().clone()}
            if compute_losses:
                losses = {"contrastive": self.loss(distances), "kl": kl}
                losses["aux_total"] = self.alpha * losses["contrastive"] + self.beta * kl
        return HiMapperOutput(
            logits=features.classify(enriched, delta),
            pre_logits=enriched,
            losses=losses,
            nodes=self.shape.split(nodes),
            hyperbolic=self.shape.split(points),
            curvature=c,
            maps=None if maps is None else [m.unflatten(-1, features.grid) for m in self.shape.split(maps)],
            stats=stats,
        )

    # -------------------------------------------------------------------------------------------- trees of pictures

    def to_tree(self, output: HiMapperOutput, b: int = 0) -> Tree:
        """The forest of picture ``b`` of a batch: all levels, leaves first, with points and, if asked for, maps.

        ``support`` are the attention maps of the nodes on the feature grid, each summing to 1. Nothing makes a parent's
        map the union of its children's, and a map is no part of an object.
        """
        if not output.nodes:
            raise UserError("this output has no tree: the Hi-Mapper was switched off; set model.enabled = True")

        from hyptree.geometry import Euclidean, Lorentz

        def joined(levels: list[Tensor]) -> Any:
            return torch.cat([level[b] for level in levels]).detach().float().cpu().numpy()

        c = 0.0 if output.curvature is None else output.curvature.item()
        return Tree(
            self.shape.parent,
            self.shape.level,
            embedding=joined(output.hyperbolic),
            manifold=Lorentz(c) if c > 0 else Euclidean(),
            support=None if output.maps is None else joined(output.maps),
            label=[f"level {l + 1} node {i}" for l, size in enumerate(self.levels) for i in range(size)],
        )

    @torch.no_grad()
    def inspect(self, x: Tensor) -> HiMapperOutput:
        """What is read of prepared pictures (B, 3, H, W) in evaluation, with maps; leaves the mode as it was."""
        was_training = self.training
        self.eval()
        try:
            return HiMapper.forward(self, x, return_maps=True)  # below a dense head self(x) gives features alone
        finally:
            self.train(was_training)

    def explain_tree(self, x: Tensor, **options: Any) -> Tree:
        """The tree of one prepared picture (1, 3, H, W), for ``hyptree.explain``."""
        if options:
            raise UserError(f"a Hi-Mapper has one tree, {', '.join(options)} cannot be chosen; leave it out")
        return self.to_tree(self.inspect(x))

    # ------------------------------------------------------------------------------------------------ what others ask

    def to_plain(self) -> nn.Module:
        """The backbone, as it is now."""
        return self.backbone

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """How the backbone wants its pictures."""
        return getattr(self.backbone, "pretrained_cfg", None) or {}

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are no weights: of the tree, of scales, and what the backbone excludes."""
        own = {name for name, _ in self.named_parameters() if name.startswith("tree.") or ".log_" in name}
        ask = getattr(self.backbone, "no_weight_decay", None)
        return own | ({f"backbone.{name}" for name in ask()} if callable(ask) else set())

    def param_groups(
        self, lr: float, plugin_lr: float | None = None, weight_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """Groups for an optimiser: the backbone at ``lr``, the rest at ``plugin_lr`` (by default the same).

        Args:
            weight_decay: of matrices and kernels; vectors and what ``no_weight_decay`` names get none, in groups of
                their own. None leaves it to the optimiser.
        """
        spared = self.no_weight_decay()
        rates = {"backbone": lr, "plugin": lr if plugin_lr is None else plugin_lr}
        groups: dict[str, dict[str, Any]] = {}
        for name, p in self.named_parameters():
            if p.requires_grad:
                part = "backbone" if name.startswith("backbone.") else "plugin"
                group: dict[str, Any] = {"name": part, "params": [], "lr": rates[part]}
                if weight_decay is not None:
                    decays = p.dim() > 1 and name not in spared
                    group["weight_decay"] = weight_decay if decays else 0.0
                    group["name"] = part if decays else f"{part}_no_decay"
                groups.setdefault(group["name"], group)["params"].append(p)
        return list(groups.values())

    def extra_repr(self) -> str:
        return f"levels={self.levels}, geometry={self.space.geometry}, sign={self.loss.sign}, enabled={self.enabled}"

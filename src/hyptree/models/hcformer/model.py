"""HCFormer: a vision backbone whose token mixer is soft clustering, windows in hyperbolic space.

Patches of a window gather around centres of the window, windows gather around centres of the picture. Importing this
module registers ``hcformer_pico|nano|tiny|small|medium`` with timm. See docs/hcformer.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead, DropPath, LayerScale, Mlp, get_act_layer, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyptree.errors import require_one_of
from hyptree.models.convs import ConvStem, Downsample, MapBatchNorm, NormedDownsample, Stem
from hyptree.nn.cluster.level import Geometry
from hyptree.nn.cluster.mixer import ClusterAssignment, ClusterMixer
from hyptree.ops.bare import is_bare, is_free
from hyptree.ops.gelu_mlp import gelu_mlp
from hyptree.ops.map_norm import MapNorm
from hyptree.ops.windows import Size

__all__ = ["ClusterAssignment", "HCFormer"]

GELU = get_act_layer("gelu")
NUM_STAGES = 4
CACHE = 16 * 2**20
"""Bytes of the widest maps that a CPU works on at once in evaluation; larger ones are paid for in fresh memory."""
CONTEXTS = ("hierarchy", "shifted", "none")
CONVS = ("plain", "normed")
NORMS = ("group", "batch")
POOLS = ("", "avg", "max", "avgmax", "catavgmax", "fast", "fastavg", "fastmax", "fastavgmax", "fastcatavgmax")


class Block(nn.Module):
    """Clustering, then an MLP, each added to its input: (B, H, W, C) -> (B, H, W, C)."""

    def __init__(
        self,
        dim: int,
        mixer: ClusterMixer,
        norm: type[nn.Module],
        mlp_ratio: float,
        input_norm: bool,
        layer_scale: float | None,
        act_layer: str,
        proj_drop: float,
        drop_path: float,
        **factory: Any,
    ):
        super().__init__()
        self.norm1 = norm(dim, **factory) if input_norm else nn.Identity()
        self.mixer = mixer
        self.norm2 = norm(dim, **factory)
        self.hidden = int(dim * mlp_ratio)
        self.mlp = Mlp(dim, self.hidden, act_layer=get_act_layer(act_layer), drop=proj_drop, **factory)
        self.scale1 = LayerScale(dim, layer_scale, **factory) if layer_scale is not None else nn.Identity()
        self.scale2 = LayerScale(dim, layer_scale, **factory) if layer_scale is not None else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.has_dropout = proj_drop > 0
        self.mlp_checkpointing = False

    def forward(self, x: Tensor, record: MutableSequence[ClusterAssignment] | None = None) -> Tensor:
        factor = _factor(self.scale1)
        if factor is not None and self._adds_at_once():
            x = self.mixer(x, record, factor, True)
        else:
            mixed = self.mixer(self.norm1(x), record, factor)
            x = x + self.drop_path(mixed if factor is not None else self.scale1(mixed))
        if self.mlp_checkpointing and self.training and not torch.jit.is_scripting():
            hidden = checkpoint(self._mlp, x, use_reentrant=False, preserve_rng_state=self.has_dropout)
        else:
            hidden = self._mlp(x)
        return x + self.drop_path(hidden)

    def _adds_at_once(self) -> bool:
        """Whether nothing stands between the mixer and the sum, so that its last pass may add."""
        drops = self.training and type(self.drop_path) is not nn.Identity
        layers = (self.norm1, self.mixer, self.drop_path)
        return not drops and type(self.norm1) is nn.Identity and all(is_free(layer) for layer in layers)

    def _mlp(self, x: Tensor) -> Tensor:
        mlp, factor = self.mlp, _factor(self.scale2)
        if self.has_dropout or not (is_bare(mlp, Mlp) and is_bare(mlp.act, GELU)):
            return self.scale2(mlp(self.norm2(x)))
        hidden = gelu_mlp(x, self.norm2, mlp.fc1, mlp.fc2, factor)
        return hidden if factor is not None else self.scale2(hidden)


class Stage(nn.Module):
    """Downsampling (except in the first stage) and the blocks of one resolution."""

    def __init__(self, downsample: nn.Module, blocks: Sequence[Block]):
        super().__init__()
        self.downsample = downsample
        self.blocks, self.width = nn.ModuleList(blocks), max(block.hidden for block in blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor, record: MutableSequence[ClusterAssignment] | None = None) -> Tensor:
        parts = [self.downsample(x)]
        # How many pictures' widest maps are CACHE bytes, at least one: in evaluation no picture knows of another.
        is_alone = not (self.training or torch.is_grad_enabled() or record is not None)
        if parts[0].device.type == "cpu" and is_alone and not torch.compiler.is_compiling():
            x = parts[0]
            parts = x.split(max(1, CACHE // max(1, self.width * x.shape[1] * x.shape[2] * x.element_size())))
        outs = []
        recomputes = self.grad_checkpointing and self.training and record is None and not torch.jit.is_scripting()
        for x in parts:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x, record)
            outs.append(x)
        return torch.cat(outs) if len(outs) > 1 else outs[0]


class HCFormer(nn.Module):
    """Four stages of clustering blocks with the interface of a timm model; any input size.

    Args:
        img_size: input size that the position bias is made for, one number or (height, width).
        in_chans, num_classes, global_pool, drop_rate, drop_path_rate, proj_drop_rate: as in every timm model;
            ``num_classes=0`` gives pooled features.
        depths, dims, num_heads, mlp_ratios: one value per stage. head_dim: width of a head, one for all or per stage.
        folds: windows per side of each stage's map at ``img_size``.
        patch_centres: patch-level centres per side of a window, per stage; a smaller window has at most one per patch.
        window_centres: window-level centres per side of the map, per stage; 0 for no window level. One number changes
            only the stages with more than one window, as the paper's ablation does.
        scaling: what grows with the input beyond ``img_size``: the "window" (the number of windows is kept) or the
            "fold" (the size of the windows is kept, their number grows).
        patch_geometry, window_geometry: "euclidean" or "hyperbolic".
        assignment: "soft", or "hard" as in Context Cluster: the best centre alone, weighted by a sigmoid.
        context: what connects windows: "hierarchy" (the window level), "shifted" (no window level, the windows of
            every second block are shifted by half, as in Swin) or "none".
        position_bias: learned bias of position and centre. alpha: initial factor of the similarities.
        curvature: ``c > 0`` of hyperbolic levels. learnable_curvature: learn one ``c`` per block and level.
        clip_norm: longest tangent vector before the exponential map.
        mixer_norm: normalise the mixer's two results before they are projected (the paper; its code does not).
        input_norm: normalise the block's input before the mixer.
        norm: "group" (one group, the paper) or "batch", in front of the MLPs and at the end; the mixer's stays "group".
        convs: "plain" (the paper: a 4 x 4 stem, one convolution between stages) or "normed" (a stem of three 3 x 3
            convolutions; a norm and an activation follow every convolution), which learns much faster from little.
        layer_scale: initial factor of each residual branch, None for no factor. act_layer: timm's name of the MLP's
            activation.
    """

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        depths: Sequence[int] = (2, 2, 6, 2),
        dims: Sequence[int] = (32, 64, 196, 224),
        num_heads: Sequence[int] = (4, 4, 8, 8),
        head_dim: int | Sequence[int] = 16,
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        folds: Sequence[int] = (7, 7, 1, 1),
        patch_centres: Sequence[int] = (4, 2, 7, 4),
        window_centres: int | Sequence[int] = (4, 4, 1, 0),
        *,
        scaling: Literal["window", "fold"] = "window",
        patch_geometry: Geometry = "euclidean",
        window_geometry: Geometry = "hyperbolic",
        assignment: Literal["soft", "hard"] = "soft",
        context: Literal["hierarchy", "shifted", "none"] = "hierarchy",
        position_bias: bool = True,
        alpha: float = 1.0,
        curvature: float = 1.0,
        learnable_curvature: bool = False,
        clip_norm: float = 1.0,
        mixer_norm: bool = True,
        input_norm: bool = False,
        norm: Literal["group", "batch"] = "group",
        convs: Literal["plain", "normed"] = "plain",
        layer_scale: float | None = 1e-5,
        act_layer: str = "gelu",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        require_one_of("HCFormer: context", context, CONTEXTS)
        require_one_of("HCFormer: norm", norm, NORMS)
        require_one_of("HCFormer: convs", convs, CONVS)
        depths, dims = _per_stage("depths", depths), _per_stage("dims", dims)
        num_heads = _per_stage("num_heads", num_heads)
        head_dims = [head_dim] * NUM_STAGES if isinstance(head_dim, int) else _per_stage("head_dim", head_dim)
        folds, mlp_ratios = _per_stage("folds", folds), _per_stage("mlp_ratios", mlp_ratios)
        patch_centres = _per_stage("patch_centres", patch_centres)
        if isinstance(window_centres, int):
            if context != "hierarchy":
                raise ValueError(
                    f"HCFormer: context {context!r} has no window level for window_centres={window_centres}"
                )
            window_centres = [window_centres if fold > 1 else (1, 1, 1, 0)[i] for i, fold in enumerate(folds)]
        window_centres = _per_stage("window_centres", window_centres)
        if learnable_curvature and "hyperbolic" not in (patch_geometry, window_geometry):
            raise ValueError("HCFormer: learnable_curvature needs a hyperbolic level; set window_geometry='hyperbolic'")
        factory = {"device": device, "dtype": dtype}
        map_norm: type[nn.Module] = MapNorm if norm == "group" else MapBatchNorm
        self.num_classes, self.in_chans = num_classes, in_chans
        self.num_features = self.head_hidden_size = dims[-1]
        self.drop_rate = drop_rate
        rates = torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist()

        self.stages = nn.ModuleList()
        self.feature_info = []
        height, width = _as_size(img_size)
        size = -(-height // 4), -(-width // 4)  # rounded up
        for stage, (depth, dim) in enumerate(zip(depths, dims, strict=True)):
            if stage:
                size = -(-size[0] // 2), -(-size[1] // 2)
            blocks = []
            for block in range(depth):
                mixer = ClusterMixer(
                    dim,
                    num_heads[stage],
                    head_dims[stage],
                    size,
                    folds[stage],
                    patch_centres[stage],
                    window_centres[stage] if context == "hierarchy" else 0,
                    scaling=scaling,
                    shifted=context == "shifted" and (sum(depths[:stage]) + block) % 2 == 1,
                    patch_geometry=patch_geometry,
                    window_geometry=window_geometry,
                    assignment=assignment,
                    position_bias=position_bias,
                    curvature=curvature,
                    learnable_curvature=learnable_curvature,
                    norm=mixer_norm,
                    alpha=alpha,
                    clip=clip_norm,
                    **factory,
                )
                ratio, rate = mlp_ratios[stage], rates.pop(0)
                options = (ratio, input_norm, layer_scale, act_layer, proj_drop_rate, rate)
                blocks.append(Block(dim, mixer, map_norm, *options, **factory))
            first: nn.Module
            if convs == "plain":
                first = Stem(in_chans, dim, **factory) if stage == 0 else Downsample(dims[stage - 1], dim, **factory)
            elif stage == 0:
                first = ConvStem(in_chans, dim, map_norm, **factory)
            else:
                first = NormedDownsample(dims[stage - 1], dim, map_norm, **factory)
            self.stages.append(Stage(first, blocks))
            self.feature_info.append({"num_chs": dim, "reduction": 4 * 2**stage, "module": f"stages.{stage}"})
        self.norm: nn.Module = map_norm(dims[-1], **factory)
        _check_pool(global_pool, num_classes)
        self.head = ClassifierHead(dims[-1], num_classes, global_pool, drop_rate, **factory)
        self.global_pool = global_pool
        self.apply(_init_weights)

    # ---------------------------------------------------------------------------------------------------- clusters

    def assignments(self, x: Tensor, with_output: bool = False) -> Any:
        """The assignments of every block, in the order of the blocks, recorded in one ordinary forward.

        Args:
            x: (B, C, H, W) pictures.
            with_output: give ``(logits, assignments)``.

        Returns:
            One :class:`ClusterAssignment` per block. They are part of the graph: use ``torch.no_grad()`` to look only.
        """
        record: deque[ClusterAssignment] = deque()  # not a list, of which accelerate's hooks hand on a copy
        features = self.forward_features(x, record)
        counts = [len(stage.blocks) for stage in self.stages]  # type: ignore[arg-type]
        places = [(stage, block) for stage, count in enumerate(counts) for block in range(count)]
        named = [replace(seen, stage=s, block=b) for seen, (s, b) in zip(record, places, strict=True)]
        return (self.forward_head(features), named) if with_output else named

    # ----------------------------------------------------------------------------------------------------- forward

    def forward_features(self, x: Tensor, record: MutableSequence[ClusterAssignment] | None = None) -> Tensor:
        """The last stage's map after the final norm, (B, num_features, H / 32, W / 32), in channels-last memory."""
        if x.dim() != 4 or x.shape[1] != self.in_chans:
            raise ValueError(f"HCFormer: expected pictures (B, {self.in_chans}, H, W), got {tuple(x.shape)}")
        for stage in self.stages:
            x = stage(x, record)
        return self.norm(x).permute(0, 3, 1, 2)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pooling, dropout and, unless ``pre_logits``, the classifier."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps of chosen stages, and what ``forward_features`` gives.

        Args:
            indices: the last n stages if an int, all if None.
            norm: apply the final norm to the last stage's map. stop_early: skip the stages after the last chosen one.
            output_fmt: "NCHW" or "NHWC". intermediates_only: give the list alone.
        """
        output_fmt = str(getattr(output_fmt, "value", output_fmt))
        require_one_of("HCFormer.forward_intermediates: output_fmt", output_fmt, ("NCHW", "NHWC"))
        take, last = feature_take_indices(len(self.stages), _as_list(indices))
        maps = []
        stages = self.stages[: last + 1] if stop_early else self.stages
        for index, stage in enumerate(stages):
            x = stage(x)
            if index in take:
                seen = self.norm(x) if norm and index == len(self.stages) - 1 else x
                maps.append(seen if output_fmt == "NHWC" else seen.permute(0, 3, 1, 2))
        if intermediates_only:
            return maps
        return self.norm(x).permute(0, 3, 1, 2) if len(stages) == len(self.stages) else x.permute(0, 3, 1, 2), maps

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages, norm and head that the chosen maps do not need; gives the indices as positive numbers."""
        take, last = feature_take_indices(len(self.stages), _as_list(indices))
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    # ------------------------------------------------------------------------------------------------ what timm asks

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier; 0 classes for pooled features, and "" as pooling for maps."""
        _check_pool(self.global_pool if global_pool is None else global_pool, num_classes)
        self.global_pool = self.global_pool if global_pool is None else global_pool
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool)
        if isinstance(self.head.fc, nn.Linear):
            _init_weights(self.head.fc)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Position biases, temperatures and curvatures."""
        endings = (".position.bias", ".alpha", ".beta", ".curvature.raw")
        return {name for name, _ in self.named_parameters() if name.endswith(endings)}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise learning rates: the stem, then stage by stage (``coarse``) or block by block."""
        if coarse:
            return {"stem": r"^stages\.0\.downsample", "blocks": [(r"^stages\.(\d+)", None), (r"^norm", (99999,))]}
        return {
            "stem": r"^stages\.0\.downsample",
            "blocks": [
                (r"^stages\.(\d+)\.downsample", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool | Literal["mlp"] = True) -> None:
        """Recompute each block in the backward pass instead of keeping what is inside it.

        Args:
            enable: "mlp" recomputes the MLPs alone. They are a quarter of the work and, eight times as wide as the map,
                most of the memory of the first two stages.
        """
        if enable not in (True, False, "mlp"):
            raise ValueError(f"HCFormer: grad checkpointing is True, False or 'mlp', got {enable!r}")
        for stage in self.stages:
            stage.grad_checkpointing = enable is True  # type: ignore[assignment]
            for block in stage.blocks:  # type: ignore[union-attr]
                block.mlp_checkpointing = enable == "mlp"


def _factor(scale: nn.Module) -> Tensor | None:
    """``gamma`` of a bare LayerScale, for the product in front of it; None where the layer has to be called."""
    return scale.gamma if isinstance(scale, LayerScale) and is_bare(scale, LayerScale) else None


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _check_pool(pool: str, num_classes: int) -> None:
    require_one_of("HCFormer: global_pool", pool, POOLS)
    if not pool and num_classes:
        raise ValueError(
            f"HCFormer: global_pool '' leaves maps, which {num_classes} classes cannot use; set num_classes=0"
        )


def _per_stage(name: str, values: Sequence[Any]) -> list[Any]:
    if isinstance(values, (str, int, float)) or len(values) != NUM_STAGES:
        raise ValueError(f"HCFormer: {name} needs one value for each of the {NUM_STAGES} stages, got {values!r}")
    return list(values)


def _as_list(indices: int | Sequence[int] | None) -> int | list[int] | None:
    return indices if indices is None or isinstance(indices, int) else list(indices)


def _as_size(size: int | Sequence[int]) -> Size:
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"HCFormer: img_size is one positive number or (height, width), got {size!r}")
    return pair[0], pair[1]


# ---------------------------------------------------------------------------------------------------------------- sizes


def _cfg(size: int = 224, **options: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, size, size),
        "pool_size": (size // 32, size // 32),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stages.0.downsample",
        "classifier": "head.fc",
        "fixed_input_size": False,
        "license": "mit",
        **options,
    }


default_cfgs = generate_default_cfgs(
    {
        "hcformer_pico": _cfg(64, first_conv="stages.0.downsample.conv1"),
        "hcformer_nano": _cfg(),
        "hcformer_tiny": _cfg(),
        "hcformer_small": _cfg(),
        "hcformer_medium": _cfg(),
    }
)


SIZES: dict[str, dict[str, Any]] = {
    "hcformer_pico": {  # norm, convolutions and layer scale: made for a short training from nothing
        "img_size": 64,
        "depths": (1, 1, 2, 1),
        "dims": (24, 48, 96, 160),
        "num_heads": (2, 4, 8, 8),
        "head_dim": 8,
        "mlp_ratios": (3, 3, 4, 4),
        "norm": "batch",
        "convs": "normed",
        "layer_scale": None,
        "folds": (4, 2, 1, 1),
        "patch_centres": (2, 2, 2, 2),
        "window_centres": (2, 2, 1, 0),
    },
    "hcformer_nano": {},
    "hcformer_tiny": {"dims": (32, 64, 196, 320), "head_dim": 24},
    "hcformer_small": {"dims": (64, 128, 320, 512), "head_dim": 32},
    "hcformer_medium": {
        "depths": (4, 4, 12, 4),
        "dims": (64, 128, 320, 512),
        "num_heads": (6, 6, 12, 12),
        "head_dim": 32,
    },
}


def _create(variant: str, pretrained: bool, options: dict[str, Any]) -> HCFormer:
    out_indices = options.pop("out_indices", tuple(range(NUM_STAGES)))
    if pretrained:
        raise ValueError(f"{variant}: there are no pretrained weights; train it (hyptree train) or load your own")
    return build_model_with_cfg(
        HCFormer,
        variant,
        pretrained,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **{**SIZES[variant], **options},
    )


@register_model
def hcformer_pico(pretrained: bool = False, **options: Any) -> HCFormer:
    """For 64 px pictures and two CPU cores; maps of 16, 8, 4 and 2 patches per side."""
    return _create("hcformer_pico", pretrained, options)


@register_model
def hcformer_nano(pretrained: bool = False, **options: Any) -> HCFormer:
    """5.3 million parameters."""
    return _create("hcformer_nano", pretrained, options)


@register_model
def hcformer_tiny(pretrained: bool = False, **options: Any) -> HCFormer:
    """7 million parameters."""
    return _create("hcformer_tiny", pretrained, options)


@register_model
def hcformer_small(pretrained: bool = False, **options: Any) -> HCFormer:
    """16 million parameters."""
    return _create("hcformer_small", pretrained, options)


@register_model
def hcformer_medium(pretrained: bool = False, **options: Any) -> HCFormer:
    """34 million parameters."""
    return _create("hcformer_medium", pretrained, options)

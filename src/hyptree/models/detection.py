"""Detection and instances: torchvision's Mask R-CNN (He et al. 2017) on the pyramid of any timm backbone.

Images reach the detector as the data pipeline made them: normalised, in the size to be looked at. The detector itself
only pads a batch to a common size (zeros, the mean colour), so its boxes and masks are in the pixels of its input.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import AnchorGenerator, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign

from hyptree.models.decoders.pyramid import Checkpointed, Pyramid

BOX_CELLS, MASK_CELLS = 7, 14
"""Edge of the grid a region is sampled on, for its class and box and for its mask."""
CANONICAL_CELLS = 28
"""A region this many anchor scales wide is read one level above the middle one: 224 px at the usual scale 8."""


class DetectionPyramid(Checkpointed, nn.Module):
    """A pyramid in the form torchvision's detectors take, with one more level (every other pixel of the last) on top.

    Shape:
        (B, 3, H, W) -> ordered names ``"0", "1", ..., "pool"`` to maps (B, out_channels, H_i, W_i).
    """

    def __init__(self, backbone: nn.Module, channels: int = 256):
        super().__init__()
        self.pyramid = Pyramid(backbone, channels)
        self.out_channels = channels
        self.strides = [*self.pyramid.strides, 2 * self.pyramid.strides[-1]]
        self.level_names = [str(i) for i in range(len(self.pyramid.strides))]

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        levels = self.pyramid(x)
        named = OrderedDict(zip(self.level_names, levels, strict=True))
        named["pool"] = levels[-1][..., ::2, ::2]  # the largest anchors need no more than this
        return named


class PadOnly(GeneralizedRCNNTransform):
    """What torchvision does to a batch before the backbone, without normalising and resizing: the data came so.

    (Its own switch for this, ``_skip_resize``, acts in training alone; an evaluation would still resize to 800 px.)
    """

    def __init__(self, size_divisible: int = 32):
        super().__init__(1, 1, [0.0] * 3, [1.0] * 3, size_divisible)

    def normalize(self, image: Tensor) -> Tensor:
        if not image.is_floating_point():
            raise TypeError(
                f"images must be normalised floats, got {image.dtype}; see hyptree.data.pictures.transforms"
            )
        return image

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        return image, target


# torchvision keeps coordinates in the dtype of the features. Eight bits of bfloat16 place a corner at 1,000 px only to
# the nearest 4, so under autocast anchors are made in float32 and every head hands back float32.


class _Anchors(AnchorGenerator):
    def set_cell_anchors(self, dtype: torch.dtype, device: torch.device) -> None:
        super().set_cell_anchors(torch.float32, device)


class _ProposalHead(RPNHead):
    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, deltas = super().forward(x)
        return [score.float() for score in scores], [delta.float() for delta in deltas]


class _BoxPredictor(FastRCNNPredictor):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(x)
        return scores.float(), deltas.float()


class _MaskPredictor(MaskRCNNPredictor):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class BoxDetector(Checkpointed, FasterRCNN):
    """torchvision's Faster R-CNN on our pyramid; ``mask_rcnn`` makes it."""


class MaskDetector(Checkpointed, MaskRCNN):
    """torchvision's Mask R-CNN on our pyramid; ``mask_rcnn`` makes it."""


def mask_rcnn(
    backbone: nn.Module,
    num_classes: int,
    *,
    has_masks: bool = True,
    pyramid_channels: int = 256,
    head_channels: int = 1024,
    anchor_scale: float = 8.0,
    anchor_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    num_proposals: int = 1000,
    num_learned: int = 512,
    max_detections: int = 100,
    min_score: float = 0.05,
) -> BoxDetector | MaskDetector:
    """A Mask R-CNN with fresh heads; a Faster R-CNN where there are no masks to learn from.

    While training it takes images and targets (boxes (N, 4), labels (N,) from 1, masks (N, H, W) uint8) and gives a
    dict of losses; in eval mode it takes images and gives boxes, labels, scores and masks (N, 1, H, W) in [0, 1].

    Args:
        backbone: gives features of several strides, see ``hyptree.models.decoders.pyramid_backbone``.
        num_classes: kinds of objects, the background not counted.
        has_masks: whether to predict a mask for every box.
        pyramid_channels: width of the pyramid and of the mask head.
        head_channels: width of the box head.
        anchor_scale: edge of a square anchor in strides of its level. 8 is the usual one and means 32 to 512 px; take
            4 for pictures of about 128 px.
        anchor_ratios: height over width of the anchors.
        num_proposals: regions kept per image, in training and in evaluation; twice as many are looked at.
        num_learned: of these, how many per image the heads learn from at most, a quarter of them objects.
        max_detections: per image. min_score: of a detection worth keeping.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1 (the background does not count), got {num_classes}")
    if not anchor_scale > 0:
        raise ValueError(f"anchor_scale must be positive, got {anchor_scale}")
    if not anchor_ratios or min(anchor_ratios) <= 0:
        raise ValueError(f"anchor_ratios must be positive numbers, got {tuple(anchor_ratios)}")
    pyramid = DetectionPyramid(backbone, pyramid_channels)

    def sample_regions(cells: int) -> MultiScaleRoIAlign:
        return MultiScaleRoIAlign(
            pyramid.level_names,
            output_size=cells,
            sampling_ratio=2,
            canonical_scale=round(CANONICAL_CELLS * anchor_scale),
        )

    anchors = _Anchors(
        sizes=tuple((round(anchor_scale * stride),) for stride in pyramid.strides),
        aspect_ratios=(tuple(anchor_ratios),) * len(pyramid.strides),
    )
    options: dict[str, Any] = {
        "rpn_anchor_generator": anchors,
        "rpn_head": _ProposalHead(pyramid_channels, len(anchor_ratios)),
        "box_roi_pool": sample_regions(BOX_CELLS),
        "box_head": TwoMLPHead(pyramid_channels * BOX_CELLS**2, head_channels),
        "box_predictor": _BoxPredictor(head_channels, num_classes + 1),
        "rpn_pre_nms_top_n_train": 2 * num_proposals,
        "rpn_post_nms_top_n_train": num_proposals,
        "rpn_pre_nms_top_n_test": 2 * num_proposals,
        "rpn_post_nms_top_n_test": num_proposals,
        "box_batch_size_per_image": num_learned,
        "box_detections_per_img": max_detections,
        "box_score_thresh": min_score,
    }
    if has_masks:
        options |= {
            "mask_roi_pool": sample_regions(MASK_CELLS),
            "mask_head": MaskRCNNHeads(pyramid_channels, (pyramid_channels,) * 4, 1),
            "mask_predictor": _MaskPredictor(pyramid_channels, pyramid_channels, num_classes + 1),
        }
    detector = MaskDetector(pyramid, **options) if has_masks else BoxDetector(pyramid, **options)
    detector.transform = PadOnly()
    return detector

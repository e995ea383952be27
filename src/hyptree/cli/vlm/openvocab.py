"""``hyptree vlm eval-openvocab``: a detector whose boxes are named by the CLIP of a segmenter, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyptree.cli.config import AsJson, OnDevice
from hyptree.runs import RunFolder


@dataclass(kw_only=True)
class EvalOpenVocabConfig(AsJson, OnDevice):
    """``hyptree vlm eval-openvocab``; as JSON the numbers of single classes too."""

    detector: Path
    """Run of the task detect or openvocab_detect: its boxes, and its data."""
    segmenter: Path
    """Run of the task openvocab: its CLIP names the boxes, its map fills what they leave."""
    split: Literal["train", "val", "test"] = "val"
    """Which part of the detector's data."""
    novel: tuple[str, ...] | None = None
    """Classes to count as novel. [those that the segmenter did not see]"""
    limit: int | None = None
    """Pictures to look at. [all]"""
    text_weight: float = 0.5
    """Share of CLIP in a score, from 0 (the detector alone) to 1."""
    min_score: float = 0.3
    """Score of an instance in the panoptic map."""
    out: Path | None = None
    """JSON file for the numbers."""


def eval_openvocab(config: EvalOpenVocabConfig) -> int:
    """AP and PQ of base and novel classes, by a detector whose boxes are named by text."""
    for run in (config.detector, config.segmenter):
        RunFolder(run).require_run()
    import json

    from hyptree.errors import as_user_error
    from hyptree.files import write_text
    from hyptree.tables import numbers
    from hyptree.train.openvocab import evaluate_openvocab
    from hyptree.train.run.log import headline

    with as_user_error():
        scores = evaluate_openvocab(
            config.detector,
            config.segmenter,
            split=config.split,
            novel=config.novel,
            limit=config.limit,
            text_weight=config.text_weight,
            min_score=config.min_score,
            device=config.find_device(),
        )
    if config.out is not None:
        write_text(config.out, json.dumps(scores, indent=2) + "\n")
    print(json.dumps(scores) if config.json else "\n".join(numbers(headline(scores))))
    return 0

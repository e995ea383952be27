"""``hyptree vlm train-fewshot``: a latent hierarchy of classes, attributes and pictures from a few shots."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hyptree.data.settings import read_data_flag
from hyptree.vlm.encoders.spec import check_spec
from hyptree.vlm.lathadapter.settings import FewShotJob


@dataclass(kw_only=True)
class TrainFewshotConfig(FewShotJob):
    """``hyptree vlm train-fewshot``."""


def train_fewshot(config: TrainFewshotConfig) -> None:
    """Learn attributes between classes and pictures from a few shots, test on the same, new and shifted classes.

    Features are kept in --cache, so a second run takes seconds. --ablate trains each part on and off. What is done
    stays in --out; --resume goes on with it.

    hyptree vlm train-fewshot --model hf:runs/clip_world --data world --shots 1 2 4 8 16 --protocol base-to-new
    """
    for data in (config.data, *config.transfer):
        read_data_flag(data)
    check_spec(config.model)
    from hyptree.vlm.lathadapter.fewshot_run import run_fewshot, table

    report = run_fewshot(config)
    if config.json:
        print(json.dumps(report))
    else:
        print("\n".join([*table(report), f"results in {config.out}"]))

"""The table of ``hyptree bench vlm`` for inference: pictures classified by CLIP alone, and by a few-shot head on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Built, Contender, Result, Sample, compare, ratio
from benchmarks.session import Emit
from hyptree.tables import markdown_head, markdown_row
from hyptree.vlm import LatentHierarchyHead

LIMIT = 1.02
"""What classifying by the head may cost as a multiple of classifying by cosine, image tower included; on CUDA."""

LOGIT_SCALE = 100.0
CLOSE = 1e-3
"""Of logits in float32: a head that adds nothing must repeat those of the cosine, which are 100 at most."""


def contenders(model: Any, pixels: Tensor, num_classes: int, dtype: str, compiled: bool) -> list[Contender]:
    """Both ways from the same image tower to logits of ``num_classes`` classes, whose text vectors are ready.

    Args:
        model: a CLIP of transformers. dtype: "bfloat16" means autocast. compiled: all through torch.compile.
    """
    model.eval()
    width = model.config.projection_dim
    text = torch.nn.functional.normalize(torch.randn(num_classes, width, device=pixels.device), dim=-1)
    head = LatentHierarchyHead.for_classes(text, logit_scale=LOGIT_SCALE).to(pixels.device).eval()
    baked = head.bake(text)

    def embed(x: Tensor) -> Tensor:
        output = model.get_image_features(pixel_values=x)
        return output if isinstance(output, Tensor) else output.pooler_output  # transformers 5 gives an output

    def by_cosine(x: Tensor) -> Tensor:
        return LOGIT_SCALE * torch.nn.functional.normalize(embed(x).float(), dim=-1) @ text.mT

    def by_head(x: Tensor) -> Tensor:
        return head.classify(embed(x), baked)

    def prepared(way: Callable[[Tensor], Tensor], check: Callable[[], float]) -> Callable[[], Built]:
        run = torch.compile(way) if compiled else way

        @torch.no_grad()
        def call() -> object:
            with torch.autocast(pixels.device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
                return run(pixels)

        return lambda: Built(call, check())

    @torch.no_grad()
    def error_of_head() -> float:
        """Of a head without refinement and without distances, beside the cosine."""
        bare = LatentHierarchyHead(width, 0, beta=0.0, hyp_weight=0.0, logit_scale=LOGIT_SCALE).to(pixels.device).eval()
        by_head = bare.classify(embed(pixels[:2]), bare.bake(text))
        return float((by_head - by_cosine(pixels[:2])).abs().max()) / LOGIT_SCALE

    return [
        Contender("by cosine", prepared(by_cosine, lambda: 0.0)),
        Contender("by the head", prepared(by_head, error_of_head)),
    ]


def inference(contenders: list[Contender], sample: Sample, repeats: int, binding: bool, emit: Emit) -> int:
    """Time both and print them; gives 1 where one is wrong or, if ``binding``, the limit is missed."""
    results = compare(contenders, sample, repeats, CLOSE)
    emit({"kind": "table", "name": "inference"}, ["", *markdown_head(["pictures classified", "ms", "of cosine"])])
    for result in results:
        emit(*_line(result, results[0]))
    share = ratio(results[1], results[0])
    if share is None:
        return 1
    met = share.value <= LIMIT
    word = ("met" if met else "MISSED") if binding else "binding on cuda with --size base"
    line = {"kind": "verdict", "step": "by the head", "of": "by cosine", "ratio": share.value, "limit": LIMIT}
    text = f"the head takes {share.value:.3f} ({share.low:.3f} to {share.high:.3f}) of cosine, limit {LIMIT}: {word}"
    emit(line | {"quartiles": [share.low, share.high], "met": met, "binding": binding}, [text])
    return int(binding and not met)


def _line(result: Result, cosine: Result) -> tuple[dict[str, Any], list[str]]:
    share = ratio(result, cosine)
    line: dict[str, Any] = {"kind": "inference", "way": result.name, "status": result.status, "note": result.note}
    line |= {"seconds": result.median if result.seconds else None, "error": result.error}
    line |= {"of_cosine": share and share.value}
    time = f"{1e3 * result.median:.2f}" if result.seconds else f"{result.status}: {result.note}"
    return line, [markdown_row([result.name, time, f"{share.value:.3f}" if share else "-"])]

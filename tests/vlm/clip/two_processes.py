"""One of two processes that share a batch; a module of its own, so that it imports little."""

from __future__ import annotations

import os

import torch

from hyptree.vlm.clip.contrast import contrastive_loss, gather_rows

CURVATURES = (None, 0.7)


def run(rank: int, port: int, folder: str) -> None:
    """Loss and gradient of this process's half of ``given.pt``, flat and hyperbolic, into ``found-*.pt``."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    inputs = torch.load(f"{folder}/given.pt")
    rows = slice(3 * rank, 3 * rank + 3)
    assert torch.equal(gather_rows(inputs["image"][rows]), inputs["image"])
    for c in CURVATURES:
        weight = inputs["weight"].clone().requires_grad_()
        image, text = inputs["image"][rows] @ weight, inputs["text"][rows].flatten(0, 1) @ weight
        chosen = inputs["chosen"][rows].flatten()
        loss = contrastive_loss(image, text, 2.0, c=c, captions=inputs["captions"][rows], chosen=chosen)
        loss.backward()
        torch.save({"loss": loss.detach(), "grad": weight.grad}, f"{folder}/found-{c}-{rank}.pt")
    torch.distributed.destroy_process_group()

"""What a process of ours said, without what its libraries say to each other."""

from __future__ import annotations


def own(text: str) -> str:
    """Lines of a standard error without those that torch 2.15 logs when transformers imports torchao 0.18."""
    return "".join(line for line in text.splitlines(keepends=True) if "torch/utils/_pytree.py" not in line)

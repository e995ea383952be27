"""Embeddings of texts that are made once: the one place where they are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hyptree.errors import UserError
from hyptree.files import load_tensors, save_tensors


class TextTable:
    """Embeddings of texts under an encoder as it is now: each is made once, without gradient, float32 on the CPU.

    Nothing tells a table that an encoder has changed. So it is an object of its own: make it where the weights stand
    still, and let it go when they move. On disk a key says which weights it is of.
    """

    def __init__(self, encode: Callable[[list[str]], Tensor], block: int = 256):
        self.encode, self.block = encode, block
        self._row: dict[str, int] = {}
        self._rows = torch.empty(0, 0)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """(n, d); those that are new are embedded now."""
        self.fill(texts)
        return self.rows(texts)

    def rows(self, texts: Sequence[str]) -> Tensor:
        """(n, d) of texts that the table has; another one is a ``KeyError``."""
        return self._rows[[self._row[text] for text in texts]]

    def fill(self, texts: Sequence[str], show: Callable[[int], None] | None = None) -> None:
        """Embed those that are new; ``show`` is told how many more are done."""
        new = sorted({text for text in texts if text not in self._row}, key=lambda text: (len(text), text))
        parts = []
        for start in range(0, len(new), self.block):  # similar lengths together: padding costs as much as words
            part = new[start : start + self.block]
            with torch.no_grad():
                rows = self.encode(part).float().cpu()
            if not bool(rows.isfinite().all()):
                bad = part[int((~rows.isfinite().all(1)).nonzero()[0])]
                raise UserError(f"the encoder gives numbers that are not finite for {bad!r}; look at its weights")
            parts.append(rows)
            if show is not None:
                show(len(part))
        self._add(new, parts)

    def fill_from(self, path: Path, texts: Sequence[str], key: str, show: Callable[[int], None] | None = None) -> None:
        """The same with a file, which is read if it is of these texts and this key, and written otherwise.

        What the key does not know of shows in the first text: it is embedded again and compared.
        """
        texts = list(dict.fromkeys(texts))
        digest = hashlib.sha256("\0".join([key, *texts]).encode()).hexdigest()
        if path.is_file():
            tensors, state = load_tensors(path)
            if state.get("digest") == digest and "rows" in tensors:
                with torch.no_grad():
                    probe = self.encode(texts[:1]).float().cpu()
                rows = tensors["rows"]
                if rows[:1].shape == probe.shape and torch.allclose(rows[:1], probe, atol=1e-4):
                    self._add(texts, [rows])
                    return
        self.fill(texts, show)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, {"rows": self.rows(texts)}, {"digest": digest})

    def _add(self, texts: Sequence[str], parts: Sequence[Tensor]) -> None:
        if texts:
            self._row |= {text: len(self._row) + i for i, text in enumerate(texts)}
            self._rows = torch.cat([self._rows, *parts] if self._rows.numel() else list(parts))

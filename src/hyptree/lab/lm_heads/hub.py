"""Files of a model on the Hugging Face Hub, one at a time: of a sharded model only the shard that holds the head."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from hyptree.errors import UserError

T = TypeVar("T")

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_repo(text: str) -> bool:
    """Whether a text that is no path here can be the name of a model, ``org/name``."""
    return _REPO.fullmatch(text) is not None and not text.endswith((".safetensors", ".gguf"))


def require_lm_head(path: Path | str) -> bool:
    """Whether a head is on this machine; False where the text can only be the name of a model on the Hub.

    Raises:
        UserError: neither. A misspelt folder beside others must not be looked for on the network.
    """
    here = Path(path).exists()
    if not here and not (is_repo(str(path)) and not Path(path).parent.exists()):
        raise UserError(f"cannot read {path}: no such file or folder")
    return here


@dataclass(frozen=True)
class HubModel:
    """A model of the Hub, by its name ``org/name``. What was fetched stays in the Hub's own cache."""

    repo: str

    def files(self) -> list[str]:
        """Names of its files.

        Raises:
            UserError: the Hub cannot be reached, or it has no such model.
        """
        # Asked first, and by the one call that does not try for half a minute where there is no network.
        info = self._ask(lambda hub: hub.HfApi().model_info(self.repo, timeout=20))
        return sorted(one.rfilename for one in info.siblings or ())

    def fetch(self, name: str) -> Path:
        """A file of it on this machine."""
        return Path(self._ask(lambda hub: hub.hf_hub_download(self.repo, name)))

    def _ask(self, question: Callable[[Any], T]) -> T:
        try:
            return question(import_module("huggingface_hub"))
        except Exception as error:  # its own errors, those of its HTTP library, of the disk: all mean "not to be had"
            text = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(f"{self.repo} is no file or folder here, and the Hub did not give it: {text}") from error

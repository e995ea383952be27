"""An encoder of which a part is trained: only that part is saved, and the frozen rest is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.errors import UserError, as_user_error
from hyptree.files import hash_tensors
from hyptree.vlm.adapters import adapter_config
from hyptree.vlm.adapters.handle import attach


class TunedEncoder(nn.Module):
    """An encoder with an adapter or with some weights of its own that are trained.

    Only what is trained is in its ``state_dict``. The frozen rest comes from where the encoder comes from, and
    ``check_base`` tells whether it is the one that was trained with. All weights of the encoder, whose module is
    ``clip``, are frozen here; a subclass attaches an adapter, of which it keeps the ``handle``, or thaws some of them,
    and then calls ``save_trained_alone``.
    """

    base: Tensor

    def __init__(self, encoder: Any):
        super().__init__()
        self.encoder = encoder
        self.clip: nn.Module = encoder.model
        self.handle: Any = None
        self.clip.requires_grad_(False)
        # What the frozen weights are, before an adapter renames or replaces them.
        self.register_buffer("base", _digest(self.clip))
        self._own_base = tuple(self.base.tolist())
        self._frozen: set[str] = set()

    def save_trained_alone(self) -> None:
        """From now on leave what is frozen out of the state dict."""
        trained = {id(p) for p in self.tuned_parameters()}
        self._frozen = {
            f"clip.{name}" for name, tensor in self.clip.state_dict(keep_vars=True).items() if id(tensor) not in trained
        }
        self.register_state_dict_post_hook(_leave_out_frozen)

    def tuned_parameters(self) -> list[nn.Parameter]:
        """What is trained in the encoder; none where it is frozen."""
        return [p for p in self.clip.parameters() if p.requires_grad]

    def load_trained(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Take over what was trained, all of it and nothing else, on this encoder and no other."""
        problem: Any = None
        try:
            missing, unexpected = self.load_state_dict(tensors, strict=False)
            problem = next(iter({*missing, *unexpected} - self._frozen), None)
        except RuntimeError as error:
            problem = " ".join(str(error).split())
        if problem is not None:
            raise UserError(f"the weights of {source} are not those of its recipe: {problem}")
        self.check_base()

    def check_base(self) -> None:
        """Refuse weights that were trained on another encoder than the one that is loaded."""
        if tuple(self.base.tolist()) != self._own_base:
            raise UserError(
                f"these weights were trained on another encoder than {self.encoder.name}; give the one they were made "
                "with"
            )

    def train(self, mode: bool = True) -> TunedEncoder:
        """Training mode for what stands on the encoder; the encoder stays in eval mode, as it was trained."""
        super().train(mode)
        self.clip.eval()
        return self


def attach_method(
    encoder: Any, method: str, options: Mapping[str, Any], where: str = "model.args.adapter", **fixed: Any
) -> Any:
    """Attach the adapter of a method name; None for ``frozen``.

    Args:
        where: the options come from, for the message; ``fixed`` ones are not the user's.
    """
    if method == "frozen":
        return None
    with as_user_error(f"method {method}"):
        return attach(encoder, adapter_config(method, {**options, **fixed}, f"{where} of method {method}"))


def _digest(model: nn.Module) -> Tensor:
    """Four numbers that differ when a weight, a name or a shape does."""
    whole = hashlib.sha256()
    hash_tensors(whole, model.state_dict())
    words = whole.digest()
    return torch.tensor([int.from_bytes(words[i : i + 8], "big", signed=True) for i in range(0, 32, 8)])


def _leave_out_frozen(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, TunedEncoder)
    for name in module._frozen:
        state.pop(prefix + name, None)

"""Devices by name."""

from __future__ import annotations

import torch

from hyptree.errors import UserError


def find_device(name: str) -> torch.device:
    """The device with this name, or one line on why it cannot be used."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device

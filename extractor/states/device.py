"""Where a forward runs."""

from __future__ import annotations

from hsstore.errors import MissingExtraError, UsageError, extra_hint


def check_device(name: str) -> str:
    """The device, if torch has it. Raises `UsageError`."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError("checking states needs torch", hint=extra_hint("hf")) from None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"there is no device {name!r}, expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the forward runs on cpu or cuda, not on {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"there is no device {name!r}: torch sees {torch.cuda.device_count()} GPUs")
    return name

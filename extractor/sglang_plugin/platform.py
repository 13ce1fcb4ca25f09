"""Entry point of SGLang's group `sglang.srt.platforms`: says whether our CPU platform takes this machine.

Imports nothing of SGLang, which calls it in each of its processes before it knows what it runs on.
"""

from __future__ import annotations

import os

from extractor.sglang_plugin import CPU_VARIABLE


def activate() -> str | None:
    """Dotted name of the platform class, or None to leave the machine to SGLang's own detection."""
    if os.environ.get(CPU_VARIABLE) != "1":
        return None
    return "extractor.sglang_plugin.platform_impl.TorchCpuPlatform"

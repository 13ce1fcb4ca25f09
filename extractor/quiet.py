"""transformers, imported so that it neither prints, warns, shows bars of its own nor reaches for the network.

The one place of the package that imports it; everybody else calls `transformers()`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import warnings
from functools import cache
from typing import Any


@cache
def transformers() -> Any:
    """The module. Raises `ImportError` when it is not installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
    # Read when torch loads libgomp, whose threads else spin while they wait: on two cores shared with other work
    # (load 7) SmolLM2 was captured at 12 to 22 tokens/s, with this at 177 to 369.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns after a fork
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers as module
        from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    atexit.register(_keep_swig_capsules)
    return module


def _keep_swig_capsules() -> None:
    """Let the capsules of SWIG's runtime outlive the interpreter: sentencepiece's is destroyed after the type that its
    destructor needs, in some orders of imports, and a finished run would end with a segmentation fault (exit 139)."""
    for name, module in list(sys.modules.items()):
        if name.startswith("swig_runtime_data"):
            for value in vars(module).values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))

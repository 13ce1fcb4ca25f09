"""hsstore: hidden states of a verifier, stored once, trained on many times.

The names below load on first use: `import hsstore` costs nothing, `hsstore --help` imports neither numpy nor zarr.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Store": "hsstore.store",
    "StoreWriter": "hsstore.writer",
    "Plan": "hsstore.plan",
    "PlanParameters": "hsstore.plan",
    "open_source": "hsstore.source",
    "HsstoreError": "hsstore.errors",
}

__all__ = ["HsstoreError", "Plan", "PlanParameters", "Store", "StoreWriter", "__version__", "open_source"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hsstore' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)

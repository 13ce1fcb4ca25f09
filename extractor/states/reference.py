"""An independent forward: transformers' own model over the same ids, in float32 and then in bfloat16.

The weights are loaded once, in float32, and rounded in place for the second pass: exact for a bfloat16 checkpoint.
Of the layers that are asked all rows are kept, of the others some, to say which layer a wrong state belongs to. Leaves
what may differ to `layers`.

Letters: T tokens, H hidden size, n decoder layers.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from extractor.chat import first_line
from extractor.engines.transformers import load_model
from extractor.modelfiles import json_object, read
from extractor.quiet import transformers
from extractor.verifier import Verifier
from extractor.weights import tensor_shapes, weight_files
from hsstore.console import human_bytes
from hsstore.errors import MissingExtraError, UsageError, extra_hint
from hsstore.findings import printable

if TYPE_CHECKING:
    import torch

_ROOM = 1.15  # activations and what a load needs besides the weights
_ROOM_BYTES = 1 << 30


def forward_bytes(verifier: Verifier) -> int:
    """Memory that its weights take in float32, with room to work."""
    files = [file for file in weight_files(verifier.path) if file.suffix == ".safetensors"]
    n = sum(math.prod(shape) for file in files for shape in tensor_shapes(file).values())
    return int(_ROOM * 4 * n) + _ROOM_BYTES


def free_bytes(device: str) -> int:
    """Memory that is free on a device; of the machine, or of the control group that this process is in."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, taken = (Path("/sys/fs/cgroup", name).read_text().strip() for name in (limit, used))
        except OSError:
            continue  # no such group: the machine's own figure holds
        if most.isdecimal():
            free = min(free, max(0, int(most) - int(taken)))
    return free


def no_room(verifier: Verifier, device: str, share: float = 1.0) -> str:
    """Why the model cannot be loaded, "" when it can. `share`: how much of the free memory may be taken."""
    if not any(file.suffix == ".safetensors" for file in weight_files(verifier.path)):
        return ""  # older formats do not say how large they are: loading shows
    if how := _quantised(verifier):
        return f"its weights are quantised ({how}): a forward in float32 is not what an engine computes with them"
    needed, free = forward_bytes(verifier), int(share * free_bytes(device))
    if needed <= free:
        return ""
    return f"its weights take {human_bytes(needed)} in float32, {human_bytes(free)} of memory may be used on {device}"


def _quantised(verifier: Verifier) -> str:
    """By which method, "" for plain weights."""
    file = verifier.path / "config.json"
    config = json_object(read(file), file)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    found = next((p["quantization_config"] for p in parts if isinstance(p.get("quantization_config"), dict)), None)
    return "" if found is None else printable(str(found.get("quant_method", "unknown"))[:40])


@dataclass(frozen=True, slots=True)
class Given:
    """States of one forward, float32 on the CPU."""

    full: dict[str, npt.NDArray[np.float32]]
    """[T, H] by name, of those that were asked."""
    some: dict[str, npt.NDArray[np.float32]]
    """Some rows of every state: `after_0` … `after_n`, `final`."""


class Reference:
    """A verifier in transformers. Use as a context manager: it leaves nothing in memory."""

    def __init__(self, verifier: Verifier, *, device: str = "cpu", trust_remote_code: bool = False) -> None:
        """Raises `UsageError` when transformers cannot load it, `MissingExtraError` without transformers."""
        try:
            library = transformers()
        except ImportError as error:
            raise MissingExtraError(f"it needs {error.name}", hint=extra_hint("hf")) from None
        import torch

        self.version = str(library.__version__)
        self.device = device
        self._model: Any = load_model(verifier.path, "float32", trust_remote_code, {})
        try:
            self._model = self._model.to(torch.device(device)).eval()
        except torch.OutOfMemoryError:
            raise UsageError(f"{verifier.name} does not fit into the memory of {device}") from None
        self._decoder: Any = self._model.get_decoder()
        self.is_routed = any("expert" in name for name, _ in self._decoder.named_modules())
        """A mixture of experts: rounding may send a token to another one."""
        if len(self._decoder.layers) < verifier.n_layers:
            found = f"{len(self._decoder.layers)} decoder layers, config.json says {verifier.n_layers}"
            raise UsageError(f"transformers gives {verifier.name} {found}")
        self._rows: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._asked: frozenset[str] = frozenset()
        self._full: dict[str, torch.Tensor] = {}
        self._some: dict[str, torch.Tensor] = {}
        self._hook(verifier.n_layers)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hook(self, n_layers: int) -> None:
        for k, block in enumerate(self._decoder.layers):
            block.register_forward_pre_hook(self._entering(f"after_{k}"), with_kwargs=True)
        self._decoder.layers[n_layers - 1].register_forward_hook(self._leaving(f"after_{n_layers}"))

    def _entering(self, name: str) -> Any:
        def keep(_module: Any, args: Any, kwargs: Any) -> None:
            self._keep(name, args[0] if args else kwargs["hidden_states"])

        return keep

    def _leaving(self, name: str) -> Any:
        def keep(_module: Any, _args: Any, out: Any) -> None:
            self._keep(name, out[0] if isinstance(out, tuple) else out)

        return keep

    def _keep(self, name: str, states: torch.Tensor) -> None:
        import torch

        rows = states[0]
        if name in self._asked:
            self._full[name] = rows.to("cpu", torch.float32, copy=True)
        self._some[name] = rows[torch.from_numpy(self._rows).to(rows.device)].to("cpu", torch.float32, copy=True)

    def forward(self, ids: npt.NDArray[np.int32], asked: Sequence[str], rows: npt.NDArray[np.intp]) -> Given:
        """One sample. `rows`: which ones to keep of every layer. Raises `UsageError` when the model's code fails."""
        import torch

        self._asked, self._rows = frozenset(asked), rows
        tokens = torch.from_numpy(ids.astype(np.int64))[None].to(self.device)
        try:
            with torch.inference_mode():
                self._keep("final", self._decoder(input_ids=tokens, use_cache=False).last_hidden_state)
        except torch.OutOfMemoryError:
            raise UsageError(f"a sample of {len(ids):,} tokens does not fit into the memory of {self.device}") from None
        except Exception as error:  # noqa: BLE001 - the boundary to a library, and to code that comes with the model
            raise UsageError(f"transformers fails on a sample of {len(ids):,} tokens: {first_line(error)}") from None
        full, some = _numpy(self._full), _numpy(self._some)
        self._full, self._some = {}, {}
        return Given(full, some)

    def to_bfloat16(self) -> None:
        """Round the weights: what follows is transformers' own bfloat16.

        Buffers that no checkpoint holds stay as they are, as in a model that is loaded in bfloat16: rounded frequencies
        of rotary embeddings would turn late tokens by whole radians.
        """
        import torch

        kept = [
            (module, name, module._buffers[name])
            for module in self._model.modules()
            for name in module._non_persistent_buffers_set
        ]
        self._model = self._model.to(torch.bfloat16)
        for module, name, buffer in kept:
            module._buffers[name] = buffer

    def close(self) -> None:
        import torch

        self._model = self._decoder = None
        self._full, self._some = {}, {}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _trim()


def _numpy(states: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[np.float32]]:
    return {name: tensor.numpy() for name, tensor in states.items()}


def _trim() -> None:
    """Give freed memory back to the system: glibc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def threads(n: int | None) -> Iterator[None]:
    """So many threads of torch for a while; as many as there are cores without a number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n or len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)

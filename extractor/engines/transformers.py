"""The embedded engine: transformers' own forward, one sample at a time. Exact, deterministic, and the tests' oracle.

States are taken by hooks on the decoder layers, so only the asked ones are kept: `after_k` is what enters layer k
(0-based), `final` the decoder's last hidden state, after the model's final norm. Rows are rounded to bfloat16, their
CRC32C is taken, then they go to their place in the staged files. Leaves checking what arrived to `extractor.capture`.

Letters: T tokens of a sample, H hidden size, k decoder layers.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from extractor.chat import first_line
from extractor.engines.base import EngineInfo, Job, Ticket
from extractor.quiet import transformers
from extractor.weights import tensor_shapes, weight_files
from extractor.words import counted
from hsstore.digest import crc32c
from hsstore.durable import pwrite_all
from hsstore.errors import NoSpaceError, UsageError

_OPTIONS = {"device": "cpu, cuda or cuda:N", "attn_implementation": "eager, sdpa, …", "threads": "a number"}
_DTYPES = ("auto", "bfloat16", "float16", "float32")
_UNLIMITED = 1 << 30
_FULL = {errno.ENOSPC, errno.EDQUOT}


class TransformersEngine:
    """A verifier in this process."""

    def __init__(
        self,
        model: str | Path,
        *,
        layers: tuple[str, ...],
        dtype: str = "auto",
        trust_remote_code: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Load the model. Raises `UsageError` for an unknown option, or a model that cannot be loaded."""
        transformers()  # before torch: it sets what torch reads when it loads
        import torch

        settings = check_options(dtype, dict(options or {}))
        if "threads" in settings:
            torch.set_num_threads(int(settings["threads"]))
        self._device = choose_device(settings.get("device"))
        self._model = load_model(Path(model), dtype, trust_remote_code, settings)
        try:
            self._model = self._model.to(self._device).eval()
        except torch.OutOfMemoryError:
            raise UsageError(
                f"{Path(model).name} does not fit into the memory of {self._device}",
                hint="use --engine sglang with several GPUs, or --engine-option device=cpu",
            ) from None
        self._decoder = self._model.get_decoder()
        self._layers = layers
        self._states: dict[str, Any] = {}
        self._hook(layers)
        self.info = EngineInfo(
            engine="transformers",
            version=str(transformers().__version__),
            norm="post",
            compute_dtype=str(self._model.dtype).removeprefix("torch."),
            longest_tokens=getattr(self._decoder.config, "max_position_embeddings", 0) or _UNLIMITED,
            flags={
                "attn_implementation": str(self._decoder.config._attn_implementation),
                "device": self._device.type,
                "torch": str(torch.__version__),
            },
        )

    def _hook(self, layers: tuple[str, ...]) -> None:
        blocks = self._decoder.layers
        for name in layers:
            if name == "final":
                continue
            k = int(name.removeprefix("after_"))

            def keep(_module: Any, args: Any, kwargs: Any, name: str = name) -> None:
                self._states[name] = args[0] if args else kwargs["hidden_states"]

            blocks[k].register_forward_pre_hook(keep, with_kwargs=True)

    def capture(self, jobs: Iterable[Job]) -> Iterator[Ticket]:
        """One forward a job, in order. Without device memory for it a sample gets an error."""
        import torch

        for job in jobs:
            try:
                states = self._forward(job)
            except torch.OutOfMemoryError as error:
                self._states.clear()
                torch.cuda.empty_cache()
                reason = f"out of device memory: {str(error).partition('.')[0]}"
                yield Ticket(source_index=job.source_index, n_rows=0, crc32c={}, error=reason)
                continue
            yield self._deliver(job, states)

    def _forward(self, job: Job) -> dict[str, Any]:
        import torch

        ids = torch.from_numpy(job.input_ids.astype(np.int64))[None].to(self._device)  # [1, T]
        with torch.inference_mode():
            out = self._decoder(input_ids=ids, use_cache=False)
            self._states["final"] = out.last_hidden_state
            states, self._states = self._states, {}
            return {name: states[name][0].to(torch.bfloat16).cpu().contiguous() for name in self._layers}  # [T, H]

    def _deliver(self, job: Job, states: Mapping[str, Any]) -> Ticket:
        import torch

        crcs = {}
        for name, rows_TH in states.items():
            rows = memoryview(rows_TH.view(torch.uint16).numpy()).cast("B")
            crcs[name] = crc32c(rows)
            _write(job.files[name], rows, job.row * rows_TH.shape[1] * 2)
        return Ticket(source_index=job.source_index, n_rows=len(states["final"]), crc32c=crcs)

    def close(self) -> None:
        self._model = self._decoder = None
        self._states.clear()


def _write(path: str, rows: memoryview, offset: int) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        pwrite_all(fd, rows, offset)
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpaceError(
                f"the disk under {path} is full", hint="free space, then run the same with --resume"
            ) from None
        raise
    finally:
        os.close(fd)


def check_options(dtype: str, options: dict[str, str]) -> dict[str, str]:
    """The engine's settings. Raises `UsageError` for one that it has not."""
    for name in options:
        if name not in _OPTIONS:
            known = "; ".join(f"{k} ({v})" for k, v in _OPTIONS.items())
            raise UsageError(f"the transformers engine has no option {name!r}; it has {known}")
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown, expected {', '.join(_DTYPES)}")
    if not options.get("threads", "1").isdigit():
        raise UsageError(f"threads must be a number, found {options['threads']!r}")
    return options


def choose_device(name: str | None) -> Any:
    """A torch device; None = CUDA where there is some. Raises `UsageError`."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(f"there is no device {name!r}, expected {_OPTIONS['device']}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"there is no device {name!r}: torch sees no GPU", hint="leave --engine-option device out")
    return device


def load_model(model: Path, dtype: str, trust_remote_code: bool, options: Mapping[str, str]) -> Any:
    """The whole model. Raises `UsageError` when it cannot be loaded, or its checkpoint lacks a tensor."""
    import torch

    attention = {"attn_implementation": options["attn_implementation"]} if "attn_implementation" in options else {}
    chosen = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded, report = transformers().AutoModelForCausalLM.from_pretrained(
                str(model),
                dtype=chosen,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **attention,
            )
    except Exception as error:  # noqa: BLE001 - the boundary to a library that raises anything on foreign files
        if "ignore_mismatched_sizes" in str(error):
            where = f": {first}" if (first := _misfit(model, trust_remote_code)) else ""
            raise UsageError(
                f"config.json of {model} does not fit the weights{where}", hint="download the model completely"
            ) from None
        raise UsageError(f"transformers cannot load {model}: {first_line(error)}", hint="try --engine sglang") from None
    # transformers fills what the checkpoint lacks with random numbers and only logs it.
    if absent := sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}):
        raise UsageError(
            f"the weights in {model} lack {counted(len(absent), 'tensor')} of {type(loaded).__name__},"
            f" the first is {absent[0]}",
            hint="download the model completely",
        )
    if not hasattr(loaded.get_decoder(), "layers"):
        raise UsageError(f"{type(loaded).__name__} has no list of decoder layers", hint="use --engine sglang")
    return loaded


def _misfit(model: Path, trust_remote_code: bool) -> str:
    """The first tensor whose shape is not what config.json makes of it, "" when that cannot be told."""
    import torch

    files = [file for file in weight_files(model) if file.suffix == ".safetensors"]
    stored = {name: shape for file in files for name, shape in tensor_shapes(file).items()}
    library = transformers()
    how = {"trust_remote_code": trust_remote_code}
    try:
        config = library.AutoConfig.from_pretrained(str(model), local_files_only=True, **how)
        with torch.device("meta"):
            wanted = library.AutoModelForCausalLM.from_config(config, **how).state_dict()
    except Exception:  # noqa: BLE001 - the same boundary; the caller has its error already, this only adds a name
        return ""
    for name, tensor in wanted.items():
        if name in stored and stored[name] != list(tensor.shape):
            return f"{name} is {stored[name]}, by config.json {list(tensor.shape)}"
    return ""

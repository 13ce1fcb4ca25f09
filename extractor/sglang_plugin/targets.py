"""The places inside SGLang 0.5.23 that the capture hooks attach to, and the check that they are still there.

SGLang only logs a hook whose target moved, and serves on without it: states would then be missing, or lost in part.
So every target is looked up and its parameters compared before an engine starts.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping

RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
APPEND_PREFILL = RESULTS + "_append_prefill_hidden_states"
APPEND_DECODE = RESULTS + "_append_decode_hidden_states"
COPY_TO_CPU = "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu"
ASYNC_D2H = "sglang.srt.managers.utils._async_d2h"
VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
CONFIGURE = (
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture"
)
GET_PARALLEL = "sglang.srt.runtime_context.get_parallel"
RUN_SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    APPEND_PREFILL: (
        "self",
        "req",
        "logits_output",
        "hidden_state_offset",
        "capture_hidden_mode",
        "extend_input_len",
        "store",
    ),
    APPEND_DECODE: ("req", "hidden_states", "start", "accept_len"),
    COPY_TO_CPU: ("self", "return_logprob", "return_hidden_states"),
    ASYNC_D2H: ("tensor",),
    VALIDATE: ("self", "obj", "input_ids"),
    CONFIGURE: (
        "model",
        "eagle_use_aux_hidden_state",
        "eagle_aux_hidden_state_layer_ids",
        "dflash_use_aux_hidden_state",
        "dflash_target_layer_ids",
        "is_dspark",
    ),
    GET_PARALLEL: (),
}
SERVER_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    RUN_SERVER: (
        "server_args",
        "tokenizer_manager",
        "template_manager",
        "port_args",
        "scheduler_infos",
        "subprocess_watchdog",
        "execute_warmup_func",
        "launch_callback",
    ),
}
"""Only where HTTP is answered: looking there imports all of it."""


def moved_targets(parameters: Mapping[str, tuple[str, ...]] = PARAMETERS) -> list[str]:
    """One sentence for each target that is not what the hooks were written for."""
    problems = []
    for target, expected in parameters.items():
        try:
            found = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
        except (ImportError, AttributeError) as error:
            problems.append(f"{target} is gone ({error})")
            continue
        if found != expected:
            problems.append(f"{target} takes ({', '.join(found)}), expected ({', '.join(expected)})")
    return problems

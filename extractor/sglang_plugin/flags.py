"""SGLang's own flags: which are not free, which say nothing about a state's bits, which a capture must record.

Every field of SGLang's `ServerArgs` can be given to the engine. Responsible for refusing those that the capture rests
on, each with its reason, and for the part of a running engine's settings that two captures must agree in. A flag that
nobody thought of is recorded as soon as somebody gives it. Leaves the options that have names of their own to
`settings`, defaults by device to `host`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hsstore.errors import UsageError

_SET = "the extraction sets it itself"
_MODEL = "the states would not be those of the model whose digest the store records"
_ONE_STAGE = "SGLang captures the states of layers only where one process holds all layers"
_ONE_MACHINE = "this engine lives on one machine"
_PLAIN = "the capture needs an engine that prefills and answers by itself"

RESERVED: Mapping[str, tuple[str, str]] = {
    "enable_return_aux_hidden_states": (_SET, ""),
    "return_aux_hidden_state_layer_ids": (_SET, "name the states with --layers"),
    "aux_hidden_state_capture": (_SET, "name the states with --layers"),
    "enable_return_hidden_states": (_SET, ""),
    "return_hidden_states_mode": (_SET, ""),
    "skip_tokenizer_init": (_SET, ""),
    "model_path": (_SET, "give --model"),
    "tokenizer_path": ("tokens are made before the engine sees them", "give --model"),
    "revision": ("the directory of the model decides", "give --model"),
    "dtype": (_SET, "give --dtype"),
    "trust_remote_code": (_SET, "give --trust-remote-code"),
    "tp_size": (_SET, "give tp=N"),
    "dp_size": (_SET, "give dp=N"),
    "allow_auto_truncate": ("a prompt that was cut has states for fewer tokens than the sample", "give --max-length"),
    "is_embedding": ("an embedding engine has no states of layers", ""),
    "max_queued_requests": ("SGLang would refuse samples while it is busy", "give in_flight=N"),
    "tokenizer_worker_num": ("requests are sent by one process", ""),
    "pp_size": (f"{_ONE_STAGE}, so pipeline parallelism is out", "give tp=N"),
    "pp_max_micro_batch_size": (_ONE_STAGE, "give tp=N"),
    "pp_async_batch_depth": (_ONE_STAGE, "give tp=N"),
    "nnodes": (_ONE_MACHINE, "start one extraction a machine"),
    "node_rank": (_ONE_MACHINE, "start one extraction a machine"),
    "dist_init_addr": (_ONE_MACHINE, "start one extraction a machine"),
    "use_ray": (_ONE_MACHINE, "start one extraction a machine"),
    "enable_lora": (_MODEL, "merge the adapter into the weights"),
    "lora_paths": (_MODEL, "merge the adapter into the weights"),
    "disaggregation_mode": (_PLAIN, ""),
    "encoder_only": (_PLAIN, ""),
    "dllm_algorithm": (_PLAIN, ""),
    "enable_multi_layer_eagle": ("drafting has no place in a capture", ""),
}
"""Flag → why it is not free, and what to do instead."""

_DRAFTING = ("speculative_", "decoupled_spec_", "spec_trace_")

RECORDED_ALWAYS = (
    "device",
    "attention_backend",
    "quantization",
    "kv_cache_dtype",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "page_size",
    "tp_size",
    "attn_dp_size",
    "ep_size",
    "moe_runner_backend",
    "disable_cuda_graph",
)
RECORDED_WHEN_ON = (
    # which kernels, and in which precision
    "prefill_attention_backend",
    "prefill_kv_cache_dequant_dtype",
    "model_impl",
    "enable_tf32_matmul",
    "bf16_gemm_backend",
    "fp8_gemm_runner_backend",
    "fp4_gemm_runner_backend",
    "triton_attention_reduce_in_fp32",
    "flashinfer_mla_disable_ragged",
    "disable_chunked_prefix_cache",
    "enable_fused_qk_norm_rope",
    "enable_deterministic_inference",
    "rl_on_policy_target",
    "enable_torch_compile",
    "dsa_prefill_backend",
    "dsa_topk_backend",
    "dsv4_prefill_backend",
    "dsv4_attn_backend",
    "mamba_ssm_dtype",
    "linear_attn_prefill_backend",
    # how a mixture of experts is computed
    "moe_a2a_backend",
    "flashinfer_mxfp4_moe_precision",
    "deepep_dispatcher_output_dtype",
    "disable_shared_experts_fusion",
    "enable_w4a4_mxfp4_megamoe",
    # in which order ranks add up
    "attn_cp_size",
    "dcp_size",
    "moe_dp_size",
    "moe_dense_tp_size",
    "disable_custom_all_reduce",
    "enable_nccl_nvls",
    "enable_symm_mem",
    "enable_torch_symm_mem",
    "enable_mscclpp",
    "enable_quant_communications",
    "enable_flashinfer_allreduce_fusion",
    "boundary_reduction",
    # how batches are formed
    "enable_two_batch_overlap",
    "enable_single_batch_overlap",
)
NEUTRAL = frozenset(
    {
        "disable_radix_cache",  # a prompt never shares rows with another: its salt is its own
        "dp_size",  # more copies of the same computation
        "load_balance_method",
        "mem_fraction_static",
        "max_total_tokens",
        "max_running_requests",
        "schedule_policy",
        "schedule_conservativeness",
        "context_length",  # how long a prompt may be; the scaling of positions is in the model's config
        "watchdog_timeout",
        "soft_watchdog_timeout",
        "sleep_on_idle",
        "random_seed",
        "base_gpu_id",
        "gpu_id_step",
        "numa_node",
        "gc_threshold",
        "nccl_port",
        "port",
        "host",
        "dist_timeout",
        "enable_p2p_check",
        "log_level",
        "log_level_http",
        "show_time_cost",
        "enable_metrics",
        "crash_dump_folder",
        "decode_log_interval",
        "disable_overlap_schedule",
        "scheduler_recv_interval",
        "sampling_backend",
        "grammar_backend",
        "weight_loader_disable_mmap",
        "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
        "weight_loader_drop_cache_after_load",
        "download_dir",
        "enable_multimodal",
        "skip_server_warmup",
    }
)
"""Flags that may differ between two runs of one capture: they decide when and where, not what is computed."""

_OFF: tuple[Any, ...] = (None, False, "", "auto", "none", "default", [], {})
_SIZES = ("attn_cp_size", "dcp_size", "moe_dp_size")  # 1 is off


def check_free(flags: Iterable[str]) -> None:
    """Raise `UsageError` for the first flag that is not the caller's to set."""
    for flag in flags:
        if flag.startswith(_DRAFTING):
            raise UsageError(f"the engine option {flag} is not free: drafting has no place in a capture")
        if flag in RESERVED:
            reason, hint = RESERVED[flag]
            raise UsageError(f"the engine option {flag} is not free: {reason}", hint=hint or "leave it out")


def check_values(flags: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a value with which a free flag would spoil the capture."""
    if flags.get("load_format") == "dummy":
        raise UsageError(f"the engine option load_format=dummy makes weights up: {_MODEL}", hint="leave it out")
    cache = flags.get("disable_radix_cache", True)
    if not isinstance(cache, bool):
        raise UsageError(f"disable_radix_cache is true or false, found {cache!r}")
    if flags.get("enable_mis"):
        raise UsageError("the engine option enable_mis joins prompts into one: their states would see each other")


def uses_dp_attention(flags: Mapping[str, Any]) -> bool:
    width = flags.get("attn_dp_size", 1)
    return bool(flags.get("enable_dp_attention")) or (isinstance(width, int) and width > 1)


def recorded(resolved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """What a capture record keeps of an engine's settings: all that can change a state's bits.

    `resolved` are the settings of the running engine, `given` the flags of the caller. A given flag that is in none of
    the lists above is kept too, as it was given.
    """
    kept = {name: resolved[name] for name in RECORDED_ALWAYS if resolved.get(name) is not None}
    kept |= {name: resolved[name] for name in RECORDED_WHEN_ON if _on(name, resolved.get(name))}
    asked = set(given) - NEUTRAL - set(RECORDED_ALWAYS) - set(RECORDED_WHEN_ON)
    kept |= {name: given[name] for name in asked if _on(name, given[name])}
    return {name: flag_text(value) for name, value in sorted(kept.items())}


def _on(name: str, value: Any) -> bool:
    return value not in _OFF and not (name in _SIZES and value == 1)


def flag_text(value: Any) -> str:
    """One spelling for a value, whatever type SGLang gives it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    return msgspec.json.encode(value, order="sorted", enc_hook=str).decode()

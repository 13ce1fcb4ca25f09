"""Options and layers: what is refused before an engine starts."""

from __future__ import annotations

import pytest

from extractor.sglang_plugin.flags import RESERVED, recorded
from extractor.sglang_plugin.settings import SglangSettings, layer_numbers, parse_options
from hsstore.errors import UsageError


def test_options_come_as_text_or_values() -> None:
    found = parse_options({"tp": "2", "chunked_prefill_size": -1, "mem-fraction-static": "0.7", "quantization": "fp8"})
    flags = {"mem_fraction_static": 0.7, "quantization": "fp8"}
    assert found == SglangSettings(tp=2, chunked_prefill_size=-1, flags=flags)
    assert parse_options({"enable_dp_attention": "true"}).flags == {"enable_dp_attention": True}


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_flags_the_capture_rests_on_are_refused(name: str) -> None:
    """With truncated prompts, for one, rows would be missing."""
    with pytest.raises(UsageError, match=name):
        parse_options({name: "x"})
    with pytest.raises(UsageError, match=name):
        parse_options({name.replace("_", "-"): "x"})


@pytest.mark.parametrize("name", ["speculative_algorithm", "speculative-draft-model-path", "speculative_num_steps"])
def test_drafting_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="drafting has no place"):
        parse_options({name: "x"})


def test_a_refusal_says_why_and_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"pp_size.*one process holds all layers") as caught:
        parse_options({"pp_size": 2})
    assert caught.value.hint == "give tp=N"
    with pytest.raises(UsageError, match="not be those of the model") as caught:
        parse_options({"enable_lora": "true"})
    assert "merge" in caught.value.hint


def test_the_prefix_cache_may_be_turned_on() -> None:
    assert parse_options({"disable_radix_cache": "false"}).flags == {"disable_radix_cache": False}
    with pytest.raises(UsageError, match="true or false"):
        parse_options({"disable_radix_cache": "off"})


def test_weights_that_are_made_up_are_refused() -> None:
    """The record would name the digest of weights that were never loaded."""
    with pytest.raises(UsageError, match="load_format=dummy"):
        parse_options({"load_format": "dummy"})
    assert parse_options({"load_format": "safetensors"}).flags == {"load_format": "safetensors"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": "two"}, "tp"),
        ({"device": "tpu"}, "tpu"),
        ({"in_flight": 0}, "in_flight"),
        ({"tp": "0"}, "at least 1"),
        ({"dp": "0"}, "at least 1"),
        ({"chunked_prefill_size": "0"}, "-1 for no chunks, found 0"),
        ({"enable_mis": "true"}, "see each other"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options(options)


def test_layers_come_in_ascending_order() -> None:
    """SGLang delivers ascending columns whatever order was asked: another order would swap states."""
    assert layer_numbers(("after_27", "after_2", "after_15", "final"), 30) == (2, 15, 27)
    assert layer_numbers(("after_1", "after_29", "final"), 30) == (1, 29)
    assert layer_numbers(("final",), 30) == ()


@pytest.mark.parametrize("name", ["after_0", "after_30", "after_31", "after_x", "2", "layer_2", "after_-1"])
def test_states_that_sglang_cannot_deliver_are_refused(name: str) -> None:
    """The last layer ends the engine at its first forward; the embedding is never offered."""
    with pytest.raises(UsageError, match="after_1 … after_29"):
        layer_numbers((name, "final"), 30)


RESOLVED = {
    "device": "cuda",
    "attention_backend": "fa3",
    "quantization": None,
    "chunked_prefill_size": 8192,
    "tp_size": 8,
    "dp_size": 2,
    "attn_cp_size": 1,
    "fp8_gemm_runner_backend": "auto",
    "disable_custom_all_reduce": True,
    "random_seed": 91234,
    "max_total_tokens": 481020,
}


def test_what_can_change_a_bit_is_recorded_and_nothing_else() -> None:
    """A resume on a node with more free memory is the same capture, one with other kernels is not."""
    expected = {
        "attention_backend": "fa3",
        "chunked_prefill_size": "8192",
        "device": "cuda",
        "disable_custom_all_reduce": "true",
        "tp_size": "8",
    }
    assert recorded(RESOLVED, {"mem_fraction_static": 0.8, "disable_radix_cache": False}) == expected
    assert recorded(RESOLVED | {"max_total_tokens": 7, "random_seed": 2, "dp_size": 4}, {}) == expected


def test_a_flag_that_nobody_thought_of_is_recorded_as_given() -> None:
    """SGLang has hundreds, and gets more: leaving one out would join two captures into one."""
    found = recorded(RESOLVED, {"json_model_override_args": {"b": 1, "a": [2]}, "new_kernel": True, "off": False})
    assert found["json_model_override_args"] == '{"a":[2],"b":1}'
    assert found["new_kernel"] == "true"
    assert "off" not in found

"""Options and layers: what is refused before an engine starts."""

from __future__ import annotations

import pytest

from extractor.sglang_plugin.settings import RESERVED, SglangSettings, layer_numbers, parse_options
from hsstore.errors import UsageError


def test_options_come_as_text_or_values() -> None:
    found = parse_options({"tp": "2", "chunked_prefill_size": -1, "mem-fraction-static": "0.7", "quantization": "fp8"})
    flags = {"mem_fraction_static": 0.7, "quantization": "fp8"}
    assert found == SglangSettings(tp=2, chunked_prefill_size=-1, flags=flags)
    assert parse_options({"enable_dp_attention": "true"}).flags == {"enable_dp_attention": True}


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_flags_the_capture_rests_on_are_refused(name: str) -> None:
    """With the prefix cache on, for one, rows would be missing."""
    with pytest.raises(UsageError, match=name):
        parse_options({name: "x"})
    with pytest.raises(UsageError, match=name):
        parse_options({name.replace("_", "-"): "x"})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tp": "two"}, "tp"), ({"device": "tpu"}, "tpu"), ({"in_flight": 0}, "in_flight"), ({"tp": "0"}, "at least 1")],
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

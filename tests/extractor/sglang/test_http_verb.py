"""`hsstore verifier` before anything is loaded: which flags are free, where it listens, what it says."""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from extractor.serving import run
from extractor.serving.settings import ServingSettings
from extractor.sglang_plugin import SPOOL_VARIABLE, hooks, routes, server
from extractor.sglang_plugin.protocol import Target
from extractor.sglang_plugin.server import ServerStart, forced, read_flags
from hsstore.cli import run as hsstore
from hsstore.errors import LockedError, UsageError


def start(*flags: str, **more: Any) -> ServerStart:
    values: dict[str, Any] = {
        "model_path": "/m",
        "architecture": "LlamaForCausalLM",
        "layers": (2, 4),
        "dtype": "float32",
        "trust_remote_code": False,
        "device": "cpu",
        "cpu_pool_tokens": 100,
        "host": "127.0.0.1",
        "port": 1,
        "radix_cache": False,
        "tokenizer": False,
        "token": "",
        "log_level": "warning",
        "flags": flags,
    }
    return ServerStart(**(values | more))


def parser() -> argparse.ArgumentParser:
    """A few of SGLang's flags, as its own parser has them."""
    parser = server._Parser()
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--disable-radix-cache", action="store_true")
    for name in ("--host", "--port", "--api-key", "--config", "--speculative-algorithm", "--nnodes"):
        parser.add_argument(name)
    return parser


def test_free_flags_go_through_under_all_their_names() -> None:
    raw, given = read_flags(parser(), start("--tensor-parallel-size=8", "--disable-radix-cache"))
    assert given == {"tp_size": 8, "disable_radix_cache": True}
    assert raw.model_path == "/m"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--speculative-alg", "EAGLE3"), "drafting has no place in a capture"),  # argparse takes abbreviations
        (("--pp-size=2",), "pipeline parallelism is out"),
        (("--load-format", "dummy"), "makes weights up"),
        (("--host", "0.0.0.0"), "--host is not free"),
        (("--port=1",), "--port is not free"),
        (("--api-key", "secret-key"), "--api-key is not free"),
        (("--config", "x.yaml"), "--config is not free"),
        (("--model-path", "/other"), "model_path is not free"),
        (("--no-such-flag",), "SGLang does not take these flags"),
        (("--tp-size", "many"), "SGLang does not take these flags"),
        (("--help",), "SGLang's own flags are many"),
    ],
)
def test_flags_that_the_capture_rests_on_are_refused(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        read_flags(parser(), start(*flags))
    assert "secret-key" not in str(caught.value)


def test_what_the_capture_rests_on_is_set_whatever_was_given() -> None:
    flags = forced(start(radix_cache=True, token="key"), "DFLASH", [1, 3])
    assert flags["return_aux_hidden_state_layer_ids"] == [1, 3]
    assert flags["enable_return_aux_hidden_states"] is True
    assert (flags["disable_radix_cache"], flags["skip_tokenizer_init"], flags["api_key"]) == (False, True, "key")
    assert forced(start(), "DFLASH", [1])["disable_radix_cache"] is True


@dataclass
class Arguments:
    """As SGLang's, with the defaults of its fields."""

    model_path: str = "/m"
    page_size: int = 1
    speculative_algorithm: str | None = None
    api_key: str | None = None
    ssl_keyfile: str | None = None
    moe_layout: list[int] = field(default_factory=list)


def test_a_server_knows_what_its_starter_chose() -> None:
    """What may bear on a state's bits is recorded, what says where it serves is not: above all no key."""
    given = Arguments("/x", 16, "DFLASH", "secret", "/key", [])
    found = routes.chosen(given)
    assert found.pop("moe_layout", []) == []
    assert found == {"page_size": 16}


@pytest.mark.parametrize(("spool", "ticket"), [("1:/x", ""), (None, "0" * 32)])
def test_rules_for_clients_hold_in_servers_only(
    monkeypatch: pytest.MonkeyPatch, spool: str | None, ticket: str
) -> None:
    monkeypatch.delenv(SPOOL_VARIABLE, raising=False)
    if spool:
        monkeypatch.setenv(SPOOL_VARIABLE, spool)
    with pytest.raises(ValueError, match="has a ticket"):
        hooks._refuse_foreign(Target(1, 1, 0, {"final": "/etc/passwd"}, {"final": -1}, ticket))


def test_other_machines_reach_it_only_with_a_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HSSTORE_TOKEN", raising=False)
    assert hsstore(["verifier", "--model", "/nowhere", "--host", "0.0.0.0"]) == 2
    assert "served only with a token" in capsys.readouterr().err
    assert ServingSettings(model="m", host="0.0.0.0", token="x").token == "x"
    assert "xyz123" not in repr(ServingSettings(model="m", token="xyz123"))
    assert hsstore(["verifier", "--model", "/nowhere"]) == 10


@pytest.mark.parametrize("size", ["nan", "inf", "1e300", "0", "-1"])
def test_the_spool_has_a_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsstore(["verifier", "--model", "/nowhere", "--spool-gb", size]) == 2
    assert "--spool-gb" in capsys.readouterr().err


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LockedError, match=f"port {port} of 127.0.0.1 is in use"):
            run.free_port("127.0.0.1", port)
    assert run.free_port("127.0.0.1", 0) > 0
    with pytest.raises(UsageError, match="cannot listen"):
        run.free_port("203.0.113.1", 0)


def test_urls_reach_the_server_from_here() -> None:
    assert run.url_of("0.0.0.0", 5) == "http://127.0.0.1:5"
    assert run.url_of("[::]", 5) == "http://[::1]:5"
    assert run.url_of("gpu1", 5) == "http://gpu1:5"


def test_the_model_is_read_as_extractions_read_it(tiny_model: Path, tmp_path: Path) -> None:
    """So that both sides compare the same digests; what cannot be read is said, not guessed."""
    served = routes.read_model(str(tiny_model))
    assert (served.path, served.architecture, served.unknown) == (str(tiny_model), "LlamaForCausalLM", "")
    assert len(served.config_sha256) == len(served.weights_sampled_sha256) == 64
    assert "no config.json" in routes.read_model(str(tmp_path)).unknown

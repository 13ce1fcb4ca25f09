"""What a worker refuses before it loads anything, how an actor tells of it, what the command makes of an address."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from extractor.fleet import command, worker
from extractor.fleet.actor import FleetActor, Status
from extractor.fleet.messages import Erred, Order, make_order, settings_of
from extractor.settings import Settings
from hsstore.errors import MissingExtraError, NotFoundError, UsageError
from hsstore.store import Store
from tests.stores import make_samples, make_store


def settings(directory: Path, **more: object) -> Settings:
    return Settings(model="hub/name", prompts=Path("chats.jsonl"), out=directory / "store", **more)  # type: ignore[arg-type]


def order(directory: Path, **more: object) -> Order:
    beacon = directory / "beacon"
    beacon.touch()
    return make_order(settings(directory, **more), beacon, "")


def changed(given: Order, **fields: object) -> Order:
    return msgspec.structs.replace(given, **fields)


def ended(actor: FleetActor) -> Status:
    """The last status, with every event that came before."""
    events = []
    end = time.monotonic() + 300
    while time.monotonic() < end:
        status = msgspec.json.decode(actor.status(), type=Status)
        events += status.events
        if status.exit_code is not None:
            return msgspec.structs.replace(status, events=events)
        time.sleep(0.05)
    pytest.fail("the worker does not end")


def test_an_order_says_the_same_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths do not depend on the working directory, and what only the command does is left out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    asked = settings(tmp_path, engine_options={"tp": "2"}, metrics_port=9000, log_json="-", retry_failed=True)
    sent = msgspec.json.encode(make_order(asked, tmp_path / "beacon", "uuid"))
    got = settings_of(msgspec.json.decode(sent, type=Order))
    assert (got.model, got.prompts) == ("hub/name", tmp_path / "chats.jsonl")
    assert (got.engine_options, got.resume) == ({"tp": "2"}, True)
    assert (got.metrics_port, got.log_json, got.retry_failed) == (None, None, False)
    assert not settings_of(order(tmp_path, append=True)).resume


def test_another_version_is_refused(tmp_path: Path) -> None:
    """Its settings may mean something else; the actor tells the worker's words, and that it ended."""
    actor = FleetActor(msgspec.json.encode(changed(order(tmp_path), version="0.0.1")))
    status = ended(actor)
    assert status.exit_code == 2
    (event,) = status.events
    assert isinstance(event, Erred)
    assert event.kind == "usage"
    assert "the command was given by 0.0.1" in event.message
    assert status.log == ""


def test_a_worker_that_fails_unexpectedly_says_so() -> None:
    """The supervisor counts it and starts another one; the run does not hang on it."""
    status = ended(FleetActor(b"no order at all"))
    assert status.exit_code == 1
    assert [type(event) for event in status.events] == [Erred]


def test_a_node_that_does_not_see_the_store_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make a store of its own at the same path, and nobody would notice."""
    monkeypatch.setattr(worker, "_SIGHT_SECONDS", 0.0)
    given = order(tmp_path)
    asked = settings_of(given)
    worker._refuse_blind(given, asked)
    with pytest.raises(NotFoundError, match="does not exist"):
        worker._refuse_blind(changed(given, store_uuid="a"), asked)
    make_store(asked.out, make_samples([5, 9])).close()
    with pytest.raises(UsageError, match=r"this node sees store .* the command a"):
        worker._refuse_blind(changed(given, store_uuid="a"), asked)
    with Store.open(asked.out) as store:
        worker._refuse_blind(changed(given, store_uuid=store.header.uuid), asked)
    with pytest.raises(UsageError, match="does not see"):
        worker._refuse_blind(changed(given, beacon=str(tmp_path / "gone")), asked)


def test_where_the_cluster_is_must_not_be_in_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started from a job of a cluster, a bare --ray would start a second one on the head."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(UsageError, match=r"RAY_ADDRESS is 10.0.0.1:6379"):
        command._address(settings(tmp_path, ray=""))
    assert command._address(settings(tmp_path, ray="auto")) == "auto"
    monkeypatch.delenv("RAY_ADDRESS")
    assert command._address(settings(tmp_path, ray="")) == "local"
    with pytest.raises(UsageError, match="exclude each other"):
        command._address(settings(tmp_path, ray="auto", shard="0/2"))
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"hsstore\[ray\]"):
        command._address(settings(tmp_path, ray="auto"))


@pytest.mark.parametrize(
    ("engine", "options", "gpus"),
    [
        ("sglang", {}, 1),
        ("sglang", {"tp": "4", "dp": "2"}, 8),
        ("sglang", {"tp": "4", "device": "cpu"}, 0),
        ("transformers", {}, 1),
        ("transformers", {"device": "cpu"}, 0),
        ("http", {}, 0),
    ],
)
def test_gpus_that_an_engine_takes(engine: str, options: dict[str, str], gpus: int) -> None:
    assert command._engine_gpus(engine, options) == gpus

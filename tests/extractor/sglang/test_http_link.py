"""One server: which road its rows take, and what is made of answers that do not hold."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from extractor.engines import http_link
from extractor.engines.base import Job
from extractor.engines.http_link import Link, ServerLost, Wanted, check_model, disagreements
from extractor.sglang_plugin.protocol import KEY, Ready, Receipt, ServedModel, ServerInfo, Target, WriteError
from hsstore.answers import TransientError
from hsstore.digest import crc32c
from hsstore.errors import IncompleteError, UsageError

ROW_BYTES = 8
LAYERS = ("after_2", "final")
INFO = ServerInfo(
    Ready("0.5.23", "float32", 100, {"device": "cpu"}),
    ServedModel("/m", "Llama", "c" * 64, "w" * 64),
    False,
    True,
    "auto",
    "default",
    1,
)


class Body(io.BytesIO):
    """What `http_fetch` uses of an answer."""

    @property
    def length(self) -> int:
        return len(self.getvalue()) - self.tell()


class FakeServer:
    """A client whose server is here: writes staged files when it sees them, else keeps the rows."""

    url = "http://fake"

    def __init__(self) -> None:
        self.sees = True
        self.says: list[WriteError] = []
        self.spoils = 0
        self.points: tuple[int, ...] = (2,)
        self.kept: dict[str, bytes] = {}
        self.dropped: list[str] = []
        self.targets: list[Target] = []
        self.fails: Callable[[Target], None] = lambda target: None

    def info(self) -> ServerInfo:
        return INFO

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        target = msgspec.convert(body["sampling_params"]["custom_params"][KEY], Target)
        assert body["cache_salt"] == body["rid"] == target.ticket
        assert body["return_hidden_states"] is True
        assert len(body["input_ids"]) == target.n_tokens
        self.targets.append(target)
        self.fails(target)
        states = {name: bytes([i + 1]) * (target.n_tokens * ROW_BYTES) for i, name in enumerate(target.files)}
        for name, path in target.files.items():
            if path and self.sees:
                with open(path, "r+b") as file:
                    file.seek(target.row * ROW_BYTES)
                    file.write(states[name])
        if not any(target.files.values()):
            self.kept[target.ticket] = b"".join(states.values())
        receipt = Receipt(target.n_tokens, {name: crc32c(rows) for name, rows in states.items()}, self.points)
        return {"finish_reason": {"type": "length"}, KEY: [msgspec.to_builtins(receipt)]}

    def rows(self, ticket: str, take: Callable[[Any], Any]) -> Any:
        rows = self.kept[ticket]
        if self.spoils:
            self.spoils -= 1
            rows = b"?" + rows[1:]
        return take(Body(rows))

    def write_errors(self, ticket: str) -> list[WriteError]:
        return [msgspec.structs.replace(error, request=self.targets[-1].request) for error in self.says]

    def drop(self, ticket: str) -> None:
        self.dropped.append(ticket)
        self.kept.pop(ticket, None)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_link, "PROOF_SECONDS", 0.05)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    directory = tmp_path / "store" / "staging" / "000000.0123abcd"
    directory.mkdir(parents=True)
    files = {name: str(directory / f"hidden.{name}") for name in LAYERS}
    for path in files.values():
        Path(path).write_bytes(bytes(10 * ROW_BYTES))
    return Job(source_index=7, input_ids=np.ones(3, np.int32), row=2, files=files)


def link_to(server: FakeServer, transfer: Any = "auto", confirm_seconds: float = 0.05) -> Link:
    wanted = Wanted(layers=LAYERS, points=(2,), row_bytes=ROW_BYTES, answer_seconds=1, confirm_seconds=confirm_seconds)
    return Link(server, wanted, transfer)  # type: ignore[arg-type]


def capture(link: Link, job: Job) -> Any:
    return link.capture(job, threading.Event())


def assert_in_place(job: Job) -> None:
    for i, path in enumerate(job.files.values()):
        expected = bytes(2 * ROW_BYTES) + bytes([i + 1]) * (3 * ROW_BYTES) + bytes(5 * ROW_BYTES)
        assert Path(path).read_bytes() == expected


def test_a_server_that_sees_the_files_writes_them(server: FakeServer, job: Job) -> None:
    """Proved once for a store, by a row of its own in a file of its own that does not stay."""
    link = link_to(server)
    for _ in range(2):
        assert capture(link, job).error == ""
        assert_in_place(job)
    probe, *real = server.targets
    assert (probe.n_tokens, len(real)) == (1, 2)
    assert not set(probe.files.values()) & set(job.files.values())
    assert real[0].files == job.files
    assert len(list(Path(job.files["final"]).parent.iterdir())) == len(LAYERS)
    assert server.dropped == []


@pytest.mark.parametrize("said", [True, False])
def test_a_server_that_does_not_see_them_is_fetched_from(
    server: FakeServer, job: Job, capsys: pytest.CaptureFixture[str], said: bool
) -> None:
    """It says so, or it writes to another directory of that name, as with a stale mount: then nothing arrives."""
    server.sees = False
    if said:
        server.says = [WriteError(0, "/x", errno.ENOENT, "No such file or directory")]
    link = link_to(server)
    assert capture(link, job).error == ""
    assert_in_place(job)
    why = "No such file" if said else "not what was captured"
    note = capsys.readouterr().err
    assert "its states are fetched over HTTP" in note
    assert why in note
    assert server.kept == {}  # freed when it has arrived


def test_shared_was_asked_for_and_is_not(server: FakeServer, job: Job) -> None:
    server.sees = False
    with pytest.raises(UsageError, match="does not write where this run stages") as caught:
        capture(link_to(server, "shared"), job)
    assert str(Path(job.files["final"]).parent.parent) in caught.value.hint


def test_a_directory_that_is_lost_later_is_proved_anew(server: FakeServer, job: Job) -> None:
    """A mount can go while the run goes on: the sample is sent again, and the rows then come over HTTP."""
    link = link_to(server)
    capture(link, job)
    server.sees = False
    for path in job.files.values():
        Path(path).write_bytes(bytes(10 * ROW_BYTES))
    with pytest.raises(ServerLost, match="not what was captured"):
        capture(link, job)
    assert server.dropped[-1] == server.targets[-1].ticket  # it must not write them late
    assert capture(link, job).error == ""
    assert_in_place(job)


def test_rows_that_come_torn_are_fetched_once_more(server: FakeServer, job: Job) -> None:
    link = link_to(server, "fetch")
    server.spoils = 1
    assert capture(link, job).error == ""
    assert_in_place(job)
    server.spoils = 2
    with pytest.raises(ServerLost, match="not those it captured"):
        capture(link, job)
    assert server.kept == {}


def test_a_server_that_takes_other_layers_now_is_lost(server: FakeServer, job: Job) -> None:
    """It was started anew under the same URL."""
    link = link_to(server, "fetch")
    server.points = (3,)
    with pytest.raises(ServerLost, match="other layers"):
        capture(link, job)
    with pytest.raises(UsageError, match=r"after layers \[3\], expected \[2\]"):
        link.handshake()


def test_a_request_without_an_answer_is_dropped(server: FakeServer, job: Job) -> None:
    """The server may still be at it, and another one does the sample meanwhile."""

    def fails(target: Target) -> None:
        raise TransientError("timed out")

    server.fails = fails
    with pytest.raises(ServerLost, match="timed out"):
        capture(link_to(server, "fetch"), job)
    assert server.dropped == [target.ticket for target in server.targets]


def test_an_abort_says_nothing_of_the_sample(server: FakeServer, job: Job) -> None:
    """It looks like a normal answer, but for its reason; a server that ends gives one for all that it has."""
    server.generate = lambda body: {"finish_reason": {"type": "abort", "message": "bye"}}  # type: ignore[method-assign]
    with pytest.raises(ServerLost, match="gave a request up: bye"):
        capture(link_to(server, "fetch"), job)


def test_the_handshake_goes_through_each_rank(server: FakeServer) -> None:
    link = link_to(server)
    assert link.handshake() == INFO
    (target,) = server.targets
    assert target.files == {"after_2": "", "final": ""}
    assert server.dropped == [target.ticket]


def test_every_difference_to_the_model_is_named() -> None:
    same = {"config_sha256": "c" * 64, "weights_sampled": "w" * 64, "dtype": "float32"}
    assert check_model(INFO, "u", **same) == []
    other = msgspec.structs.replace(INFO, load_format="dummy", capture=False)
    found = check_model(other, "u", config_sha256="d" * 64, weights_sampled="x" * 64, dtype="bfloat16")
    assert [text.split()[1] for text in found] == ["weights", "was", "config.json", "weights", "runs"]
    silent = msgspec.structs.replace(INFO, model=ServedModel("/m", unknown="a bucket"))
    assert check_model(silent, "u", **same) == []


def test_servers_that_differ_are_told_apart() -> None:
    assert disagreements(INFO, INFO) == []
    ready = msgspec.structs.replace(INFO.ready, version="0.6", flags={"device": "cuda", "tp_size": "2"})
    found = disagreements(INFO, msgspec.structs.replace(INFO, ready=ready))
    assert found == ["SGLang: 0.5.23 → 0.6", "device: cpu → cuda", "tp_size: none → 2"]


def test_a_spool_that_could_not_keep_rows_is_a_lost_server(server: FakeServer, job: Job) -> None:
    def rows(ticket: str, take: object) -> None:
        raise IncompleteError("the server could not keep the rows: the spool was full")

    server.rows = rows  # type: ignore[method-assign]
    with pytest.raises(ServerLost, match="spool was full"):
        capture(link_to(server, "fetch"), job)

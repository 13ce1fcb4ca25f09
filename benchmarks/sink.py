"""The road of captured rows from the scheduler's tensors to committed shards, without a model, against the disk alone.

    python benchmarks/sink.py [--turns 5] [--shards 6] [--rows 8192] [--hidden 7168] [--directory DIR]

A process takes the place of SGLang's: for every request it hands the tensors of its prefill chunks to the real
`Capture` and `RowWriter`. The real `SglangEngine` and `ShardRun` stage, send, confirm, check, seal and commit.
Timed from the first stage to the last commit, and interleaved with `dd conv=fsync` of the same bytes to the same disk.

Beside it, in the same turns, upstream's way through nested Python lists, with SGLang 0.5.23's own functions: `tolist`
and msgpack of its `BatchTokenIDOutput` in a scheduler process, one ZeroMQ hop (as without a detokenizer), decoding, a
tensor and a plain write without fsync in the caller's. It carries three of the four states and checks nothing.

The sink must have 0.8 of dd and 20 times the lists.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from seal import SAMPLE_TOKENS, STATES, dd, entries_of, make_sources, make_writer  # noqa: E402

from extractor.capture import ShardRun  # noqa: E402
from extractor.engines import sglang as engines  # noqa: E402
from extractor.prompts import Sample  # noqa: E402
from extractor.sglang_plugin import ERRORS_VARIABLE, hooks, protocol  # noqa: E402
from extractor.sglang_plugin.capture import Capture, state_bytes  # noqa: E402
from extractor.sglang_plugin.process import EngineProcess  # noqa: E402
from extractor.sglang_plugin.writer import RowWriter  # noqa: E402
from extractor.watch.events import Deaf  # noqa: E402
from hsstore.digest import crc32c  # noqa: E402
from hsstore.layout import assign  # noqa: E402
from hsstore.records import SampleEntry  # noqa: E402

POINTS = (2, 8, 13)
CHUNK_TOKENS = 1024
LIST_TOKENS, LIST_REQUESTS = 256, 4
SHARE, TIMES = 0.8, 20.0


# --- in the place of SGLang ---------------------------------------------------------------------------------------


def scheduler(fd: int, hidden: int) -> None:
    """Answers requests as the hooks do, from tensors that are there already."""
    import torch

    torch.set_num_threads(1)
    connection = Connection(fd)
    connection.recv_bytes()  # Start
    connection.send_bytes(msgspec.msgpack.encode(protocol.Ready("none", "bfloat16", 1 << 20, {})))
    aux, last = tensors(hidden)
    writer = RowWriter(hooks._report)
    while True:
        try:
            request = msgspec.msgpack.decode(connection.recv_bytes(), type=protocol.Request)
        except EOFError:
            return
        capture = Capture(request.target)
        for start in range(0, request.target.n_tokens, CHUNK_TOKENS):
            n_rows = min(CHUNK_TOKENS, request.target.n_tokens - start)
            capture.add(aux[:n_rows], last[:n_rows], writer.put)
        receipt = capture.receipt(prompt_tokens=request.target.n_tokens, cached_tokens=0, points=POINTS)
        connection.send_bytes(msgspec.msgpack.encode(protocol.Answer(request.target.request, receipt)))


def tensors(hidden: int, n_rows: int = CHUNK_TOKENS) -> tuple[Any, Any]:
    """What the logits processor of a prefill chunk delivers: [t, 3H] and [t, H]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(n_rows, (len(POINTS) + 1) * hidden, generator=generator).to(torch.bfloat16)
    return drawn[:, : len(POINTS) * hidden].contiguous(), drawn[:, len(POINTS) * hidden :].contiguous()


class SinkProcess(EngineProcess):
    """An engine process that is `scheduler` of this file."""

    hidden = 0

    def _spawn(self, theirs: socket.socket, log_level: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, __file__, "--scheduler", str(theirs.fileno()), "--hidden", str(self.hidden)],
                env=os.environ | {ERRORS_VARIABLE: str(self.directory / "errors")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )


@contextmanager
def sink_engine(directory: Path, hidden: int) -> Iterator[engines.SglangEngine]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 16,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    SinkProcess.hidden = hidden
    engines.EngineProcess = SinkProcess  # type: ignore[misc]
    engine = engines.SglangEngine(directory, layers=STATES, options={"device": "cpu"})
    yield engine
    engine.close()


class Losses(Deaf):
    """A watcher that lets nothing be lost in silence."""

    def sample_retried(self, source_index: int, reason: str) -> None:
        raise AssertionError(f"sample {source_index}: {reason}")


def sample_of(entry: SampleEntry) -> Sample:
    ids, mask = np.zeros(SAMPLE_TOKENS, np.int32), np.ones(SAMPLE_TOKENS, np.uint8)
    return Sample(source_index=entry.source_index, uid=entry.uid, input_ids=ids, loss_mask=mask, n_cut=0)


def sink(root: Path, engine: engines.SglangEngine, hidden: int, rows: int, n_shards: int) -> float:
    """Seconds to bring so many shards into a fresh store."""
    entries = entries_of(rows // SAMPLE_TOKENS * n_shards)
    writer = make_writer(root, entries, hidden, rows)
    samples = {e.source_index: sample_of(e) for e in entries}
    shards = dict(enumerate(tuple(placed) for placed in assign(entries, rows)))
    assert len(shards) == n_shards
    start = time.perf_counter()
    ShardRun(writer, shards, samples, engine, Losses()).run(list(shards))
    return time.perf_counter() - start


# --- upstream's way -----------------------------------------------------------------------------------------------


def list_scheduler(address: str, hidden: int) -> None:
    """Sends the states of a request as SGLang 0.5.23 does, LIST_REQUESTS times for each line that comes in."""
    io_struct, zmq = upstream()
    aux, _ = tensors(hidden, LIST_TOKENS)
    empty = {f.name: [] for f in msgspec.structs.fields(io_struct.BatchTokenIDOutput) if f.required}
    channel = zmq.Context().socket(zmq.PUSH)
    channel.connect(address)
    print("ready", flush=True)
    for _ in sys.stdin:
        for _ in range(LIST_REQUESTS):
            lists = aux.cpu().clone().tolist()  # batch_result_processor._append_prefill_hidden_states
            io_struct.sock_send(channel, io_struct.BatchTokenIDOutput(**empty | {"output_hidden_states": [lists]}))


def upstream() -> tuple[Any, Any]:
    import warnings

    warnings.simplefilter("ignore")
    import torch
    import zmq
    from sglang.srt.managers import io_struct

    torch.set_num_threads(1)
    return io_struct, zmq


class Lists:
    """A scheduler that sends lists, and this process as the caller that makes tensors and a file of them."""

    def __init__(self, directory: Path, hidden: int) -> None:
        self.io_struct, zmq = upstream()
        address = f"ipc://{directory}/lists"
        self.channel = zmq.Context().socket(zmq.PULL)
        self.channel.bind(address)
        self.path = directory / "lists.bin"
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--lists", address, "--hidden", str(hidden)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"

    def turn(self) -> float:
        """MB/s of bfloat16 states."""
        import torch

        assert self.process.stdin
        start, n_bytes = time.perf_counter(), 0
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        with open(self.path, "wb") as file:
            for _ in range(LIST_REQUESTS):
                [lists] = self.io_struct.sock_recv(self.channel).output_hidden_states
                states = torch.tensor(lists, dtype=torch.bfloat16)
                n_bytes += file.write(states.view(torch.uint8).numpy().data)
        return n_bytes / (time.perf_counter() - start) / 1e6

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)


# --- in turn ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """MB/s, and seconds of CPU per GB of the sink."""

    sink: float
    dd: float
    lists: float
    cpu: float


def turn(
    number: int,
    directory: Path,
    engine: engines.SglangEngine,
    shape: tuple[int, int, int],
    sources: list[Path],
    lists: Lists,
) -> Turn:
    n_bytes = sum(path.stat().st_size for path in sources)
    root, taken, cpu = directory / f"store-{number}", {}, 0.0
    for which in ("sink", "dd") if number % 2 else ("dd", "sink"):
        os.sync()  # nothing of what went before is left to either
        if which == "dd":
            taken[which] = dd(sources, directory)
        else:
            cpu = cpu_seconds(engine)
            taken[which] = sink(root, engine, *shape)
            cpu = cpu_seconds(engine) - cpu
            shutil.rmtree(root)
    found = Turn(
        sink=n_bytes / taken["sink"] / 1e6,
        dd=n_bytes / taken["dd"] / 1e6,
        lists=lists.turn(),
        cpu=cpu / n_bytes * 1e9,
    )
    print(f"turn {number + 1}: sink {found.sink:6.0f} MB/s, {found.cpu:.2f} s of CPU per GB,", end=" ")
    print(f"dd {found.dd:6.0f} MB/s, share {found.sink / found.dd:.2f}, lists {found.lists:.1f} MB/s", flush=True)
    return found


def cpu_seconds(engine: engines.SglangEngine) -> float:
    """Of this process and of that in the place of SGLang, user and system."""
    here, there = os.times(), Path(f"/proc/{engine._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return here.user + here.system + (int(there[11]) + int(there[12])) / os.sysconf("SC_CLK_TCK")


# --- what a byte goes through -------------------------------------------------------------------------------------


def steps_of_sink(directory: Path, hidden: int) -> dict[str, float]:
    """GB/s of one thread in each step, the best of some tries."""
    aux, last = tensors(hidden)
    data = state_bytes(aux, last, 0)
    path = directory / "step"
    path.write_bytes(data.data)
    buffer = bytearray(data.nbytes)

    def write() -> None:
        with open(path, "r+b", buffering=0) as file:
            file.truncate(0)
            file.truncate(data.nbytes)
            file.write(data.data)

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            file.readinto(buffer)

    calls: dict[str, Callable[[], object]] = {
        "columns out of the chunk (scheduler)": lambda: state_bytes(aux, last, 0),
        "CRC32C (scheduler; again when confirmed)": lambda: crc32c(data.data),
        "write to the page cache (writer thread)": write,
        "read back (once when confirmed, once when sealed)": read,
    }
    return {name: max(data.nbytes / seconds(call) / 1e9 for _ in range(5)) for name, call in calls.items()}


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report(turns: list[Turn], steps: dict[str, float], hidden: int) -> int:
    print("one thread, alone, in the steps that have no other benchmark:")
    for name, rate in steps.items():
        print(f"  {rate:6.1f} GB/s  {name}")
    ours, copy, lists = (statistics.harmonic_mean(getattr(t, name) for t in turns) for name in ("sink", "dd", "lists"))
    cpu = statistics.median(t.cpu for t in turns)
    print(f"{len(turns)} turns, all bytes over all seconds:")
    print(f"  sink {ours:.0f} MB/s, {ours * 1e6 / (len(STATES) * 2 * hidden):.0f} tokens/s,", end=" ")
    print(f"{cpu:.2f} s of CPU per GB on {os.cpu_count()} cores")
    print(f"  {ours / copy:.2f} of dd conv=fsync, {copy:.0f} MB/s (must be {SHARE} or more)")
    print(f"  {ours / lists:.0f} x upstream's lists, {lists:.1f} MB/s (must be {TIMES:.0f} or more)")
    return 0 if ours >= SHARE * copy and ours >= TIMES * lists else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--shards", type=int, default=6, help="of a turn; a shard is sealed while the next comes in")
    parser.add_argument("--rows", type=int, default=8192, help="of a shard")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--scheduler", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lists", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scheduler is not None:
        scheduler(options.scheduler, options.hidden)
        return 0
    if options.lists is not None:
        list_scheduler(options.lists, options.hidden)
        return 0
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((SAMPLE_TOKENS, options.hidden), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        sources = make_sources(directory / "sources", options.shards * options.rows * options.hidden * 2, rows)
        lists = Lists(directory, options.hidden)
        with sink_engine(directory / "model", options.hidden) as engine:
            shape = (options.hidden, options.rows, options.shards)
            turns = [turn(n, directory, engine, shape, sources, lists) for n in range(options.turns)]
        lists.close()
        steps = steps_of_sink(directory, options.hidden)
    return report(turns, steps, options.hidden)


if __name__ == "__main__":
    sys.exit(main())

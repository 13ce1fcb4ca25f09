"""Copies a store again and again, killed at its first step, at a later one, …; run as a program, which forks:
`python -m tests.hsstore.killed_copy SOURCE SCRATCH STRIDE`, with stride 1 at every step.

Prints a JSON object with counts; ends with an assertion that failed when a state is not as promised.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsstore import copying, destination, manifest, paths
from hsstore.copying import Copy
from hsstore.errors import NotFoundError
from hsstore.places import open_place
from hsstore.store import Store
from hsstore.verify import Verifier

STEPS = ("pwrite", "fsync", "link", "rename", "chmod", "unlink", "mkdir", "rmdir", "open")


def copy(source: Path, out: Path) -> Copy:
    work = Copy(open_place(source), open_place(out), jobs=1)
    list(work.events())
    return work


def killed_at(step: int, source: Path, out: Path) -> bool:
    """Whether a child was killed before that step; False when it had fewer."""
    child = os.fork()
    if child == 0:
        try:
            arm(step)
            copy(source, out)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def arm(step: int) -> None:
    """Let this process kill itself before its step-th change to the disk."""
    left = [step]

    def counted(real: Callable[..., Any], opens: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not opens or (len(arguments) > 1 and arguments[1] & (os.O_CREAT | os.O_WRONLY)):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return call

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name), name == "open"))


def look(out: Path) -> str:
    """What a killed copy left, in a word: raises unless it is sound."""
    try:
        header = manifest.load_header(out)
    except NotFoundError:
        assert not out.exists(), f"{out} is there and is no store: {os.listdir(out)}"
        return "nothing"
    with Store.open(out):
        pass
    damage = [str(f) for f in Verifier(out, "full").findings() if f.severity == "damage"]
    assert damage == [], damage
    staged = sorted(p.relative_to(out / paths.STAGING).name for p in (out / paths.STAGING).rglob("*"))
    return f"{len(manifest.load_records(out, header))} {len(staged)}"


def main(source: Path, scratch: Path, stride: int) -> None:
    expected = copying.state_of(open_place(source)).manifest_id()
    out, states, step = scratch / "killed", [], 1
    while killed_at(step, source, out):
        states.append(look(out))
        work = copy(source, out)
        assert work.summary.manifest_id == expected, (step, work.summary)
        if step % 20 == 1:
            look(out)
        shutil.rmtree(out)
        for garbage in scratch.glob(".killed.*"):
            shutil.rmtree(garbage)
        step += stride
    # And kill after kill without a whole run between: what each left is the start of the next.
    in_a_row = 0
    shutil.rmtree(out)
    while killed_at(60 + in_a_row, source, out):
        states.append(look(out))
        in_a_row += 1
    assert destination.state_of(open_place(out)).manifest_id() == expected
    counts = {"kills": len(states), "in_a_row": in_a_row, "without_store": states.count("nothing")}
    print(json.dumps(counts | {"states": len(set(states))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

"""Runs `hsstore extract` many times, killed after a while each: imports torch once, then forks for every run.

Reads one JSON object a line, `{"arguments": [...], "seconds": 1.5}`, and answers the exit status of the child (−9 when
it was killed). Leaves judging the store to the test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any


def main() -> None:
    import torch

    from extractor.quiet import transformers
    from hsstore.cli import run

    torch.set_num_threads(1)
    library = transformers()
    _ = library.AutoModelForCausalLM, library.AutoTokenizer
    import transformers.models.llama.modeling_llama

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os._exit(run(order["arguments"]))
        print(json.dumps({"status": wait(pid, order)}), flush=True)


def wait(pid: int, order: dict[str, Any]) -> int:
    """Exit status of the child, killed when its seconds are over or the file `until` is there."""
    end = time.monotonic() + (order.get("seconds") or 600.0)
    until = order.get("until")
    while time.monotonic() < end and not (until and os.path.exists(until)):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.Signals[order.get("kill", "SIGKILL")])
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()

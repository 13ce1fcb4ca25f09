"""Let a model answer prompts itself: JSON lines of `messages` in, the same with the answers out.

    python examples/demo/answer.py --model DIRECTORY --prompts examples/demo/prompts.jsonl --out answers.jsonl

A drafter learns to guess what its verifier would say, so the verifier's own words are the best training data. Each user
turn of a line is answered in order. Responsible for an output that is whole or not there: whole batches go to a hidden
file beside it, from which an interrupted run goes on. Leaves hidden states to `hsstore extract`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

Message = dict[str, str]
Conversation = list[Message]
PROGRESS_SECONDS = 15.0


class Model:
    """The model and its tokenizer; `generate` answers one batch."""

    def __init__(self, directory: Path, *, max_new_tokens: int, temperature: float, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries, about each other
            from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList
            from transformers.utils import logging

            logging.set_verbosity_error()
            logging.disable_progress_bar()
            self._tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.bfloat16, attn_implementation="eager"
            ).eval()
        self._torch, self._criteria = torch, StoppingCriteriaList
        self._options = {
            "max_new_tokens": max_new_tokens,
            "do_sample": True,
            "temperature": temperature,
            "top_k": 0,
            "top_p": 1.0,
            "pad_token_id": self._tokenizer.pad_token_id,
        }

    def generate(self, conversations: list[Conversation], progress: Progress, *, seed: int) -> list[str]:
        """The next answer of each. The same seed, batch and number of threads give the same words."""
        torch, tokenizer = self._torch, self._tokenizer
        texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        n_prompt = batch.input_ids.shape[1]

        def tick(ids: Any, _scores: Any, **_: Any) -> Any:
            progress.step(ids.shape[1] - n_prompt, int((ids[:, n_prompt:] != tokenizer.eos_token_id).sum()))
            return torch.zeros(len(ids), dtype=torch.bool)

        torch.manual_seed(seed)
        with torch.inference_mode():
            ids = self._model.generate(**batch, **self._options, stopping_criteria=self._criteria([tick]))
        answers = ids[:, n_prompt:]
        progress.add(int((answers != tokenizer.eos_token_id).sum()))
        return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


class Progress:
    """A line on stderr now and then."""

    def __init__(self, n_conversations: int) -> None:
        self.total, self.done, self.tokens = n_conversations, 0, 0
        self.start = self._last = time.monotonic()

    def step(self, n_steps: int, n_tokens: int) -> None:
        if time.monotonic() - self._last >= PROGRESS_SECONDS:
            self.say(f"token {n_steps} of the next answers", self.tokens + n_tokens)

    def add(self, n_tokens: int) -> None:
        self.tokens += n_tokens

    def say(self, what: str, n_tokens: int) -> None:
        self._last = time.monotonic()
        rate = n_tokens / (self._last - self.start)
        print(
            f"answers: {self.done}/{self.total} conversations · {what} · {rate:.0f} tok/s", file=sys.stderr, flush=True
        )


def answer_all(model: Model, conversations: list[Conversation], progress: Progress, *, seed: int) -> list[Conversation]:
    """Each conversation with an answer after every user turn."""
    waiting = [list(c) for c in conversations]
    spoken: list[Conversation] = [[] for _ in conversations]
    while turn := [i for i, messages in enumerate(waiting) if messages]:
        for i in turn:
            spoken[i].append(waiting[i].pop(0))
            while spoken[i][-1]["role"] != "user":
                spoken[i].append(waiting[i].pop(0))
        answers = model.generate([spoken[i] for i in turn], progress, seed=seed)
        for i, text in zip(turn, answers, strict=True):
            spoken[i].append({"role": "assistant", "content": text})
    return spoken


def read_prompts(file: Path) -> list[Conversation]:
    """The conversations of a file; ends the program at a line that is none."""
    conversations = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            messages = json.loads(line)["messages"]
            roles = [m["role"] for m in messages]
            good = all(isinstance(m["content"], str) for m in messages) and set(roles) <= {"system", "user"}
        except (ValueError, TypeError, KeyError):
            good, roles = False, []
        if not good or roles[-1:] != ["user"]:
            sys.exit(f"error: {file} line {number}: expected messages of system and user that end with a user turn")
        conversations.append(messages)
    return conversations


def whole_batches(part: Path, batch: int) -> int:
    """How many lines of an interrupted run can be kept; cuts the file to them."""
    lines = part.read_bytes().splitlines(keepends=True) if part.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    kept = whole[: len(whole) // batch * batch]
    part.write_bytes(b"".join(kept))
    return len(kept)


def run(arguments: argparse.Namespace) -> None:
    conversations = read_prompts(arguments.prompts)
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = [arguments.prompts.read_text(), str(arguments.model), *map(str, vars(arguments).values())]
    part = out.with_name(f".{out.name}.{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]}.part")
    done = whole_batches(part, arguments.batch)
    model = Model(
        arguments.model,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        threads=arguments.threads,
    )
    progress = Progress(len(conversations))
    with open(part, "a", encoding="utf-8") as file:
        for first in range(done, len(conversations), arguments.batch):
            progress.done = first
            batch = conversations[first : first + arguments.batch]
            for messages in answer_all(model, batch, progress, seed=arguments.seed + first):
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            progress.done += len(batch)
            progress.say(f"{progress.tokens:,} tokens", progress.tokens)
    part.rename(out)
    print(f"{out}: {len(conversations)} conversations answered")


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a model answer prompts itself.")
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines of messages, system and user only")
    parser.add_argument("--out", type=Path, required=True, help="the same lines with the answers")
    parser.add_argument("--max-new-tokens", type=int, default=112, help="longest answer (default 112)")
    parser.add_argument("--batch", type=int, default=30, help="conversations at once (default 30)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sampling (default 0.7)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    # Threads wait for each other: on two busy cores two of them gave 7 tok/s where one gave 36.
    parser.add_argument("--threads", type=int, default=1, help="of torch; decides the words too (default 1)")
    run(parser.parse_args())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

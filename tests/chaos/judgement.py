"""The judgement over a store that a disturbed extraction says is complete."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsstore import manifest, paths
from hsstore.store import Store
from hsstore.verify import Verifier

if TYPE_CHECKING:
    from tests.chaos.extraction import Extraction

ROOT = Path(__file__).parents[2]


def shards(out: Path) -> int:
    """How many the store will have."""
    return sum(len(layout.shards) for layout in manifest.load_layouts(out, manifest.load_header(out)))


def damage(out: Path, depth: Any) -> list[str]:
    """What a verification finds wrong; nothing when there is no store yet."""
    if not (out / paths.HEADER).exists():
        return []
    return [str(finding) for finding in Verifier(str(out), depth).findings() if finding.severity == "damage"]


def judge(done: Extraction) -> None:
    """Every line accounted for, every sample once and with the tokens of its line, everything whole."""
    outcome, settings, report = done.outcome, done.settings, done.report
    counts = {name: outcome[name] for name in ("written", "failed", "skipped", "remaining", "input")}
    report.balances.append(
        f"written {counts['written']} + failed {counts['failed']} + skipped {counts['skipped']} "
        f"= input {counts['input']} in {outcome['shards']} shards"
    )
    expected = {
        "written": settings.samples - len(done.bad),
        "failed": 0,
        "skipped": len(done.bad),
        "remaining": 0,
        "input": settings.samples,
    }
    if counts != expected:
        done.violation(f"it says {counts}, expected {expected}")
    report.tokens += outcome["tokens"]
    _judge_samples(done)
    _verify(done, "manifest", str(done.out), "--full")
    if settings.states:
        _verify(done, "states", str(done.out), "--model", str(settings.model))


def _judge_samples(done: Extraction) -> None:
    expected = uids(done)
    with Store.open(done.out) as store:
        found: dict[int, list[str]] = {}
        for record in store_records(done.out):
            for entry in record.samples:
                if entry.ok:
                    found.setdefault(entry.source_index, []).append(entry.uid)
        listed = sorted(int(i) for i, flag in zip(store.index.source_index, store.index.flags, strict=True) if not flag)
    twice = {index: who for index, who in found.items() if len(who) > 1}
    if twice:
        done.violation(f"{len(twice)} samples are there more than once, sample {min(twice)} among them")
    if listed != sorted(expected):
        done.violation(f"{len(listed)} samples are listed, expected {len(expected)}")
    wrong = [index for index, uid in expected.items() if found.get(index, [""])[0] != uid]
    if wrong:
        done.violation(f"{len(wrong)} samples have not the tokens of their line, line {wrong[0] + 1} among them")


def store_records(out: Path) -> Any:
    header = manifest.load_header(out)
    dead = manifest.quarantined(manifest.load_tombstones(out, header))
    return [record for record in manifest.load_records(out, header) if record.shard not in dead]


def uids(done: Extraction) -> dict[int, str]:
    """By line number from 0: digest of ids and mask, tokenized here and now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from extractor.chat import ChatTokenizer
        from extractor.prompts import PromptOptions, read_prompts
        from extractor.verifier import read_verifier

        verifier = read_verifier(str(done.settings.model))
        options = PromptOptions(vocab_size=verifier.vocab_size, max_length=min(4096, verifier.context_tokens or 4096))
        tokenizer = cache(lambda: ChatTokenizer.load(verifier.path))
        return {s.source_index: s.uid for s in read_prompts(done.prompts, options, tokenizer).samples}


def _verify(done: Extraction, *arguments: str) -> None:
    command = [sys.executable, "-m", "hsstore.cli", "verify", *arguments, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=done.environment())
    what = f"verify {arguments[0]}{' --full' if '--full' in arguments else ''}"
    if ended.returncode:
        done.violation(f"{what} ended with {ended.returncode}: {ended.stdout[-600:]} {ended.stderr[-600:]}")
        return
    json.loads(ended.stdout.splitlines()[-1])  # the summary
    done.report.verified.append(f"{what} clean")

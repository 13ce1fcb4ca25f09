"""All checks of some samples that need no store, and one verdict out of them.

The forward is the stronger witness: what it finds right the head alone cannot make wrong, and what both find is said
once. Only the forward can tell a head that predicts nothing because its weights are random from ids that no such model
would expect. Leaves samples, records and digests to `verification`, the first samples of a run to `first`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from extractor.foreign import finalnorm
from extractor.foreign.finalnorm import FinalNorm
from extractor.states import agreement, norm, reference, statistics
from extractor.states.agreement import Agreement, Neighbours
from extractor.states.device import check_device
from extractor.states.errors import to_bfloat16
from extractor.states.finding import Finding, damage, merged, note
from extractor.states.head import Head, load_head
from extractor.states.layers import Comparison, Forward
from extractor.states.norm import Lengths
from extractor.states.reference import Reference
from extractor.states.sample import Checked
from extractor.verifier import Verifier
from hsstore.errors import MissingExtraError, UsageError
from hsstore.records import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    positions: int = 256
    """Tokens of a sample that the head is asked about."""
    no_forward: str = ""
    """Why there is no forward, "" for one."""
    device: str = "cpu"
    trust_remote_code: bool = False
    memory_share: float = 1.0
    """Of the free memory, what the forward may take."""
    threads: int | None = None
    """None: as many as cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was checked and what came out."""

    lengths: Lengths | None
    agreement: Agreement | None
    forward: Forward | None
    findings: tuple[Finding, ...]

    @property
    def is_decided(self) -> bool:
        """Whether anything was compared with the verifier at all."""
        head = self.agreement is not None and self.agreement.is_decided
        return self.forward is not None or head or any(f.severity == "damage" for f in self.findings)

    @property
    def sound(self) -> bool:
        return not any(f.severity == "damage" for f in self.findings)


def check(
    samples: Sequence[Checked], verifier: Verifier, capture: Capture, options: Options, neighbours: Neighbours
) -> Report:
    """The sizes of capture and verifier must agree. Raises `MissingExtraError` without torch or safetensors."""
    check_device(options.device)
    findings = [*_foreign_ids(samples, verifier), *statistics.not_finite(samples)]
    bad = {i for f in findings for i in f.samples}
    good = [s for s in samples if s.source_index not in bad]
    with reference.threads(options.threads):
        final_norm, head, notes = _tensors(verifier, capture)
        findings += notes
        lengths = norm.measure(good, final_norm) if final_norm and "final" in capture.layers else None
        asked = _ask(good, head, final_norm, capture, options) if head else None
        forward, said = _forward(good, verifier, capture, final_norm, options)
        findings += said
        if head is not None and asked is None and good:
            findings.append(note("skipped", "head: no checked sample has a next token"))
        by_head = agreement.judge(asked, capture.norm, neighbours) if asked else []
        known = any(f.kind == "norm" for f in by_head)  # said with figures already
        by_head += [f for f in norm.judge(lengths, capture.norm) if not known or f.samples] if lengths else []
        if asked and forward and head and by_head:
            by_head = _without_own(by_head, good, forward, head, final_norm, options, neighbours)
    findings += _reconciled(by_head, forward)
    if asked and (why := asked.undecided):
        findings.append(note("undecided", f"{why}; the forward decides" if forward else why, "final"))
    return Report(lengths=lengths, agreement=asked, forward=forward, findings=tuple(merged(findings)))


def _foreign_ids(samples: Sequence[Checked], verifier: Verifier) -> list[Finding]:
    what = f"ids outside the model's vocabulary of {verifier.vocab_size}: the ids are of another tokenizer"
    return [
        damage("tokenizer", what, samples=(s.source_index,))
        for s in samples
        if s.n_tokens and not 0 <= int(s.input_ids.min()) <= int(s.input_ids.max()) < verifier.vocab_size
    ]


def _tensors(verifier: Verifier, capture: Capture) -> tuple[FinalNorm | None, Head | None, list[Finding]]:
    """Final norm and head as far as they are known here, and what cannot be checked without them."""
    if "final" not in capture.layers:
        return None, None, [note("skipped", "head: the store does not hold `final`")]
    final_norm, head, notes = None, None, []
    try:
        final_norm = finalnorm.of_model(verifier)
    except MissingExtraError:
        raise
    except UsageError as error:
        notes.append(note("skipped", f"other sides of the norm: {error.message}"))
    try:
        head = load_head(verifier)
    except UsageError as error:
        notes.append(note("skipped", f"head: {error.message}"))
    if final_norm is None and capture.norm == "pre" and head is not None:
        notes.append(note("skipped", "head: final is before a norm that is not known here"))
        head = None
    return final_norm, head, notes


def _ask(
    samples: Sequence[Checked], head: Head, final_norm: FinalNorm | None, capture: Capture, options: Options
) -> Agreement | None:
    return agreement.ask(samples, head, final_norm, capture.norm, options.positions)


def _forward(
    samples: Sequence[Checked], verifier: Verifier, capture: Capture, final_norm: FinalNorm | None, options: Options
) -> tuple[Forward | None, list[Finding]]:
    if not samples:
        return None, [note("skipped", "forward: no sample is left to compare")]
    why = options.no_forward or reference.no_room(verifier, options.device, options.memory_share)
    if why:
        return None, [note("skipped", f"forward: {why}")]
    try:
        with Reference(verifier, device=options.device, trust_remote_code=options.trust_remote_code) as running:
            compared = Comparison(capture, final_norm, verifier.n_layers).run(running, samples)
    except UsageError as error:
        return None, [note("skipped", f"forward: {error.message}")]
    return compared, list(compared.findings)


def _without_own(
    by_head: list[Finding],
    samples: Sequence[Checked],
    forward: Forward,
    head: Head,
    final_norm: FinalNorm | None,
    options: Options,
    neighbours: Neighbours,
) -> list[Finding]:
    """Without what the head finds in transformers' own states of these ids as well: that is no fault of stored ones.

    Ids which the model does not expect at all, though the states are theirs, are another tokenizer's.
    """
    theirs = [replace(s, states={"final": _bits(forward.final[s.source_index])}) for s in samples]
    own = agreement.ask(theirs, head, final_norm, "post", options.positions)
    if own is None or own.is_flat:
        return [f for f in by_head if f.kind == "norm"]
    shown = {(f.kind, f.samples) for f in agreement.judge(own, "post", neighbours)}
    rest = [f for f in by_head if (f.kind, f.samples) not in shown]
    if forward.failed or not own.is_hopeless:
        return rest
    base = f"{own.n} {own.over}: transformers' own {own.declared:.1%}, chance {own.chance:.1%}"
    what = f"the states are those of these ids, but the model does not expect such ids ({base}): another tokenizer's"
    return [*(f for f in rest if f.kind != "agreement"), damage("tokenizer", what, "final")]


def _reconciled(by_head: list[Finding], forward: Forward | None) -> list[Finding]:
    """Without what the forward says too, or knows better."""
    if forward is None or not any(layer.state == "final" for layer in forward.layers):
        return by_head
    named = {f.kind for f in forward.findings if "final" in f.states} - {"weights"}
    out = []
    for one in by_head:
        if one.severity == "note" or one.kind == "tokenizer":
            out.append(one)
        elif not forward.failed or (one.samples and not forward.failed & set(one.samples)):
            seen = f"the head alone would say: {one.detail}; the forward of the same ids finds them right"
            out.append(replace(one, severity="note", kind="undecided", detail=seen))
        elif one.kind not in named and not (named and one.kind == "agreement"):
            out.append(one)
    return out


def ids_of(samples: Sequence[Checked]) -> Mapping[int, npt.NDArray[np.int32]]:
    """Neighbours for a caller that has no store: the checked samples themselves."""
    return {s.source_index: s.input_ids for s in samples}


def _bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (to_bfloat16(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)

"""From a prompts file to samples: ids and loss mask of every usable line, a reason for every other one.

One JSON object a line, in one of four spellings, the first of them that is there counts: `input_ids` + `loss_mask`,
`messages`, `conversations` (ShareGPT), `text`. The file is read once, as a stream (`.gz` too); a bad line is recorded
with its number and reason and never ends the run. Leaves to `extractor.messages` and `extractor.chat` what a
conversation becomes, to `hsstore.layout` where a sample goes.

Letters: T tokens of a sample.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from extractor.chat import ChatTokenizer, Tokens
from extractor.messages import chat_messages
from extractor.reasons import REASONS, Rejected, Rejection
from extractor.words import counted
from hsstore.digest import sample_uid
from hsstore.errors import NotFoundError, UsageError
from hsstore.records import InputSummary

_MIN_TOKENS = 2
_INT32 = 1 << 31
_FILE_HINT = "give --prompts a JSON-lines file that this user may read"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One usable line."""

    source_index: int
    """0-based line of the prompts file."""
    uid: str
    input_ids: npt.NDArray[np.int32]
    """[T]"""
    loss_mask: npt.NDArray[np.uint8]
    """[T], 1 = assistant token."""
    n_cut: int
    """Tokens beyond the length limit that were left off."""
    id: str = ""
    """The line's own `id`, "" without one; for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Settings that decide which ids a line becomes; they are part of the store's layout record."""

    vocab_size: int
    max_length: int
    overlong: Literal["truncate", "drop"] = "truncate"
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Extra variables of the chat template, e.g. `enable_thinking`."""

    def as_text(self) -> dict[str, str]:
        options = {"max_length": str(self.max_length), "overlong": self.overlong}
        for name, value in sorted(self.template_arguments.items()):
            options[f"template.{name}"] = msgspec.json.encode(value).decode()
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A prompts file, read."""

    samples: list[Sample]
    rejections: list[Rejection]
    summary: InputSummary

    @property
    def n_tokens(self) -> int:
        return sum(len(s.input_ids) for s in self.samples)

    @property
    def longest(self) -> int:
        return max((len(s.input_ids) for s in self.samples), default=0)

    @property
    def n_truncated(self) -> int:
        return sum(s.n_cut > 0 for s in self.samples)


def read_prompts(
    path: Path,
    options: PromptOptions,
    tokenizer: Callable[[], ChatTokenizer],
    on_bytes: Callable[[int], None] = lambda _n: None,
) -> Prompts:
    """Read the whole file. `tokenizer` is called for lines that need one only; `on_bytes` hears how far the reading is.

    Raises `NotFoundError` for a missing file, `UsageError` for one that gives no sample at all.
    """
    samples: list[Sample] = []
    rejections: list[Rejection] = []
    n_lines = 0
    with LineSource(path) as source:
        for n_lines, line in enumerate(source, 1):
            try:
                samples.append(_sample(line, n_lines - 1, options, tokenizer))
            except Rejected as r:
                rejections.append(Rejection(line=n_lines, reason=r.reason, detail=r.detail))
            on_bytes(source.n_bytes)
        summary = InputSummary(
            name=path.name,
            bytes=source.n_bytes,
            sha256=source.sha256.hexdigest(),
            lines=n_lines,
            rejected=dict(sorted(Counter(r.reason for r in rejections).items())),
            options=options.as_text(),
        )
    if not samples:
        raise UsageError(
            _nothing_usable(path, n_lines, rejections), hint="see `hsstore extract --help` for the spellings"
        )
    return Prompts(samples=samples, rejections=rejections, summary=summary)


def _nothing_usable(path: Path, n_lines: int, rejections: list[Rejection]) -> str:
    if not n_lines:
        return f"{path} is empty: expected one JSON object a line"
    first = next((r for r in rejections if r.reason != "blank_line"), rejections[0])
    because = f"{REASONS[first.reason]}{f' [{first.detail}]' if first.detail else ''}"
    return f"none of the {counted(n_lines, 'line')} of {path} gives a sample; line {first.line}: {because}"


def _sample(line: bytes, source_index: int, options: PromptOptions, tokenizer: Callable[[], ChatTokenizer]) -> Sample:
    document = decode_line(line)
    tokens = _tokens(document, tokenizer)
    n = len(tokens.ids)
    if n < _MIN_TOKENS:
        raise Rejected("too_short", counted(n, "token"))
    if tokens.ids.min() < 0 or tokens.ids.max() >= options.vocab_size:
        bad = tokens.ids[(tokens.ids < 0) | (tokens.ids >= options.vocab_size)][0]
        raise Rejected("ids_outside_vocabulary", f"id {bad}, vocabulary of {options.vocab_size}")
    if n > options.max_length and options.overlong == "drop":
        raise Rejected("too_long", counted(n, "token"))
    ids = tokens.ids[: options.max_length].astype(np.int32)
    mask = tokens.mask[: options.max_length]
    if not mask[1:].any():  # nothing predicts the first token
        raise Rejected("no_assistant_token", f"{int(tokens.mask.sum())} behind --max-length" if n > len(ids) else "")
    return Sample(
        source_index=source_index,
        uid=sample_uid(ids, mask),
        input_ids=ids,
        loss_mask=mask,
        n_cut=n - len(ids),
        id=_id(document),
    )


def decode_line(line: bytes) -> dict[str, Any]:
    """The object that a line consists of. Raises `Rejected`."""
    if not line.strip():
        raise Rejected("blank_line")
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise Rejected("not_utf8", f"byte {error.start + 1}") from None
    try:
        document = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected("not_json", str(error)[:120]) from None
    if not isinstance(document, dict):
        raise Rejected("not_an_object", type(document).__name__)
    return document


def _tokens(line: dict[str, Any], tokenizer: Callable[[], ChatTokenizer]) -> Tokens:
    if line.get("input_ids") is not None:
        return _given(line["input_ids"], line.get("loss_mask"))
    if line.get("messages") is not None or line.get("conversations") is not None:
        messages = chat_messages(line)
        return tokenizer().encode_chat(messages)
    if isinstance(line.get("text"), str):
        return tokenizer().encode_text(line["text"])
    raise Rejected("no_known_field", f"fields: {', '.join(list(line)[:5])}"[:120] if line else "no fields")


def _given(ids: Any, mask: Any) -> Tokens:
    """Judged by whole arrays: a hundred million tokens pass here, a test of each would take longer than all else."""
    if (found := _whole_numbers(ids)) is None:
        raise Rejected("bad_ids")
    if (flags := _flags(mask)) is None:
        raise Rejected("bad_mask", "" if mask is not None else "no loss_mask")
    if len(found) != len(flags):
        raise Rejected("mask_length", f"{len(found)} ids, mask of {len(flags)}")
    return Tokens(ids=found, mask=flags)


def _whole_numbers(values: Any) -> npt.NDArray[np.int64] | None:
    """[T] of a JSON list of int32; None for anything else, booleans included."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        return None
    try:
        found = np.array(array("q", values), np.int64)
    except OverflowError:
        return None
    return found if not len(found) or -_INT32 < found.min() <= found.max() < _INT32 else None


def _flags(values: Any) -> npt.NDArray[np.uint8] | None:
    """[T] of a JSON list of 0, 1, false and true; None for anything else."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int, bool}:
        return None
    try:
        found = np.array(bytearray(values), np.uint8)
    except ValueError:  # below 0, above 255
        return None
    return found if not len(found) or found.max() <= 1 else None


def _id(line: dict[str, Any]) -> str:
    """The line's own name: a string, or a number as text."""
    found = line.get("id")
    return str(found) if type(found) in (str, int) else ""


class LineSource:
    """The lines of a file, plain or gzip, with SHA-256 and size of the file's own bytes as they pass."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = 0
        self.sha256 = hashlib.sha256()

    def __enter__(self) -> LineSource:
        if self.path.exists() and not self.path.is_file():
            raise UsageError(f"{self.path} is no regular file: a resume must be able to read it again", hint=_FILE_HINT)
        try:
            self._raw: BinaryIO = open(self.path, "rb", buffering=0)
        except FileNotFoundError:
            raise NotFoundError(f"the prompts file {self.path} does not exist", hint=_FILE_HINT) from None
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror}", hint=_FILE_HINT) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def __iter__(self) -> Iterator[bytes]:
        plain = io.BufferedReader(_Tee(self._raw, self._passed), 1 << 20)
        packed = plain.peek(2)[:2] == b"\x1f\x8b"
        stream = gzip.GzipFile(fileobj=plain) if packed else plain
        try:
            for number, line in enumerate(stream):
                yield line.removeprefix(_BOM) if number == 0 else line
        except (EOFError, OSError, zlib.error) as error:
            raise UsageError(
                f"{self.path} cannot be read to its end: {error}",
                hint=f"copy it again; `gzip -t {self.path}` checks it" if packed else "copy it again",
            ) from None

    def _passed(self, data: memoryview) -> None:
        self.sha256.update(data)
        self.n_bytes += len(data)


class _Tee(io.RawIOBase):
    """Shows every byte that is read to somebody else."""

    def __init__(self, raw: BinaryIO, show: Callable[[memoryview], None]) -> None:
        self._raw = raw
        self._show = show

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self._raw.readinto(buffer)  # type: ignore[attr-defined]
        self._show(memoryview(buffer)[:n])
        return int(n)

"""Reading prompts: every line gives a sample or a reason, whatever is in the file."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extractor.chat import ChatTokenizer
from extractor.prompts import PromptOptions, Prompts, read_prompts
from extractor.reasons import REASONS
from hsstore.digest import sample_uid
from hsstore.errors import NotFoundError, UsageError

GOOD = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def no_tokenizer() -> ChatTokenizer:
    raise UsageError("no tokenizer here")


def read(path: Path, data: bytes, tokenizer: Any = no_tokenizer, **options: Any) -> Prompts:
    path.write_bytes(data)
    return read_prompts(path, PromptOptions(**({"vocab_size": 300, "max_length": 64} | options)), tokenizer)


def lines(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "blank_line"),
        (b" \t ", "blank_line"),
        (b"\xff\xfe", "not_utf8"),
        (b'{"text": "\xe9"}', "not_utf8"),
        (b"nonsense", "not_json"),
        (b'{"text": "cut', "not_json"),
        (b'{"text": "a"} {"text": "b"}', "not_json"),
        (b'{"text": NaN}', "not_json"),
        (b'{"text": "\\ud800"}', "not_json"),
        (b"[" * 100_000, "not_json"),
        (b"[1, 2]", "not_an_object"),
        (b"null", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"{}", "no_known_field"),
        (b'{"prompt": "hi"}', "no_known_field"),
        (b'{"text": 3}', "no_known_field"),
        (b'{"messages": []}', "empty_conversation"),
        (b'{"messages": [{"role": "user", "content": "hi"}]}', "no_assistant_token"),
        (b'{"text": ""}', "too_short"),
        (b'{"text": "a"}', "too_short"),
        (b'{"input_ids": "1 2", "loss_mask": [1]}', "bad_ids"),
        (b'{"input_ids": [1, 2.0], "loss_mask": [0, 1]}', "bad_ids"),
        (b'{"input_ids": [1, true], "loss_mask": [0, 1]}', "bad_ids"),
        (b'{"input_ids": [1, 99999999999999999999], "loss_mask": [0, 1]}', "bad_ids"),
        (b'{"input_ids": [1, 300], "loss_mask": [0, 1]}', "ids_outside_vocabulary"),
        (b'{"input_ids": [1, -1], "loss_mask": [0, 1]}', "ids_outside_vocabulary"),
        (b'{"input_ids": [1, 2]}', "bad_mask"),
        (b'{"input_ids": [1, 2], "loss_mask": [0, 2]}', "bad_mask"),
        (b'{"input_ids": [1, 2], "loss_mask": [0, 0.5]}', "bad_mask"),
        (b'{"input_ids": [1, 2], "loss_mask": [1]}', "mask_length"),
        (b'{"input_ids": [1], "loss_mask": [1]}', "too_short"),
        (b'{"input_ids": [], "loss_mask": []}', "too_short"),
        (b'{"input_ids": [1, 2, 3], "loss_mask": [1, 0, 0]}', "no_assistant_token"),
    ],
)
def test_a_bad_line_is_counted_with_its_number(
    tmp_path: Path, byte_chat: ChatTokenizer, line: bytes, reason: str
) -> None:
    """Never fatal, never silent: line 2 is reported, lines 1 and 3 keep their source_index."""
    prompts = read(tmp_path / "p.jsonl", lines(GOOD, line, GOOD), lambda: byte_chat)
    assert [(r.line, r.reason) for r in prompts.rejections] == [(2, reason)]
    assert prompts.summary.rejected == {reason: 1}
    assert [s.source_index for s in prompts.samples] == [0, 2]
    assert prompts.summary.lines == 3
    assert reason in REASONS


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.binary(max_size=40) | st.sampled_from([lines(GOOD), lines(CHAT), b"\n", b"\r\n", b"{}\n"])))
def test_any_bytes_are_accounted_for(tmp_path: Path, byte_chat: ChatTokenizer, rows: list[bytes]) -> None:
    """For any file: one sample or one reason a line, and no exception but one of ours."""
    data = b"".join(rows)
    try:
        prompts = read(tmp_path / "p.jsonl", data, lambda: byte_chat)
    except UsageError:  # no usable line, or a broken gzip
        return
    assert len(prompts.samples) + len(prompts.rejections) == prompts.summary.lines
    assert {s.source_index + 1 for s in prompts.samples}.isdisjoint(r.line for r in prompts.rejections)
    assert prompts.summary.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "dress",
    [
        pytest.param(lambda data: data, id="plain"),
        pytest.param(lambda data: b"\xef\xbb\xbf" + data, id="byte order mark"),
        pytest.param(lambda data: data.replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param(lambda data: data.rstrip(b"\n"), id="no last newline"),
        pytest.param(gzip.compress, id="gzip"),
    ],
)
def test_dresses_of_a_file_give_the_same_samples(tmp_path: Path, byte_chat: ChatTokenizer, dress: Any) -> None:
    data = lines(GOOD, CHAT, {"text": "plain words"})
    expected = read(tmp_path / "a.jsonl", data, lambda: byte_chat)
    found = read(tmp_path / "b.jsonl", dress(data), lambda: byte_chat)
    assert [s.uid for s in found.samples] == [s.uid for s in expected.samples]
    assert not found.rejections
    assert found.summary.bytes == len(dress(data))
    assert found.summary.sha256 == hashlib.sha256(dress(data)).hexdigest()


def test_duplicates_share_their_uid_and_nothing_else(tmp_path: Path) -> None:
    prompts = read(tmp_path / "p.jsonl", lines(GOOD, GOOD))
    one, two = prompts.samples
    assert one.uid == two.uid == sample_uid(one.input_ids, one.loss_mask)
    assert (one.source_index, two.source_index) == (0, 1)
    assert one.input_ids.dtype == np.int32
    assert one.loss_mask.dtype == np.uint8


def test_long_samples_are_cut_and_counted(tmp_path: Path) -> None:
    long = {"input_ids": list(range(10)), "loss_mask": [0] * 4 + [1] * 6}
    prompts = read(tmp_path / "p.jsonl", lines(long, GOOD), max_length=6)
    assert prompts.samples[0].input_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert prompts.samples[0].n_cut == 4
    assert prompts.n_truncated == 1
    assert prompts.summary.options["max_length"] == "6"


def test_long_samples_are_dropped_on_request(tmp_path: Path) -> None:
    long = {"input_ids": list(range(10)), "loss_mask": [1] * 10}
    prompts = read(tmp_path / "p.jsonl", lines(long, GOOD), max_length=6, overlong="drop")
    assert [(r.line, r.reason, r.detail) for r in prompts.rejections] == [(1, "too_long", "10 tokens")]


def test_a_cut_that_leaves_no_assistant_token_rejects(tmp_path: Path) -> None:
    """Cut to its question alone, a sample costs disk and teaches nothing."""
    long = {"input_ids": list(range(10)), "loss_mask": [0] * 8 + [1, 1]}
    prompts = read(tmp_path / "p.jsonl", lines(long, GOOD), max_length=6)
    assert [(r.line, r.reason) for r in prompts.rejections] == [(1, "no_assistant_token")]
    assert "max-length" in prompts.rejections[0].detail


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n\n", "none of the 2 lines"),
        (b"nonsense\n", "line 1: the line is not one JSON document"),
        (b"\n{}\n", "line 2: none of input_ids"),
    ],
)
def test_a_file_without_samples_is_an_error(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path / "p.jsonl", data)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    options = PromptOptions(vocab_size=9, max_length=9)
    with pytest.raises(NotFoundError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl", options, no_tokenizer)
    with pytest.raises(UsageError, match="no regular file"):
        read_prompts(tmp_path, options, no_tokenizer)
    with pytest.raises(UsageError, match="cannot be read to its end"):
        read(tmp_path / "cut.gz", gzip.compress(lines(GOOD) * 100)[:-20])


def test_ids_need_no_tokenizer_and_text_names_the_lack(tmp_path: Path) -> None:
    assert read(tmp_path / "p.jsonl", lines(GOOD)).samples
    with pytest.raises(UsageError, match="no tokenizer here"):
        read(tmp_path / "p.jsonl", lines(GOOD, CHAT))

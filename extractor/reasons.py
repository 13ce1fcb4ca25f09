"""Why a line of the prompts file gives no sample: the closed list of reasons, and how a reason travels.

`Rejected` never leaves `extractor.prompts`: it ends as a `Rejection` with its line number, is counted by reason in the
store's layout record and listed in the report file. It is no error: a file with bad lines is still extracted.
"""

from __future__ import annotations

from dataclasses import dataclass

REASONS = {
    "blank_line": "the line holds nothing but white space",
    "not_utf8": "the line is not UTF-8",
    "not_json": "the line is not one JSON document",
    "not_an_object": "the line is JSON, but not an object",
    "no_known_field": "none of input_ids, messages, conversations and text is there",
    "bad_message": "a message lacks its role or content, or they are no text",
    "unknown_role": "a ShareGPT `from` that no chat role corresponds to",
    "empty_conversation": "no messages, or messages without any text",
    "not_text": "a content list with parts other than text (images, audio)",
    "tool_calls": "tool calls or tool definitions, which this version does not render",
    "template_refused": "the tokenizer's chat template raised an error on this conversation",
    "template_not_prefix": "the template renders earlier turns differently later on: no exact loss mask exists",
    "bad_ids": "input_ids is not a list of integers",
    "ids_outside_vocabulary": "an id is negative or not below the verifier's vocabulary size",
    "bad_mask": "loss_mask is missing, or holds something else than 0 and 1",
    "mask_length": "loss_mask and input_ids differ in length",
    "too_short": "fewer than 2 tokens: nothing follows the first",
    "too_long": "more tokens than --max-length, under --overlong drop",
    "no_assistant_token": "no token behind the first is an assistant token (within --max-length): nothing to train on",
}


class Rejected(Exception):
    """This line gives no sample, because of `reason` (a key of `REASONS`)."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REASONS, reason
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One line that gave no sample."""

    line: int
    """1-based, as editors count."""
    reason: str
    """Key of `REASONS`."""
    detail: str
    """What was found, at most a few words."""

"""Why a line of the input has no answer: what is added to the reasons of `extractor.reasons`.

`skipped` lines are decided: the same run would decide the same again. `failed` ones are the engine's fault, and a
resume tries them again.
"""

from __future__ import annotations

SKIPPED = {
    "no_conversation": "neither messages nor conversations: text and input_ids cannot be answered",
    "no_user_turn": "nobody asks anything: there is no user message",
    "tool_turn": "a tool's message follows from an answer that is made anew; --turns last keeps it",
    "prompt_too_long": "the conversation up to an answer leaves no token for it in the model's context",
    "truncated": "an answer was cut by --max-new-tokens, under --drop-truncated",
    "empty_answer": "the verifier ended its turn without a word",
}
FAILED = {
    "refused": "the engine refused the request",
    "engine_error": "the engine answered with an error, each time it was asked",
    "engine_lost": "engines were lost on this line alone",
    "out_of_memory": "the device has no memory for this line alone",
}
REASONS = SKIPPED | FAILED
LATER = frozenset({"prompt_too_long", "truncated", "empty_answer", "template_refused"})
"""Of the skipped: those that are known only once the verifier has been asked, or its template."""

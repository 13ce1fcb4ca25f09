"""Loss masks are exact: what is trained is what the model would emit, for real and for awkward templates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extractor.chat import ChatTokenizer
from extractor.reasons import Rejected
from hsstore.errors import UsageError
from tests.extractor.tiny import CHATML, byte_tokenizer

# SmolLM2's vocabulary has no token for bytes above 0xF0, so planes above the third are lost to any user of it.
LETTERS = st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x2FFFF) | st.sampled_from("\n <>|🙂")
TEXT = st.text(LETTERS, max_size=40)
# Content that begins with white space may merge with the header's newline; that case has a test of its own.
ANSWER = TEXT.map(str.lstrip)
SPECIAL_FREE = TEXT.filter(lambda t: "<|" not in t)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@st.composite
def chats(draw: Any) -> list[dict[str, str]]:
    turns = draw(st.lists(st.tuples(SPECIAL_FREE, ANSWER.filter(lambda t: "<|" not in t)), min_size=1, max_size=4))
    messages = [{"role": "system", "content": draw(SPECIAL_FREE)}] if draw(st.booleans()) else []
    if draw(st.booleans()):  # common in ShareGPT: the assistant opens
        messages.append(assistant(draw(ANSWER.filter(lambda t: "<|" not in t))))
    for question, answer in turns:
        messages += [user(question), assistant(answer)]
    if draw(st.booleans()):
        messages.append(user(draw(SPECIAL_FREE)))
    return messages


def trained(chat: ChatTokenizer, messages: list[dict[str, str]]) -> str:
    tokens = chat.encode_chat(messages)
    return str(chat._tokenizer.decode(tokens.ids[tokens.mask == 1].tolist(), clean_up_tokenization_spaces=False))


@pytest.mark.model
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=chats())
def test_trained_tokens_are_the_answers_and_their_ends(
    smollm2_chat: ChatTokenizer, messages: list[dict[str, str]]
) -> None:
    """The law of the mask: mask = 1 decodes to exactly the assistant's texts, each with its turn-ending token.

    Off by one token here, and a drafter learns to predict headers, or never learns to stop.
    """
    answers = "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")
    assert trained(smollm2_chat, messages) == answers


@pytest.mark.model
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=chats())
def test_ids_are_the_tokenizers_own(smollm2_chat: ChatTokenizer, messages: list[dict[str, str]]) -> None:
    """Ids equal `apply_chat_template(tokenize=True)`: the verifier sees what it was trained on."""
    own = smollm2_chat._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert smollm2_chat.encode_chat(messages).ids.tolist() == own


@pytest.mark.model
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=chats())
def test_tokenizers_without_offsets_give_the_same_mask(
    smollm2_chat: ChatTokenizer, messages: list[dict[str, str]]
) -> None:
    """Python tokenizers (Kimi's) have no offset mapping: prefixes of ids must lead to the same mask."""
    slow = ChatTokenizer(WithoutOffsets(smollm2_chat._tokenizer))
    one, two = smollm2_chat.encode_chat(messages), slow.encode_chat(messages)
    assert one.ids.tolist() == two.ids.tolist()
    assert one.mask.tolist() == two.mask.tolist()


class WithoutOffsets:
    """A tokenizer as Python-only ones are."""

    is_fast = False

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, text: str, **how: Any) -> Any:
        assert "return_offsets_mapping" not in how
        return {"input_ids": self._inner(text, **how)["input_ids"]}


@pytest.mark.model
def test_default_system_prompt_is_kept_and_not_trained(smollm2_chat: ChatTokenizer) -> None:
    """SmolLM2's template injects a system prompt of its own; it is context, like any other."""
    messages = [user("hi"), assistant("yo")]
    text = smollm2_chat._tokenizer.decode(smollm2_chat.encode_chat(messages).ids.tolist())
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert trained(smollm2_chat, messages) == "yo<|im_end|>"


@pytest.mark.model
def test_a_token_that_straddles_the_header_is_not_trained(smollm2_chat: ChatTokenizer) -> None:
    """An answer that begins with newlines merges with the header's: that token is not what the model would emit."""
    messages = [user("hi"), assistant("\n\n\nyo")]
    tokens = smollm2_chat.encode_chat(messages)
    answer = trained(smollm2_chat, messages)
    assert answer.endswith("\nyo<|im_end|>")
    assert len(answer) < len("\n\n\nyo<|im_end|>")  # the merge did occur
    assert tokens.mask.sum() >= 2


def chat_of(template: str) -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer(template))


TALK = [user("one"), assistant("ALPHA"), user("two"), assistant("BETA")]


def test_generation_marks_of_the_template_are_used() -> None:
    """A template that marks the assistant's tokens itself is believed to the letter."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<s>{% generation %}{{ m['content'] }}</s>"
        "{% endgeneration %}{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    )
    chat = chat_of(template)
    assert chat.marks_generation
    assert trained(chat, TALK) == "ALPHA</s>BETA</s>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(CHATML, "ALPHA<|im_end|>BETA<|im_end|>", id="chatml"),
        pytest.param(
            "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}"
            "{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}",
            " ALPHA</s> BETA</s>",
            id="mistral: no generation prompt",
        ),
        pytest.param(
            CHATML + "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}",
            "ALPHA<|im_end|>BETA<|im_end|>",
            id="phi-3: a token behind the whole conversation",
        ),
        pytest.param(
            "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
            "{{ '<|im_start|>' + m['role'] + '\n' }}"
            "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
            "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            "ALPHA<|im_end|><think>\n\n</think>\n\nBETA<|im_end|>",
            id="qwen3: thoughts only in the last turn",
        ),
        pytest.param(
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            "ALPHA\nBETA\n",
            id="no turn-ending token: all that the template writes",
        ),
    ],
)
def test_templates_in_use(template: str, expected: str) -> None:
    assert trained(chat_of(template), TALK) == expected


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(
            "{{ messages | length }} turns: {% for m in messages %}<{{ m['content'] }}>{% endfor %}", id="counts turns"
        ),
        pytest.param(
            "{% for m in messages %}{{ '<s>' + m['content'] + '</s>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<s>think:' }}{% endif %}",
            id="prompt that no rendering repeats",
        ),
        pytest.param("{% for m in messages %}{{ m['content'] if loop.last else '' }}{% endfor %}", id="forgets turns"),
    ],
)
def test_templates_without_an_exact_mask_are_refused(template: str) -> None:
    """Where a prefix is rendered differently no mask can be right; a wrong one must not be made up."""
    with pytest.raises(Rejected) as caught:
        chat_of(template).encode_chat(TALK)
    assert caught.value.reason == "template_not_prefix"


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[7]['content'] }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_rejects_the_line(template: str) -> None:
    with pytest.raises(Rejected) as caught:
        chat_of(template).encode_chat(TALK)
    assert caught.value.reason == "template_refused"


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages | nofilter }}", "{% if x %}", "{{"])
def test_what_is_no_template_is_the_models_fault(template: str) -> None:
    """Not one reason a line: it is wrong for all of them. Lines of plain text do not need it."""
    chat = chat_of(template)
    assert len(chat.encode_text("hi").ids)
    with pytest.raises(UsageError, match="is no template"):
        chat.encode_chat(TALK)


OPENED = [assistant("HELLO"), *TALK]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(CHATML, "HELLO<|im_end|>ALPHA<|im_end|>BETA<|im_end|>", id="chatml"),
        pytest.param(
            "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}"
            "{{ m['content'] + '</s>' }}{% endif %}{% endfor %}",
            "HELLO</s>ALPHA</s>BETA</s>",
            id="no generation prompt",
        ),
        pytest.param(
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
            "{% if m['role'] == 'assistant' %}{{ '<think>' + m.get('reasoning_content', '') + '</think>' }}{% endif %}"
            "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            "<think></think>HELLO<|im_end|><think></think>ALPHA<|im_end|><think></think>BETA<|im_end|>",
            id="thoughts are the model's in the first turn as in later ones",
        ),
    ],
)
def test_the_assistant_may_open_the_conversation(template: str, expected: str) -> None:
    assert trained(chat_of(template), OPENED) == expected
    with_thought = [{**OPENED[0], "reasoning_content": "<|im_start|>assistant\n"}, *TALK]
    if "reasoning_content" in template:
        assert trained(chat_of(template), with_thought).startswith("<think><|im_start|>assistant\n</think>HELLO")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}", "template_refused"),
        ("{% for m in messages[1:] %}{{ m['content'] }}{% endfor %}", "template_not_prefix"),
        (
            "{{ messages[0]['content'] | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "template_not_prefix",
        ),
    ],
)
def test_an_opening_that_is_not_rendered_has_its_reason(template: str, reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        chat_of(template).encode_chat(OPENED)
    assert caught.value.reason == reason
    assert "empty conversation" not in caught.value.detail


def test_template_arguments_reach_the_template() -> None:
    template = CHATML.replace("{% for m", "{{ date_string }}{% for m", 1)
    chat = ChatTokenizer(byte_tokenizer(template), {"date_string": "26 Jul 2024"})
    assert chat.render([user("x")]).startswith("26 Jul 2024")


def test_text_trains_every_token(byte_chat: ChatTokenizer) -> None:
    tokens = byte_chat.encode_text("héllo")
    assert len(tokens.ids) == 6
    assert np.all(tokens.mask == 1)

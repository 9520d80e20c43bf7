"""R1: tokens of a record are a function of it, and which of them count: text, prompts, chats."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner.language.samples import Tokens, chat_tokens, prompt_tokens, text_tokens
from tests.runner.language.chats import FORMATS, chat_tokenizer

tokenizer_of = cache(chat_tokenizer)
QUESTION, REPLY = "Hello, who are you?", "I am a 🦙 é"
SYSTEM = "You are a system."
SPOKEN = (("user", QUESTION), ("assistant", REPLY), ("user", "And 42?"), ("assistant", "42\nis"))

# What each format makes of SPOKEN, written by hand: pieces that are not counted, and that are,
# by turns. The system's message follows the first piece.
BY_HAND = {
    "chatml": (
        ("", "<|im_start|>system\nYou are a system.<|im_end|>\n"),
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
        f"{REPLY}<|im_end|>",
        "\n<|im_start|>user\nAnd 42?<|im_end|>\n<|im_start|>assistant\n",
        "42\nis<|im_end|>",
        "\n",
    ),
    "llama": (
        (
            "<|begin_of_text|>",
            "<|start_header_id|>system<|end_header_id|>\n\nYou are a system.<|eot_id|>",
        ),
        f"<|start_header_id|>user<|end_header_id|>\n\n{QUESTION}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f"{REPLY}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nAnd 42?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "42\nis<|eot_id|>",
        "",
    ),
    "mistral": (
        ("<s> [INST] ", "You are a system.\n\n"),
        f"{QUESTION} [/INST]",
        f" {REPLY}</s>",
        " [INST] And 42? [/INST]",
        " 42\nis</s>",
        "",
    ),
}


def messages_of(spoken: Any = SPOKEN, system: bool = False) -> list[dict[str, str]]:
    """Return a conversation as a record has it."""
    said = (("system", SYSTEM), *spoken) if system else spoken
    return [{"role": role, "content": content} for role, content in said]


def pieces(tokenizer: Any, tokens: Tokens) -> list[str]:
    """Return the text of runs of tokens, those that do not count and those that do by turns."""
    runs: list[list[int]] = [[]]
    for token, counted in zip(tokens.input_ids, tokens.counted, strict=True):
        if counted != bool((len(runs) - 1) % 2):
            runs.append([])
        runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
@pytest.mark.parametrize("generation", [True, False], ids=["blocks", "prefixes"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_assistants_tokens_count_as_in_a_template_rendered_by_hand(
    name: str, generation: bool, system: bool
) -> None:
    tokenizer = tokenizer_of(name, generation)
    (before, of_system), first, *rest = BY_HAND[name]
    expected = [before + (of_system if system else "") + first, *rest]
    got = pieces(tokenizer, chat_tokens(tokenizer, messages_of(system=system)))
    assert got == [piece for piece in expected if piece]


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_and_prefixes_give_the_same_tokens(name: str) -> None:
    marked, unmarked = (tokenizer_of(name, generation) for generation in (True, False))
    assert chat_tokens(marked, messages_of()) == chat_tokens(unmarked, messages_of())


def test_a_block_that_ends_within_a_character_of_several_tokens_counts_all_of_them() -> None:
    tokenizer = chat_tokenizer("chatml")
    end = "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    bare = "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
    tokenizer.chat_template = tokenizer.chat_template.replace(end, bare)
    got = pieces(
        tokenizer, chat_tokens(tokenizer, messages_of([*SPOKEN[:1], ("assistant", "é🦙")]))
    )
    assert got[1:] == ["é🦙", "<|im_end|>\n"]


def test_a_conversation_that_changes_its_beginning_later_is_refused() -> None:
    tokenizer = chat_tokenizer("chatml", generation=False)
    last = "{% if loop.last %}{{ message['content'] }}{% else %}{{ '(older)' }}{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message['content'] + ", last + "{{ "
    )
    with pytest.raises(ConfigError) as refused:
        chat_tokens(tokenizer, messages_of())
    assert "otherwise than its first 2 messages" in str(refused.value)
    assert "{% generation %}" in str(refused.value)


def test_messages_that_the_template_refuses_are_named_with_its_reason() -> None:
    wrong = messages_of([SPOKEN[0], SPOKEN[0]])
    with pytest.raises(ConfigError, match=r"Hello, who are you.*roles must alternate"):
        chat_tokens(tokenizer_of("mistral", True), wrong)
    with pytest.raises(ConfigError, match="does not render them"):
        chat_tokens(tokenizer_of("chatml", True), [{"role": "user"}])
    with pytest.raises(ConfigError, match="empty conversation"):
        chat_tokens(tokenizer_of("chatml", True), [])


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat_template"):
        chat_tokens(tokenizer, messages_of())


def test_all_of_a_text_counts_but_its_first_token_which_nothing_predicts() -> None:
    tokenizer = tokenizer_of("chatml", True)
    tokens = text_tokens(tokenizer, "Hello 🦙")
    assert tokenizer.decode(tokens.input_ids) == "Hello 🦙<|im_end|>"
    assert tokens.counted == [False] + [True] * (len(tokens.input_ids) - 1)


@pytest.mark.parametrize("prompt", ["The answer is", "The answer is ", "Hello\n", ""])
def test_the_completion_and_the_end_count_after_the_prompts_own_tokens(prompt: str) -> None:
    tokenizer = tokenizer_of("chatml", True)
    tokens = prompt_tokens(tokenizer, prompt, "42.\n\nHello")
    alone = tokenizer(prompt).input_ids
    assert tokens.input_ids[: len(alone)] == alone
    assert tokenizer.decode(tokens.input_ids) == prompt + "42.\n\nHello<|im_end|>"
    first = max(len(alone), 1)
    assert tokens.counted == [place >= first for place in range(len(tokens.input_ids))]


def test_a_tokenizer_that_ends_texts_itself_gives_one_end() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = chat_tokenizer("llama")
    begin, end = tokenizer.convert_tokens_to_ids(["<|begin_of_text|>", tokenizer.eos_token])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<|begin_of_text|> $A {tokenizer.eos_token}",
        special_tokens=[("<|begin_of_text|>", begin), (tokenizer.eos_token, end)],
    )
    for tokens in (text_tokens(tokenizer, "Hello"), prompt_tokens(tokenizer, "Hel", "lo")):
        assert tokenizer.decode(tokens.input_ids) == "<|begin_of_text|>Hello<|im_end|>"


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.eos_token = None
    for made in (lambda: text_tokens(tokenizer, "a"), lambda: prompt_tokens(tokenizer, "a", "b")):
        with pytest.raises(ConfigError, match="end-of-sequence"):
            made()

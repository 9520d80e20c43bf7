"""R1: tokens of a record are a function of it, and which of them count: text, prompts, chats."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from accel.machine.errors import ConfigError
from runner.language.samples import Tokens, chat_tokens, prompt_tokens, text_tokens
from tests.runner.language.chats import FORMATS, chat_tokenizer

tokenizer_of = cache(chat_tokenizer)
SPOKEN = (("user", "Who?"), ("assistant", "I am a 🦙 é"), ("user", "Hm"), ("assistant", "42\nis"))
# What each format makes of SPOKEN with a system's message, written by hand; ⟦ ⟧ is around what
# counts. The system's message is between two #.
HEAD, EOT = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"
USER, REPLY = HEAD.format("user"), HEAD.format("assistant")
BY_HAND = {
    "chatml": "#<|im_start|>system\nBe.<|im_end|>\n#<|im_start|>user\nWho?<|im_end|>\n<|im_start|>"
    "assistant\n⟦I am a 🦙 é<|im_end|>⟧\n<|im_start|>user\nHm<|im_end|>\n<|im_start|>assistant\n"
    "⟦42\nis<|im_end|>⟧\n",
    "llama": f"<|begin_of_text|>#{HEAD.format('system')}Be.{EOT}#{USER}Who?{EOT}{REPLY}⟦I am a 🦙 é"
    f"{EOT}⟧{USER}Hm{EOT}{REPLY}⟦42\nis{EOT}",
    "mistral": "<s> [INST] #Be.\n\n#Who? [/INST]⟦ I am a 🦙 é</s>⟧ [INST] Hm [/INST]⟦ 42\nis</s>",
}


def by_hand(name: str, system: bool = False) -> list[str]:
    """Return the pieces of a conversation that do not count and that do, by turns."""
    begin, of_system, rest = BY_HAND[name].split("#")
    return re.split("[⟦⟧]", begin + (of_system if system else "") + rest)


def messages_of(spoken: Any = SPOKEN, system: bool = False) -> list[dict[str, str]]:
    """Return a conversation as a record has it."""
    said = (("system", "Be."), *spoken) if system else spoken
    return [{"role": role, "content": content} for role, content in said]


def pieces(tokenizer: Any, tokens: Tokens) -> list[str]:
    """Return the text of runs of tokens, those that do not count and those that do by turns."""
    runs: list[list[int]] = [[]]
    for token, counted in zip(tokens.input_ids, tokens.counted, strict=True):
        if counted == bool(len(runs) % 2):
            runs.append([])
        runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_assistants_tokens_count_as_in_a_template_rendered_by_hand(
    name: str, system: bool
) -> None:
    marked, unmarked = (tokenizer_of(name, generation) for generation in (True, False))
    found = chat_tokens(marked, messages_of(system=system))
    assert pieces(marked, found) == by_hand(name, system)
    assert chat_tokens(unmarked, messages_of(system=system)) == found


def test_a_block_that_ends_within_a_character_of_several_tokens_counts_all_of_them() -> None:
    tokenizer = chat_tokenizer("chatml")
    end = "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    bare = "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
    tokenizer.chat_template = tokenizer.chat_template.replace(end, bare)
    messages = messages_of([SPOKEN[0], ("assistant", "é🦙")])
    assert pieces(tokenizer, chat_tokens(tokenizer, messages))[1:] == ["é🦙", "<|im_end|>\n"]


def test_of_a_template_whose_prefixes_do_not_agree_contents_count_or_it_is_refused() -> None:
    tokenizer = chat_tokenizer("chatml", generation=False)
    plain, content = tokenizer.chat_template, "{{ message['content'] + "
    thought = "{{ '<think></think>' if loop.last else '' }}"
    tokenizer.chat_template = plain.replace(content, thought + content, 1)
    expected = by_hand("chatml")
    expected[-2] = f"<think></think>{expected[-2]}"
    assert pieces(tokenizer, chat_tokens(tokenizer, messages_of())) == expected
    dropped = "{{ message['content'] if loop.last else '(older)' }}{{ "
    tokenizer.chat_template = plain.replace(content, dropped, 1)
    with pytest.raises(ConfigError, match=r"than its first 2 messages.*\{% generation %\}"):
        chat_tokens(tokenizer, messages_of())


REFUSED = {
    r"Who\?.*roles must alternate": ("mistral", [SPOKEN[0], SPOKEN[0]]),
    "empty conversation": ("chatml", []),
    "does not render them": ("chatml", [("user", None)]),
    "chat_template": ("", SPOKEN),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_messages_that_no_template_renders_are_refused_with_its_reason(reason: str) -> None:
    name, spoken = REFUSED[reason]
    tokenizer = chat_tokenizer(name or "chatml")
    tokenizer.chat_template = tokenizer.chat_template if name else None
    with pytest.raises(ConfigError, match=reason):
        chat_tokens(tokenizer, messages_of(spoken))


@pytest.mark.parametrize("prompt", ["The answer is", "The answer is ", "Hello\n", "", None])
def test_what_follows_the_prompts_own_tokens_counts_but_never_a_first_token(
    prompt: str | None,
) -> None:
    tokenizer, text = tokenizer_of("chatml"), "42.\n\nHello 🦙"
    alone = tokenizer(prompt or "").input_ids
    made = text_tokens(tokenizer, text)
    tokens = made if prompt is None else prompt_tokens(tokenizer, prompt, text)
    assert tokens.input_ids[: len(alone)] == alone
    assert tokenizer.decode(tokens.input_ids) == (prompt or "") + text + "<|im_end|>"
    first = max(len(alone), 1)
    assert tokens.counted == [place >= first for place in range(len(tokens.input_ids))]


def test_a_tokenizer_that_ends_texts_itself_gives_one_end_and_one_without_is_refused() -> None:
    tokenizer = chat_tokenizer("llama")
    begin, end = "<|begin_of_text|>", tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}",
        special_tokens=[(one, tokenizer.convert_tokens_to_ids(one)) for one in (begin, end)],
    )
    for tokens in (text_tokens(tokenizer, "Hello"), prompt_tokens(tokenizer, "Hel", "lo")):
        assert tokenizer.decode(tokens.input_ids) == f"{begin}Hello{end}"
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="end-of-sequence"):
        text_tokens(tokenizer, "Hello")

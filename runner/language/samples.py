"""Tokens of a record, and which of them the loss counts: plain text, prompt/completion, chat.

Pure functions of a tokenizer and a record, so that their results can be cached.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel.machine.errors import ConfigError, text_of

Message = Mapping[str, Any]
IGNORED = -100  # label of a token that the loss does not count
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
OTHER = "\ue000"  # a content unlike any other
MARKED = (
    "Mark what the assistant writes with {% generation %} … {% endgeneration %} in the template."
)


@dataclass(frozen=True)
class Tokens:
    """A tokenized record.

    Args:
        input_ids: the token ids, special tokens included.
        counted: for each token whether the loss counts it; never the first, which nothing predicts.
    """

    input_ids: list[int]
    counted: list[bool]


def text_tokens(tokenizer: Any, text: str) -> Tokens:
    """Return the tokens of plain text and its end-of-sequence token; all of them count.

    Raises:
        ConfigError: if the tokenizer has no end-of-sequence token.
    """
    ids = _ids(tokenizer, text)
    return _tokens([*ids, _end(tokenizer)], 0)


def prompt_tokens(tokenizer: Any, prompt: str, completion: str) -> Tokens:
    """Return the tokens of a prompt, its completion and the end-of-sequence token.

    The completion and the end count. The sample begins with the tokens of the prompt alone, as in
    generation, even where the text of both would be merged into other tokens.

    Raises:
        ConfigError: if the tokenizer has no end-of-sequence token.
    """
    given = _ids(tokenizer, prompt)
    ids = _ids(tokenizer, prompt + completion)
    if ids[: len(given)] != given:
        ids = [*given, *tokenizer(completion, add_special_tokens=False, verbose=False).input_ids]
    return _tokens([*ids, _end(tokenizer)], len(given))


def _end(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        rule = "a sample ends with the end-of-sequence token, and this tokenizer has none"
        raise ConfigError.of("eos_token: null", rule, "Set it in tokenizer_config.json.")
    return int(tokenizer.eos_token_id)


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text with what the tokenizer puts before it, and no end."""
    ids = list(tokenizer(text, verbose=False).input_ids)
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _tokens(ids: list[int], first: int) -> Tokens:
    first = max(first, 1)
    return Tokens(ids, [position >= first for position in range(len(ids))])


def chat_tokens(tokenizer: Any, messages: Sequence[Message]) -> Tokens:
    """Return the tokens of a conversation by the tokenizer's chat template; the assistant's count.

    They are those of the template's ``{% generation %}`` blocks. In a template without such blocks
    they are what each reply adds to the prompt of generation, up to its end token; where the
    template renders earlier messages otherwise once later ones follow, the content and its end.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.
        messages: mappings with `role`, `content`, and what else the template reads.

    Raises:
        ConfigError: if there is no template, it refuses the messages, or it has no generation
            blocks and changes what the assistant said.
    """
    from jinja2 import TemplateError

    try:
        conversation = [dict(message) for message in messages]
        if not GENERATION.search(tokenizer.get_chat_template()):
            return _by_rendering(tokenizer, conversation)
        found = tokenizer.apply_chat_template(
            conversation,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
    except ConfigError:
        raise
    except (TypeError, ValueError, TemplateError) as error:
        rule = f"the tokenizer's chat template does not render them ({text_of(error)})"
        remedy = "Correct them, or choose a tokenizer with a template for them."
        raise ConfigError.of(_shown(messages), rule, remedy) from error
    counted: list[bool] = []
    reached = 0  # where the text of the last counted token ends
    for marked, (start, end) in zip(found["assistant_masks"], found["offset_mapping"], strict=True):
        # transformers marks only the first of several tokens of a block's last character.
        counted.append(bool(marked) or start < reached)
        reached = end if counted[-1] else reached
    return Tokens(list(found["input_ids"]), counted)


def _by_rendering(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> Tokens:
    """Return the tokens of a conversation by a template without generation blocks."""

    def rendered(part: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(list(part), tokenize=False, add_generation_prompt=prompt)
        )

    text = rendered(messages)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places = found["offset_mapping"]
    added = set(tokenizer.get_added_vocab().values())
    pairs = zip(found["input_ids"], places, strict=True)
    marks = [place for token, place in pairs if token in added]
    spans = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        prompt, reply = rendered(messages[:index], prompt=True), rendered(messages[: index + 1])
        if text.startswith(reply) and reply.startswith(prompt):
            start, end = len(prompt), len(reply)
            # Generation stops at the end token: white space behind it is the template's.
            last = max((last for _, last in marks if start < last <= end), default=end)
            spans.append((start, end if text[last:end].strip() else last))
            continue
        other = [*messages[:index], message | {"content": OTHER}, *messages[index + 1 :]]
        before, _, behind = rendered(other).partition(OTHER)
        start, end = len(before), len(text) - len(behind)
        if f"{before}{text[start:end]}{behind}" != text or _differ(message, text[start:end]):
            rule = "the chat template has no generation blocks, renders the conversation otherwise "
            rule += f"than its first {index + 1} messages, and the last of these not as it is"
            raise ConfigError.of(_shown(messages), rule, MARKED)
        after = (last for first, last in marks if first >= end and not text[end:first].strip())
        spans.append((start, next(after, end)))
    counted = [any(start < last and first < end for first, last in spans) for start, end in places]
    return Tokens(list(found["input_ids"]), counted)


def _differ(message: Message, text: str) -> bool:
    return str(message.get("content")).strip() != text.strip()


def _shown(messages: object) -> str:
    return f"messages={messages!r:.200}"

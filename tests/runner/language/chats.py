"""Chat templates of three formats, with and without generation blocks, and a tokenizer for them."""

from __future__ import annotations

from typing import Any

from runner.language.tokenizer import train_bpe

TEXTS = ["The answer is 42.\n\nHello, who are you? I am a system of assistants and users. " * 20]

# (( and )) stand for the tags of a generation block.
# ChatML: https://github.com/openai/openai-python/blob/v0.28.1/chatml.md
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}(({{ message['content'] + '<|im_end|>' }}))"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3/
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['role'] == 'assistant' %}(({{ message['content'] | trim + '<|eot_id|>' }}))"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# https://docs.mistral.ai/cookbook/concept-deep-dive-tokenization-chat_templates (V1)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
    "{% endif %}{{ '<s>' }}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ ' [INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% else %}(({{ ' ' + message['content'] + '</s>' }})){% endif %}{% endfor %}"
)
SPECIAL = {
    "chatml": [],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
}
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL}
FORMATS = tuple(TEMPLATES)


def template(name: str, generation: bool) -> str:
    """Return the template of a format, with or without generation blocks."""
    tags = ("{% generation %}", "{% endgeneration %}") if generation else ("", "")
    return TEMPLATES[name].replace("((", tags[0]).replace("))", tags[1])


def chat_tokenizer(name: str = "chatml", generation: bool = True) -> Any:
    """Return a small tokenizer with the template and the special tokens of a format."""
    tokenizer = train_bpe(TEXTS, 320)
    tokenizer.add_tokens(SPECIAL[name], special_tokens=True)
    tokenizer.chat_template = template(name, generation)
    return tokenizer

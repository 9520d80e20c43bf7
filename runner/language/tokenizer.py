"""Tokenizers: loaded from a folder, a file or the hub, or trained on the data's own text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from accel.machine.errors import ConfigError, MissingPackageError, text_of
from accel.machine.imports import is_available

TRAINED = "bpe:"
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
LEAST = 256 + len((PAD, START, END))  # every byte has a token
# ChatML. Source: https://huggingface.co/docs/transformers/chat_templating
CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def load_tokenizer(name: str, texts: Callable[[], Iterable[str]] | None = None) -> Any:
    """Return a fast tokenizer of transformers; its padding token is set.

    Code of the tokenizer's repository is never run.

    Args:
        name: a folder, a file `tokenizer.json`, an id of the hub, or `bpe:N`, which trains a
            byte-level BPE of N tokens.
        texts: called for the texts that `bpe:N` is trained on.

    Raises:
        ConfigError: if there is no such tokenizer, or N is no size.
        MissingPackageError: if transformers is not installed.
    """
    if not is_available("transformers"):
        raise MissingPackageError("transformers", f"tokenizer={name}", extra="hf")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name.startswith(TRAINED):
        size = name.removeprefix(TRAINED)
        if not size.isdecimal() or texts is None:
            rule = "bpe:N trains N tokens on the texts of a data set"
            raise ConfigError.of(f"tokenizer={name}", rule, "Write bpe:4096 beside data of text.")
        return train_bpe(texts(), int(size))
    path = Path(name).expanduser()
    try:
        if path.is_file() and not (path.parent / "tokenizer_config.json").exists():
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            place = str(path.parent if path.is_file() else path) if path.exists() else name
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # of the hub, of a file's format, of a missing package
        rule = f"no folder, file tokenizer.json or id of the hub gives it ({text_of(error)})"
        remedy = "Name another, or bpe:N, which trains one on the data."
        raise ConfigError.of(f"tokenizer={name}", rule, remedy) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_bpe(texts: Iterable[str], size: int) -> Any:
    """Return a byte-level BPE that was trained on texts, with a ChatML template.

    The same texts give the same tokenizer. It encodes every text without loss. Its
    end-of-sequence token is ChatML's `<|im_end|>`, so that one token ends texts and messages.

    Args:
        texts: the texts.
        size: the number of tokens, special ones included, if the texts have as many.

    Raises:
        ConfigError: if `size` is too small for the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if size < LEAST:
        rule = f"a byte-level BPE has {LEAST} tokens or more: the bytes and three special ones"
        raise ConfigError.of(f"bpe:{size}", rule, "Write bpe:4096.")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        chat_template=CHATML,
    )

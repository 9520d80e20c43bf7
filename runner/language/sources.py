"""Data of language models: text, prompts with completions, conversations, texts with labels."""

from __future__ import annotations

import contextlib
import logging
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import ConcatDataset

from accel.checkpoint.directory import file_digest
from accel.machine.errors import ConfigError, nearest, unknown_choice
from runner.data.datasets import Data
from runner.language import readers
from runner.language.cache import VERSION, cached, load
from runner.language.models import require_fit
from runner.language.packing import (
    CLASSES,
    LARGEST,
    Layout,
    Mixture,
    Padding,
    RecordStream,
    Rows,
    RowStream,
    TooLong,
    labels_of,
    write_classes,
    write_rows,
    write_tokens,
)
from runner.language.readers import Opening, Record, SampleBy, Source
from runner.language.samples import Tokens, chat_tokens, prompt_tokens, text_tokens
from runner.language.tokenizer import TRAINED, load_tokenizer
from runner.runs.json_files import digest

Format = Literal["text", "prompt", "chat", "label"]
# Columns of a record in each format; a recipe's `columns` may name others.
COLUMNS = {
    **{"text": ("text",), "prompt": ("prompt", "completion"), "chat": ("messages",)},
    "label": ("text", "label"),
}
MESSAGE = ("role", "content")  # names in a message, which may be others, too
ROLES = {"human": "user", "gpt": "assistant"}  # as ShareGPT has them
MAKE = {"text": text_tokens, "prompt": prompt_tokens, "chat": chat_tokens}
# What the recipe may say of one of several sources.
OF_SOURCES = ("subset", "weight", "format", "columns")
CACHE = "~/.cache/runner/text"
logger = logging.getLogger(__name__)


def text_data(
    tokenizer: str,
    train: Any,
    validation: Any = None,
    test: Any = None,
    path: str | None = None,
    subset: str | None = None,
    format: Format = "text",
    columns: Mapping[str, str] | None = None,
    sample_by: SampleBy = "document",
    context: int = 1024,
    packing: bool = True,
    too_long: TooLong | None = None,
    stream: bool = False,
    cache_dir: str = CACHE,
) -> Data:
    """Return tokenized records of text, JSONL or Parquet files, or of a data set of Hugging Face.

    Args:
        tokenizer: a folder, a file tokenizer.json, an id of the hub, or `bpe:4096`, which trains
            one on the training text.
        train: a file, a glob, `stdlib:*.py` (of Python's library), a split, or a list of these;
            with weights [{path: …, weight: 2}, {path: …, split: …, weight: 1}], the shares of
            samples (of packed rows) in an epoch. Each may have `format` and `columns` of its own.
        validation: likewise; several by name {easy: …, hard: …}; or the fraction of the training
            samples that is held out.
        test: likewise, no fraction.
        path: data set of the hub, or folder of `save_to_disk`, of which `train`, `validation` and
            `test` name splits; null: they name files, whose endings say how they are read.
        subset: configuration of that data set.
        format: of records: text, prompt (prompt and completion, of which the completion counts),
            chat (messages, of which the assistant's count), label (a text and its class).
        columns: other names of the columns text, prompt, completion, messages, label, and of role
            and content in messages; one with braces is a template: "{instruction}\\n{input}".
        sample_by: a sample of a text file: document (all of it), paragraph or line.
        context: tokens of a row, the most of a sample.
        packing: whether rows hold several samples; false: each is padded.
        too_long: split a longer sample, cut it, or drop it; null: split plain text, cut others.
        stream: whether text is tokenized as it is read, in its own order, and never stored.
        cache_dir: folder of tokenized text, shared by runs.

    Raises:
        ConfigError: for what is missing, malformed or empty, and for too large a context.
    """
    encoder = Encoder(None, format, columns or {}, context)
    opening = partial(readers.source, sample_by, path, subset, stream)
    keys = (*(("path", "split") if path is None else ("split", "path")), *OF_SOURCES)
    maker = _Maker(tokenizer, encoder, packing, too_long, stream, cache_dir, opening, keys)
    return maker.data(train, validation, test)


@dataclass(frozen=True)
class Encoder:
    """Makes the tokens of a record.

    Args:
        tokenizer: of transformers.
        format: of the records.
        columns: their names in the records, where they differ.
        context: the most tokens of a text with a label; of others all are kept here.
    """

    tokenizer: Any
    format: Format
    columns: Mapping[str, str]
    context: int

    def __post_init__(self) -> None:
        if self.format not in COLUMNS:
            raise ConfigError(unknown_choice("data.format", self.format, COLUMNS))
        known = COLUMNS[self.format] + (MESSAGE if self.format == "chat" else ())
        for name in set(self.columns) - set(known):
            value = f"data.columns.{name}={self.columns[name]}"
            rule = f"data.format={self.format} reads the columns {', '.join(known)}"
            raise ConfigError.of(value, rule, nearest(name, known))

    def __call__(self, place: str, record: Record) -> tuple[Tokens, Any]:
        """Return the tokens of the record of a place, and its label, where the format has one.

        Raises:
            ConfigError: for a missing column, or one of another type; it names the place.
        """
        with _at(place):
            values = [self.column(name, record) for name in COLUMNS[self.format]]
            if self.format == "label":
                ids = self.tokenizer(values[0], truncation=True, max_length=self.context).input_ids
                return Tokens(ids, [False] * len(ids)), values[1]
            make: Any = MAKE[self.format]
            return make(self.tokenizer, *values), None

    def column(self, name: str, record: Record) -> Any:
        """Return what a record has in a column; a name with braces is a template of others."""
        column = self.columns.get(name, name)
        value = f"data.columns.{name}={column}"
        try:
            if "{" in column:
                _require_parts(value, column, record)
            found: Any = column.format_map(record) if "{" in column else record[column]
            if name == "messages" and set(MESSAGE) & set(self.columns):
                role, content = (self.columns.get(part, part) for part in MESSAGE)
                found = [
                    {"role": ROLES.get(m[role], m[role]), "content": m[content]} for m in found
                ]
        except KeyError as error:
            missing = str(error.args[0])
            rule = f"there is no column {missing!r}"
            raise ConfigError.of(value, rule, nearest(missing, record)) from error
        wanted: Any = {"messages": list, "label": (str, int)}.get(name, str)
        if not isinstance(found, wanted):
            rule = f"data.format={self.format} does not read a {type(found).__name__} there"
            raise ConfigError.of(value, rule, f"The columns are {', '.join(record)}.")
        return found

    def texts(self, place: str, record: Record) -> list[str]:
        """Return the texts of a record, of which a tokenizer is trained."""
        with _at(place):
            values = [self.column(name, record) for name in COLUMNS[self.format]]
        if self.format == "chat":
            return [str(message.get("content") or "") for message in values[0]]
        return [value for value in values if isinstance(value, str)]


def _require_parts(value: str, template: str, record: Record) -> None:
    """Refuse a null in a column that a template names: it would become the word None."""
    for _, part, _, _ in string.Formatter().parse(template):
        if part and string.Formatter().get_field(part, (), record)[0] is None:
            rule, remedy = f"the column {part!r} is null there", 'Give it a text, such as "".'
            raise ConfigError.of(value, rule, remedy)


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
    """Name the place of a record in problems with it."""
    try:
        yield
    except ConfigError as error:
        problems = (replace(one, value=f"{place}: {one.value}") for one in error.problems)
        raise ConfigError(*problems) from error


# -- from sources to Data ------------------------------------------------------------------


@dataclass
class _Maker:
    """Makes data sets of sources; `encoder` is that of records without a format of their own."""

    name: str  # of the tokenizer
    encoder: Encoder
    packing: bool
    too_long: TooLong | None
    stream: bool
    cache_dir: str
    opening: Opening
    keys: Sequence[str]  # that a source may have
    classes: list[Any] = field(default_factory=list)
    largest: int = 0  # token of all data sets

    def data(self, train: Any, validation: Any, test: Any) -> Data:
        """Return the data sets that the arguments of a factory name."""
        fraction = validation if isinstance(validation, float) else 0.0
        self._check(validation, fraction)
        sources = self._opened("data.train", train)
        self.tokenizer, self.folder = self._load_tokenizer(sources)
        self.layout = self._layout()
        found = Data(self._made(sources, fraction), artifacts={"tokenizer": self.folder})
        for split, given in {"validation": validation, "test": test}.items():
            key, made = f"data.{split}", None
            if isinstance(given, Mapping) and not set(given) & set(self.keys):
                made = {n: self._made(self._opened(f"{key}.{n}", g)) for n, g in given.items()}
            elif given is not None:
                held_out = split == "validation" and fraction > 0
                of = sources if held_out else self._opened(key, given)
                made = self._made(of, -fraction if held_out else 0.0)
            setattr(found, split, made)
        found.facts = {
            **{"vocab_size": len(self.tokenizer), "pad_token_id": self.layout.pad_token_id},
            **{name: getattr(self.tokenizer, name) for name in ("eos_token_id", "bos_token_id")},
            **{"context": self.layout.context},
        }
        if self.classes:
            found.facts |= {"num_classes": len(self.classes), "classes": self.classes}
            write = partial(write_classes, self.classes)
            folder = cached(self._entry("classes", self.classes), write)
            found.artifacts = {**found.artifacts, CLASSES: folder / CLASSES}
        largest = max(self.largest, self.layout.pad_token_id)
        found.check_model = partial(require_fit, largest=largest, context=self.layout.context)
        if not self.packing:
            # The main process joins the batches of a stream for all: they have one shape.
            length = self.layout.context if self.stream else 0
            found.collate_fn = Padding(self.layout.pad_token_id, length)
        if not self.stream:
            parts: list[Any] = getattr(found.train, "datasets", [found.train])
            found.lengths = torch.cat([part.lengths for part in parts])
            if weights := [one.node["weight"] for one in sources if "weight" in one.node]:
                found.sampler = Mixture([len(part) for part in parts], weights)
        return found

    def _check(self, validation: Any, fraction: float) -> None:
        if self.encoder.format == "label" and (self.packing or self.stream):
            value = f"data.{'packing' if self.packing else 'stream'}=true"
            rule = "a row has one label, and all labels are known before training"
            remedy = f"Set {value.replace('true', 'false')}."
            raise ConfigError.of(f"{value} with data.format=label", rule, remedy)
        if isinstance(validation, float) and (self.stream or not 0 < fraction < 1):
            rule = "a fraction between 0 and 1 of samples that are all known is held out"
            remedy = "Set data.stream=false, or name files for validation."
            raise ConfigError.of(f"data.validation={validation}", rule, remedy)

    def _opened(self, key: str, given: Any) -> list[Source]:
        return readers.opened(key, given, self.opening, self.keys)

    def _encoder(self, source: Source, tokenizer: Any) -> Encoder:
        own = {name: source.node[name] for name in ("format", "columns") if name in source.node}
        kinds = {self.encoder.format, own.get("format", self.encoder.format)}
        if "label" in kinds and len(kinds) > 1:
            rule = "each of several sources has labels, or none has"
            raise ConfigError.of(source.key, rule, "Set data.format=label for all of them.")
        return replace(self.encoder, tokenizer=tokenizer, **own)

    def _entry(self, kind: str, *content: object) -> Path:
        """Return the folder of an entry of the cache, which has this content."""
        name = f"{kind}-{digest([VERSION, *content])[:32]}"
        return Path(self.cache_dir).expanduser().absolute() / name

    def _load_tokenizer(self, sources: Sequence[Source]) -> tuple[Any, Path]:
        """Return the tokenizer, which is trained where it is asked for, and its entry."""
        if not self.name.startswith(TRAINED):
            tokenizer = load_tokenizer(self.name)
            content = (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template)
            folder = self._entry("tokenizer", *content, tokenizer.special_tokens_map)
            return tokenizer, cached(folder, tokenizer.save_pretrained)
        encoders = [self._encoder(source, None) for source in sources]
        formats = [[encoder.format, encoder.columns] for encoder in encoders]
        folder = self._entry("tokenizer", self.name, formats, [*map(_content, sources)])

        def texts() -> Iterator[str]:
            for source, encoder in zip(sources, encoders, strict=True):
                for place, record in source.read():
                    yield from encoder.texts(place, record)

        cached(folder, lambda staged: load_tokenizer(self.name, texts).save_pretrained(staged))
        return load_tokenizer(str(folder)), folder

    def _layout(self) -> Layout:
        """Return the layout of rows; a ConfigError if the tokenizer's model takes none as long."""
        context, limit = self.encoder.context, self.tokenizer.model_max_length
        if not 2 <= context <= limit:
            rule = f"{self.name} has at least 2 and at most {limit} positions"
            raise ConfigError.of(
                f"data.context={context}", rule, f"Set data.context={min(limit, 1024)}."
            )
        too_long = self.too_long or ("split" if self.encoder.format == "text" else "cut")
        return Layout(context, too_long, self.packing, self.tokenizer.pad_token_id or 0)

    def _made(self, sources: Sequence[Source], fraction: float = 0.0) -> Any:
        """Return the data set of sources.

        Args:
            sources: one after another.
            fraction: of samples that are left out; below 0: that alone are in it.
        """
        encoders = [self._encoder(source, self.tokenizer) for source in sources]
        for source, encoder in zip(sources, encoders, strict=True):
            if (first := next(iter(source.read()), None)) is None:
                rule, remedy = "it has no samples", "Name files that have some."
                raise ConfigError.of(source.key, rule, remedy)
            encoder(*first)
        if self.stream:
            self.largest = self.tokenizer.vocab_size - 1  # added tokens may never come up
            whole = self.packing or self.layout.too_long != "cut"
            return (RowStream if whole else RecordStream)(sources, encoders, self.layout)
        folders = [self._tokens(*pair) for pair in zip(sources, encoders, strict=True)]
        self.largest = max(self.largest, *(int(load(one, LARGEST)[0]) for one in folders))
        labels = {label for folder in folders for label in labels_of(folder)}
        self.classes = self.classes or sorted(labels)
        if unknown := labels - set(self.classes):
            rule = f"the training samples have no label {min(unknown)!r}"
            remedy = f"They have {', '.join(map(str, self.classes))}."
            raise ConfigError.of(sources[0].key, rule, remedy)
        parts = [
            Rows(folder, self._rows(folder, fraction, source.key), self.layout, self.classes)
            for folder, source in zip(folders, sources, strict=True)
        ]
        for part, source in zip(parts, sources, strict=True):
            if part.left_out:
                told = "%s: %d samples are left out: none of their tokens counts in the loss"
                logger.warning(told, source.key, part.left_out)
        return parts[0] if len(parts) == 1 else ConcatDataset(parts)

    def _tokens(self, source: Source, encoder: Encoder) -> Path:
        context = encoder.context if encoder.format == "label" else None
        settings = (self.folder.name, encoder.format, encoder.columns, context)
        folder = self._entry("tokens", *settings, _content(source))
        return cached(folder, partial(write_tokens, source, encoder))

    def _rows(self, tokens: Path, fraction: float, key: str) -> Path:
        folder = self._entry("rows", tokens.name, asdict(self.layout), fraction)
        return cached(folder, partial(write_rows, tokens, self.layout, fraction, key))


def _content(source: Source) -> list[str]:
    """Return what tells the records of a source from others: names, endings, and digests."""
    return [source.name, *(f"{path.suffix} {file_digest(path)}" for path in source.files)]

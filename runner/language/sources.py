"""Data of language models: text, prompts with completions, conversations, texts with labels."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import ConcatDataset

from accel.machine.errors import ConfigError, nearest, unknown_choice
from runner.data.datasets import Data
from runner.language import readers
from runner.language.cache import VERSION, cached, file_digest
from runner.language.packing import (
    Layout,
    Mixture,
    Padding,
    RecordStream,
    Rows,
    RowStream,
    TooLong,
    labels_of,
    write_rows,
    write_tokens,
)
from runner.language.readers import Opening, Record, SampleBy, Source
from runner.language.samples import Tokens, chat_tokens, prompt_tokens, text_tokens
from runner.language.tokenizer import TRAINED, load_tokenizer
from runner.runs.json_files import digest, read_json

Format = Literal["text", "prompt", "chat", "label"]
# Columns of a record in each format; a recipe's `columns` may name others.
COLUMNS = {
    **{"text": ("text",), "prompt": ("prompt", "completion"), "chat": ("messages",)},
    "label": ("text", "label"),
}
CACHE = "~/.cache/runner/text"

# -- factories -----------------------------------------------------------------------------


def text(
    tokenizer: str,
    train: Any,
    validation: Any = None,
    test: Any = None,
    sample_by: SampleBy = "document",
    context: int = 1024,
    packing: bool = True,
    too_long: TooLong | None = None,
    stream: bool = False,
    cache_dir: str = CACHE,
) -> Data:
    """Return plain text of files, tokenized.

    Args:
        tokenizer: a folder, a file tokenizer.json, an id of the hub, or `bpe:4096`, which trains
            one on the training text.
        train: a file, a glob, `stdlib:*.py` (of Python's library), or a list of these; with
            weights [{path: …, weight: 2}, …], the shares of samples (of packed rows) in an epoch.
        validation: likewise; several by name {easy: …, hard: …}; or the fraction of the training
            samples that is held out.
        test: likewise, no fraction.
        sample_by: what a sample is: document (a file), paragraph or line.
        context: tokens of a row, the most of a sample.
        packing: whether rows hold several samples; false: each is padded.
        too_long: split a longer sample, cut it, or drop it; null: split plain text, cut others.
        stream: whether text is tokenized as it is read, in its own order, and never stored.
        cache_dir: folder of tokenized text, shared by runs.

    Raises:
        ConfigError: for what is missing, malformed or empty, and for too large a context.
    """
    settings = Settings(tokenizer, "text", {}, context, packing, too_long, stream, cache_dir)
    opening = partial(readers.of_files, partial(readers.text_records, sample_by))
    keys = ("path", "weight")
    return _data(settings, (opening, keys), f"text by {sample_by}", train, validation, test)


def jsonl(
    tokenizer: str,
    train: Any,
    validation: Any = None,
    test: Any = None,
    format: Format = "text",
    columns: Mapping[str, str] | None = None,
    context: int = 1024,
    packing: bool = True,
    too_long: TooLong | None = None,
    stream: bool = False,
    cache_dir: str = CACHE,
) -> Data:
    """Return records of JSONL files, tokenized.

    Args:
        tokenizer: as of `text`.
        train: as of `text`; a source of a list may have `format` and `columns` of its own.
        validation: likewise, or by name, or a fraction.
        test: likewise.
        format: of records: text, prompt (prompt and completion, of which the completion counts),
            chat (messages, of which the assistant's count), label (a text and its class).
        columns: other names of the columns text, prompt, completion, messages, label; a name
            with braces is a template, such as "{instruction}\\n{input}".
        context: as of `text`.
        packing: as of `text`.
        too_long: as of `text`.
        stream: as of `text`.
        cache_dir: as of `text`.

    Raises:
        ConfigError: for what is missing, malformed or empty, and for too large a context.
    """
    settings = Settings(
        tokenizer, format, columns or {}, context, packing, too_long, stream, cache_dir
    )
    opening = partial(readers.of_files, readers.json_records)
    keys = ("path", "weight", "format", "columns")
    return _data(settings, (opening, keys), "jsonl", train, validation, test)


def parquet(
    tokenizer: str,
    train: Any,
    validation: Any = None,
    test: Any = None,
    format: Format = "text",
    columns: Mapping[str, str] | None = None,
    context: int = 1024,
    packing: bool = True,
    too_long: TooLong | None = None,
    stream: bool = False,
    cache_dir: str = CACHE,
) -> Data:
    """Return records of Parquet files, tokenized; the arguments are those of `jsonl`."""
    settings = Settings(
        tokenizer, format, columns or {}, context, packing, too_long, stream, cache_dir
    )
    opening = partial(readers.of_files, readers.parquet_records)
    keys = ("path", "weight", "format", "columns")
    return _data(settings, (opening, keys), "parquet", train, validation, test)


def hf_dataset(
    tokenizer: str,
    path: str,
    subset: str | None = None,
    train: Any = "train",
    validation: Any = None,
    test: Any = None,
    format: Format = "text",
    columns: Mapping[str, str] | None = None,
    context: int = 1024,
    packing: bool = True,
    too_long: TooLong | None = None,
    stream: bool = False,
    cache_dir: str = CACHE,
) -> Data:
    """Return records of a data set of Hugging Face, tokenized.

    Args:
        tokenizer: as of `text`.
        path: id of the hub, or a folder of `save_to_disk`.
        subset: name of a configuration of the data set.
        train: name of a split, such as `train` or `train[:1%]`, or a list of sources with weights:
            [{path: …, subset: …, split: …, weight: 2}, …].
        validation: likewise, or by name, or a fraction.
        test: likewise.
        format: as of `jsonl`.
        columns: as of `jsonl`.
        context: as of `text`.
        packing: as of `text`.
        too_long: as of `text`.
        stream: as of `text`; the data set is not downloaded first.
        cache_dir: as of `text`.

    Raises:
        ConfigError: for what is missing or empty, and for too large a context.
    """
    settings = Settings(
        tokenizer, format, columns or {}, context, packing, too_long, stream, cache_dir
    )
    opening = partial(readers.of_splits, path, subset, stream)
    keys = ("split", "path", "subset", "weight", "format", "columns")
    return _data(settings, (opening, keys), "hf", train, validation, test)


# -- settings ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """How records become samples; the arguments of the factories tell them."""

    tokenizer: str
    format: Format
    columns: Mapping[str, str]
    context: int
    packing: bool
    too_long: TooLong | None
    stream: bool
    cache_dir: str

    def check(self) -> None:
        """Raise a ConfigError for settings that contradict each other."""
        if self.format == "label" and (self.packing or self.stream):
            value = f"data.{'packing' if self.packing else 'stream'}=true"
            rule = "a row has one label, and all labels are known before training"
            remedy = f"Set {value.replace('true', 'false')}."
            raise ConfigError.of(f"{value} with data.format=label", rule, remedy)

    def entry(self, kind: str, *content: object) -> Path:
        """Return the folder of an entry of the cache, which has this content."""
        name = f"{kind}-{digest([VERSION, *content])[:32]}"
        return Path(self.cache_dir).expanduser().absolute() / name


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
        known = COLUMNS[self.format]
        for name in set(self.columns) - set(known):
            value = f"data.columns.{name}={self.columns[name]}"
            rule = f"data.format={self.format} reads the columns {', '.join(known)}"
            raise ConfigError.of(value, rule, nearest(name, known))

    def __call__(self, place: str, record: Record) -> tuple[Tokens, Any]:
        """Return the tokens of the record of a place, and its label, where the format has one.

        Raises:
            ConfigError: for a missing column, or one of another type; it names the place.
        """
        try:
            values = [self.column(name, record) for name in COLUMNS[self.format]]
            if self.format == "label":
                ids = self.tokenizer(values[0], truncation=True, max_length=self.context).input_ids
                return Tokens(ids, [False] * len(ids)), values[1]
            make: Any = {"text": text_tokens, "prompt": prompt_tokens, "chat": chat_tokens}[
                self.format
            ]
            return make(self.tokenizer, *values), None
        except ConfigError as error:
            problems = (replace(one, value=f"{place}: {one.value}") for one in error.problems)
            raise ConfigError(*problems) from error

    def column(self, name: str, record: Record) -> Any:
        """Return what a record has in a column; a name with braces is a template of others."""
        column = self.columns.get(name, name)
        value = f"data.columns.{name}={column}"
        try:
            found = column.format_map(record) if "{" in column else record[column]
        except KeyError as error:
            missing = str(error.args[0])
            rule = f"there is no column {missing!r}"
            raise ConfigError.of(value, rule, nearest(missing, record)) from error
        wanted: Any = {"messages": list, "label": (str, int)}.get(name, str)
        if not isinstance(found, wanted):
            rule = f"data.format={self.format} does not read a {type(found).__name__} there"
            raise ConfigError.of(value, rule, f"The columns are {', '.join(record)}.")
        return found

    def texts(self, record: Record) -> Iterator[str]:
        """Yield the texts of a record, of which a tokenizer is trained."""
        for name in COLUMNS[self.format]:
            if isinstance(found := self.column(name, record), str):
                yield found
            elif name == "messages":
                yield from (str(message.get("content") or "") for message in found)


# -- from sources to Data ------------------------------------------------------------------


def _data(
    settings: Settings,
    opening: tuple[Opening, Sequence[str]],
    kind: str,
    train: Any,
    validation: Any,
    test: Any,
) -> Data:
    settings.check()
    fraction = validation if isinstance(validation, float) else 0.0
    if isinstance(validation, float) and (settings.stream or not 0 < fraction < 1):
        rule = "a fraction between 0 and 1 of samples that are all known is held out"
        remedy = "Set data.stream=false, or name files for validation."
        raise ConfigError.of(f"data.validation={validation}", rule, remedy)
    sources = readers.opened("data.train", train, *opening)
    tokenizer, folder = _tokenizer(settings, sources)
    _check_context(settings, tokenizer)
    maker = _Maker(settings, kind, tokenizer, folder.name)
    found = Data(maker.made(sources, fraction), artifacts={"tokenizer": folder})
    found.facts = {
        **{"vocab_size": len(tokenizer), "pad_token_id": maker.layout.pad_token_id},
        **{name: getattr(tokenizer, name) for name in ("eos_token_id", "bos_token_id")},
        **{"context": settings.context, **maker.label_facts},
    }
    for split, given in {"validation": validation, "test": test}.items():
        if isinstance(given, Mapping) and not set(given) & set(opening[1]):
            named = {
                name: readers.opened(f"data.{split}.{name}", one, *opening)
                for name, one in given.items()
            }
            setattr(found, split, {name: maker.made(one) for name, one in named.items()})
        elif given is not None:
            held = given is validation and fraction > 0
            of = sources if held else readers.opened(f"data.{split}", given, *opening)
            setattr(found, split, maker.made(of, -fraction if held else 0.0))
    if not settings.packing:
        # The main process joins the batches of a stream for all: they have one shape.
        length = settings.context if settings.stream else 0
        found.collate_fn = Padding(maker.layout.pad_token_id, length)
    if not settings.stream:
        parts: list[Any] = getattr(found.train, "datasets", [found.train])
        found.lengths = torch.cat([part.lengths for part in parts])
        if "weight" in sources[0].node:
            weights = [source.node["weight"] for source in sources]
            found.sampler = Mixture([len(part) for part in parts], weights)
    return found


def _tokenizer(settings: Settings, sources: Sequence[Source]) -> tuple[Any, Path]:
    """Return the tokenizer and the folder of the cache that keeps it."""
    name = settings.tokenizer
    if name.startswith(TRAINED):
        encoders = [_encoder(settings, None, source) for source in sources]

        def texts() -> Iterator[str]:
            for source, encoder in zip(sources, encoders, strict=True):
                for _, record in source.read():
                    yield from encoder.texts(record)

        formats = [[encoder.format, encoder.columns] for encoder in encoders]
        folder = settings.entry("tokenizer", name, formats, [_content(one) for one in sources])
        cached(folder, lambda staged: load_tokenizer(name, texts).save_pretrained(staged))
        return load_tokenizer(str(folder)), folder
    tokenizer = load_tokenizer(name)
    content = (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template)
    folder = settings.entry("tokenizer", *content, tokenizer.special_tokens_map)
    return tokenizer, cached(folder, lambda staged: tokenizer.save_pretrained(staged))


def _encoder(settings: Settings, tokenizer: Any, source: Source) -> Encoder:
    own = {name: source.node.get(name, getattr(settings, name)) for name in ("format", "columns")}
    return Encoder(tokenizer, **own, context=settings.context)


def _content(source: Source) -> list[str]:
    return [source.name, *map(file_digest, source.files)]


def _check_context(settings: Settings, tokenizer: Any) -> None:
    """Raise a ConfigError if rows are longer than the tokenizer, or a model beside it, allows."""
    beside = read_json(Path(settings.tokenizer).expanduser() / "config.json")
    limit = min(tokenizer.model_max_length, beside.get("max_position_embeddings") or sys.maxsize)
    if not 2 <= settings.context <= limit:
        rule = f"{settings.tokenizer} has at least 2 and at most {limit} positions"
        remedy = f"Set data.context={min(limit, 1024)}."
        raise ConfigError.of(f"data.context={settings.context}", rule, remedy)


class _Maker:
    """Makes data sets of sources."""

    def __init__(self, settings: Settings, kind: str, tokenizer: Any, identity: str) -> None:
        self.settings, self.kind = settings, kind
        self.tokenizer, self.identity = tokenizer, identity
        too_long = settings.too_long or ("split" if settings.format == "text" else "cut")
        pad = tokenizer.pad_token_id or 0
        self.layout = Layout(settings.context, too_long, settings.packing, pad)
        self.classes: list[Any] = []

    @property
    def label_facts(self) -> dict[str, object]:
        """The facts of labels; empty: the format has none."""
        return {"num_classes": len(self.classes), "classes": self.classes} if self.classes else {}

    def made(self, sources: Sequence[Source], fraction: float = 0.0) -> Any:
        """Return the data set of sources.

        Args:
            sources: one after another.
            fraction: of samples that are left out; below 0: that alone are in it.
        """
        encoders = [_encoder(self.settings, self.tokenizer, source) for source in sources]
        for source, encoder in zip(sources, encoders, strict=True):
            first = next(iter(source.read()), None)
            if first is None:
                rule, remedy = "it has no samples", "Name files that have some."
                raise ConfigError.of(source.key, rule, remedy)
            encoder(*first)
        if self.settings.stream:
            whole = self.layout.packing or self.layout.too_long != "cut"
            return (RowStream if whole else RecordStream)(sources, encoders, self.layout)
        folders = [self._tokens(*pair) for pair in zip(sources, encoders, strict=True)]
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
        return parts[0] if len(parts) == 1 else ConcatDataset(parts)

    def _tokens(self, source: Source, encoder: Encoder) -> Path:
        context = encoder.context if encoder.format == "label" else None
        settings = (self.kind, self.identity, encoder.format, encoder.columns, context)
        folder = self.settings.entry("tokens", *settings, _content(source))
        return cached(folder, partial(write_tokens, source, encoder))

    def _rows(self, tokens: Path, fraction: float, key: str) -> Path:
        folder = self.settings.entry("rows", tokens.name, asdict(self.layout), fraction)
        return cached(folder, partial(write_rows, tokens, self.layout, fraction, key))

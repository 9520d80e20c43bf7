"""Command lines of ``runner data``: samples as a language model is trained on them; tokenizers."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.machine.errors import ConfigError, nearest
from runner.cli import arguments as command_line
from runner.cli import program
from runner.cli.arguments import CommandParser
from runner.exit_codes import DONE
from runner.language.samples import IGNORED

if TYPE_CHECKING:
    from rich.console import Console

    from runner.data.datasets import Data

COUNTED, OTHER, TITLE = "green", "dim", "bold cyan"
MARKS = "⟦", "⟧"  # around what counts, where there are no colours


def main(arguments: Sequence[str]) -> int:
    """Print samples of a recipe's data, or train a tokenizer.

    Raises:
        ConfigError: if an option is refused.
    """
    actions = {"show": show, "tokenizer": train_tokenizer}
    parser = CommandParser("data", "Look at the data of a language model, or train a tokenizer.")
    parser.add_argument("action", choices=actions, help="runner data ACTION --help tells more")
    return actions[parser.parse_args(list(arguments[:1])).action](arguments[1:])


def show(arguments: Sequence[str]) -> int:
    """Print decoded samples of a recipe's data, with what the loss counts, lengths and cuts.

    Raises:
        ConfigError: if the recipe or an option is refused, or the data are no tokens.
    """
    from runner.data.datasets import num_samples
    from runner.reporting import run_table
    from runner.training import build

    parser = CommandParser("data show", "Print samples of a recipe's data: [flags] [key=value ...]")
    add = parser.add_argument
    add("--split", default="train", metavar="NAME", help="e.g. validation, validation/easy (train)")
    add("--count", type=int, default=3, metavar="N", help="samples or packed rows (3)")
    add("--index", type=int, default=0, metavar="I", help="the first of them (0)")
    found, rest = parser.parse_known_args(list(arguments))
    flags = command_line.parse(rest)
    if flags.multirun or flags.cfg or flags.dry_run:
        rule, remedy = "it shows the data of one recipe", "Leave out -m, --cfg and --dry-run."
        raise ConfigError.of(parser.prog, rule, remedy)
    overrides = program.last_of_each(command_line.searched(flags))
    examined, missing = program.checked(overrides, flags.config_name)
    build.require([examined], missing)
    data = build.build_data(examined.recipe)
    if found.split not in data.sizes():
        rule = "the data have no such split"
        raise ConfigError.of(f"--split {found.split}", rule, nearest(found.split, data.sizes()))
    split, _, name = found.split.partition("/")
    dataset = data.sets(split)[name]
    size = num_samples(dataset)
    if found.count < 1 or not 0 <= found.index < (found.index + 1 if size is None else size):
        value = f"--index {found.index} --count {found.count}"
        rule = f"{found.split} has {'a stream of' if size is None else size} samples"
        raise ConfigError.of(value, rule, "Count from 0, and show one or more.")
    viewer = _Viewer(data, run_table.console_for_tables())
    batches = _batches(examined.recipe.seed, dataset, data.collate_fn, found.index)
    for number, batch in enumerate(itertools.islice(batches, found.count), start=found.index):
        viewer.show(f"{found.split}[{number}]", batch)
    viewer.summarize(f"{'a stream' if size is None else size} in {found.split}")
    if split == "train" and data.lengths is not None:
        lengths = [int(length) for length in data.lengths]
        told = f"{min(lengths)} to {max(lengths)} tokens, median {statistics.median_low(lengths)}"
        print(f"all rows: {told}")
    return DONE


def _batches(seed: int, dataset: Any, function: Any, first: int) -> Iterator[Any]:
    """Yield batches of one sample, in the order of the data set."""
    from runner.data.datasets import Collate, SeededDataset, SeededStream, num_samples

    collate = Collate(function)
    if (size := num_samples(dataset)) is None:
        stream = SeededStream(dataset, seed)
        stream.skip = first
        yield from (collate([sample]) for sample in stream)
    else:
        seeded = SeededDataset(dataset, seed)
        yield from (collate([seeded[index]]) for index in range(first, size))


class _Viewer:
    """Prints batches of one sample, or of one row of packed samples, and sums them up."""

    def __init__(self, data: Data, console: Console) -> None:
        from runner.language.tokenizer import load_tokenizer

        if "tokenizer" not in data.artifacts:
            rule = "tokens are shown by the tokenizer among the artifacts of the data"
            remedy = "Choose data=jsonl, or another of text; or return Data(artifacts=…)."
            raise ConfigError.of(f"data with {', '.join(data.artifacts) or 'none'}", rule, remedy)
        self.tokenizer = load_tokenizer(str(data.artifacts["tokenizer"]))
        self.data = data
        self.console = console
        self.coloured = console.is_terminal and not console.no_color
        self.totals: Counter[str] = Counter()
        self._line([("counted by the loss", True), (", the rest is not", False)])

    def show(self, title: str, batch: Any) -> None:
        """Print a batch of one row.

        Raises:
            ConfigError: if it has no tokens.
        """
        if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
            rule = "a batch of tokens has input_ids and labels"
            remedy = "Choose data=jsonl, or another of text."
            raise ConfigError.of(f"{title}: {type(batch).__name__}", rule, remedy)
        row = {name: values[0].tolist() for name, values in batch.items()}
        length = sum(row.get("attention_mask", [1] * len(row["input_ids"])))
        ids, labels = row["input_ids"][:length], row["labels"]
        label = ""
        if isinstance(labels, int):
            classes = self.data.facts.get("classes")
            label = f", label {classes[labels] if classes else labels}"
            labels = [IGNORED] * length
        counted = [label != IGNORED for label in labels[:length]]
        positions = row.get("position_ids", range(length))
        starts = [place for place, position in enumerate(positions) if position == 0]
        spans = list(itertools.pairwise([*starts, length]))
        pad = self.data.facts.get("pad_token_id")
        filled = 0
        if len(spans) > 1 and {*ids[starts[-1] :]} == {pad} and not any(counted[starts[-1] :]):
            first, end = spans.pop()
            filled = end - first
        self._add(rows=1, tokens=length, counted=sum(counted), filled=filled)
        told = f"{length} tokens{label}" if label else _share(length, sum(counted))
        told += f", {len(spans)} samples" if len(spans) > 1 else ""
        told += f", {filled} of padding" if filled else ""
        self._print(f"{title}: {told}", TITLE)
        for number, (first, end) in enumerate(spans, start=1):
            if len(spans) > 1:
                share = _share(end - first, sum(counted[first:end]))
                self._print(f"── sample {number} of {len(spans)}: {share}", TITLE)
            self._sample(ids[first:end], counted[first:end])
        self._print("")

    def _sample(self, ids: list[int], counted: list[bool]) -> None:
        cut = len(ids) == self.data.facts.get("context") and ids[-1] != self.tokenizer.eos_token_id
        self._add(samples=1, cut=cut)
        runs = itertools.groupby(zip(ids, counted, strict=True), key=lambda pair: pair[1])
        self._line((self.tokenizer.decode([one for one, _ in run]), key) for key, run in runs)
        if cut:
            told = f"── no end token: cut at {len(ids)} tokens, or continued in another row"
            self._print(told, "yellow")

    def summarize(self, of: str) -> None:
        """Print what was shown, of how many rows."""
        totals = self.totals
        shares = _share(totals["tokens"] - totals["filled"], totals["counted"])
        told = f"{totals['samples']} samples, {totals['cut']} cut, {totals['filled']} of padding"
        self._print(f"{totals['rows']} rows of {of}: {shares}; {told}", TITLE)

    def _add(self, **counts: int) -> None:
        self.totals.update(counts)

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, soft_wrap=True)

    def _line(self, runs: Any) -> None:
        """Print runs of text: (text, whether the loss counts it)."""
        from rich.text import Text

        line = Text()
        for text, counted in runs:
            shown = text.replace("\x1b", "␛")
            if counted and not self.coloured:
                shown = shown.join(MARKS)
            line.append(shown, style=COUNTED if counted else OTHER)
        end = "" if line.plain.endswith("\n") else "\n"
        self.console.print(line, end=end, soft_wrap=True)


def _share(tokens: int, counted: int) -> str:
    return f"{tokens} tokens, {counted} counted ({counted / max(tokens, 1):.1%})"


def train_tokenizer(arguments: Sequence[str]) -> int:
    """Train a byte-level BPE on files, and save it with a chat template.

    Raises:
        ConfigError: if a file cannot be read, the size is too small, or the folder is not empty.
    """
    from runner.language import readers
    from runner.language.tokenizer import load_tokenizer

    parser = CommandParser("data tokenizer", "Train a byte-level BPE with a ChatML template.")
    add = parser.add_argument
    files = "text, JSONL or Parquet files, globs, 'stdlib:*.py'; of records every text"
    add("files", metavar="FILE", nargs="+", help=files)
    add("--size", type=int, default=4096, metavar="N", help="tokens (4096)")
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    found = parser.parse_args(list(arguments))
    if found.out.exists() and (not found.out.is_dir() or any(found.out.iterdir())):
        raise ConfigError.of(f"--out {found.out}", "it is there, and not empty", "Name a new one.")
    sources = [readers.of_files("document", "FILE", {"path": name}) for name in found.files]
    texts = (text for one in sources for _, record in one.read() for text in _texts(record))
    tokenizer = load_tokenizer(f"bpe:{found.size}", lambda: texts)
    tokenizer.save_pretrained(found.out)
    print(f"{found.out}: {len(tokenizer)} tokens. Use it: data.tokenizer={found.out}")
    return DONE


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a record, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)

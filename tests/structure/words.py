"""How often the words of the field occur, and those that they replace.

Counted in any case, in names (``dp_state_dict``), comments, docstrings and messages alike; ``what``
in comments, docstrings and strings only. A word begins where no letter goes before it, so that
``DistributedDataParallel`` is none; in names, a term has underscores or nothing for its spaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tests.structure.source import Source

FIELD = {
    "data parallel": r"data[ _-]?parallel",
    "shard": r"(re|un)?shard",
    "all-gather": r"all[ _-]?gather",
    "reduce-scatter": r"reduce[ _-]?scatter",
    "process group": r"process[ _-]?group",
    "rendezvous": r"rendezvous",
    "state dict": r"state[ _-]?dict",
    "tied weights": r"tied[ _-](weight|parameter)|(weight|parameter)s? (is|are) tied",
    "micro-batch": r"micro[ _-]?batch",
}
REPLACED = {
    "whole": r"whole(?![a-z])",
    "told, told by": r"told(?![a-z])",
    "tells": r"tells(?![a-z])",
    "alone": r"alone(?![a-z])",
    "go on, goes on": r"go(es)? on(?![a-z])",
    "anew": r"anew(?![a-z])",
    "settle…": r"settle",
    "spread": r"spread",
    "in parts": r"in parts(?![a-z])",
}
WHAT = re.compile(r"(?<![a-z_])what\s", re.IGNORECASE)


def count(text: str, pattern: str) -> int:
    """Return how often a word of `FIELD` or `REPLACED` is in `text`, over ends of lines too."""
    joined = re.sub(r"\s*\n[\s#]*", " ", text)
    return len(re.findall(rf"(?<![a-z]){pattern}", joined, re.IGNORECASE))


def counts(texts: Iterable[str], words: Mapping[str, str]) -> dict[str, int]:
    """Return how often each of `words` is in all of `texts`."""
    texts = list(texts)
    return {word: sum(count(text, pattern) for text in texts) for word, pattern in words.items()}


def num_what(sources: Iterable[Source]) -> int:
    """Return how often "what" stands in comments, docstrings and strings of `sources`."""
    return sum(len(WHAT.findall(text)) for source in sources for text in source.prose())

"""Python files of a checkout, as syntax trees and as text. Imports nothing of what it reads."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGES = ("accel", "runner")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# From Python 3.12 the tokenizer splits an f-string; before, it is one STRING.
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


@dataclass(frozen=True)
class Source:
    """One Python file.

    Attributes:
        place: the path below the root of the checkout, with slashes.
        text: the content.
    """

    place: str
    text: str

    @property
    def module(self) -> str:
        """The dotted name; a package's ``__init__`` has the name of the package."""
        return self.place.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """All tokens, comments included."""
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def docstring_lines(self) -> set[int]:
        """The lines that hold strings which are statements: docstrings, also of attributes."""
        return {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and is_text(node.value)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }

    @cached_property
    def code_tokens(self) -> list[tokenize.TokenInfo]:
        """The tokens without comments, docstrings and layout."""
        return [
            token
            for token in self.tokens
            if token.type not in LAYOUT and token.start[0] not in self.docstring_lines
        ]

    @cached_property
    def code_lines(self) -> set[int]:
        """The lines that hold code."""
        return {
            line for token in self.code_tokens for line in range(token.start[0], token.end[0] + 1)
        }


def is_text(node: ast.AST) -> bool:
    """Return whether `node` is a string without parts to be formatted."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def read(root: Path, *folders: str) -> list[Source]:
    """Return the Python files below `folders` of a checkout, by path.

    Args:
        root: of the checkout.
        folders: relative to `root`.
    """
    return [
        Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
    ]

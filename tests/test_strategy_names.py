"""Only a strategy's own files name it, read from the source: nothing is imported."""

from __future__ import annotations

import ast
import io
import re
import tokenize

import pytest

from tests.test_architecture import FACADES, ROOT, sources

# A strategy's own files: its room, the files of its config, and the table that names all.
OWN_FILES = (
    *("accel/strategies/mesh/", "accel/strategies/deepspeed/", "accel/strategies/megatron/"),
    *("accel/config/fsdp.py", "accel/config/deepspeed", "accel/config/tensor_parallel.py"),
    "accel/strategies/table.py",
)
# Code lines elsewhere that name a strategy, by file: arguments and attributes of the documented
# API, a remedy, and kinds of optimizers.
NAMING_LINES = {
    "accel/accelerator.py": 5,
    "accel/enums.py": 3,
    "accel/state.py": 11,
    "accel/strategies/optimizer_kinds.py": 1,
}
NAMES = re.compile(
    r"(?<!enable_)fsdp|fully_?shard|deepspeed|tensor_?parallel|torch_tp|megatron", re.I
)


def naming_lines(text: str) -> list[str]:
    """Return the lines of code that name a strategy: no comments, docstrings or imports."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    tree = ast.parse(text)
    left_out = {
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    named = {
        token.start[0] + offset
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in skipped
        for offset, part in enumerate(token.string.splitlines())
        if NAMES.search(part)
    }
    return [text.splitlines()[line - 1].strip() for line in sorted(named - left_out)]


@pytest.mark.parametrize("package", ["accel", "runner"])
def test_a_strategy_is_named_in_its_own_files(package: str) -> None:
    found = {}
    for module, path, _ in sources(package):
        place = str(path.relative_to(ROOT))
        if module.removesuffix(".__init__") not in FACADES and not place.startswith(OWN_FILES):
            found[place] = naming_lines(path.read_text())
    expected = {place: n for place, n in NAMING_LINES.items() if place.startswith(package)}
    assert {place: len(lines) for place, lines in found.items() if lines} == expected, found


def test_lines_that_name_a_strategy_are_found() -> None:
    text = '"""Of FSDP."""\nimport deepspeed  # of fsdp\nx = f(\n    fsdp_plugin,  # fsdp\n    1)\n'
    assert naming_lines(text) == ["fsdp_plugin,  # fsdp"]

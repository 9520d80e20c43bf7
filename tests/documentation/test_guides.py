"""C2, L1, R10: the commands and code of README and the guides run, and their links lead on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner import exit_codes
from tests.documentation.guides import BLOCK, DOCUMENTS, ROOT, Reader

pytestmark = pytest.mark.timeout(1800)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
of_each = pytest.mark.parametrize(
    "document", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in DOCUMENTS]
)


@of_each
def test_the_recipes_of_a_document_are_valid(document: Path, tmp_path: Path) -> None:
    failures = Reader(document, tmp_path, real=False).failures()
    assert not failures, "\n".join(failures)


@pytest.mark.slow  # the fast test checks the same commands and starts no training
@of_each
def test_a_document_runs(document: Path, tmp_path: Path) -> None:
    failures = Reader(document, tmp_path, real=True).failures()
    assert not failures, "\n".join(failures)


def links(document: Path) -> list[tuple[str, str]]:
    """Return the paths and anchors that a document links to, outside of its code."""
    return LINK.findall(BLOCK.sub("", document.read_text(encoding="utf-8")))


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = BLOCK.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


@of_each
def test_links_of_a_document_lead_somewhere(document: Path) -> None:
    for path, anchor in links(document):
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_index_names_every_guide() -> None:
    index = ROOT / "docs" / "index.md"
    named = {(index.parent / path).resolve() for path, _ in links(index)}
    assert {path for path in DOCUMENTS if path.parent != ROOT} - {index} - named == set()


def test_the_guide_of_runs_lists_the_exit_codes() -> None:
    """R10."""
    guide = (ROOT / "docs" / "runs.md").read_text()
    codes = {value for value in vars(exit_codes).values() if isinstance(value, int)}
    for code in codes - {exit_codes.OF_SIGNAL}:
        assert f"| {code} |" in guide

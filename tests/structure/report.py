"""The table of measures of a checkout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.structure import imports, mirror, naming, sizes, words
from tests.structure.source import PACKAGES, Source, read

Row = tuple[str, str, float | int | str]


def measures(root: Path) -> list[Row]:
    """Return (subject, measure, value) of everything that is measured of the checkout at `root`."""
    packages = {package: read(root, package) for package in PACKAGES}
    both = [source for sources in packages.values() for source in sources]
    return [
        *_naming(both),
        *_interface(packages["accel"]),
        *_functions(packages),
        *_files(packages),
        *_imports(root, packages),
        *_tests(root, both),
        *_words(root, both),
    ]


def _naming(both: list[Source]) -> Iterator[Row]:
    found = naming.naming_lines(both)
    subject = "lines that name a strategy"
    yield subject, "outside of rooms, as issue 12 counts", len(naming.counted(found))
    yield subject, "files with such lines", len({one.place for one in naming.counted(found)})
    yield subject, "facades and DDP included", len(found)
    for kind, number in naming.per_kind(found).items():
        yield subject, f"    {kind}", number


def _interface(accel: list[Source]) -> Iterator[Row]:
    over = sizes.overriders(accel, "Strategy")
    yield "Strategy", "public members", len(over)
    for number in (0, 1):
        few = [member for member, classes in over.items() if len(classes) == number]
        yield "Strategy", f"members with {number} overriders", len(few)
    for member, classes in over.items():
        yield "Strategy", f"    overriders of {member}", len(classes)
    for name in sizes.FACTS:
        yield "Strategy", f"fields and methods of {name}", len(sizes.public_members(accel, name))


def _functions(packages: dict[str, list[Source]]) -> Iterator[Row]:
    every = [source for sources in packages.values() for source in sources]
    for subject, sources in {**packages, "both": every}.items():
        found = sizes.functions(sources)
        median, p90 = sizes.median_and_p90([one.num_lines for one in found])
        yield f"functions of {subject}", "number", len(found)
        yield f"functions of {subject}", "lines, median", median
        yield f"functions of {subject}", "lines, 90th percentile", p90
        yield f"functions of {subject}", "lines, longest", found[0].num_lines
        yield f"functions of {subject}", "    the longest", found[0].name


def _files(packages: dict[str, list[Source]]) -> Iterator[Row]:
    for package, sources in packages.items():
        yield f"files of {package}", "number", len(sources)
        yield f"files of {package}", "over 400 lines", len(sizes.longer(sources, 400))
        yield f"files of {package}", "over 500 lines", len(sizes.longer(sources, 500))
        yield f"files of {package}", "lines", sum(one.num_lines for one in sources)
        yield f"files of {package}", "lines of code", sum(len(one.code_lines) for one in sources)
        density = round(sizes.any_per_thousand_lines(sources), 1)
        yield f"files of {package}", "`Any` per 1,000 lines", density


def _imports(root: Path, packages: dict[str, list[Source]]) -> Iterator[Row]:
    for package, sources in packages.items():
        found = imports.cycles(imports.graph(sources))
        yield f"imports of {package}", "cycles (also lazy and type-only)", len(found)
        for cycle in found:
            yield f"imports of {package}", "    a cycle", " ".join(cycle)
    yield "runner/", "modules at the top", len(list((root / "runner").glob("*.py")))
    rooms = [path.parent.name for path in (root / "runner").glob("*/__init__.py")]
    yield "runner/", "rooms", len(rooms)


def _tests(root: Path, both: list[Source]) -> Iterator[Row]:
    missing = mirror.untested(root, both)
    for package in PACKAGES:
        own = [place for place in missing if place.startswith(f"{package}/")]
        yield "tests", f"modules of {package} without a test of their name", len(own)
    for place in missing:
        yield "tests", "    none for", place


def _words(root: Path, both: list[Source]) -> Iterator[Row]:
    kinds = {"packages": both, "tests": read(root, "tests")}
    for place, sources in kinds.items():
        own = [one for one in sources if not one.place.startswith("tests/structure/")]
        texts = [one.text for one in own]
        yield from _counted(place, texts, words.num_what(own))
    readme = (root / "README.md").read_text(encoding="utf-8")
    yield from _counted("README", [readme], len(words.WHAT.findall(readme)))


def _counted(place: str, texts: list[str], whats: int) -> Iterator[Row]:
    for word, number in words.counts(texts, words.FIELD).items():
        yield f"field's words in {place}", word, number
    for word, number in words.counts(texts, words.REPLACED).items():
        yield f"replaced words in {place}", word, number
    yield f"replaced words in {place}", "what …", whats


def table(rows: list[Row]) -> str:
    """Return `rows` as aligned text, each subject said once."""
    width = max(len(subject) for subject, _, _ in rows)
    wide = max(len(measure) for _, measure, _ in rows)
    lines, before = [], ""
    for subject, measure, value in rows:
        shown = "" if subject == before else subject
        lines.append(f"{shown:<{width}}  {measure:<{wide}}  {value}")
        before = subject
    return "\n".join(lines)

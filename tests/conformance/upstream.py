"""How much of the upstream release's documented names `accel` has.

``python -m tests.conformance.upstream`` prints the counts, and each gap with its reason.
`upstream_names.txt` lists the names, a line each: ``name(parameters): members``.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.conformance.upstream_gaps import REASONS

NAMES = Path(__file__).with_name("upstream_names.txt")
LINE = re.compile(r"([\w.]+)\((.*?)\)(?:: (.*))?")
MEMBER = re.compile(r"(\w+)(?:\((.*)\))?")


@dataclass(frozen=True)
class Documented:
    """A documented name.

    Args:
        path: as the documentation has it, below the package: "utils.gather", "Accelerator".
        parameters: in their documented order; ``args`` and ``kwargs`` stand for any.
        members: name of each documented member → its parameters; None: an attribute.
    """

    path: str
    parameters: tuple[str, ...]
    members: dict[str, tuple[str, ...] | None]

    def find(self) -> object:
        """Return what the name stands for in `accel`.

        Raises:
            LookupError: if there is none.
        """
        module, _, name = self.path.removeprefix("accelerate.").rpartition(".")
        try:
            return getattr(importlib.import_module(".".join(filter(None, ("accel", module)))), name)
        except (ImportError, AttributeError):
            raise LookupError(self.path) from None


@dataclass(frozen=True)
class Gap:
    """A documented thing that `accel` lacks.

    Args:
        kind: "name", "member" or "parameter"; "argument": a parameter of a member.
        where: what it is.
    """

    kind: str
    where: str

    @property
    def reason(self) -> str:
        """Why it is lacking; empty: nobody says."""
        found = (why for start, why in REASONS.items() if self.where.startswith(start))
        return next(found, "")


@cache
def documented() -> tuple[Documented, ...]:
    """Return the documented names in their order."""
    found = []
    for line in NAMES.read_text(encoding="utf-8").splitlines():
        match = None if line.startswith("#") else LINE.fullmatch(line)
        if match is not None:
            path, parameters, members = match.groups()
            found.append(Documented(path, _split(parameters), _members(members or "")))
    return tuple(found)


def _split(parameters: str) -> tuple[str, ...]:
    return tuple(filter(None, parameters.split(", ")))


def _members(text: str) -> dict[str, tuple[str, ...] | None]:
    members: dict[str, tuple[str, ...] | None] = {}
    for part in filter(None, text.split(" · ")):
        match = MEMBER.fullmatch(part)
        assert match is not None, part
        members[match[1]] = None if match[2] is None else _split(match[2])
    return members


def takes(found: object, parameter: str) -> bool:
    """Return whether what `found` stands for has the parameter, by name."""
    if inspect.isclass(found) and issubclass(found, enum.Enum):
        found = enum.EnumMeta.__call__
    assert callable(found)
    parameters = inspect.signature(found).parameters.values()
    if parameter in ("args", "kwargs"):
        wanted = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return any(p.kind is wanted[parameter] or p.name == parameter for p in parameters)
    return any(p.name == parameter for p in parameters)


def has(found: object, member: str) -> bool:
    """Return whether a class has the member: its own, a field, or set by one of its methods."""
    assert inspect.isclass(found)
    if hasattr(found, member) or hasattr(_stateful(found), member):
        return True
    if dataclasses.is_dataclass(found) and member in found.__dataclass_fields__:
        return True
    written = re.compile(rf"self\.{member}\b(?:, self\.\w+)*\s*(?::[^=\n]+)?=(?!=)")
    own = [kind for kind in found.__mro__ if kind.__module__.startswith("accel.")]
    annotated = any(member in vars(kind).get("__annotations__", {}) for kind in own)
    return annotated or any(written.search(inspect.getsource(kind)) for kind in own)


def _stateful(found: object) -> object:
    """Return the class of a loader's instances with ``use_stateful_dataloader=True``."""
    from accel.data.loaders import PreparedLoader, stateful_class

    is_loader = inspect.isclass(found) and issubclass(found, PreparedLoader)
    return stateful_class(found) if is_loader else found  # type: ignore[arg-type]


def gaps_of(name: Documented) -> Iterator[Gap]:
    """Yield what `accel` lacks of a documented name."""
    try:
        found = name.find()
    except LookupError:
        yield Gap("name", name.path)
        yield from (Gap("parameter", f"{name.path}({p})") for p in name.parameters)
        yield from (Gap("member", f"{name.path}.{member}") for member in name.members)
        return
    for parameter in name.parameters:
        if not takes(found, parameter):
            yield Gap("parameter", f"{name.path}({parameter})")
    for member, arguments in name.members.items():
        if not has(found, member):
            yield Gap("member", f"{name.path}.{member}")
            continue
        method = getattr(_stateful(found), member, None)
        for argument in arguments or ():
            if not (callable(method) and takes(method, argument)):
                yield Gap("argument", f"{name.path}.{member}({argument})")


def totals() -> dict[str, int]:
    """Return the number of documented things of each kind."""
    names = documented()
    methods = [arguments or () for name in names for arguments in name.members.values()]
    return {
        "name": len(names),
        "member": sum(len(name.members) for name in names),
        "parameter": sum(len(name.parameters) for name in names),
        "argument": sum(len(arguments) for arguments in methods),
    }


def main() -> None:
    """Print the counts and the gaps."""
    gaps = [gap for name in documented() for gap in gaps_of(name)]
    for gap in gaps:
        print(f"{gap.kind:9} {gap.where}: {gap.reason or 'NO REASON'}")
    for kind, total in totals().items():
        print(f"{kind}s {total - sum(gap.kind == kind for gap in gaps)} of {total}")


if __name__ == "__main__":
    main()

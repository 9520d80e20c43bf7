"""Names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def attribute(package: str, places: Mapping[str, str], name: str) -> Any:
    """Return what `name` of `package` stands for, and keep it there for the next time.

    Args:
        package: name of the package.
        places: "module", or "module:name" where that differs, by public name.
        name: the name that was asked for.

    Raises:
        AttributeError: if the package has no such name.
    """
    place = places.get(name)
    if place is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module, _, own_name = place.partition(":")
    value = getattr(importlib.import_module(module), own_name or name)
    setattr(sys.modules[package], name, value)
    return value

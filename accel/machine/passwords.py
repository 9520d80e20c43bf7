"""Passwords in URLs are needed to connect, and neither shown nor written."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"  # as SQLAlchemy renders them
# A password may hold a slash and, as people write them, an @: the host begins after the last one.
# A number of a port's size before a slash, a query or a comma is a port.
_IN_URL = re.compile(r"(?<=://)([^\s:/]*):(?!\d{1,5}[/?,])([^\s'\"]+)@")
_IN_QUERY = re.compile(r"([?&][^\s=&]*(?:password|passwd|pwd)=)[^\s&'\"]+", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """Return a text with the passwords of its URLs hidden."""
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_URL.sub(rf"\1:{HIDDEN}@", text))


def shown(command: Iterable[str]) -> list[str]:
    """Return the words of a command line as they may be shown."""
    return [without_passwords(word) for word in command]

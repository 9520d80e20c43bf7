"""Why `accel` lacks some of the documented names of the upstream release."""

from __future__ import annotations

# Beginning of a documented name, member (``Name.member``) or parameter (``Name(parameter)``) → why.
REASONS: dict[str, str] = {}

"""What a command about runs prints."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from runner.reporting import run_table


def printed(show: Callable[..., None], *content: Any) -> str:
    out = io.StringIO()
    show(*content, run_table.console_for_tables(file=out))
    return out.getvalue()

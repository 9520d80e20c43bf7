"""Code of fresh interpreters that run a function of the runner's. Free of torch.

They run with -P, so that nothing in the working directory is taken for `accel`, `runner` or a
module of the standard library; the user's code is found behind everything else.
"""

from __future__ import annotations

import sys


def code(module: str, function: str = "main") -> str:
    """Return code that calls ``module.function(order)``.

    The order is JSON, the first argument; its "path" is added to the end of `sys.path`.
    """
    return (
        "import json, sys; order = json.loads(sys.argv[1]); "
        "sys.path.extend(path for path in order['path'] if path not in sys.path); "
        f"from {module} import {function}; {function}(order)"
    )


def command(module: str, order: str) -> list[str]:
    """Return the command of a fresh interpreter that calls ``module.main`` with an order."""
    return [sys.executable, "-P", "-c", code(module), order]

"""``python -m runner``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from runner import cli  # which imports `accel` once `sys.path` is final

    sys.exit(cli.main())

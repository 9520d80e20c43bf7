"""``python -m accel.commands``."""

from __future__ import annotations

import sys

from accel.commands.program import main

if __name__ == "__main__":
    sys.exit(main())

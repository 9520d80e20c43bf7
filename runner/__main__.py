"""``python -m runner``."""

from __future__ import annotations

import sys

from runner.recipe import paths

if __name__ == "__main__":
    paths.move_project_last()
    from runner import cli

    sys.exit(cli.main())

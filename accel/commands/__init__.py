"""Command lines: `accel launch`, `config`, `env`, `merge-weights`, `estimate-memory`."""

from __future__ import annotations

import argparse
from typing import NoReturn

from accel.machine.errors import closest, did_you_mean


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that suggests the nearest flag."""

    def error(self, message: str) -> NoReturn:
        """Report an error, and the known flag that an unknown one resembles."""
        flags = [name for action in self._actions for name in action.option_strings]
        unknown = message.partition("unrecognized arguments: ")[2].split()
        names = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        close = [found for name in names if (found := closest(name, flags)) is not None]
        super().error(f"{message}. {did_you_mean(*close)}" if close else message)

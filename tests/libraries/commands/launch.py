"""`accel launch`, as command lines of libraries start it: a parser, and what it found."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from accel.commands import launch


class LaunchParser:
    """Read the arguments of `accel launch`."""

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:
        """Return what a command line starts.

        Args:
            args: flags, the script, and its own arguments.

        Raises:
            ConfigError: if the flags or the file of settings are refused.
        """
        return argparse.Namespace(launch=launch.parse(args))


def launch_command_parser() -> LaunchParser:
    """Return the parser of the command line."""
    return LaunchParser()


def launch_command(args: argparse.Namespace) -> None:
    """Start a script; the process becomes the script's launcher.

    Args:
        args: of the parser.
    """
    args.launch.execute()

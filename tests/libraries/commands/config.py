"""The file of settings, as command lines of libraries read it."""

from __future__ import annotations

from pathlib import Path

from accel.commands import launch_config

default_config_file = str(launch_config.default_config_file())


class Settings:
    """Settings of a file, by name."""

    def __init__(self, values: dict[str, object]) -> None:
        self._values = values

    def to_dict(self) -> dict[str, object]:
        """Return the settings by name."""
        return dict(self._values)


def load_config_from_file(config_file: str | None) -> Settings:
    """Return the settings of a file.

    Args:
        config_file: its path; None: that of the default file.

    Raises:
        ConfigError: if it cannot be read.
    """
    return Settings(launch_config.load(Path(config_file or default_config_file)))

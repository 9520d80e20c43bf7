"""One process: the defaults of `Strategy` are right as they are."""

from __future__ import annotations

from typing import final

from accel.strategies.base import Strategy


@final
class SingleProcessStrategy(Strategy):
    """The whole model in one process."""

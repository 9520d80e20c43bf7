"""A training engine: one loop for any device and any number of processes.

Importing this package imports neither torch nor an optional package; using a name does.
"""

from __future__ import annotations

from accel import _exports

# Release of the documented API that this package offers: libraries choose their calls by it.
__version__ = "1.15.0"

_exports.install()
__all__, __getattr__, __dir__ = _exports.lazy(__name__)

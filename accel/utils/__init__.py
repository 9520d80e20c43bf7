"""Functions and classes of the documented `utils`; `accel._exports` says where they are."""

from __future__ import annotations

from accel import _exports

__all__, __getattr__, __dir__ = _exports.lazy(__name__)

"""From a plan to its number format."""

from __future__ import annotations

from accel.errors import ConfigError, Problem, nearest
from accel.plan import Plan
from accel.precision.amp import DTYPES, AmpPrecision
from accel.precision.base import Precision


def build_precision(plan: Plan) -> Precision:
    """Return the number format that `plan` names.

    Raises:
        ConfigError: if this version does not compute in it.
    """
    if plan.mixed_precision == "no":
        return Precision()
    if plan.mixed_precision in DTYPES:
        return AmpPrecision(plan.mixed_precision, plan.device_type, plan.autocast, plan.scaler)
    known = ("no", *DTYPES)
    raise ConfigError(
        Problem(
            f"mixed_precision={plan.mixed_precision!r}",
            f"it is one of {', '.join(known)}",
            nearest(plan.mixed_precision, known),
        )
    )

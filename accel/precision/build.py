"""From a plan to its number format."""

from __future__ import annotations

from accel.errors import ConfigError, unknown_choice
from accel.planning.plan import Plan
from accel.precision.amp import AmpPrecision
from accel.precision.base import COMPUTE_DTYPES, Precision


def build_precision(plan: Plan) -> Precision:
    """Return the number format that `plan` names.

    Raises:
        ConfigError: if this version does not compute in it.
    """
    if plan.mixed_precision == "no":
        return Precision()
    if plan.mixed_precision in COMPUTE_DTYPES:
        return AmpPrecision(plan.mixed_precision, plan.device_type, plan.autocast)
    raise ConfigError(
        unknown_choice("mixed_precision", plan.mixed_precision, ("no", *COMPUTE_DTYPES))
    )

"""The number format of a run, from its plan; a library of fp8 is imported only where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.machine.enums import FP8BackendType
from accel.precision.amp import AmpPrecision
from accel.precision.base import Precision

if TYPE_CHECKING:
    from accel.plan.plan import Plan


def build_precision(plan: Plan) -> Precision:
    """Return the number format that `plan` names."""
    name = plan.mixed_precision
    if name == "no":
        return Precision()
    if plan.fp8.backend == FP8BackendType.AO:
        from accel.precision.fp8 import TorchaoPrecision

        return TorchaoPrecision(plan.fp8.recipe, plan.device, plan.autocast)
    if plan.fp8.backend == FP8BackendType.TE:
        from accel.precision.transformer_engine import TransformerEnginePrecision

        return TransformerEnginePrecision(plan.fp8.recipe, plan.device_type, plan.autocast)
    return AmpPrecision(name, plan.device_type, plan.autocast)

"""Options of a run that DeepSpeed ignores: its engine scales losses and accumulates itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.errors import Problem

if TYPE_CHECKING:
    from accel.planning.plan import Plan


def ignored(plan: Plan) -> list[Problem]:
    """Return what the run asks for and DeepSpeed would take without a word.

    Args:
        plan: the resolved configuration of the run.
    """
    problems = []
    scaler = ", ".join(f"{name}={value!r}" for name, value in plan.scaler.to_kwargs().items())
    if scaler and plan.mixed_precision == "fp16":
        problems.append(
            Problem(
                f"GradScalerKwargs({scaler}) with deepspeed",
                "its engine scales losses itself",
                "Give initial_scale_power and loss_scale_window in the section fp16 of "
                "hf_ds_config.",
            )
        )
    stages = [plugin.stage for plugin in plan.plugin("deepspeed").values()]
    if plan.accumulation.sync_each_batch and min(stages) < 2:
        problems.append(
            Problem(
                f"sync_each_batch=True with ZeRO {min(stages)}",
                "its engine exchanges gradients at the end of an optimizer step",
                "Leave it out, or use zero_stage=2 or 3, which do at every micro-batch.",
            )
        )
    return problems

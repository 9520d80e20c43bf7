"""Options of a run that an engine of DeepSpeed, which wraps, casts and scales itself, ignores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.errors import Problem

if TYPE_CHECKING:
    from accel.plan import Plan


def ignored(plan: Plan) -> list[Problem]:
    """Return what the run asks for and DeepSpeed would take without a word.

    Args:
        plan: the resolved configuration of the run.
    """
    problems = []
    for used, handler, rule, remedy in (
        (
            True,
            plan.ddp,
            "DeepSpeed's engine wraps the model, not DistributedDataParallel",
            "Leave it out; zero_optimization has the sizes of its buckets.",
        ),
        (
            plan.mixed_precision != "no",
            plan.autocast,
            "DeepSpeed's engine casts the model, and autocast is not used",
            "Leave it out, or switch torch_autocast on in hf_ds_config.",
        ),
        (
            plan.mixed_precision == "fp16",
            plan.scaler,
            "DeepSpeed's engine scales losses itself",
            "Give initial_scale_power and loss_scale_window in the section fp16 of hf_ds_config.",
        ),
    ):
        given = ", ".join(f"{name}={value!r}" for name, value in handler.to_kwargs().items())
        if used and given:
            value = f"{type(handler).__name__}({given}) under DeepSpeed"
            problems.append(Problem(value, rule, remedy))
    stages = [plugin.stage for plugin in (plan.engines.deepspeed or {}).values()]
    if plan.accumulation.sync_each_batch and min(stages) < 2:
        problems.append(
            Problem(
                f"sync_each_batch=True with ZeRO {min(stages)}",
                "its engine exchanges gradients at the end of an optimizer step",
                "Leave it out, or use zero_stage=2 or 3, which do at every micro-batch.",
            )
        )
    return problems

"""Checks before an engine is built: the run, the machine, the model and the optimizer."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch

from accel.config.deepspeed_json import value_at
from accel.logging import get_logger
from accel.machine.errors import Problem, Problems
from accel.strategies.base import Objects
from accel.strategies.deepspeed.initialize import can_build_op
from accel.strategies.deepspeed.settings import ZERO, Settings
from accel.strategies.deepspeed.wrappers import DummyOptim
from accel.strategies.optimizers import (
    WHOLE_TENSOR,
    is_elementwise,
    quantized_kind,
    whole_tensor_kind,
)

if TYPE_CHECKING:
    from accel.plan.plan import Plan

logger = get_logger(__name__)


def plan_problems(plan: Plan) -> list[Problem]:
    """Return the options of a run that DeepSpeed would ignore: it scales and accumulates itself."""
    problems = Problems()
    scaler = ", ".join(f"{name}={value!r}" for name, value in plan.scaler.to_kwargs().items())
    if scaler and plan.mixed_precision == "fp16":
        problems.add(
            f"GradScalerKwargs({scaler}) with deepspeed",
            "its engine scales losses itself",
            "Give initial_scale_power and loss_scale_window in the section fp16 of hf_ds_config.",
        )
    stages = [plugin.stage for plugin in plan.plugin("deepspeed").values()]
    if plan.accumulation.sync_each_batch and min(stages) < 2:
        problems.add(
            f"sync_each_batch=True with ZeRO {min(stages)}",
            "its engine reduces gradients at the end of an optimizer step",
            "Remove it, or use zero_stage=2 or 3, which reduce them at every micro-batch.",
        )
    return problems


def object_problems(objects: Objects) -> list[Problem]:
    """Return the reasons why one engine cannot take these objects."""
    problems = Problems()
    if len(objects.models) > 1:
        problems.append(two_models(f"{len(objects.models)} models in one call"))
    if len(objects.optimizers) > 1:
        problems.add(
            f"prepare: {len(objects.optimizers)} optimizers under DeepSpeed",
            "an engine steps one",
            "Put the parameters into groups of one optimizer.",
        )
    if objects.optimizers and not objects.models:
        problems.add(
            "prepare: an optimizer without its model under DeepSpeed",
            "the engine takes both at once",
            "Prepare them in one call: prepare(model, optimizer, …).",
        )
    return problems


def two_models(value: str) -> Problem:
    """Return the problem that one plugin or one `Accelerator` has more than one model."""
    return Problem(
        f"prepare: {value} under DeepSpeed",
        "a plugin describes one model, and an Accelerator trains one",
        "Give several plugins by name, select the next with "
        "state.select_deepspeed_plugin(name), and build an Accelerator for each trained model.",
    )


def check_devices(settings: Settings, package: ModuleType) -> None:
    """Note offload devices that this machine or the stage of ZeRO does not support."""
    for name, lowest in (("optimizer", 1), ("param", 3)):
        device = settings.config[ZERO].get(f"offload_{name}", {}).get("device", "none")
        if device == "nvme" and not can_build_op(package, "AsyncIOBuilder"):
            settings.problems.add(
                f"offload_{name}_device='nvme'",
                "DeepSpeed's asynchronous I/O cannot be built on this machine",
                "Install libaio's development files, or use 'cpu'.",
            )
        if (name, device) == ("param", "cpu") and settings.stage < lowest:
            logger.warning_once(
                f"offload_param_device='cpu' has no effect under ZeRO {settings.stage}: "
                "only stage 3 offloads parameters."
            )
            del settings.config[ZERO]["offload_param"]
            continue
        lowest = 3 if device == "nvme" else lowest
        if device != "none" and settings.stage < lowest:
            settings.problems.add(
                f"offload_{name}_device={device!r} with ZeRO {settings.stage}",
                f"it requires stage {lowest} or higher",
                f"Use zero_stage={lowest}, or remove it.",
            )


def check_optimizer(
    settings: Settings, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Note parameters of the optimizer that the engine would not step."""
    known = {id(p) for p in model.parameters()}
    num_unknown = sum(id(p) not in known for g in optimizer.param_groups for p in g["params"])
    if num_unknown:
        settings.problems.add(
            f"prepare: {num_unknown} parameters of the optimizer are in no prepared model",
            "the engine steps the parameters of its model",
            "Build the optimizer from model.parameters().",
        )
    groups = [group for group in optimizer.param_groups if group["params"]]
    kinds = type(optimizer).__name__, value_at(settings.config, "optimizer.type")
    if "Adagrad" in kinds and len(groups) > 1 and settings.stage > 0:
        settings.problems.add(
            f"prepare: Adagrad with {len(groups)} groups under ZeRO {settings.stage}",
            "DeepSpeed rebuilds it with one group",
            "Put all parameters into one group, or use zero_stage=0.",
        )
    for index, group in enumerate(groups):
        frozen = not any(parameter.requires_grad for parameter in group["params"])
        if frozen and settings.stage in (1, 2):
            settings.problems.add(
                f"prepare: group {index} of the optimizer, whose parameters are all frozen",
                f"ZeRO {settings.stage} requires a trainable parameter in each group",
                "Give the optimizer [p for p in … if p.requires_grad].",
            )


def check_kind(settings: Settings, optimizer: torch.optim.Optimizer) -> None:
    """Note an optimizer that ZeRO would turn into another algorithm; warn of an unknown one.

    The engine steps flat tensors, which concatenate fragments of many weights. A configuration with
    ``zero_allow_untested_optimizer`` skips the check.
    """
    flat = settings.stage > 0 or any(
        value_at(settings.config, f"{name}.enabled") is True for name in ("bf16", "fp16")
    )
    quantized = quantized_kind(optimizer)
    if quantized is not None:
        settings.problems.add(
            f"prepare: {quantized} under DeepSpeed",
            "it quantizes its state by blocks, and the engine saves and steps fp32 state of flat "
            "tensors",
            "Use torch.optim.AdamW, whose state ZeRO shards, or DDP.",
        )
    if not flat or settings.allows_untested is not None or quantized is not None:
        return
    kind = whole_tensor_kind(optimizer)
    if isinstance(optimizer, DummyOptim):  # DeepSpeed's own Muon knows which weights are matrices
        kind = str(value_at(settings.config, "optimizer.type"))
        kind = next((k for k in WHOLE_TENSOR - {"Muon"} if k.lower() == kind.lower()), None)
    remedy = "zero_allow_untested_optimizer in the configuration (hf_ds_config) skips this check."
    if kind is not None:
        settings.problems.add(
            f"prepare: {kind} under ZeRO {settings.stage}",
            "its update depends on full weights, and ZeRO steps flat tensors of their fragments: "
            "that is another algorithm",
            f"Use an elementwise optimizer (AdamW, SGD, Lion, …), or no DeepSpeed; {remedy}",
        )
    elif not is_elementwise(optimizer):
        logger.warning_once(
            f"{type(optimizer).__name__} under ZeRO {settings.stage}: accel does not know whether "
            "its update is elementwise. If not, it is another algorithm here, as ZeRO steps flat "
            f"tensors of fragments of weights. If so, {remedy}"
        )


def check_leaves(settings: Settings, model: torch.nn.Module, package: ModuleType) -> None:
    """Let stage 3 gather mixtures of experts all at once, or note unknown classes."""
    given = settings.plugin.transformer_moe_cls_names
    names = [name.strip() for name in (given or "").split(",") if name.strip()]
    if not names:
        return
    classes = {type(module).__name__: type(module) for module in model.modules()}
    unknown = [name for name in names if name not in classes]
    value = f"transformer_moe_cls_names={given!r}"
    if unknown:
        rule = f"the model has no module of class {', '.join(unknown)}"
        settings.problems.add(value, rule, f"Its classes are {', '.join(sorted(classes))}.")
    elif type(model).__name__ in names:
        rule = f"{type(model).__name__} is the class of the model itself"
        settings.problems.add(value, rule, "Give the classes of its layers that hold experts.")
    elif settings.stage < 3:
        rule = "only stage 3 gathers modules"
        settings.problems.add(f"{value} with ZeRO {settings.stage}", rule, "Remove it.")
    elif not settings.problems:
        package.utils.set_z3_leaf_modules(model, [classes[name] for name in names])

"""What this machine, this model or two owners of one value do not let an engine do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.deepspeed_json import value_at
from accel.errors import Problem
from accel.logging import get_logger
from accel.strategies.deepspeed.dummies import DummyOptim
from accel.strategies.deepspeed.package import can_build
from accel.strategies.deepspeed.settings import ZERO, Settings
from accel.strategies.deepspeed.wrappers import DeepSpeedOptimizer
from accel.strategies.optimizer_kinds import WHOLE_TENSOR, is_elementwise, whole_tensor_kind

logger = get_logger(__name__)


def two_models(value: str) -> Problem:
    """Return the problem that one plugin or one `Accelerator` has more than one model."""
    return Problem(
        f"prepare: {value} under DeepSpeed",
        "a plugin describes one model, and an Accelerator trains one",
        "Give several plugins by name, select the next with "
        "state.select_deepspeed_plugin(name), and build an Accelerator for each trained model.",
    )


def check_devices(settings: Settings, package: ModuleType) -> None:
    """Note places for parameters and optimizer state that do not exist here."""
    for what, lowest in (("optimizer", 1), ("param", 3)):
        device = settings.config[ZERO].get(f"offload_{what}", {}).get("device", "none")
        if device == "nvme" and not can_build(package, "AsyncIOBuilder"):
            settings.note(
                f"offload_{what}_device='nvme'",
                "DeepSpeed's asynchronous I/O cannot be built on this machine",
                "Install libaio's development files, or use 'cpu'.",
            )
        lowest = 3 if device == "nvme" else lowest
        if device != "none" and settings.stage < lowest:
            settings.note(
                f"offload_{what}_device={device!r} with ZeRO {settings.stage}",
                f"it takes stage {lowest} or more",
                f"Use zero_stage={lowest}, or leave it out.",
            )


def check_optimizer(
    settings: Settings, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Note parameters of the optimizer that the engine would not step."""
    known = {id(p) for p in model.parameters()}
    strange = sum(id(p) not in known for g in optimizer.param_groups for p in g["params"])
    if strange:
        settings.note(
            f"prepare: {strange} parameters of the optimizer are in no prepared model",
            "the engine steps the parameters of its model",
            "Build the optimizer from model.parameters().",
        )
    groups = [group for group in optimizer.param_groups if group["params"]]
    kinds = type(optimizer).__name__, value_at(settings.config, "optimizer.type")
    if "Adagrad" in kinds and len(groups) > 1 and settings.stage > 0:
        settings.note(
            f"prepare: Adagrad with {len(groups)} groups under ZeRO {settings.stage}",
            "DeepSpeed builds it anew, in one group",
            "Put all parameters into one group, or use zero_stage=0.",
        )
    for index, group in enumerate(groups):
        frozen = not any(parameter.requires_grad for parameter in group["params"])
        if frozen and settings.stage in (1, 2):
            settings.note(
                f"prepare: group {index} of the optimizer, whose parameters are all frozen",
                f"ZeRO {settings.stage} finds nothing there to step",
                "Leave them out of the optimizer: [p for p in … if p.requires_grad].",
            )


def check_kind(settings: Settings, optimizer: torch.optim.Optimizer) -> None:
    """Note an optimizer that ZeRO would turn into another algorithm; warn of one that it might.

    The engine steps flat tensors, in which parts of many weights follow one another. A
    configuration that says ``zero_allow_untested_optimizer`` itself decides.
    """
    flat = settings.stage > 0 or any(
        value_at(settings.config, f"{name}.enabled") is True for name in ("bf16", "fp16")
    )
    if not flat or settings.allows_untested is not None:
        return
    kind = whole_tensor_kind(optimizer)
    if isinstance(optimizer, DummyOptim):  # DeepSpeed's own Muon knows which weights are matrices
        kind = str(value_at(settings.config, "optimizer.type"))
        kind = next((k for k in WHOLE_TENSOR - {"Muon"} if k.lower() == kind.lower()), None)
    remedy = "zero_allow_untested_optimizer in the configuration (hf_ds_config) takes it as it is."
    if kind is not None:
        settings.note(
            f"prepare: {kind} under ZeRO {settings.stage}",
            "its update depends on whole weights, and ZeRO steps flat tensors of parts of them: "
            "that is another algorithm",
            f"Use an elementwise optimizer (AdamW, SGD, Lion, …), or no DeepSpeed; {remedy}",
        )
    elif not is_elementwise(optimizer):
        logger.warning_once(
            f"{type(optimizer).__name__} under ZeRO {settings.stage}: accel does not know whether "
            "it steps each element by its own gradient alone. If not, it is another algorithm here,"
            f" as ZeRO steps flat tensors of parts of weights. If so, {remedy}"
        )


def check_leaves(settings: Settings, model: torch.nn.Module, package: ModuleType) -> None:
    """Let stage 3 fetch mixtures of experts as a whole, or note classes that do not exist."""
    given = settings.plugin.transformer_moe_cls_names
    names = [name.strip() for name in (given or "").split(",") if name.strip()]
    if not names:
        return
    classes = {type(module).__name__: type(module) for module in model.modules()}
    unknown = [name for name in names if name not in classes]
    told = f"transformer_moe_cls_names={given!r}"
    if unknown:
        rule = f"the model has no module of class {', '.join(unknown)}"
        settings.note(told, rule, f"Its classes are {', '.join(sorted(classes))}.")
    elif type(model).__name__ in names:
        rule = f"{type(model).__name__} is the whole model, whose inputs then need no gradients"
        settings.note(told, rule, "Name the classes of its layers that hold experts.")
    elif settings.stage < 3:
        rule = "only stage 3 fetches modules"
        settings.note(f"{told} with ZeRO {settings.stage}", rule, "Leave it out.")
    elif not settings.problems:
        package.utils.set_z3_leaf_modules(model, [classes[name] for name in names])


def backward_problems(optimizer: DeepSpeedOptimizer, kwargs: Mapping[str, Any]) -> list[Problem]:
    """Return why an engine cannot compute gradients now, or not so."""
    stage = optimizer.engine.zero_optimization_stage()
    problems = [
        Problem(
            f"backward({name}=…) under DeepSpeed",
            "its engine knows retain_graph alone",
            "Leave it out.",
        )
        for name in kwargs
        if name != "retain_graph"
    ]
    if optimizer.trainable.changed():
        problems.append(
            Problem(
                "backward after parameters were frozen, unfrozen or replaced under DeepSpeed",
                "its engine steps those that required gradients at prepare, and no other ones",
                "Set requires_grad before prepare. To change it in the course of training: "
                "save_state, build model and Accelerator() anew, prepare, load_state.",
            )
        )
    if kwargs.get("retain_graph") and stage == 3:
        problems.append(
            Problem(
                "backward(retain_graph=True) under ZeRO 3",
                "parameters are let go of in the backward pass, and a second one lacks them",
                "Sum the losses, and call backward once.",
            )
        )
    if optimizer.window_ended and stage in (1, 2):
        problems.append(
            Problem(
                f"a second backward before optimizer.step under ZeRO {stage}",
                "it would take the place of the first one's gradients",
                "Sum the losses, put `with accelerator.no_sync(model):` around all but the last, "
                "or drop the first one's gradients with optimizer.zero_grad().",
            )
        )
    return problems


def clip_problems(
    plugin: DeepSpeedPlugin,
    optimizer: DeepSpeedOptimizer,
    parameters: list[torch.Tensor],
    max_norm: float,
    norm_type: float,
) -> list[Problem]:
    """Return why an engine cannot clip these parameters' gradients so."""
    value, problems = f"clip_grad_norm_(…, {max_norm})", []
    if optimizer.clipping not in (0.0, float(max_norm)) and max_norm != math.inf:
        where = f"{plugin.place}: gradient_clipping={optimizer.clipping}"
        if plugin.gradient_clipping is not None:
            where = plugin.source("gradient_clipping")
        remedy = 'Make them equal, or write "auto" for gradient_clipping.'
        problems.append(Problem(f"{value} with {where}", "they disagree", remedy))
    if norm_type != 2:
        rule = "DeepSpeed clips by the norm of order 2"
        problems.append(Problem(f"{value[:-1]}, norm_type={norm_type})", rule, "Leave it out."))
    given = {id(parameter) for parameter in parameters}
    left = sum(p.requires_grad and id(p) not in given for p in optimizer.engine.module.parameters())
    if left:
        rule = f"DeepSpeed clips all parameters together, and {left} of them are not given"
        problems.append(Problem(value, rule, "Give model.parameters()."))
    return problems

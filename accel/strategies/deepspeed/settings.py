"""The engine's configuration, resolved from the run and its objects, and checks before it is built.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from accel.config.deepspeed import Claims, DeepSpeedPlugin
from accel.config.deepspeed_json import AUTO, KEYS, Config, autos, set_at, value_at
from accel.logging import get_logger
from accel.machine.errors import Problem, Problems
from accel.precision.wrapping import MakeContext
from accel.strategies.base import Objects
from accel.strategies.deepspeed.wrappers import DummyOptim, DummyScheduler
from accel.strategies.optimizers import (
    WHOLE_TENSOR,
    is_elementwise,
    named_kind,
    quantized_kind,
)

if TYPE_CHECKING:
    from accel.plan.plan import Plan
    from accel.precision.base import Precision


MICRO_BATCH = "train_micro_batch_size_per_gpu"
BATCH = "train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
ZERO = "zero_optimization"
UNTESTED = "zero_allow_untested_optimizer"
AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}  # `torch_autocast.dtype` by precision
AUTO_CLIPPING = 1.0  # maximum norm of gradients, for "auto" where nothing gives one
# The parameters that each schedule of DeepSpeed takes from the run.
SCHEDULES = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}


class Settings(Claims):
    """Resolve DeepSpeed's configuration.

    `num_steps`: micro-batches per optimizer step.
    `allows_untested`: whether the configuration allows untested optimizers; None: not given.
    """

    def __init__(self, plugin: DeepSpeedPlugin, plan: Plan) -> None:
        super().__init__(plugin)
        self.plan, self.dp_size = plan, plan.parallel_dims.dp_size
        self.num_steps = 1
        untested = value_at(self.config, UNTESTED)
        self.allows_untested: bool | None = None if untested == AUTO else untested

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return int(value_at(self.config, KEYS["zero_stage"]))

    @property
    def on_disk(self) -> bool:
        """Whether parameters or optimizer state are offloaded to disk."""
        keys = (f"{ZERO}.offload_{name}.device" for name in ("optimizer", "param"))
        return "nvme" in (value_at(self.config, key) for key in keys)

    # -- from the run --------------------------------------------------------------------------

    def resolve_run(self, batch_sizes: list[int]) -> None:
        """Resolve accumulation, precision, clipping and batch sizes."""
        self.num_steps = steps = self._num_steps()
        if ACCUMULATION not in self.plugin.decided:  # else already compared
            self.claim(ACCUMULATION, steps, f"Accelerator(gradient_accumulation_steps={steps})")
        self._resolve_precision()
        is_open = value_at(self.config, "gradient_clipping") == AUTO
        self.default("gradient_clipping", AUTO_CLIPPING if is_open else 0.0)
        self._resolve_batch_sizes(batch_sizes, steps)
        self.default(UNTESTED, True)  # `checks.check_kind` knows more of them than DeepSpeed
        self.default("zero_force_ds_cpu_optimizer", False)
        gathers = KEYS["zero3_save_16bit_model"]
        if value_at(self.config, gathers) == AUTO:
            set_at(self.config, gathers, False)
        self._resolve_offload()

    def _num_steps(self) -> int:
        """Return the run's micro-batches per step; where it has one, those of the configuration.

        A configuration may get them after the run was planned; a caller that accumulates by itself
        tells the run of one.
        """
        steps, found = self.plan.accumulation.num_steps or 1, value_at(self.config, ACCUMULATION)
        return found if steps == 1 and isinstance(found, int) else steps

    def _resolve_offload(self) -> None:
        """Offload nothing by default, and require a folder for nvme."""
        for name in ("optimizer", "param"):
            section = value_at(self.config, f"{ZERO}.offload_{name}") or {}
            if section.get("device") == AUTO:
                section["device"] = "none"
            if section.get("device") in ("none", "cpu"):
                section.pop("nvme_path", None)
            elif section.get("device") == "nvme" and section.get("nvme_path") in (None, AUTO):
                self.problems.add(
                    f"{self.plugin.place}: {ZERO}.offload_{name}.device='nvme'",
                    "nvme needs a folder on a disk of this machine",
                    f"Give nvme_path there, or offload_{name}_nvme_path=….",
                )

    def _resolve_precision(self) -> None:
        chosen = self.plan.mixed_precision
        source = f"Accelerator(mixed_precision={chosen!r})"
        autocast = value_at(self.config, "torch_autocast.enabled") is True
        handler = ", ".join(f"{k}={v!r}" for k, v in self.plan.autocast.to_kwargs().items())
        if autocast and chosen in AUTOCAST and handler:
            self.problems.add(
                f"AutocastKwargs({handler}) with {self.plugin.place}: torch_autocast.enabled=true",
                "autocast is configured in two places",
                "Remove one of them.",
            )
        if autocast and chosen in AUTOCAST:
            self.claim("torch_autocast.dtype", AUTOCAST[chosen], source)
        elif autocast:
            self.claim("torch_autocast.enabled", False, source)
        for name in ("bf16", "fp16"):
            key, on = f"{name}.enabled", chosen == name
            if (on and not autocast) or value_at(self.config, key) is not None:
                self.claim(key, on, source)

    def autocast(self, precision: Precision) -> MakeContext:
        """Return the factory of contexts for forward passes over weights in half precision."""
        off = value_at(self.config, "torch_autocast.enabled") is False
        return contextlib.nullcontext if off else precision.autocast

    def _resolve_batch_sizes(self, sizes: list[int], steps: int) -> None:
        source = "the prepared loaders"
        choose = min if self.plugin.is_train_batch_min else max
        if sizes:
            size = choose(sizes)
            self.claim(MICRO_BATCH, size, f"batch_size={size} of {source}")
        global_batch = value_at(self.config, BATCH)
        per_step = steps * self.dp_size
        if isinstance(global_batch, int) and not sizes:
            self.default(MICRO_BATCH, max(1, global_batch // per_step))
        self.default(MICRO_BATCH, 1)
        size = value_at(self.config, MICRO_BATCH)
        if BATCH not in self.plugin.decided:
            source = f"{size} samples × {steps} micro-batches × {self.dp_size} processes"
            self.claim(BATCH, size * per_step, source)

    # -- from the objects ----------------------------------------------------------------------

    def resolve_optimizer(self, optimizer: torch.optim.Optimizer | None, device_type: str) -> None:
        """Resolve the section ``optimizer``, which excludes an optimizer of torch."""
        section = self.config.get("optimizer")
        if isinstance(optimizer, DummyOptim):
            if section is None:
                self.problems.add(
                    f"DummyOptim, and {self.plugin.place} has no optimizer",
                    "it is a placeholder for the optimizer of the configuration",
                    "Add the section optimizer, or build an optimizer of torch.",
                )
                return
            for name, value in optimizer.values.items():
                key = f"optimizer.params.{name}"
                if name in optimizer.defaulted:
                    self.default(key, value)
                else:
                    self.claim(key, value, f"DummyOptim({name}={value!r})")
            if device_type == "cpu" and str(section.get("type")).lower() in ("adam", "adamw"):
                self.default("optimizer.params.torch_adam", True)  # its own kernels need compiling
        elif optimizer is not None and section is not None:
            self.problems.add(
                f"{self.plugin.place}: optimizer with {type(optimizer).__name__} in prepare",
                "the optimizer is given in two places",
                "Prepare a DummyOptim, or remove the section optimizer.",
            )
        elif section is not None:
            self.config.pop("optimizer")  # a model that is only evaluated

    def resolve_scheduler(self, scheduler: object, optimizer: torch.optim.Optimizer | None) -> None:
        """Resolve the section ``scheduler``, which excludes a scheduler of torch."""
        section = self.config.get("scheduler")
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None:
            if section is None:
                self.problems.add(
                    f"DummyScheduler, and {self.plugin.place} has no scheduler",
                    "it is a placeholder for the scheduler of the configuration",
                    "Add the section scheduler, or give lr_scheduler_callable.",
                )
                return
            self._resolve_schedule(section, scheduler, optimizer)
        elif scheduler is not None and section is not None:
            self.problems.add(
                f"{self.plugin.place}: scheduler with {type(scheduler).__name__} in prepare",
                "the scheduler is given in two places",
                "Prepare a DummyScheduler without lr_scheduler_callable, or remove the section.",
            )
        elif section is not None and optimizer is not None:
            self.problems.add(
                f"{self.plugin.place}: scheduler, and prepare was given none",
                "a scheduler is saved and loaded as a prepared object",
                "Prepare a DummyScheduler with the optimizer, or remove the section.",
            )
        elif section is not None:
            self.config.pop("scheduler")  # a model that is only evaluated

    def _resolve_schedule(
        self, section: Config, scheduler: DummyScheduler, optimizer: torch.optim.Optimizer | None
    ) -> None:
        taken = SCHEDULES.get(str(section.get("type")), ())
        for name, value in scheduler.kwargs.items():
            self.claim(f"scheduler.params.{name}", value, f"DummyScheduler({name}={value!r})")
        params = "scheduler.params"
        if value_at(self.config, f"{params}.warmup_min_lr") == AUTO:
            self.default(f"{params}.warmup_min_lr", 0)
        if "warmup_max_lr" in taken or value_at(self.config, f"{params}.warmup_max_lr") == AUTO:
            self._resolve_rate(f"{params}.warmup_max_lr", optimizer)
        for name in ("warmup_num_steps", "total_num_steps"):
            key, given = f"{params}.{name}", getattr(scheduler, name)
            is_given = bool(given) or (given is not None and value_at(self.config, key) == AUTO)
            if is_given and (name in taken or value_at(self.config, key) is not None):
                # DeepSpeed takes no warm-up of 0, which is the default, and 1 is its shortest.
                steps = 1 if name == "warmup_num_steps" and given == 0 else given
                self.claim(key, steps, f"DummyScheduler({name}={given})")
        lacks = value_at(self.config, f"{params}.total_num_steps") is None
        if "total_num_steps" in taken and lacks:
            self.problems.add(
                f"{self.plugin.place}: {section.get('type')} without total_num_steps",
                "the schedule decays the learning rate until the last step",
                "Give DummyScheduler(…, total_num_steps=…).",
            )

    def _resolve_rate(self, key: str, optimizer: torch.optim.Optimizer | None) -> None:
        """Let a schedule warm up to the optimizer's learning rate, or to those of its groups."""
        if optimizer is None:
            return
        rates = [group["lr"] for group in optimizer.param_groups if group["params"]]
        given = True
        if isinstance(optimizer, DummyOptim):
            rate = value_at(self.config, "optimizer.params.lr")
            own = [group.get("lr") for group in optimizer.params if isinstance(group, Mapping)]
            rates = [rate if one is None else one for one in own] or [rate]
            given = "lr" not in optimizer.defaulted or any(one is not None for one in own)
        several = isinstance(value_at(self.config, key), (list, tuple))
        value = rates if several or len(set(rates)) > 1 else rates[0]
        if given:
            self.claim(key, value, f"lr={value!r} of the optimizer")
        else:
            self.default(key, value)

    def resolve_model(self, model: torch.nn.Module) -> None:
        """Resolve the sizes that depend on the model's width; limit buckets to the model's size."""
        width, total = hidden_size(model), num_elements(model)
        zero = self.config[ZERO]
        own = not self.plugin.has_config
        auto = {
            "reduce_bucket_size": width * width,
            "allgather_bucket_size": _even(width * width),
            "stage3_prefetch_bucket_size": int(0.9 * width * width),
            "stage3_param_persistence_threshold": 10 * width,
        }
        for name, value in auto.items():
            if zero.get(name) == AUTO or (own and self.stage == 3 and name.startswith("stage3")):
                zero[name] = value
        if own:  # no bucket needs to be larger than the model, nor stage 3's than a layer
            largest = width * width if self.stage == 3 else 500_000_000
            zero.setdefault("reduce_bucket_size", max(min(largest, total), 1))
            zero.setdefault("allgather_bucket_size", _even(min(largest, total)))
            self._resolve_disk(model)

    def _resolve_disk(self, model: torch.nn.Module) -> None:
        """Keep no offloaded parameters in memory, and size buffers by the largest parameter.

        DeepSpeed's defaults are 10⁹ elements in memory, and five buffers of 10⁸.
        """
        section = self.config[ZERO].get("offload_param", {})
        if section.get("device") != "nvme":
            return
        section.setdefault("max_in_cpu", 0)
        sizes = [math.prod(_shape(parameter)) for parameter in model.parameters()]
        if sizes:  # none before the model is built, for `zero.Init`
            section.setdefault("buffer_size", math.ceil(max(sizes) / self.dp_size))
            most = max(len(list(m.parameters(recurse=False))) for m in model.modules())
            section.setdefault("buffer_count", max(5, 2 * most))

    def finish(self) -> Config:
        """Return the configuration.

        Raise a `ConfigError` that names every contradiction, and all values that are still "auto".
        """
        if not self.problems:
            for key in autos(self.config):
                self.problems.add(
                    f'{self.plugin.place}: {key}="auto"',
                    "it cannot be resolved from the run",
                    f"Give {key} a value, or remove it.",
                )
        self.problems.raise_if()
        return self.config


def hidden_size(model: torch.nn.Module) -> int:
    """Return the model's width: that of its ``config``, else that of most of its weights."""
    config = getattr(model, "config", None)
    for owner in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "n_embd", "d_model", "width"):
            found = getattr(owner, name, None)
            if isinstance(found, int) and found > 0:
                return found
        sizes = getattr(owner, "hidden_sizes", None)
        if sizes:
            return int(max(sizes))
    widths: collections.Counter[int] = collections.Counter()
    for parameter in model.parameters():
        shape = _shape(parameter)
        if len(shape) > 1:
            widths[shape[-1]] += math.prod(shape)
    return max(widths, key=lambda width: (widths[width], width)) if widths else 1


def num_elements(model: torch.nn.Module) -> int:
    """Return the number of the model's parameters, sharded ones included."""
    return sum(math.prod(_shape(parameter)) for parameter in model.parameters())


def _even(size: int) -> int:
    """Return an even bucket size, as stages 1 and 2 require."""
    return max(2, size + size % 2)


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


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


def check_devices(settings: Settings) -> None:
    """Note offload devices that the stage of ZeRO does not support."""
    for name, lowest in (("optimizer", 1), ("param", 3)):
        device = settings.config[ZERO].get(f"offload_{name}", {}).get("device", "none")
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
    groups = optimizer.param_groups
    kinds = type(optimizer).__name__, value_at(settings.config, "optimizer.type")
    if "Adagrad" in kinds and len(groups) > 1 and settings.stage > 0:
        settings.problems.add(
            f"prepare: Adagrad with {len(groups)} groups under ZeRO {settings.stage}",
            "DeepSpeed rebuilds it with one group",
            "Put all parameters into one group, or use zero_stage=0.",
        )
    for index, group in enumerate(groups):
        frozen = not any(parameter.requires_grad for parameter in group["params"])
        if not group["params"] or (frozen and settings.stage in (1, 2)):
            settings.problems.add(
                f"prepare: group {index} of the optimizer, whose parameters are all frozen or none",
                "DeepSpeed drops empty groups, and ZeRO 1 and 2 need a trainable parameter in each",
                "Give the optimizer groups of [p for p in … if p.requires_grad] that hold any.",
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
    kind = named_kind(optimizer, WHOLE_TENSOR)
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

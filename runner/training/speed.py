"""Where the time of a run goes, how fast it trains, and what of the device's peak that is.

Nothing here waits for a device: between log points marks are only recorded (on a GPU by events of
its stream), and a log point, which reads from the device anyway, turns them into seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from accel.config.training import is_compiling
from accel.optimizer import unwrap_optimizer
from runner.training.state import PAUSES, Stopwatch

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.data.batches import Window
    from runner.recipe.schema import Trainer
    from runner.training.step import Step

COMPUTE, OPTIMIZER, FORWARD = "forward_backward", "optimizer", "forward"  # phases of a step
SLOW = 1.1  # times the median rank's own time: a rank that is named
# Dense peaks in TFLOP/s by a part of the device's name, the first that fits: fp32, TF32, fp16 and
# bf16 with fp32 sums, fp8. Source: NVIDIA's data sheets; with sparsity, some state the double.
PEAKS: dict[str, dict[str, float]] = {
    "GB200": {"no": 80, "tf32": 1250, "fp16": 2500, "bf16": 2500, "fp8": 5000},
    "B200": {"no": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500},
    "H100 PCIe": {"no": 51, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513},
    " NVL": {"no": 60, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5},  # H100, H200
    "H100": {"no": 67, "tf32": 494.5, "fp16": 989.5, "bf16": 989.5, "fp8": 1979},
    "H200": {"no": 67, "tf32": 494.5, "fp16": 989.5, "bf16": 989.5, "fp8": 1979},
    "A100": {"no": 19.5, "tf32": 156, "fp16": 312, "bf16": 312},
    "L40S": {"no": 91.6, "tf32": 183, "fp16": 362, "bf16": 362, "fp8": 733},
    "RTX 4090": {"no": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3},
    "V100": {"no": 15.7, "fp16": 125},
    "T4": {"no": 8.1, "fp16": 65},
}
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FORMULAS = {**flop_registry, _CPU_ATTENTION: sdpa_flop, _CPU_ATTENTION_BACKWARD: sdpa_backward_flop}


class Speed:
    """Measures the steps of a run.

    Args:
        accelerator: the run's engine.
        watch: gets the seconds of the phases of a step.

    Attributes:
        flops_per_sample: floating-point operations of this rank's forward and backward passes, over
            the samples of all ranks, as counted in the first step; 0: not known.
        own: seconds in which each rank waited for no other, by rank: data and forward passes.
    """

    def __init__(self, accelerator: Accelerator, watch: Stopwatch) -> None:
        self._accelerator, self._watch = accelerator, watch
        compiled = is_compiling(accelerator.plan.dynamo)  # operations are not seen one by one
        self.flops_per_sample: float | None = 0.0 if compiled else None
        self.own = [0.0] * accelerator.num_processes
        self._own = self._data = self._other = 0.0
        self._steps = 0  # since the last log point
        self._marks: list[tuple[str, Any]] = []  # (phase that begins, when)
        self._mark, self._between = clock_of(accelerator.device)

    def attach(self, step: Step) -> None:
        """Mark where phases of a step begin, by hooks of its prepared optimizers and models."""
        self._models = step.models
        for optimizer in map(unwrap_optimizer, step.optimizers.values()):
            optimizer.register_step_pre_hook(lambda *_: self.begin(OPTIMIZER))
            optimizer.register_step_post_hook(lambda *_: self.begin(COMPUTE))
        # Ranks of different pipeline stages compute different parts: they are not compared.
        self._compared = len(self.own) > 1 and self._accelerator.parallel_dims.pp == 1
        if self._compared and self.flops_per_sample is None:
            for model in map(self._accelerator.unwrap_model, step.models.values()):
                model.register_forward_pre_hook(lambda *_: self._forward(FORWARD))
                model.register_forward_hook(lambda *_: self._forward(COMPUTE))

    # -- at every step ---------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """Mark that a phase of the step begins; none, if it is empty."""
        self._marks.append((phase, self._mark()))

    def _forward(self, phase: str) -> None:
        if self._marks and self._marks[-1][0]:  # not in an evaluation
            self.begin(phase)

    def fetching(self, windows: Generator[Window, None, None]) -> Generator[Window, None, None]:
        """Yield windows; the wait for each counts as `data`."""
        with contextlib.closing(windows):
            began = time.perf_counter()
            for window in windows:
                self._data += time.perf_counter() - began
                yield window
                began = time.perf_counter()

    def train(self, step: Step, window: Window, trainer: Trainer) -> Mapping[str, torch.Tensor]:
        """Make one step, and count the operations of the first."""
        self._steps += 1
        self.begin(COMPUTE)
        if self.flops_per_sample is None:
            with Flops(lambda: self._marks[-1][0] in (COMPUTE, FORWARD)) as flops:
                values = step.train(self._accelerator, window, trainer)
            self.flops_per_sample = flops.total / window.num_samples
        else:
            values = step.train(self._accelerator, window, trainer)
        self.begin("")
        return values

    # -- at a log point --------------------------------------------------------------------

    def read(self) -> None:
        """Turn the marks into seconds, once the device has done what was asked of it."""
        marks, watch = self._marks, self._watch
        if marks and not isinstance(marks[-1][1], float):
            marks[-1][1].synchronize()  # for a step without values, of which nothing was read
        found = {COMPUTE: 0.0, OPTIMIZER: 0.0, FORWARD: 0.0, "": 0.0}
        for (phase, begin), (_, end) in itertools.pairwise(marks):
            found[phase] += self._between(begin, end)
        marks.clear()
        watch.add(OPTIMIZER, found[OPTIMIZER])
        exchanges = self._steps * sum(map(exposed_exchange, self._models.values()))
        self._steps, exposed = 0, min(exchanges, found[COMPUTE])
        if exposed:
            watch.add("communication", exposed)
        watch.add(COMPUTE, found[COMPUTE] + found[FORWARD] - exposed)
        # A GPU computes while the host waits for data: only what it then waits, too, costs time.
        watch.add("data", min(self._data, max(0.0, watch.unknown - self._other)))
        self._other = watch.unknown
        self._own, self._data = self._own + found[FORWARD] + self._data, 0.0

    def lap(self, samples: int, tokens: int) -> dict[str, float]:
        """Return rates and shares since the last log point. Every process must call this together.

        Args:
            samples: trained on since then, over all processes.
            tokens: likewise; 0 where samples have no weights.
        """
        phases = self._watch.lap()
        total = sum(phases.values())
        seconds = total - sum(phases[phase] for phase in PAUSES)
        found = self.rates(samples, tokens, seconds)
        found |= {f"time/{phase}": spent / total for phase, spent in phases.items()}
        if self._compared:
            mine = torch.tensor([self._own], device=self._accelerator.device)
            owns, self._own = self._accelerator.comm.all_gather(mine).tolist(), 0.0
            self.own = [before + one for before, one in zip(self.own, owns, strict=True)]
            rank, ratio = slowest_rank(owns)
            if ratio > SLOW:
                found |= {"slowest_rank": float(rank), "slowest_rank_ratio": ratio}
        return found

    def rates(self, samples: int, tokens: float, seconds: float) -> dict[str, float]:
        """Return rates over some seconds by name, as far as they are known.

        Those of operations are of this rank's device.
        """
        seconds = max(seconds, 1e-9)  # nothing was trained
        found = {"samples_per_second": samples / seconds}
        if tokens:
            found["tokens_per_second"] = tokens / seconds
        if self.flops_per_sample:
            found["flops_per_second"] = self.flops_per_sample * samples / seconds
            if peak := peak_of(self._accelerator.device, self._accelerator.mixed_precision):
                found["mfu"] = found["flops_per_second"] / peak
        return found


def exposed_exchange(model: torch.nn.Module) -> float:
    """Return the seconds of a step in which gradients are exchanged while nothing is computed.

    torch's DDP samples them; of other models, which do not tell, 0.
    """
    data: Mapping[str, int] = getattr(model, "_get_ddp_logging_data", dict)()
    overlap = data.get("avg_backward_compute_comm_overlap_time", 0)
    return (data.get("avg_backward_comm_time", 0) - overlap) / 1e9


def slowest_rank(seconds: list[float]) -> tuple[int, float]:
    """Return the rank of the most seconds, and these over the median's (the lower of two)."""
    most, median = max(seconds), statistics.median_low(seconds)
    return seconds.index(most), most / median if median > 0 else 1.0


def clock_of(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return what marks a moment, and what gives the seconds between two marks.

    On a device that works behind the host's back a mark is an event of its current stream.
    """
    event_type = getattr(getattr(torch, device.type, None), "Event", None)
    if device.type == "cpu" or event_type is None:
        return time.perf_counter, lambda begin, end: end - begin

    def mark() -> Any:
        event = event_type(enable_timing=True)
        event.record()
        return event

    return mark, lambda begin, end: begin.elapsed_time(end) / 1000


def peak_of(device: torch.device, precision: str) -> float | None:
    """Return the peak of a device in FLOP/s for a precision; None: it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if precision == "no" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    peaks = next((row for part, row in PEAKS.items() if part in name), {})
    return peaks[precision] * 1e12 if precision in peaks else None


class Flops(TorchDispatchMode):
    """Counts the floating-point operations in its context by torch's own formulas.

    Those of matrix products, convolutions and attention, as `torch.utils.flop_counter` counts them;
    without its hooks on modules. Of a tensor that is distributed, those of this rank count.

    Args:
        counts: whether the operations of the moment are counted.
    """

    supports_higher_order_operators = True

    def __init__(self, counts: Callable[[], bool]) -> None:
        super().__init__()
        self.total = 0
        self._counts = counts

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave what the user has compiled as it is."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and add what its formula says."""
        result = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(getattr(func, "_overloadpacket", func))
        if formula is not None and self._counts():
            given = (args, kwargs or {}, result)
            args, kwargs, local = tree_map_only(torch.Tensor, local_shard, given)
            self.total += formula(*args, **kwargs, out_val=local)
        return result


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor that is distributed; else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

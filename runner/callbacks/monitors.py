"""Callbacks that show modules, weights, gradients and updates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from accel.comm.ops import send_to_device
from accel.machine.errors import ConfigError
from accel.weights.tensors import init_empty_weights
from runner.data.datasets import Collate
from runner.training import build
from runner.training.evaluation import evaluation_mode
from runner.training.run import Callback

if TYPE_CHECKING:
    from runner.training.run import Run


class Histograms(Callback):
    """Logs histograms of weights and of the gradients that they get, parameter by parameter.

    Fragments are gathered, one parameter at a time. Parameters without gradients are left out.

    Args:
        every: log points between two of them.
        pattern: parameters that are logged, such as "*.head.*"; they begin with the model's name.
    """

    def __init__(self, every: int = 10, pattern: str = "*") -> None:
        self.every, self.pattern = every, pattern

    def on_start(self, loop: Run) -> None:
        """Refuse an engine that keeps gradients for itself.

        Raises:
            ConfigError: if this rank's parameters do not get all gradients.
        """
        _require_gradients(loop, "callbacks.histograms")

    def on_before_optimizer_step(self, loop: Run) -> None:
        """Log the present weights, and their gradients after clipping."""
        due = loop.state.step % (loop.recipe.trainer.log_every * self.every) == 0
        for of, model in loop.step.models.items() if due else ():
            for name, parameter in loop.accelerator.unwrap_model(model).named_parameters(of):
                if parameter.grad is not None and fnmatchcase(name, self.pattern):
                    loop.log_media(f"weights/{name}", _full(parameter))
                    loop.log_media(f"gradients/{name}", _full(parameter.grad))


class OptimizerMonitor(Callback):
    """Logs the gradient norm and the relative update of each parameter group at log points.

    ``grad_norm_<group>`` is taken after clipping; ``update_ratio_<group>`` is the norm of the
    step's change over that of the weights, whose copies are kept during that step alone.
    """

    def __init__(self) -> None:
        self._before: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def on_start(self, loop: Run) -> None:
        """Refuse an engine that keeps gradients for itself.

        Raises:
            ConfigError: if this rank's parameters do not get all gradients.
        """
        _require_gradients(loop, "callbacks.optimizer_monitor")

    def on_before_optimizer_step(self, loop: Run) -> None:
        """Measure the gradients, and keep the weights."""
        for group, parameters in _groups(loop) if loop.logs_at(loop.state.step + 1) else ():
            if parameters and group not in self._before:  # else another optimizer steps
                loop.values[f"grad_norm_{group}"] = _norm([p.grad for p in parameters])
                self._before[group] = [(p.detach(), p.detach().clone()) for p in parameters]

    def on_step(self, loop: Run) -> None:
        """Measure the updates."""
        for group, pairs in self._before.items():
            change = _norm([now - before for now, before in pairs])
            size = _norm([before for _, before in pairs])
            loop.values[f"update_ratio_{group}"] = change / size if size else float("inf")
        self._before.clear()


class ModelSummary(Callback):
    """Shows modules, their parameters and output shapes, and keeps the table with the run.

    Shapes are those of an evaluated batch of two samples, computed without memory for weights;
    where the code computes with values, or the data is a stream, there are none.

    Args:
        depth: how deep modules are listed.
    """

    def __init__(self, depth: int = 2) -> None:
        self.depth = depth

    def on_start(self, loop: Run) -> None:
        """Print the table of a new run, and write it as its media."""
        if loop.resume_from is not None or not loop.accelerator.is_main_process:
            return
        with init_empty_weights():
            step = build.build_step(loop.recipe)
        named = [(of, *one) for of, model in step.models.items() for one in model.named_modules()]
        outputs: dict[torch.nn.Module, Any] = {}
        for *_, module in named:
            module.register_forward_hook(lambda one, given, output: outputs.update({one: output}))
        with contextlib.suppress(Exception), torch.no_grad(), evaluation_mode(step):
            batch = Collate(loop.data.collate_fn)([loop.data.train[0], loop.data.train[1]])
            step.evaluate(send_to_device(batch, torch.device("meta")))
        rows = [("module", "type", "parameters", "output")]
        for of, name, module in named:
            if name.count(".") < self.depth:
                shape = "x".join(map(str, getattr(outputs.get(module), "shape", ())))
                count = f"{sum(p.numel() for p in module.parameters()):,}"
                rows.append((f"{of}.{name}".rstrip("."), type(module).__name__, count, shape))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        loop.display.text("model summary", text)
        loop.log_media("model_summary", text)


def _require_gradients(loop: Run, key: str) -> None:
    if loop.accelerator.strategy.spec.owns_parameters:
        raise ConfigError.of(key, "the engine hides gradients", "Leave it out.")
    if loop.accelerator.parallel_dims.pp > 1:
        rule = "it needs all gradients on each rank, and other stages hold some"
        raise ConfigError.of(f"{key} with pipeline stages", rule, "Leave it out.")


def _groups(loop: Run) -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
    """Yield the name of each parameter group, and those of its parameters that have gradients."""
    for name, optimizer in loop.step.optimizers.items():
        prefix = f"{name}_" if len(loop.step.optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            with_gradients = [p for p in group["params"] if p.grad is not None]
            yield f"{prefix}{group.get('name', number)}", with_gradients


def _full(tensor: Any) -> Any:
    """Return all values [N], where this rank holds a fragment, too: every rank must call this."""
    return getattr(tensor.detach(), "full_tensor", tensor.detach)().flatten()


def _norm(tensors: list[Any]) -> float:
    norms = [_full(torch.linalg.vector_norm(one.detach(), dtype=torch.float32)) for one in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))

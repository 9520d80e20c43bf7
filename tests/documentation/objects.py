"""Examples of kwargs handlers and profiling (pages: Accelerator, handlers).

The pages lost the code of some handlers' examples; they are written here in the form of the one
that they kept.
"""

from __future__ import annotations

import torch

from tests.documentation.player import Example, Names

# -- profiling ---------------------------------------------------------------------------------


def work() -> Names:
    """Assume functions that train."""

    def train() -> None:
        for _ in range(2):
            train_iteration()

    def train_iteration() -> None:
        torch.ones(4, 4) @ torch.ones(4, 4)

    return {"train": train, "train_iteration": train_iteration}


PROFILE = Example(
    """
    # Profile with default settings
    from accelerate import Accelerator
    from accelerate.utils import ProfileKwargs

    accelerator = Accelerator()
    with accelerator.profile() as prof:
        train()
    accelerator.print(prof.key_averages().table())
    """,
    work,
)

PROFILE_WITH_HANDLER = Example(
    """
    from accelerate import Accelerator
    from accelerate.utils import ProfileKwargs

    # Profile with the custom handler
    def custom_handler(prof):
        print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))

    kwargs = ProfileKwargs(
        schedule_option=dict(wait=1, warmup=1, active=1), on_trace_ready=custom_handler
    )
    accelerator = Accelerator(kwarg_handler=[kwargs])
    with accelerator.profile() as prof:
        for _ in range(10):
            train_iteration()
            prof.step()
    """,
    work,
)

PROFILE_TO_FILE = Example(
    """
    from accelerate import Accelerator
    from accelerate.utils import ProfileKwargs

    # Profile and export to Chrome Trace
    kwargs = ProfileKwargs(output_trace_dir="output_trace")
    accelerator = Accelerator(kwarg_handler=[kwargs])
    with accelerator.profile():
        train()
    """,
    work,
)

# -- handlers ----------------------------------------------------------------------------------


def handler_kwargs(names: Names) -> object:
    """Look at what the handler changes."""
    return names["kwargs"].to_kwargs()


PROFILE_KWARGS = Example(
    """
    from accelerate import Accelerator
    from accelerate.utils import ProfileKwargs

    kwargs = ProfileKwargs(activities=["cpu", "cuda"])
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    """,
    observe=handler_kwargs,
)


def small_training() -> Names:
    """Assume a model with a part that is not used, and its optimizer and inputs."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)])
    model.forward = lambda inputs: model[0](inputs)  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "inputs": torch.ones(2, 3)}


def unused_has_none(names: Names) -> tuple[object, bool]:
    """Look at what the handler changes, and whether the unused part has no gradient."""
    gradients = [p.grad for p in names["model"].parameters()]
    return names["kwargs"].to_kwargs(), all(g is None or not g.any() for g in gradients[2:])


DDP_KWARGS = Example(
    """
    from accelerate import Accelerator
    from accelerate import DistributedDataParallelKwargs

    kwargs = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(inputs).sum())
    """,
    small_training,
    unused_has_none,
)

AUTOCAST_KWARGS = Example(
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import AutocastKwargs

    kwargs = AutocastKwargs(cache_enabled=True)
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[kwargs])
    with accelerator.autocast():
        print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    """,
)

GRAD_SCALER_KWARGS = Example(
    """
    from accelerate import Accelerator
    from accelerate.utils import GradScalerKwargs

    kwargs = GradScalerKwargs(backoff_factor=0.25)
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    """,
    observe=handler_kwargs,
)

INIT_PROCESS_GROUP_KWARGS = Example(
    """
    from datetime import timedelta
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    kwargs = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=800))
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    print(torch.distributed.get_backend() if accelerator.use_distributed else "none")
    """,
    observe=handler_kwargs,
)

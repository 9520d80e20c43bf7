"""Examples that train: preparing, accumulating, clipping, skipping, joining (page: Accelerator)."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.documentation.player import Example, Names

SAMPLES = 12
BATCH_SIZE = 2
RATE = 0.1


def make_model() -> torch.nn.Module:
    """Return the model, the same on every process."""
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def make_data(samples: int = SAMPLES) -> TensorDataset:
    """Return inputs [N, 3] and targets [N, 1]."""
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def loss_func(output: Tensor, target: Tensor | None = None) -> Tensor:
    """Return the mean squared distance from the target, or from 1."""
    return (output - (1.0 if target is None else target)).square().mean()


def everything(samples: int = SAMPLES) -> Names:
    """Assume what most examples do: a model, an optimizer, a loader, a scheduler and a loss."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    dataloader = DataLoader(make_data(samples), BATCH_SIZE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6)
    return {
        "model": model,
        "optimizer": optimizer,
        "dataloader": dataloader,
        "data_loader": dataloader,
        "scheduler": scheduler,
        "loss_func": loss_func,
        "max_grad_norm": 0.5,
        "clip_value": 0.05,
    }


def weights(names: Names) -> list[float]:
    """Look at the parameters of the model."""
    tensors = [parameter.detach().flatten() for parameter in names["model"].parameters()]
    return torch.cat(tensors).tolist()


def weights_and_rate(names: Names) -> tuple[list[float], float]:
    """Look at the parameters and the learning rate."""
    return weights(names), names["scheduler"].get_last_lr()[0]


ACCUMULATE = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=1)
    dataloader, model, optimizer, scheduler = accelerator.prepare(
        dataloader, model, optimizer, scheduler
    )

    for input, output in dataloader:
        with accelerator.accumulate(model):
            outputs = model(input)
            loss = loss_func(outputs)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    """,
    everything,
    weights_and_rate,
)

CLIP_GRAD_NORM = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    dataloader, model, optimizer, scheduler = accelerator.prepare(
        dataloader, model, optimizer, scheduler
    )

    for input, target in dataloader:
        optimizer.zero_grad()
        output = model(input)
        loss = loss_func(output, target)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
    """,
    everything,
    weights,
)

CLIP_GRAD_VALUE = Example(
    CLIP_GRAD_NORM.text.replace("norm_(", "value_(").replace("max_grad_norm", "clip_value"),
    everything,
    weights,
)
SKIP_FIRST_BATCHES = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator()
    dataloader, model, optimizer, scheduler = accelerator.prepare(
        dataloader, model, optimizer, scheduler
    )
    skipped_dataloader = accelerator.skip_first_batches(dataloader, num_batches=2)
    # for the first epoch only
    for input, target in skipped_dataloader:
        optimizer.zero_grad()
        output = model(input)
        loss = loss_func(output, target)
        accelerator.backward(loss)
        optimizer.step()

    # subsequent epochs
    for input, target in dataloader:
        optimizer.zero_grad()
        ...
    """,
    everything,
    weights,
)


# -- processes with unequal numbers of batches -------------------------------------------------


def uneven() -> Names:
    """Assume three batches: on two processes, one has two and the other has one."""
    return everything(samples=3 * BATCH_SIZE)


JOIN_UNEVEN_INPUTS = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator(even_batches=True)
    ddp_model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)

    with accelerator.join_uneven_inputs([ddp_model], even_batches=False):
        for input, output in dataloader:
            outputs = model(input)
            loss = loss_func(outputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    uneven,
    weights,
)

# The page's example calls `model`, which DDP does not see: nothing is exchanged, and so joins.
JOIN_UNEVEN_INPUTS_OF_DDP = Example(
    JOIN_UNEVEN_INPUTS.text.replace("outputs = model(", "outputs = ddp_model("),
    uneven,
    weights,
)


# -- gradients that are exchanged later --------------------------------------------------------


class Shift(torch.nn.Module):
    """Adds a parameter to the inputs [B, 3]: its graph keeps nothing, so it can be used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [B, 3]."""
        return inputs + self.shift


def only_inputs() -> Names:
    """Assume a loader of inputs alone."""
    names = everything()
    inputs = make_data().tensors[0]
    return names | {"dataloader": DataLoader(inputs, BATCH_SIZE)}


def double_backward() -> Names:
    """Assume a loss whose graph can be used a second time, as the page's example does."""
    model = Shift()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return only_inputs() | {"model": model, "optimizer": optimizer, "loss_func": partial_sum}


def partial_sum(output: Tensor) -> Tensor:
    """Return a loss whose gradient depends on the process, and whose graph keeps nothing."""
    return output[:, : int(os.environ["RANK"]) + 1].sum()


NO_SYNC = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator()
    dataloader, model, optimizer = accelerator.prepare(dataloader, model, optimizer)
    input_a = next(iter(dataloader))
    input_b = next(iter(dataloader))

    with accelerator.no_sync():
        outputs = model(input_a)
        loss = loss_func(outputs)
        accelerator.backward(loss)
        # No synchronization across processes, only accumulate gradients
    outputs = model(input_b)
    accelerator.backward(loss)
    # Synchronization across all processes
    optimizer.step()
    optimizer.zero_grad()
    """,
    double_backward,
    weights,
)

# The page's example forgets the loss of the second forward pass.
NO_SYNC_OF_TWO_BATCHES = Example(
    NO_SYNC.text.replace(
        "outputs = model(input_b)\n", "outputs = model(input_b)\n    loss = loss_func(outputs)\n"
    ),
    only_inputs,
    weights,
)


def two_inputs() -> Names:
    """Assume two batches, which differ by process."""
    rank = int(os.environ["RANK"])
    inputs = make_data().tensors[0]
    first, second = inputs[2 * rank : 2 * rank + 2], inputs[6 + 2 * rank : 8 + 2 * rank]
    return everything() | {"input_a": first, "input_b": second}


TRIGGER_SYNC_IN_BACKWARD = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator()
    dataloader, model, optimizer = accelerator.prepare(dataloader, model, optimizer)

    with accelerator.no_sync():
        loss_a = loss_func(model(input_a))  # first forward pass
        loss_b = loss_func(model(input_b))  # second forward pass

    accelerator.backward(loss_a)  # No synchronization across processes, only accumulate gradients
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss_b)  # Synchronization across all processes
    optimizer.step()
    optimizer.zero_grad()
    """,
    two_inputs,
    weights,
)


# -- preparing ---------------------------------------------------------------------------------


def kinds(names: Names) -> tuple[list[str], bool]:
    """Look at the prepared objects' classes, and whether batches are moved to the device."""
    prepared = [names[name] for name in ("model", "optimizer", "data_loader", "scheduler")]
    return [type(entry).__name__ for entry in prepared], names["data_loader"].device is not None


PREPARE = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator()
    # Assume a model, optimizer, data_loader and scheduler are defined
    model, optimizer, data_loader, scheduler = accelerator.prepare(
        model, optimizer, data_loader, scheduler
    )
    """,
    everything,
    kinds,
)

PREPARE_WITH_DEVICE_PLACEMENT = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator()
    # Assume a model, optimizer, data_loader and scheduler are defined
    device_placement = [True, True, False, False]
    # Will place the first two items passed in automatically to the right device, not the last.
    model, optimizer, data_loader, scheduler = accelerator.prepare(
        model, optimizer, data_loader, scheduler, device_placement=device_placement
    )
    """,
    everything,
    kinds,
)


class MyModel(torch.nn.Linear):
    """A model of the user's own."""

    def __init__(self) -> None:
        super().__init__(3, 1)


def my_model() -> Names:
    """Assume the class of a model."""
    return {"MyModel": MyModel}


UNWRAP_MODEL = Example(
    """
    # Assuming two GPU processes
    from torch.nn.parallel import DistributedDataParallel
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(MyModel())
    print(model.__class__.__name__)

    model = accelerator.unwrap_model(model)
    print(model.__class__.__name__)
    """,
    my_model,
)

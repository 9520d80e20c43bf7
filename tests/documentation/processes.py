"""Examples of processes: who runs what, and what they exchange (pages: Accelerator, state).

The pages lost the code of some examples (those of `PartialState`); they are written here in the
form of their neighbours that kept it.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.documentation.player import Example, Names


def of_state(example: Example, line: str = "from accelerate import PartialState") -> Example:
    """Return `example` with a state in the accelerator's place, imported by `line`."""
    text = example.text.replace("from accelerate import Accelerator", line)
    text = text.replace("Accelerator()", f"{line.split()[-1]}()").replace("accelerator", "state")
    return replace(example, text=text)


# -- who goes first ----------------------------------------------------------------------------

LOCAL_MAIN_PROCESS_FIRST = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator()
    with accelerator.local_main_process_first():
        # This will be printed first by local process 0 then in a seemingly
        # random order by the other processes.
        print(f"This will be printed by process {accelerator.local_process_index}")
    """,
)

MAIN_PROCESS_FIRST = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator()
    with accelerator.main_process_first():
        # This will be printed first by process 0 then in a seemingly
        # random order by the other processes.
        print(f"This will be printed by process {accelerator.process_index}")
    """,
)


STATE_LOCAL_MAIN_PROCESS_FIRST = of_state(LOCAL_MAIN_PROCESS_FIRST)
STATE_MAIN_PROCESS_FIRST = of_state(MAIN_PROCESS_FIRST)


def brief_sleep() -> Names:
    """Assume that `time.sleep` tells when it is over, and shortens the page's two seconds."""
    sleep = time.sleep

    def told(seconds: float) -> None:
        sleep(seconds / 10)
        print("slept")

    patcher = patch("time.sleep", told)
    patcher.start()
    return {"patcher": patcher}


def wake(names: Names) -> None:
    """Give `time.sleep` back."""
    names["patcher"].stop()


WAIT_FOR_EVERYONE = Example(
    """
    # Assuming two GPU processes
    import time
    from accelerate import Accelerator

    accelerator = Accelerator()
    if accelerator.is_main_process:
        time.sleep(2)
    else:
        print("I'm waiting for the main process to finish its sleep...")
    accelerator.wait_for_everyone()
    # Should print on every process at the same time
    print("Everyone is here")
    """,
    brief_sleep,
    wake,
)

STATE_WAIT_FOR_EVERYONE = of_state(WAIT_FOR_EVERYONE)

# -- who runs what -----------------------------------------------------------------------------

# The pages assume two servers with four processes each; here are as many as it takes.

ON_LOCAL_MAIN_PROCESS = Example(
    """
    # Assume we have 2 servers with 4 processes each.
    from accelerate import Accelerator

    accelerator = Accelerator()

    @accelerator.on_local_main_process
    def print_something():
        print("This will be printed by process 0 only on each server.")

    print_something()
    """,
)

ON_LOCAL_MAIN_PROCESS_OF_TWO_SERVERS = Example(ON_LOCAL_MAIN_PROCESS.text, sizes=(2,), nodes=2)

ON_LOCAL_PROCESS = Example(
    """
    # Assume we have 2 servers with 4 processes each.
    from accelerate import Accelerator

    accelerator = Accelerator()

    @accelerator.on_local_process(local_process_index=2)
    def print_something():
        print(f"Printed on process {accelerator.local_process_index}")

    print_something()
    """,
    sizes=(3, 2),
)

ON_LAST_PROCESS = Example(
    """
    # Assume we have 4 processes.
    from accelerate import Accelerator

    accelerator = Accelerator()

    @accelerator.on_last_process
    def print_something():
        print(f"Printed on process {accelerator.process_index}")

    print_something()
    """,
)

ON_MAIN_PROCESS = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator()

    @accelerator.on_main_process
    def print_something():
        print("This will be printed by process 0 only.")

    print_something()
    """,
)

ON_PROCESS = Example(
    """
    # Assume we have 4 processes.
    from accelerate import Accelerator

    accelerator = Accelerator()

    @accelerator.on_process(process_index=2)
    def print_something():
        print(f"Printed on process {accelerator.process_index}")

    print_something()
    """,
    sizes=(3, 2),
)


STATE_ON_LOCAL_MAIN_PROCESS = of_state(ON_LOCAL_MAIN_PROCESS)
STATE_ON_LOCAL_PROCESS = of_state(ON_LOCAL_PROCESS)
STATE_ON_LAST_PROCESS = of_state(ON_LAST_PROCESS)
STATE_ON_MAIN_PROCESS = of_state(ON_MAIN_PROCESS)
STATE_ON_PROCESS = of_state(ON_PROCESS)

# -- sharing out -------------------------------------------------------------------------------

SPLIT_BETWEEN_PROCESSES = Example(
    """
    # Assume there are two processes
    from accelerate import Accelerator

    accelerator = Accelerator()
    with accelerator.split_between_processes(["A", "B", "C"]) as inputs:
        print(inputs)

    with accelerator.split_between_processes(["A", "B", "C"], apply_padding=True) as inputs:
        print(inputs)
    """,
)

STATE_SPLIT_BETWEEN_PROCESSES = of_state(SPLIT_BETWEEN_PROCESSES)

ACCELERATOR_STATE_SPLIT_BETWEEN_PROCESSES = of_state(
    SPLIT_BETWEEN_PROCESSES, "from accelerate.state import AcceleratorState"
)

GATHER_FOR_METRICS = Example(
    """
    # Assuming two processes, with a batch size of 5 on a dataset with 9 samples
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    dataloader = torch.utils.data.DataLoader(range(9), batch_size=5)
    dataloader = accelerator.prepare(dataloader)
    batch = next(iter(dataloader))
    gathered_items = accelerator.gather_for_metrics(batch)
    len(gathered_items)
    """,
)

PAD_ACROSS_PROCESSES = Example(
    """
    # Assuming two processes, with the first processes having a tensor of size 1 and the second of
    # size 2
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    process_tensor = torch.arange(accelerator.process_index + 1).to(accelerator.device)
    padded_tensor = accelerator.pad_across_processes(process_tensor)
    padded_tensor.shape
    """,
)

REDUCE = Example(
    """
    # Assuming two processes
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    process_tensor = torch.arange(accelerator.num_processes) + 1 + (2 * accelerator.process_index)
    process_tensor = process_tensor.to(accelerator.device)
    reduced_tensor = accelerator.reduce(process_tensor, reduction="sum")
    reduced_tensor
    """,
)

# -- agreeing to stop --------------------------------------------------------------------------


def losses() -> Names:
    """Assume losses of which the third is not a number, on the last process alone."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    values = [3.0, 2.0, float("nan") if last else 1.0, 0.5]
    return {"losses": values, "should_do_breakpoint": lambda loss: loss != loss}


def stopped_at(names: Names) -> Any:
    """Look at the step where the training stopped."""
    return names["step"]


CHECK_TRIGGER = Example(
    """
    from accelerate import Accelerator

    accelerator = Accelerator()
    for step, loss in enumerate(losses):
        # Assume later in the training script
        # `should_do_breakpoint` is a custom function to monitor when to break,
        # e.g. when the loss is NaN
        if should_do_breakpoint(loss):
            accelerator.set_trigger()
        # Assume later in the training script
        if accelerator.check_trigger():
            break
    """,
    losses,
    stopped_at,
)

CHECK_BREAKPOINT = Example(
    CHECK_TRIGGER.text.replace("check_trigger", "check_breakpoint"), losses, stopped_at
)

"""What each process of a cell does: train, generate, save, load."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator
from accel.config.training import DataLoaderConfiguration
from tests.zoo.cells import BATCH_SIZE, NUM_STEPS, STRATEGIES, Cell
from tests.zoo.models import MODELS, UNFROZEN_AT, Batch, Entry, freeze
from tests.zoo.reference import make_optimizer

NUM_NEW_TOKENS = 4


class Steps(Dataset[Batch]):
    """The samples of all steps, in their order."""

    def __init__(self, entry: Entry) -> None:
        self.batches = [entry.batch(step, BATCH_SIZE) for step in range(NUM_STEPS)]

    def __len__(self) -> int:
        return NUM_STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> Batch:
        step, row = divmod(index, BATCH_SIZE)
        return {name: tensor[row] for name, tensor in self.batches[step].items()}


def train(cell: Cell) -> dict[str, Any]:
    """Train `cell` on this process of its group.

    Returns:
        `losses`: of each step on this process; `weights`: whole, by name, on rank 0;
        `answer`: the prompt with what was generated, or logits; `loaded`: on rank 0, the largest
        difference of what `from_pretrained` returns from the weights; a failure of the last two is
        text.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    entry = MODELS[cell.model]
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=cell.precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        **STRATEGIES[cell.strategy].arguments(cell.model),
    )
    with _whole(accelerator):
        model = entry.build()
    loader = DataLoader(Steps(entry), BATCH_SIZE)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    losses = [
        _step(accelerator, model, optimizer, batch, entry.unfreezes and step == UNFROZEN_AT)
        for step, batch in enumerate(loader)
    ]
    found: dict[str, Any] = {"losses": losses}
    state = accelerator.get_state_dict(model) or {}
    found["weights"] = {name: w.detach().float().cpu().clone() for name, w in state.items()}
    found["answer"] = _caught(_answer, accelerator, model, entry)
    found["loaded"] = _caught(_save, accelerator, model, cell)
    main = accelerator.is_main_process
    accelerator.end_training()
    accelerator.free_memory()
    del model, optimizer, loader, accelerator, state
    gc.collect()
    if not main:
        del found["weights"]
    elif found["loaded"] is None:
        found["loaded"] = _caught(_difference_of_loaded, entry, cell, found["weights"])
    return found


@contextlib.contextmanager
def _whole(accelerator: Accelerator) -> Any:
    """Have a model built as a whole also under ZeRO-3: its weights are changed after building."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    with (
        plugin.zero3_init_context_manager(enable=False)
        if plugin is not None and plugin.zero_stage == 3
        else contextlib.nullcontext()
    ):
        yield


def _step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    unfreeze: bool,
) -> float:
    if unfreeze:
        freeze(accelerator.unwrap_model(model), False)
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _caught(function: Callable[..., Any], *args: Any) -> Any:
    """Return what `function` returns, or the error as text: the other trials still run."""
    try:
        return function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"


@torch.no_grad()
def _answer(accelerator: Accelerator, model: torch.nn.Module, entry: Entry) -> torch.Tensor:
    model.eval()
    if entry.prompt is None:
        batch = entry.batch(NUM_STEPS, 2)
        logits: torch.Tensor = model(**batch).logits
        return logits.cpu()
    own: Any = accelerator.unwrap_model(model)
    told: torch.Tensor = own.generate(
        **entry.prompt(), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
    )
    return told.cpu()


def _save(accelerator: Accelerator, model: torch.nn.Module, cell: Cell) -> None:
    state = accelerator.get_state_dict(model)
    own: Any = accelerator.unwrap_model(model)
    own.save_pretrained(
        f"{cell.folder}/exported",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    accelerator.wait_for_everyone()


def _difference_of_loaded(entry: Entry, cell: Cell, weights: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of the weights in the files from those of the run.

    Files are in the format of the model that was saved.
    """
    loaded = entry.load(f"{cell.folder}/exported").state_dict()
    if loaded.keys() != weights.keys():
        raise KeyError(f"{sorted(loaded.keys() ^ weights.keys())[:4]}")
    return max(
        (weights[name].to(value.dtype).float() - value.float()).abs().max().item()
        for name, value in loaded.items()
        if entry.exported in name
    )

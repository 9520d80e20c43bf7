"""What a script prepares in place of Megatron's own schedules and data sets.

Importable without megatron-core.

Source: https://huggingface.co/docs/accelerate/usage_guides/megatron_lm
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch.utils.data import DataLoader

from accel.data.prepare import prepare_for
from accel.machine.errors import StateError
from accel.state import AcceleratorState

if TYPE_CHECKING:
    from accel.config.megatron import MegatronLMPlugin
    from accel.plan.plan import Plan


def _refuse(placeholder: object) -> NoReturn:
    name = type(placeholder).__name__
    raise StateError(f"{name} is a placeholder for what Megatron builds: prepare it with a plugin.")


@final
class MegatronLMDummyScheduler:
    """Placeholder for megatron-core's schedule of learning rates and weight decay.

    Args:
        optimizer: the optimizer.
        total_num_steps: optimizer steps until the end of the decay; None: `lr_decay_iters` of the
            plugin, or its `train_iters`.
        warmup_num_steps: optimizer steps until the full learning rate.
        kwargs: further arguments of megatron-core's `OptimizerParamScheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        self.optimizer, self.kwargs = optimizer, kwargs
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps

    def step(self, *args: object) -> NoReturn:
        """Refuse: only what `prepare` returns can step, or has a state.

        Args:
            args: not used.

        Raises:
            StateError: always.
        """
        _refuse(self)

    state_dict = load_state_dict = step


class MegatronLMDummyDataLoader(DataLoader[Any]):
    """Placeholder for loaders of Megatron's indexed data sets: those of GPT.

    Prepare it three times in one call, for loaders of training, validation and test. These also
    are endless iterators.

    Args:
        dataset_kwargs: data_path (a file's path without .bin and .idx, or several), splits_string,
            seq_length, micro_batch_size, and further fields of megatron-core's `GPTDatasetConfig`.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        super().__init__(self)  # type: ignore[arg-type]
        self.dataset_args = dataset_kwargs

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> NoReturn:
        _refuse(self)

    def set_megatron_data_args(self) -> None:
        """Set `seq_length` and the batch sizes of the run's plugin, as `prepare` does."""
        state = AcceleratorState()
        plugin: Any = state.megatron_lm_plugin
        plugin.megatron_dataset_flag, plugin.seq_length = True, self.dataset_args["seq_length"]
        size = self.dataset_args["micro_batch_size"]
        plugin.set_training_args(size, state.plan.parallel_dims.dp_size)

    def get_train_valid_test_datasets_provider(
        self, accelerator: Any
    ) -> Callable[[Sequence[int | None]], Sequence[Any]]:
        """Return a function of numbers of samples, None for those of one pass, and data sets.

        Args:
            accelerator: not used.
        """
        plugin: Any = AcceleratorState().megatron_lm_plugin
        return plugin.custom_megatron_datasets_provider_function or self._datasets

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Return endless iterators over the batches of this rank.

        Args:
            accelerator: prepares them.
        """
        found: tuple[Any, Any, Any] = accelerator.prepare(self, self, self)
        return found

    def build(self, plan: Plan, plugin: MegatronLMPlugin, first: int) -> list[Any]:
        """Return the three loaders of this rank.

        Args:
            plan: of the run.
            plugin: likewise.
            first: index of the first one among the loaders of the run.
        """
        self.set_megatron_data_args()
        size, iters = plugin.global_batch_size or 1, plugin.train_iters or 0
        evaluated = plugin.eval_iters * size
        sizes = (iters * size, (iters // plugin.eval_interval + 1) * evaluated, evaluated)
        provider = self.get_train_valid_test_datasets_provider(None)
        loaders = [
            DataLoader(dataset, batch_size=plugin.micro_batch_size)
            for dataset in provider(sizes if iters else (None, None, None))
        ]
        return [
            _endless(prepare_for(plan, loader, put_on_device=True, loader_index=index))
            for index, loader in enumerate(loaders, first)
        ]

    def _datasets(self, sizes: Sequence[int | None]) -> Sequence[Any]:
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

        given = {name: value for name, value in self.dataset_args.items() if name not in KNOWN}
        path, split = self.dataset_args["data_path"], self.dataset_args["splits_string"]
        config = GPTDatasetConfig(
            sequence_length=self.dataset_args["seq_length"],
            blend=([path] if isinstance(path, str) else list(path), None),
            split=split,
            **{**DEFAULTS, **given},
        )
        builder = BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config)
        return builder.build()


KNOWN = ("data_path", "splits_string", "seq_length", "micro_batch_size")
# Tokens are in the files; rows are not cut at the ends of documents.
DEFAULTS = {
    **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
    **{"random_seed": 1234, "create_attention_mask": False},
    "tokenizer": SimpleNamespace(eod=-1, pad=-1, vocab_size=None, unique_identifiers={}),
}


def _endless(loader: Any) -> Any:
    """Return a prepared loader that also is an iterator."""
    kind = type(loader)
    own = {"__next__": _next, "passing": iter(())}  # of the class: a loader that skips has it, too
    loader.__class__ = type(kind.__name__, (kind,), own)
    return loader


def _next(loader: Any) -> Any:
    """Return the next batch, that of a new pass after the last."""
    if (batch := next(loader.passing, None)) is None:
        loader.passing = iter(loader)
        batch = next(loader.passing)
    return batch

"""The plugin of Megatron-LM: parallel sizes, and settings of megatron-core. Free of torch.

Source: https://huggingface.co/docs/accelerate/package_reference/megatron_lm
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accel.config.checks import check_choice, check_minimum, check_types, import_callable
from accel.machine import env
from accel.machine.env import parse_bool
from accel.machine.errors import Problems

PREFIX = "MEGATRON_LM_"
# Fields that documented environment variables fill, how, and their defaults.
VARIABLES: Mapping[str, tuple[Callable[[str], Any], Any]] = {
    "tp_degree": (int, 1),
    "pp_degree": (int, 1),
    "num_micro_batches": (int, 1),
    "gradient_clipping": (float, 0.0),
    "sequence_parallelism": (parse_bool, False),
    "recompute_activations": (parse_bool, False),
    "use_distributed_optimizer": (parse_bool, False),
    "recompute_granularity": (str, None),
    "recompute_method": (str, None),
    "recompute_num_layers": (int, None),
    "attention_dropout": (float, None),
    "hidden_dropout": (float, None),
}
# What the configuration of a module of megatron-core decides, where a function builds it.
OF_MODELS = (
    *("attention_dropout", "hidden_dropout", "recompute_granularity", "recompute_activations"),
    *("sequence_parallelism", "other_megatron_args"),
)
# Whose losses are those of a loop's batches.
OF_STEPS = ("custom_train_step_class", "custom_get_batch_function", "custom_loss_function")
CALLABLES = (
    *("custom_model_provider_function", "custom_megatron_datasets_provider_function"),
    *OF_STEPS,
)
# Documented fields that are not built, by what to do instead; their defaults are accepted.
REFUSED: Mapping[str, str] = {
    "Use FullyShardedDataParallelPlugin().": "use_custom_fsdp",
    "Use use_distributed_optimizer=True.": "optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d",
    "Load the weights alone: load_checkpoint_in_model().": "no_load_optim",
    "Save the weights alone: accelerator.save_model().": "no_save_optim",
    "Choose a pp_degree that divides the layers.": "decoder_last_pipeline_num_layers",
    "Leave it out: attention is torch's scaled_dot_product_attention.": "attention_backend",
    "Set those labels to -100.": "eod_mask_loss",
    "Give ParallelismConfig(cp_size=…) without Megatron.": "context_parallel_size",
    "Divide the loss by the tokens of the step.": "calculate_per_token_loss",
    "Leave it out.": "use_precision_aware_optimizer expert_model_parallel_size "
    "expert_tensor_parallel_size pipeline_model_parallel_split_rank encoder_seq_length "
    "decoder_seq_length num_layers_per_virtual_pipeline_stage use_rotary_position_embeddings "
    "custom_prepare_model_function return_logits",
    "Give it to MegatronLMDummyScheduler: OptimizerParamScheduler's arguments.": "lr_warmup_iters "
    "lr_warmup_fraction start_weight_decay end_weight_decay weight_decay_incr_style",
    "Count optimizer steps: train_iters, lr_decay_iters.": "train_samples lr_decay_samples "
    "lr_warmup_samples consumed_samples",
    "Give the optimizer groups with their own lr and weight_decay.": "no_wd_decay_cond "
    "scale_lr_cond lr_mult",
    "Do it in your loop.": "tensorboard_dir set_all_logging_options",
}


@dataclass
class MegatronLMPlugin:
    """How megatron-core distributes a model, and its settings.

    Fields that are not built are refused, with what to do instead.

    Args:
        tp_degree: tensor-parallel size.
        pp_degree: pipeline stages.
        recompute_granularity: which activations are recomputed: full or selective; None: none.
        recompute_method: of full: uniform or block.
        recompute_num_layers: of full: layers of a unit, or of a stage.
        attention_dropout: dropout of attention weights; None: the model's own.
        hidden_dropout: dropout of hidden states; None: the model's own.
        attention_softmax_in_fp32: accepted: attention computes its softmax in fp32.
        num_micro_batches: micro-batches of an optimizer step (gradient accumulation).
        gradient_clipping: largest norm of gradients where the loop clips none; 0: not clipped.
        sequence_parallelism: whether layer norms and dropouts divide the sequence over the
            tensor-parallel ranks.
        recompute_activations: short for recompute_granularity="selective".
        use_distributed_optimizer: whether optimizer state is sharded over data-parallel ranks.
        is_train_batch_min: whether the smallest batch size of several loaders is that of training.
        seq_length: positions of T5; None: 512. Else shapes follow the batches.
        custom_model_provider_function: builds the megatron-core model of this rank; called with
            pre_process and post_process: whether it embeds tokens, and computes the output.
        train_iters: optimizer steps; of `MegatronLMDummyDataLoader` and `MegatronLMDummyScheduler`.
        eval_iters: batches of an evaluation; of `MegatronLMDummyDataLoader`.
        eval_interval: optimizer steps between evaluations; likewise.
        custom_megatron_datasets_provider_function: takes three numbers of samples, and returns
            data sets of training, validation and test; likewise.
        lr_decay_style: linear, cosine, …; of `MegatronLMDummyScheduler`.
        lr_decay_iters: optimizer steps until the smallest learning rate; likewise.
        min_lr: the smallest learning rate; likewise.
        custom_train_step_class: an `AbstractTrainStep`; None: that of the kind of model.
        custom_train_step_kwargs: further keyword arguments of that class.
        custom_get_batch_function: takes the place of what `AbstractTrainStep.get_batch_func` of
            the kind of model returns.
        custom_loss_function: likewise, of `get_loss_func`.
        megatron_dataset_flag: whether batches are those of Megatron's data sets; else they are
            those of models of transformers.
        other_megatron_args: further fields of megatron-core's `TransformerConfig`, by name.
        use_custom_fsdp: not built.
        optimizer_cpu_offload: not built.
        overlap_cpu_optimizer_d2h_h2d: not built.
        no_load_optim: not built.
        no_save_optim: not built.
        decoder_last_pipeline_num_layers: not built.
        attention_backend: not built.
        eod_mask_loss: not built.
        context_parallel_size: not built.
        calculate_per_token_loss: not built.
        use_precision_aware_optimizer: not built.
        expert_model_parallel_size: not built.
        expert_tensor_parallel_size: not built.
        pipeline_model_parallel_split_rank: not built.
        encoder_seq_length: not built.
        decoder_seq_length: not built.
        num_layers_per_virtual_pipeline_stage: not built.
        use_rotary_position_embeddings: not built.
        custom_prepare_model_function: not built.
        return_logits: not built.
        train_samples: not built.
        start_weight_decay: not built.
        end_weight_decay: not built.
        weight_decay_incr_style: not built.
        lr_decay_samples: not built.
        lr_warmup_iters: not built.
        lr_warmup_samples: not built.
        lr_warmup_fraction: not built.
        consumed_samples: not built.
        no_wd_decay_cond: not built.
        scale_lr_cond: not built.
        lr_mult: not built.
        tensorboard_dir: not built.
        set_all_logging_options: not built.

    Raises:
        ConfigError: naming every value that is wrong.

    Example:
        >>> accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: bool | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: Any = None
    no_wd_decay_cond: Any = None
    scale_lr_cond: Any = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: Any = None
    custom_model_provider_function: Any = None
    custom_prepare_model_function: Any = None
    custom_megatron_datasets_provider_function: Any = None
    custom_get_batch_function: Any = None
    custom_loss_function: Any = None
    other_megatron_args: Any = None

    def __post_init__(self) -> None:
        problems = Problems()
        for name, (parse, default) in VARIABLES.items():
            if getattr(self, name) is None:
                text = env.read(PREFIX + name.upper())
                setattr(self, name, _parsed(name, text, parse, problems) if text else default)
        check_types(self, problems)
        for name in ("tp_degree", "pp_degree", "num_micro_batches", "recompute_num_layers"):
            check_minimum(self, name, 1, problems)
        check_minimum(self, "gradient_clipping", 0, problems)
        check_choice(self, "recompute_granularity", ("full", "selective"), problems)
        check_choice(self, "recompute_method", ("uniform", "block"), problems)
        for name in CALLABLES:
            problems.collect(import_callable, self, name)
        if self.sequence_parallelism and self.tp_degree == 1:
            problems.add(
                "MegatronLMPlugin.sequence_parallelism=True with tp_degree=1",
                "it divides sequences over tensor-parallel ranks",
                "Give tp_degree=2 or more, or leave it out.",
            )
        if self.custom_model_provider_function is not None:
            for name in (name for name in OF_MODELS if getattr(self, name)):
                rule = "the TransformerConfig of the function's model decides it"
                problems.add(f"MegatronLMPlugin.{name} with a provider", rule, "Set it there.")
        if not isinstance(self.other_megatron_args or {}, Mapping):
            rule = "it maps fields of TransformerConfig to values"
            problems.add(f"other_megatron_args={self.other_megatron_args!r}", rule, "Give a dict.")
        defaults = {one.name: one.default for one in dataclasses.fields(self)}
        for remedy, names in REFUSED.items():
            for name in names.split():
                if env.read(variable := PREFIX + name.upper()):
                    problems.add_not_built(f"{variable} (environment)", remedy)
                value = getattr(self, name)
                is_one = name.endswith("_parallel_size") and value == 1
                if value not in (defaults[name], False) and not is_one:
                    problems.add_not_built(f"MegatronLMPlugin.{name}={value!r}", remedy)
        problems.raise_if()
        self.micro_batch_size: int | None = None
        self.global_batch_size: int | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of tensor-parallel ranks, and of pipeline stages."""
        return self.tp_degree or 1, self.pp_degree or 1

    @property
    def model_size(self) -> int:
        """The number of ranks that compute the same samples together."""
        return self.sizes[0] * self.sizes[1]

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set `micro_batch_size` and `global_batch_size`, as `prepare` does.

        Args:
            micro_batch_size: samples per process and forward pass.
            dp_degree: data-parallel size.
        """
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = micro_batch_size * dp_degree * (self.num_micro_batches or 1)


def _parsed(name: str, text: str, parse: Callable[[str], Any], problems: Problems) -> Any:
    """Return what a variable's text means; None, with a problem, if it means nothing."""
    with contextlib.suppress(ValueError):
        if (value := parse(text.strip())) is not None:
            return value
    kind = "true or false" if parse is parse_bool else "a number"
    shown = f"{PREFIX}{name.upper()}={text!r} (environment)"
    problems.add(shown, f"expected {kind}", "Correct it.")
    return VARIABLES[name][1]

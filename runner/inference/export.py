"""A run's model as a folder for use elsewhere: of transformers, of peft, or weights alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError
from runner.inference.load import find_checkpoint, restored_step
from runner.runs import directory
from runner.runs.job import Job

FORMATS = ("hf", "safetensors")
FOLDER = "export"  # in a run directory


def export_run(
    run_dir: Path,
    form: str,
    out: Path | None = None,
    *,
    merge: bool = False,
    checkpoint: str | None = None,
) -> tuple[Path, Path]:
    """Write the model of a run, and its tokenizer with the chat template if it has one.

    The dtype is that of the model in the recipe. The folder appears once all is written.

    Args:
        run_dir: the run directory.
        form: "hf": what `from_pretrained` of transformers reads, or of peft; "safetensors": the
            weights of any model, those of several in a folder each.
        out: the folder; None: ``export`` in the run directory.
        merge: whether adapters are merged into the base model.
        checkpoint: as `runner.load` takes it.

    Returns:
        The checkpoint, and the folder.

    Raises:
        ConfigError: if the folder is not empty, or the model cannot be written like this.
        CheckpointError: if the checkpoint is missing or incomplete.
    """
    from runner.language import generation

    job, recipe = Job.load(directory.existing(run_dir))
    target = (job.run_dir / FOLDER if out is None else out).absolute()
    tokenizer = generation.tokenizer_folder(job.run_dir)
    _require_new(target)
    with checkpoints.new_folder(target) as folder:
        path = find_checkpoint(job.run_dir, checkpoint)
        models = restored_step(path, recipe).models
        for name, model in models.items():
            found = _merged(model) if merge else model
            _name_classes(found, job.run_dir)
            place = folder if len(models) == 1 else folder / name
            _write_model(found, place, form, tokenizer if tokenizer.is_dir() else None)
        if tokenizer.is_dir():
            shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    return path, target


def _require_new(target: Path) -> None:
    """Refuse a folder that holds something; remove an empty one."""
    if target.exists():
        if not target.is_dir() or any(target.iterdir()):
            rule = "it exists and is not empty: nothing is overwritten"
            raise ConfigError.of(f"--out {target}", rule, "Remove it, or name another folder.")
        target.rmdir()


def _merged(model: Any) -> Any:
    """Return the base model of one with adapters, which are merged into its weights."""
    if not hasattr(model, "merge_and_unload"):
        raise ConfigError.of("--merge", "the model has no adapters to merge", "Leave it out.")
    if getattr(model.get_base_model(), "is_quantized", False):
        rule = "the weights of the base are quantized, and the sums would be rounded to a few bits"
        remedy = "Leave it out, and merge the adapters into the base as it was before."
        raise ConfigError.of("--merge", rule, remedy)
    _untie(model.get_base_model())
    return model.merge_and_unload()


def _untie(base: Any) -> None:
    """Give the output embedding its own weights where adapters of one embedding are merged."""
    from torch.nn import Parameter

    finds = (getattr(base, f"get_{end}_embeddings", lambda: None) for end in ("input", "output"))
    ends = [find() for find in finds]
    layers: list[Any] = [getattr(end, "base_layer", end) for end in ends]
    weights = [getattr(layer, "weight", None) for layer in layers]
    if layers != ends and weights[0] is not None and weights[0] is weights[1]:
        layers[1].weight = Parameter(weights[1].detach().clone())
        base.config.tie_word_embeddings = False


def _name_classes(model: Any, run_dir: Path) -> None:
    """Give a classifier the names of the classes that the run's data had."""
    from runner.language.packing import CLASSES

    file = run_dir / directory.ARTIFACTS / CLASSES
    config: Any = getattr(model, "config", None)
    names = [str(one) for one in json.loads(file.read_text())] if file.is_file() else []
    if names and len(names) == getattr(config, "num_labels", 0):
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}


def _write_model(model: Any, folder: Path, form: str, tokenizer: Path | None) -> None:
    from accel.checkpoint.export import export_model

    if form == "safetensors":
        export_model(model.state_dict(), folder)
        return
    if not hasattr(model, "save_pretrained"):
        rule = f"{type(model).__name__} is no model of transformers"
        raise ConfigError.of("--format hf", rule, "Give --format safetensors.")
    for adapter in getattr(model, "peft_config", {}).values():
        if not adapter.base_model_name_or_path:
            rule = "adapters are exported alone, and their base was not read from files"
            raise ConfigError.of("--format hf", rule, "Add --merge.")
        if Path(adapter.base_model_name_or_path).is_dir():  # relative to where it was trained
            adapter.base_model_name_or_path = os.path.abspath(adapter.base_model_name_or_path)
    if tokenizer is not None:
        _name_tokens(model, tokenizer)
    model.save_pretrained(folder)


def _name_tokens(model: Any, folder: Path) -> None:
    """Let generation end with the tokens that texts of the run end with."""
    from runner.language import generation

    tokenizer = generation.tokenizer_of(folder)
    ends = generation.end_tokens(tokenizer)
    for config in (model.config, getattr(model, "generation_config", model.config)):
        config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
        config.eos_token_id = ends[0] if len(ends) == 1 else ends or None

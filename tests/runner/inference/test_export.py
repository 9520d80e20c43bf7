"""C1, R5: what transformers loads of an export is the model of the run, under any strategy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import runner
from accel.checkpoint.load import read_model
from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from runner import cli
from runner.recipe.schema import Recipe
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.language import tiny_runs
from tests.runner.trained_runs import make_run

ENGINES: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp": {"fsdp": FullyShardedDataParallelPlugin()},
    "shards": {"fsdp": FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")},
    "zero3": {"deepspeed": DeepSpeedPlugin(zero_stage=3)},
}
IDS = torch.arange(3, 13)[None]


def recipe_of(engine: str) -> Recipe:
    return loops.recipe_of(trainer__max_steps=3, trainer__epochs=None, **ENGINES[engine])


def train(folder: str, engine: str) -> None:
    run_dir = Path(folder)
    loops.run(
        run_dir,
        recipe_of(engine),
        data=tiny_runs.data(None),
        model=tiny_runs.model(),
        objective=tiny_runs.NextToken(),
    )
    loops.forget()


def trained(run_dir: Path, engine: str = "one") -> Path:
    if engine == "one":
        train(str(run_dir), engine)
    else:
        run_distributed(train, 2, str(run_dir), engine)
    tiny_runs.finish(run_dir, recipe_of(engine))
    return run_dir


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_transformers_loads_the_model_of_the_run(engine: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = trained(tmp_path / "run", engine)
    assert cli.main(["export", str(run_dir), "--format", "hf"]) == 0
    out = run_dir / "export"
    exported, tokenizer = (
        AutoModelForCausalLM.from_pretrained(out),
        AutoTokenizer.from_pretrained(out),
    )
    assert exported.dtype == torch.float32
    own, _ = runner.load(run_dir)
    assert torch.equal(logits(exported), logits(own))
    stored = read_model(loops.newest(run_dir), 0)
    for name, value in exported.state_dict().items():
        assert torch.equal(value, stored[name]), name
    assert tokenizer.chat_template == tiny_runs.TEMPLATE
    assert exported.generation_config.eos_token_id == [0]
    assert cli.main(["export", str(run_dir), "--format", "safetensors", "--out", f"{out}2"]) == 0
    weights = load_file(f"{out}2/model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in weights.items())


@pytest.mark.slow
def test_any_model_is_exported_as_safetensors_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "runs", checkpoints=2, best=0)
    line = ["export", str(run_dir), "--format"]
    for flags, message in (
        (["hf"], "--format hf: CNN is no model of transformers. Give --format safetensors."),
        (["safetensors", "--merge"], "--merge: the model has no adapters to merge. Leave it out."),
    ):
        assert cli.main([*line, *flags]) == 2
        assert message in capsys.readouterr().err
        assert not list(run_dir.glob("*export*")), "what is refused leaves nothing behind"
    out = tmp_path / "out"
    for checkpoint in ("best", "last"):
        (out / checkpoint).mkdir(parents=True)  # an empty folder is taken
        flags = ["safetensors", "--checkpoint", checkpoint, "--out", str(out / checkpoint)]
        assert cli.main([*line, *flags]) == 0
        found = load_file(out / checkpoint / "model.safetensors")
        number = {"best": 0, "last": 1}[checkpoint]
        stored = read_model(run_dir / "checkpoints" / f"checkpoint_{number}", 0)
        assert found.keys() == stored.keys()
        assert all(torch.equal(value, stored[name]) for name, value in found.items())
        assert os.listdir(out / checkpoint) == ["model.safetensors"]
    assert cli.main([*line, *flags]) == 2
    assert "it exists and is not empty: nothing is overwritten" in capsys.readouterr().err

"""R1, R5, C1: adapters are trained, and checkpoints hold nothing else."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from accel.checkpoint.directory import read_manifest
from accel.checkpoint.load import read_model
from accel.machine.errors import ConfigError
from runner.language.adapters import wrap
from runner.recipe import trust
from tests import commands
from tests.helpers import WorkerError, run_distributed, with_path, write_file
from tests.runner import loops
from tests.runner.language import rows, texts, tiny_runs

# A user's package: a run of it is killed at a step.
KILL = """import os, runner
@runner.register.callback("kill")
class Kill(runner.Callback):
    def on_step(self, loop): loop.state.step == int(os.environ["AT"]) and os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    folder = str(tmp_path_factory.mktemp("base"))
    rows.tiny().save_pretrained(folder)
    return folder


def adapted(base: str, fields: dict[str, Any], **options: Any) -> Any:
    config = peft.LoraConfig(**{"target_modules": "all-linear", **fields})
    return wrap(rows.tiny(path=base, config=None, **options), config, "peft")


def train(folder: str, engine: str, *given: Any, again: bool = False, **changes: Any) -> Any:
    """Train, or go on from the newest state; return what was measured and the state's names."""
    newest = str(loops.newest(Path(folder))) if again else None
    model, data = adapted(*given), functools.partial(rows.packed, fill=True)
    losses = rows.train(folder, data, model, newest, **tiny_runs.ENGINES[engine], **changes)
    unset_hf_deepspeed_config()  # a model of the next engine is not partitioned
    return losses, list(read_model(loops.newest(Path(folder))))


def train_twice(folder: str, first: str, second: str, *given: Any) -> Any:
    train(folder, first, *given, trainer__stop_after=1)
    return train(folder, second, *given, again=True)


DORA = {"use_dora": True, "bias": "all", "modules_to_save": ["norm"]}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("engines", ["ddp fsdp", "fsdp zero3", "zero3 tp", "tp ddp"])
def test_strategies_train_and_save_adapters_alone(
    engines: str, fields: dict[str, Any], base: str, tmp_path: Path
) -> None:
    one, names = train(str(tmp_path / "one"), "ddp", base, fields)
    given = (str(tmp_path / "two"), *engines.split(), base, fields)
    if "tp" in engines and fields:
        with pytest.raises(WorkerError, match="DoRA of a model that is divided: each process"):
            run_distributed(train_twice, 2, *given)
        return
    assert all(".lora_" in name or "norm.modules_to_save." in name for name in names)
    for found in run_distributed(train_twice, 2, *given):
        assert found == (pytest.approx(one, rel=1e-6), names)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": ["q_pro"]}, r"target_modules: q_pro: .* Did you mean 'q_proj'\?"),
    ({"target_modules": "no.*"}, r"Choose peft\.target_modules from: embed_tokens, q_proj"),
    ({"init_lora_weights": "pissa"}, "changes the weights of the base"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES)
def test_mistakes_name_what_exists(fields: dict[str, Any], message: str, base: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted(base, fields)


def test_weights_of_the_base_are_not_lost_in_silence(base: str) -> None:
    model = adapted(base, {})
    model.get_parameter("base_model.model.lm_head.weight").requires_grad_(True)
    with pytest.raises(ConfigError, match=r"lm_head\.weight: it is trained"):
        model.state_dict()


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"Install 'peft': pip install 'accel-runner\[hf\]'"):
        trust.resolve("peft.LoraConfig", "peft._target_")


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["lora", "qlora"])
def test_a_killed_run_goes_on_with_the_same_bits_on_the_same_base(
    choice: str, tokenizer: str, tmp_path: Path
) -> None:
    write_file(tmp_path / "kill.py", KILL)
    base, data = rows.tiny(config=tiny_runs.CONFIG), texts.texts_of(tmp_path / "x.jsonl", [9] * 40)
    base.save_pretrained(tmp_path / "base")

    def run(*arguments: str, code: int = 0, at: int = 0) -> str:
        known = with_path(COLUMNS="300", AT=str(at), RUNNER_IMPORTS="kill")
        answer = commands.run("-m", "runner", *arguments, cwd=tmp_path, environment=known)
        assert answer.returncode == code, answer.stdout + answer.stderr
        return answer.stdout + answer.stderr

    line = f"model=hf_causal_lm model.path=base peft={choice} objective=causal_lm data=jsonl"
    line += f" data.train={data} data.validation={data} data.context=32 data.tokenizer={tokenizer}"
    line += " trainer.epochs=null trainer.max_steps=6 trainer.global_batch_size=4 tracker=none"
    line += " checkpoint.every_steps=2 callbacks.kill.name=kill deterministic=true"
    run(*line.split(), "run_dir=straight")
    run(*line.split(), "run_dir=killed", code=-9, at=5)
    run("resume=killed")
    newest = [loops.newest(tmp_path / name) for name in ("straight", "killed")]
    for name in ("model.safetensors", "optimizer.bin"):
        assert len({(path / name).read_bytes() for path in newest}) == 1
    size = sum(value.nbytes for value in read_model(newest[0]).values())
    assert (newest[0] / "model.safetensors").stat().st_size <= 1.2 * size
    assert list(read_manifest(newest[0]).metadata["base"]["model"]) == ["path", "sha256", "config"]
    uses = [["eval", "killed"], ["predict", "killed", "--output=x.pt"]]
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "transformers_version": "9"}))
    run(*uses[0])
    uses.append(["resume=killed", "trainer.max_steps=9"])
    file.write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    for use in uses:
        assert "'model' were trained with another config.json than that in" in run(*use, code=1)
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    for use in uses:
        assert "the adapters of 'model' were trained on" in run(*use, code=1)

"""The `peft` node: adapters are trained, and checkpoints hold nothing else (R1, R5, C1)."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.checkpoint.load import read_model
from accel.machine.errors import ConfigError
from runner.callbacks.averaging import EMA
from runner.language.adapters import wrap
from runner.recipe import trust
from tests import commands
from tests.helpers import about, run_distributed, with_path, write_file
from tests.runner import loops
from tests.runner.language import tiny_lm
from tests.runner.training.test_strategies import ENGINES as ALL_ENGINES

ENGINES = {name: ALL_ENGINES[name] for name in ("ddp", "fsdp", "zero2", "zero3")}
COMMAND = (
    *("-m", "runner", "--import", "tiny_lm", "model=tiny_lm", "data=null"),
    *("data.name=tokens", "objective=null", "objective.name=next_token", "scheduler=constant"),
    *("peft=lora", "peft.lora_dropout=0.1", "trainer.global_batch_size=8", "trainer.log_every=1"),
    *("trainer.epochs=null", "trainer.max_steps=8", "checkpoint.every_steps=3", "tracker=none"),
    *("distributed.device=cpu", "deterministic=true", "name=lora"),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a base model."""
    return tiny_lm.save_base(tmp_path_factory.mktemp("base"))


def adapted(path: Path | str | None, /, kind: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the small model with adapters on its linear layers."""
    import peft

    model = tiny_lm.tiny_lm(None if path is None else str(path), **options)
    return wrap(model, peft.LoraConfig(**{"target_modules": "all-linear"} | (kind or {})), "peft")


def train(folder: Path, base: Path | str | None, engine: str = "ddp", **given: Any) -> list[float]:
    """Train for some steps in this process; return the losses of all that were logged."""
    changes = given.pop("changes", {})
    recipe = loops.recipe_of(**{"trainer__max_steps": 6, **ENGINES[engine], **changes})
    torch.manual_seed(3)
    model = adapted(base, given.pop("kind", None), **given.pop("options", {}))
    parts = {"data": tiny_lm.tokens(), "objective": tiny_lm.NextToken(), "make_scheduler": None}
    loop = loops.build(folder, recipe, model=model, **parts, **given)
    loop.run()
    loop.accelerator.end_training()
    loops.forget()
    return loops.losses(folder)


def train_and_go_on(folder: str, base: str, first: str, second: str) -> tuple[list[float], int]:
    """Train under an engine and go on under another; return losses and names in the state."""
    place = Path(folder)
    train(place, base, first, changes={"trainer__stop_after": 3})
    newest = str(loops.newest(place))
    return train(place, base, second, resume_from=newest), len(read_model(Path(newest)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [("ddp", "fsdp"), ("fsdp", "zero3"), ("zero3", "zero2"), ("zero2", "ddp")]
)
def test_strategies_train_save_and_load_the_adapters_alone(
    first: str, second: str, base: Path, tmp_path: Path
) -> None:
    expected = train(tmp_path / "one", base)
    assert expected[-1] < expected[0]
    answers = run_distributed(train_and_go_on, 2, str(tmp_path / "two"), str(base), first, second)
    for losses, num_names in answers:
        assert losses == pytest.approx(expected, abs=1e-6)
        assert num_names == 28  # A and B of 14 layers


def test_a_checkpoint_is_as_large_as_the_adapters(base: Path, tmp_path: Path) -> None:
    average, sgd = {"ema": EMA()}, lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9)
    train(tmp_path, base, callbacks=average, make_optimizer=sgd)
    newest = loops.newest(tmp_path)
    trained = [one for one in adapted(base).parameters() if one.requires_grad]
    num_bytes = sum(one.numel() * one.element_size() for one in trained)
    assert (newest / "model.safetensors").stat().st_size <= 1.2 * num_bytes
    # Momentum and the weights beside their averages.
    assert (newest / "optimizer.bin").stat().st_size <= 2 * 1.5 * num_bytes


def test_a_model_without_files_keeps_its_whole_state(tmp_path: Path) -> None:
    train(tmp_path, None)
    assert len(read_model(loops.newest(tmp_path))) > 28


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [{"use_dora": True}, {"bias": "all", "modules_to_save": ["norm"]}], ids=["dora", "more"]
)
def test_other_adapters_go_on_after_a_stop(
    kind: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    expected = train(tmp_path / "one", base, kind=kind)
    train(tmp_path / "two", base, kind=kind, changes={"trainer__stop_after": 3})
    again = str(loops.newest(tmp_path / "two"))
    assert train(tmp_path / "two", base, kind=kind, resume_from=again) == expected


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_loss(base: Path, tmp_path: Path) -> None:
    expected = train(tmp_path / "plain", base)
    assert train(tmp_path / "saved", base, options={"checkpointing": True}) == about(expected)


def test_mistakes_name_what_exists(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"target_modules: q_pro: .* Did you mean 'q_proj'\?"):
        adapted(base, {"target_modules": ["q_pro"]})
    with pytest.raises(
        ConfigError, match=r"Choose peft\.target_modules from: embed_tokens, q_proj"
    ):
        adapted(base, {"target_modules": "nothing.*"})
    with pytest.raises(ConfigError, match="modules_to_save: head"):
        adapted(base, {"modules_to_save": ["head"]})
    with pytest.raises(ConfigError, match="changes the weights of the base"):
        adapted(base, {"init_lora_weights": "pissa"})
    model = adapted(base)
    model.get_parameter("base_model.model.lm_head.weight").requires_grad_(True)
    with pytest.raises(ConfigError, match=r"lm_head\.weight: it is trained"):
        model.state_dict()
    monkeypatch.setitem(trust.EXTRAS, "no_such_package", "hf")
    monkeypatch.setattr(trust, "ALLOWED", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"pip install 'accel-runner\[hf\]'"):
        trust.resolve("no_such_package.LoraConfig", "peft._target_")


# -- as a person uses it -------------------------------------------------------------------


def run(folder: Path, *arguments: str, code: int = 0, **variables: str) -> str:
    """Run a command of Python's in a folder; return what it prints."""
    write_file(folder / "tiny_lm.py", Path(tiny_lm.__file__).read_text())
    write_file(folder / "conf/model/tiny_lm.yaml", "name: tiny_lm\n")
    known = with_path(COLUMNS="300", **variables)
    answer = commands.run(*arguments, cwd=folder, environment=known)
    assert answer.returncode == code, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


def states(run_dir: Path) -> list[bytes]:
    """Return the newest weights and optimizer of a run."""
    newest = loops.newest(run_dir)
    return [(newest / name).read_bytes() for name in ("model.safetensors", "optimizer.bin")]


@pytest.mark.slow
@pytest.mark.parametrize("choices", [(), ("peft=qlora",)], ids=["lora", "qlora"])
def test_a_killed_run_goes_on_with_the_same_bits(
    choices: tuple[str, ...], base: Path, tmp_path: Path
) -> None:
    line = (*COMMAND, f"model.path={base}", *choices)
    run(tmp_path, *line, "run_dir=straight")
    run(
        tmp_path,
        *line,
        "run_dir=killed",
        "callbacks.kill.name=kill",
        code=-signal.SIGKILL,
        KILL_AT="5",
    )
    run(tmp_path, "-m", "runner", "--import", "tiny_lm", "resume=killed")
    assert states(tmp_path / "killed") == states(tmp_path / "straight")
    recipe = (tmp_path / "straight/config.yaml").read_text()
    assert ("bnb_4bit_quant_type: nf4" in recipe) == bool(choices)


@pytest.mark.slow
def test_a_changed_base_is_refused(tmp_path: Path) -> None:
    folder = tiny_lm.save_base(tmp_path / "base")
    run(tmp_path, *COMMAND, f"model.path={folder}", "run_dir=run", "trainer.stop_after=3")
    manifest = json.loads((loops.newest(tmp_path / "run") / "manifest.json").read_text())
    known = manifest["metadata"]["base"]["model"]
    assert (known["path"], list(known["sha256"])) == (str(folder), ["model.safetensors"])
    load = ("-c", "import runner; print(runner.load('run')[0].training)")
    trusted = {trust.VARIABLE: "tiny_lm"}
    assert "False" in run(tmp_path, *load, **trusted)
    assert "validation" in run(tmp_path, "-m", "runner", "eval", "run", **trusted)
    tiny_lm.save_base(folder, seed=1)
    for command in (["resume=run"], ["eval", "run"], ["predict", "run", "--output", "x.pt"]):
        text = run(tmp_path, "-m", "runner", *command, code=1, **trusted)
        assert "the adapters of 'model' were trained on the weights of" in text
    assert "those of" in run(tmp_path, *load, code=1, **trusted)

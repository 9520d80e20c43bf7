"""The product as a person uses it: whole commands, real processes, real data (R2, R9, R10)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests import commands
from tests.helpers import about, python, started, wait_until, with_path, write_file
from tests.runner.loops import losses, records, weights
from tests.runner.plain_loops import equal_runs
from tests.signals.cells import children

SHORT = ("trainer.log_every=1", "trainer.global_batch_size=64", "tracker.log_with=[]")
PLAIN = (*SHORT, "trainer.max_steps=50", "model.dropout=0", "data.augment=false")
TWO = ("distributed=multi_cpu", "distributed.num_processes=2")
STAGES = (*TWO, "parallelism.pp_size=2")
# Waits after a step for its end, where the working directory has a file that asks for it.
WAIT = """
import time
from pathlib import Path
from runner.training.run import Callback

class Wait(Callback):
    def on_step(self, loop):
        if loop.state.step == 13 and Path("wait").exists():
            Path(f"waits_{loop.accelerator.process_index}").touch()
            time.sleep(1e6)
"""
WAITING = (
    *("--import", "wait", "callbacks.wait._target_=wait.Wait", "trainer.max_steps=20"),
    *("trainer.eval_every=5", "checkpoint.every_steps=5", "checkpoint.keep_best=3"),
)
FEATURES = (
    *("model.width=4", "callbacks.freeze.names=features.*", "callbacks.freeze.by=step"),
    'callbacks.freeze.unfreeze={4: "features.5.*", 15: "features.2.*"}',
    "optimizer.groups=[{match: '*.bias', lr_scale: 2.0, name: biases}]",
)
# Language models as the recipes have them, shorter.
LANGUAGE = (
    *("data.cache_dir=cache", "data.context=64", "trainer.epochs=null", "trainer.max_steps=20"),
    *("trainer.limit_eval_batches=2", "trainer.log_every=1", "tracker.log_with=[]"),
    *("trainer.global_batch_size=8", "callbacks.generate.max_new_tokens=2"),
)
PRETRAIN = (
    *("experiment=lm_pretrain", *LANGUAGE, "data.train=stdlib:a*.py"),
    "data.tokenizer=bpe:300",
    "data.validation=0.3",
)


def run(*overrides: str, cwd: Path, code: int = 0) -> Path:
    """Run `python -m runner` in `cwd`; return the directory of the run (`cwd` if refused)."""
    known = with_path(COLUMNS="100")
    answer = commands.run("-m", "runner", *overrides, cwd=cwd, environment=known)
    assert answer.returncode == code, answer.stdout + answer.stderr
    runs = sorted(cwd.glob("runs/*/*/config.yaml"), key=lambda path: path.stat().st_mtime)
    return runs[-1].parent if runs else cwd


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty steps of the digits on one process, without dropout or augmentation."""
    return run(*PLAIN, cwd=tmp_path_factory.mktemp("straight"))


@pytest.mark.slow  # `test_loop_resume.py` does it with warm workers
@pytest.mark.parametrize(
    "more", [[], ["trainer.micro_batch_size=16"]], ids=["plain", "accumulated"]
)
def test_two_processes_see_the_losses_of_one(
    straight: Path, tmp_path: Path, more: list[str]
) -> None:
    two = run(*PLAIN, *more, *TWO, cwd=tmp_path)
    assert len(losses(two)) == 50
    assert losses(two) == about(losses(straight))


def test_what_a_run_leaves(straight: Path) -> None:
    left = "config.yaml sessions/0001/environment.json metrics.jsonl summary.json checkpoints"
    assert [name for name in left.split() if not (straight / name).exists()] == []
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["step"] == 50
    test = records(straight, "test")
    assert len(test) == 1
    assert test[0]["accuracy"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        [*SHORT, "callbacks=[ema,freeze]", "scheduler=one_cycle", *FEATURES],
        [*SHORT, *FEATURES, "callbacks=[swa,freeze]", "callbacks.swa.start=4", "scheduler=plateau"],
        ["experiment=lm_sft_chat", *LANGUAGE, "fsdp=full_shard"],
        [*PRETRAIN, "deepspeed=zero3"],
        [*PRETRAIN, "parallelism.pp_size=2", "trainer.micro_batch_size=2"],
        [*PRETRAIN, "parallelism.cp_size=2"],
    ],
    ids=["ema", "swa", "chat", "pretrain", "stages", "sequences"],
)
def test_a_killed_command_of_two_processes_goes_on(more: list[str], tmp_path: Path) -> None:
    """The same command again has the values and the bits of one that was not killed."""
    line = (*more, *WAITING, *TWO, "resume=auto")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        write_file(folder / "wait.py", WAIT)
    (cut / "wait").touch()
    command = started(python("-m", "runner", *line), cut)
    assert wait_until(lambda: len(list(cut.glob("waits_?"))) == 2 or command.poll() is not None)
    for pid in [*children(command.pid), command.pid]:
        with contextlib.suppress(ProcessLookupError):  # its parent is gone
            os.kill(pid, signal.SIGKILL)
    output, _ = command.communicate()
    assert command.returncode == -signal.SIGKILL, output
    (cut / "wait").unlink()
    resumed = run(*line, cwd=cut)
    assert (resumed / "sessions" / "0002").exists()
    straight = run(*line, cwd=whole)
    # The header of a file with tied weights has its entries in any order.
    equal_runs(straight, resumed, "optimizer.bin", ".safetensors")
    saved = weights(resumed)
    assert all(torch.equal(value, saved[name]) for name, value in weights(straight).items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        (PRETRAIN, TWO),
        (("experiment=lm_sft_chat", *LANGUAGE), TWO),
        (PRETRAIN, STAGES),
        (("experiment=bytes_gpt", *SHORT[:1], "trainer.max_steps=20"), STAGES),
    ],
    ids=["pretrain", "chat", "pretrain-stages", "bytes-stages"],
)
def test_two_processes_train_the_language_model_of_one(
    recipe: tuple[str, ...], more: tuple[str, ...], tmp_path: Path
) -> None:
    one, two = (run(*recipe, *added, cwd=tmp_path) for added in ((), more))
    assert losses(two) == about(losses(one))
    found = [json.loads((folder / "summary.json").read_text())["metrics"] for folder in (one, two)]
    assert found[1]["validation"] == about(found[0]["validation"])


@pytest.mark.slow
def test_a_run_out_of_time_is_to_be_resumed_and_a_job_of_a_sweep_is_done(tmp_path: Path) -> None:
    out_of_time = run(*SHORT, "trainer.max_time=1e-9", cwd=tmp_path, code=75)
    run(f"resume={out_of_time}", "trainer.max_steps=3", cwd=tmp_path)
    run("-m", *SHORT, "seed=1,2", "trainer.max_time=1e-9", cwd=tmp_path)


@pytest.mark.slow
def test_partitioned_weights_are_loaded_after_an_evaluation(tmp_path: Path) -> None:
    """ZeRO-3 ends an evaluation with weights on their way; the best ones, of step 4, come next."""
    best = ("checkpoint.monitor=loss", "checkpoint.mode=max")
    steps = ("trainer.max_steps=8", "trainer.eval_every=4", "trainer.limit_eval_batches=2")
    given = ("experiment=bytes_gpt", *SHORT[2:], *TWO, "deepspeed=zero3", *steps, *best)
    summary = json.loads((run(*given, cwd=tmp_path) / "summary.json").read_text())
    assert summary["best"]["step"] == 4

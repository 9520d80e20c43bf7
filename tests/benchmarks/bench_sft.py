"""trl's SFTTrainer and the runner on the same records, weights and order: losses and speed.

Each trains in a process of its own on one thread, and they take turns of some steps, so that what
else the machine does hits both alike. The extra `libraries` brings trl.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import multiprocessing
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from runner import Callback, Data

RECORDS, CONTEXT, VOCAB, BATCH, RATE = 1200, 256, 4096, 8, 1e-3
CURVE, TURN = 50, 5  # steps whose losses are compared; steps of a turn
GOAL = 0.97  # of trl's tokens per second, at least
# By format of the records: what trl is told to count in the loss.
FORMATS: dict[str, dict[str, Any]] = {
    **{"prompt": {"completion_only_loss": True}, "chat": {"assistant_only_loss": True}},
    "text": {},
}
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}


def write(folder: Path, kind: str) -> None:
    """Write functions of the standard library with their docstrings, a tokenizer, and a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from runner.language.tokenizer import train_bpe

    lines: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, ast.FunctionDef) and (told := ast.get_docstring(node)):
                asked = f"What does {path.stem}.{node.name} do?\n"
                pairs = {"user": asked, "assistant": told}.items()
                record = {
                    "prompt": {"prompt": asked, "completion": told},
                    "chat": {"messages": [{"role": role, "content": text} for role, text in pairs]},
                    "text": {"text": asked + told},
                }
                lines.append(json.dumps(record[kind]))
    (folder / "data.jsonl").write_text("\n".join(lines[:RECORDS]))
    train_bpe(lines, VOCAB).save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder / "base")


class Turns(Callback):
    """Takes turns with the other side, and keeps the losses."""

    pipe: Connection  # to the process that tells whose turn it is
    steps, began, losses = 0, 0.0, list[float]()

    def on_step(self, *_: object) -> None:
        """Count a step; after the last of a turn, tell its seconds and wait for the next turn."""
        self.steps += 1
        if self.steps % TURN == 0:
            self.pipe.send(time.perf_counter() - self.began)
            self.pipe.recv()
            self.began = time.perf_counter()

    def on_log(self, loop: Any, values: Mapping[str, float]) -> None:
        """Keep the loss."""
        self.losses.append(values["loss"])


def on_trl(folder: Path, kind: str, steps: int, log: int) -> None:
    """Train with trl."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    turns = Turns()

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.on_step()

    class Trainer(SFTTrainer):  # what it logs is rounded
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            turns.losses.append(loss)
            return loss

    arguments = SFTConfig(
        str(folder / "trl"), max_steps=steps, max_length=CONTEXT, learning_rate=RATE,
        per_device_train_batch_size=BATCH, logging_steps=log, save_strategy="no", bf16=False,
        gradient_checkpointing=False, lr_scheduler_type="constant", use_cpu=True, report_to=[],
        train_sampling_strategy="sequential", **FORMATS[kind],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    data = Dataset.from_list([json.loads(line) for line in (folder / "data.jsonl").open()])
    Trainer(model, arguments, train_dataset=data, callbacks=[EndOfStep()]).train()


def in_order(folder: str, **arguments: Any) -> Data:
    """Return the records, in their order."""
    from runner.language.sources import text_data

    files = {"tokenizer": f"{folder}/base", "train": f"{folder}/data.jsonl"}
    found = text_data(**files, cache_dir=f"{folder}/cache", **arguments)
    found.sampler = SequentialSampler(range(RECORDS))
    return found


def on_runner(folder: Path, kind: str, steps: int, log: int) -> None:
    """Train with the runner."""
    from runner import cli

    recipe = f"""model=hf_causal_lm model.path={folder}/base objective=causal_lm scheduler=null
    data={{_target_:{__name__}.in_order,folder:{folder},format:{kind},context:{CONTEXT}}}
    +data.packing=false +data.too_long=cut callbacks.turns={{_target_:{__name__}.Turns}}
    optimizer.lr={RATE} optimizer.weight_decay=0 optimizer.eps=1e-8 trainer.clip_grad_norm=1
    trainer.global_batch_size={BATCH} trainer.epochs=null trainer.max_steps={steps} tracker=none
    trainer.log_every={log} checkpoint=none distributed.device=cpu run_dir={folder}/run"""
    assert cli.main(["--import", "tests", *recipe.split()]) == 0


def side(name: str, pipe: Connection, *arguments: Any) -> None:
    """Train on one side, and tell the losses at the end."""
    from tests.benchmarks import bench_sft  # as the recipe names it

    torch.set_num_threads(1)
    bench_sft.Turns.pipe = pipe
    getattr(bench_sft, name)(*arguments)
    pipe.send([float(loss) for loss in bench_sft.Turns.losses])


def race(kind: str, steps: int, log: int) -> tuple[list[float], list[list[float]]]:
    """Return our speed over trl's in each pair of turns, and the losses of trl and of ours."""
    context, pipes, times = multiprocessing.get_context("spawn"), {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        write(folder := Path(temporary), kind)
        for name in ("on_trl", "on_runner"):
            pipes[name], other = context.Pipe()
            context.Process(target=side, args=(name, other, folder, kind, steps, log)).start()
            other.close()
            pipes[name].recv()  # the first turn warms up
        ratios = []
        for index in range(steps // TURN - 1):
            for name in sorted(pipes, reverse=index % 2 > 0):
                pipes[name].send("your turn")
                times[name] = pipes[name].recv()
            ratios.append(times["on_trl"] / times["on_runner"])
        for pipe in pipes.values():
            pipe.send("the end")
        return ratios, [pipe.recv() for pipe in pipes.values()]


def main() -> None:
    """Print how far the losses differ in each format, and the ratio of the speeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), help="to compare losses of")
    parser.add_argument("--turns", type=int, default=60, help="of each side, to compare speeds")
    options = parser.parse_args()
    for kind in options.formats:
        trl, ours = race(kind, CURVE, log=1)[1]
        apart = max(abs(one / other - 1) for one, other in zip(ours, trl, strict=True))
        ends = (f"{one[0]:.5f} to {one[-1]:.5f}" for one in (trl, ours))
        print(f"{kind:7} loss {', ours '.join(ends)}; at most {apart:.1e} apart, relatively")
    logs = [math.log(ratio) for ratio in race("prompt", (options.turns + 1) * TURN, log=10)[0]]
    mean, error = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    ratio, low, high = (math.exp(value) for value in (mean, mean - error, mean + error))
    verdict = "reached" if low >= GOAL else "missed"
    print(f"tokens/s over trl's {ratio:.3f}, 95 % in [{low:.3f}, {high:.3f}]: {GOAL} {verdict}")


if __name__ == "__main__":
    main()

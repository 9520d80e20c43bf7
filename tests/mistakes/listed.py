"""Mistakes that people have made, each with what the message must say."""

from __future__ import annotations

from tests.mistakes.cases import FAILED, Mistake


def _one(line: str, *names: str | tuple[str, ...], **more: object) -> Mistake:
    return Mistake("listed", tuple(line.split()), names, **more)  # type: ignore[arg-type]


def _files(arguments: str, files: dict[str, str | bytes], *names: str | tuple[str, ...]) -> Mistake:
    return Mistake("file", tuple(arguments.split()), names, files)


OVERLAY = "# @package _global_\n"
OWN = "conf/experiment/own.yaml"


def own(text: str, *names: str) -> Mistake:
    """A mistake in the file of an experiment."""
    return _files("experiment=own", {OWN: OVERLAY + text}, *names)


COMMAND_LINES = (
    _one("+experiment=bytes_gpt", "experiment=bytes_gpt", "Leave out the +"),
    _one("+experiment=x", "experiment=x", "bytes_gpt, gan"),
    _one("output_dir=''", "output_dir=''", "output_dir=DIR"),
    _one("run_dir=''", "run_dir=''", "run_dir=DIR"),
    _one("+model=cnn", "model=cnn", "Leave out the +"),
    _one("++model=cnn", "model=cnn", "Leave out the +"),
    _one("precision=fp32", "precision=fp32", "'no'"),
    _one("precision=float32", "precision=float32", "'no'"),
    _one("precision=32", "precision=32", "'no'"),
    _one("precision=16-mixed", "precision=16-mixed", "fp16"),
    _one("precision.mode=fp32", "precision.mode", "'no'"),
    _one("--lr 0.1", "--lr", "optimizer.lr=0.1"),
    _one("--lr=0.1", "--lr", "optimizer.lr=0.1"),
    _one("--epochs 3", "--epochs", "trainer.epochs=3"),
    _one("--seed 3", "--seed", "seed=3"),
    _one("--optimizer.lr 0.1", "--optimizer.lr", "optimizer.lr=0.1"),
    _one("--batch-size 8", "--batch-size", "trainer.global_batch_size=8"),
    _one("seed 3", "seed=3"),
    _one("optimizer.lr 0.1", "optimizer.lr=0.1"),
    _one("model cnn", "model=cnn"),
    _one("optimizer.lr = 0.1", "optimizer.lr=0.1"),
    _one("seed= 3", "seed=3"),
    _one("seed: 3", "seed=3"),
    _one("trainer.accelerator=gpu", "trainer.accelerator=gpu", "distributed"),
    _one("trainer.devices=2", "trainer.devices=2", "distributed.num_processes"),
    _one("trainer.max_epochs=2", "trainer.max_epochs=2", "'trainer.epochs'"),
    _one("trainer.precision=16", "trainer.precision=16", "precision"),
    _one("trainer.batch_size=2", "trainer.batch_size=2", "trainer.global_batch_size"),
    _one("batch_size=2", "batch_size=2", "trainer.global_batch_size"),
    _one("lr=0.1", "lr=0.1", "'optimizer.lr'"),
    _one("--config-path conf", "--config-path", "--config-dir"),
    _one("-cp conf", "-cp", "--config-dir"),
    _one("hydra/launcher=submitit_lokal -m seed=1,2", "submitit_lokal", "basic, joblib"),
    _one("hydra/launcher=rq -m seed=1,2", "rq", ("hydra-rq-launcher", "basic, joblib")),
    _one("distributed.ray.cpus=2", "distributed.ray", "distributed=ray"),
    _one("hydra/sweeper=ax -m seed=1,2", "hydra/sweeper=ax", ("hydra-ax-sweeper", "basic")),
    _one("hydra/launcher=nowhere -m seed=1,2", "hydra/launcher=nowhere"),
    _one("name=${name", "name=${name", "}"),
    _one("optimizer.lr=${trainer.epochs", "optimizer.lr=${trainer.epochs", "}"),
    _one("name=${nme}", "name", "nme"),
    _one("optimizer.lr=${oc.env:LR}", "optimizer.lr", "oc.decode", environment={"LR": "0.1"}),
    _one(
        "--cfg job --resolve optimizer.lr=${oc.env:LR}",
        "optimizer.lr",
        "oc.decode",
        environment={"LR": "1"},
    ),
    _one("optimizer.lr=${oc.env:NOT_SET_AT_ALL}", "NOT_SET_AT_ALL"),
    _one("--cfg job model.name=cnm", "model.name='cnm'", "'cnn'"),
    _one("--cfg job --resolve model.widht=3", "model.widht=3", "'width'"),
    _one("--cfg job -p trainr", "trainr", "'trainer'"),
    _one("--cfg job -p trainer.epoch", "trainer.epoch", "'trainer.epochs'"),
    _one("--resolve", "--resolve", "--cfg job"),
    _one("--cfg jbo", "--cfg", "job"),
    _one("-m seed=1,", "seed=1,"),
    _one("-m seed=", "seed="),
    _one("-m seed=,1", "seed=,1"),
    _one("trainer.clip_grad_norm=0", "trainer.clip_grad_norm=0"),
    _one("trainer.clip_grad_value=0", "trainer.clip_grad_value=0"),
    _one("optimizer.weight_decay=-1", "optimizer.weight_decay=-1"),
    _one("optimizer.lr=-1", "optimizer.lr=-1"),
    _one("optimizer=sgd optimizer.lr=-1", "optimizer.lr=-1"),
    _one("optimizer=sgd optimizer.momentum=-2", "optimizer.momentum=-2"),
    _one("optimizer=sgd optimizer.nesterov=true optimizer.momentum=0", "optimizer", "esterov"),
    _one("optimizer.betas=[1.5,0.9]", "optimizer.betas=[1.5, 0.9]"),
    _one("optimizer.betas=[0.9]", "optimizer.betas=[0.9]"),
    _one("optimizer.betas=0.9", "optimizer.betas=0.9"),
    _one("optimizer.betas=[a,b]", "optimizer.betas"),
    _one("optimizer.eps=-1", "optimizer.eps=-1"),
    _one("optimizer.lr=nan", "optimizer.lr"),
    _one("optimizer.lr=inf", "optimizer.lr"),
    _one("model.dropout=1.5", "model.dropout=1.5"),
    _one("model.width=-3", "model.width=-3"),
    _one("model.width=0", "model.width=0"),
    _one("experiment=bytes_gpt model.num_heads=7", "model.num_heads=7"),
    _one("experiment=bytes_gpt model.dim=-4", "model.dim=-4"),
    _one("scheduler.warmup=-1", "scheduler.warmup=-1"),
    _one("data.num_variants=0", "data.num_variants=0"),
    _one("eval", ("RUN_DIR", "run_dir")),
    _one("eval nowhere", "nowhere", "no such"),
    _one("eval nowhere seed", "nowhere"),
    _one("predict nowhere", "--output"),
    _one("predict nowhere --output x.jsonl", "nowhere"),
    _one("eval nowhere --split tset", "tset"),
    _one("resume=auto resume=nowhere", "nowhere"),
    _one("checkpoint.monitor=accuracyy", "checkpoint.monitor", "accuracy", late=True),
    _one("checkpoint.mode=maximum", "checkpoint.mode", "max"),
    _one("tracker.log_with=[tensorbord]", "tensorbord", "tensorboard"),
    _one("callbacks.early_stopping.monitor=nope", "monitor", late=True),
    _one("output_dir=/proc/nowhere", "output_dir", "/proc/nowhere"),
    _one("output_dir=/dev/null", "output_dir", "/dev/null"),
    _one("tags=x", "tags"),
    _one("trainer={epochs: 3", "trainer"),
    _one("model.width=3,4", "-m"),
    _one("=3", "=3"),
    _one("+", "+"),
    _one("seed==3", "seed"),
    _one("seed=1e3", "seed"),
    _one("seed=0x", "seed"),
)

FILES = (
    own("defaults:\n  - own\n", OWN, "own"),
    _files(
        "experiment=one",
        {
            "conf/experiment/one.yaml": f"{OVERLAY}defaults:\n  - two\n",
            "conf/experiment/two.yaml": f"{OVERLAY}defaults:\n  - one\n",
        },
        ("one", "two"),
    ),
    _files("experiment=own", {OWN: "name: own\ntrainer:\n  epochs: 3\n"}, OWN, OVERLAY.strip()),
    own("sead: 1\ntrainer:\n  epoch: 3\noptimizer:\n  lrr: 1\n", OWN, "trainer.epoch", "sead"),
    own("trainer:\n  epochs: many\n", OWN, "trainer.epochs"),
    _files("experiment=own", {OWN: f"{OVERLAY}name: caf\xe9\n".encode("latin-1")}, OWN, "UTF-8"),
    own("name: ${nme}\n", OWN, "nme"),
    own("name: ${name\n", OWN),
    own("trainer:\n  epochs: 3\n epochs: 4\n", OWN),
    own("trainer:\n\tepochs: 3\n", OWN, "tab"),
    own("- a\n- b\n", OWN),
    own("trainer:\n  epochs: 3\n  epochs: 4\n", OWN, "epochs"),
    own("defaults:\n  - override /model: cnm\n", "cnm", "'cnn'"),
    own("defaults:\n  - override /modl: cnn\n", "modl"),
    own("defaults:\n  - /model: byte_gpt\n", OWN, "override"),
    _files("model=own", {"conf/model/own.yaml": "name: cnn\nwidht: 3\n"}, "widht", "'width'"),
    _files("model=own", {"conf/model/own.yaml": "name: cnm\n"}, "cnm", "'cnn'"),
    _files(
        "optimizer=own", {"conf/optimizer/own.yaml": "name: adamw\nlr: 1e-3x\n"}, "optimizer.lr"
    ),
    _files(
        "precision=nope", {"conf/precision/fast.yaml": "mode: bf16\n"}, "precision=nope", "fast"
    ),
    _files("", {"pyproject.toml": "[tool.runner\nimports = 3\n"}, "pyproject.toml"),
    _files("", {"pyproject.toml": "[tool.runner]\nimports = 3\n"}, "imports"),
    _files("", {"pyproject.toml": '[tool.runner]\nimport = ["x"]\n'}, "import"),
    _files("", {"pyproject.toml": '[tool.runner]\nimports=["nowhere_x"]'}, "nowhere_x"),
    _files("", {"pyproject.toml": "[tool.runner]\nimports = [\n"}, "pyproject.toml"),
    _files("--config-name own", {"conf/own.yaml": "defaults:\n  - own\n  - _self_\n"}, "own"),
)

# Mistakes that show in training: the user's recipe asks for a loss that is not finite.
TRAINING = (
    Mistake(
        "training",
        ("optimizer=sgd", "optimizer.lr=1e30", "trainer.max_steps=4", "trainer.log_every=1"),
        ("loss=", "at step", "Lower the learning rate"),
        code=FAILED,
        late=True,
    ),
)

ALL = (*COMMAND_LINES, *FILES, *TRAINING)

"""The text of `runner --help`, from `conf/` and the schema. Imports neither torch nor Hydra."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

from runner import exit_codes
from runner.recipe import keys, paths
from runner.recipe.schema import PLUGINS, Recipe

WIDTH = 100
MAIN_KEYS = (
    *("name", "output_dir", "seed", "deterministic", "resume", "run_dir"),
    *("distributed.num_processes", "distributed.nnodes", "distributed.rdzv_endpoint"),
    *("distributed.max_restarts", "precision.mode", "trainer.epochs", "trainer.max_steps"),
    *("trainer.max_time", "trainer.hang_timeout", "trainer.global_batch_size"),
    *("trainer.micro_batch_size", "trainer.eval_every", "trainer.log_every"),
    *("trainer.clip_grad_norm", "trainer.limit_train_batches", "checkpoint.every_steps"),
    *("checkpoint.every_epochs", "checkpoint.monitor"),
)
USAGE = """\
runner trains a PyTorch model that a recipe describes.

  runner [flags] [group=file ...] [key=value ...]     train
  runner -m key=a,b,c ...                             train once for each combination of values;
                                                      the same command again goes on with the sweep
  runner -m hydra/sweeper=optuna 'key=interval(a,b)'  search with Optuna (hydra.sweeper.n_trials=20)
  runner list [DIR ...] [status=failed since=2d ...]  runs, newest first; their status and objective
  runner new DIR                                      a project: a model, data, a recipe, a test
  runner factories [optimizers [adamw]]               what a recipe can name, and its arguments
  runner data show [key=value ...]                    samples of language data, and what counts
  runner data tokenizer FILE ... --size 4096 --out D  train a byte-level BPE with a chat template
  runner show RUN_DIR | compare RUN_DIR RUN_DIR ...   one run in full | what differs between runs
  runner report DIR ...                               curves, swept keys: an HTML page
  runner again RUN_DIR [key=value ...]                a new run of what a directory describes
  runner eval RUN_DIR ... [key=value ...]             evaluate the best state of runs
  runner predict RUN_DIR --split test --output FILE   write predictions
  runner predict RUN_DIR --device-map auto …          of a model that is larger than the GPU
  runner generate RUN_DIR "prompt" ...                text of a language model
  runner export RUN_DIR --format hf | safetensors     the model in a folder, for use elsewhere
  runner lr-find [key=value ...]                      suggest a learning rate: curve and figure
  runner batch-size-find [key=value ...]              the largest micro-batch that fits in memory
  runner submit submit.nodes=2 [key=value ...]        train as a job on Slurm; runner submit --help
  python -m runner ...                                the same
"""
SWEEP = """\
Keys of a sweep (with -m; they are no part of a recipe)
  sweep.jobs=N | auto     jobs at once on this machine (1); auto: as GPUs or CPU cores allow
  sweep.dir=DIR           its directory; null: <output_dir>/<name>/sweep-<time>-<digest>
  sweep.list=FILE         the overrides of each job: YAML or a line each; or [[a=1,b=2],[a=3]]
  hydra/launcher=NAME     basic | joblib | submitit_local | submitit_slurm | ray
"""
FLAGS = """\
Flags
  -m, --multirun          a job for each combination of values, which are separated by commas
  -c, --cfg job           print the recipe that would run; with -m: what differs in each job
  --dry-run               check everything, list the jobs of -m, and start nothing
  -cn, --config-name FILE start from another file than config.yaml
  -cd, --config-dir DIR   read files of this folder, too (./conf is read anyway)
  --import PACKAGE        trust this package and import it, as [tool.runner] imports does
  -sc install=bash        shell completion: eval "$(runner -sc install=bash)"
  -i, --info              how the recipe is composed
  --version, -h, --help   this text; --cfg job --resolve shows the arguments of factories
  hydra.verbose=true      debug messages; hydra.verbose=[a,b] those of loggers a and b
"""
EXAMPLES = """\
Examples
  runner                                                    the default recipe: digits
  runner precision=bf16 optimizer.lr=3e-3 trainer.epochs=5
  runner distributed=multi_cpu distributed.num_processes=2
  runner distributed=multi_node distributed.rdzv_endpoint=node0:29400    the same on each node
  runner experiment=bytes_gpt
  runner -m optimizer.lr=1e-3,3e-3 seed=0,1 sweep.jobs=auto
  runner resume=runs/digits/20260101-120000-1a2b            resume a run
  runner debug=fdr                                          one step of everything
"""
EXIT_CODES = "\n".join(
    [
        "Exit codes",
        *(f"  {code:<4} {meaning}" for code, meaning in exit_codes.MEANINGS.items()),
        "RUNNER_FULL_TRACEBACK=1 shows the runner's own frames of an error, too.",
    ]
)


def text() -> str:
    """Return the help, with the groups of the working directory's own `conf/`."""
    return "\n".join([USAGE, _groups(), _main_keys(), SWEEP, FLAGS, EXAMPLES, EXIT_CODES]).rstrip(
        "\n"
    )


def _groups() -> str:
    folders = [paths.conf_folder(), *paths.project_conf_folders()]
    options: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            options.setdefault(path.parent.name, set()).add(path.stem)
    for name in PLUGINS:
        options.setdefault(name, {"default"})
    chosen = paths.default_files()
    lines = ["Groups (the files of conf/ and ./conf; * is the default)"]
    for group in sorted(options):
        names = sorted(options[group])
        shown = [f"{name}*" if chosen.get(group) == name else name for name in names]
        lines += entry(group, " | ".join(shown))
    return "\n".join(lines) + "\n"


def _main_keys() -> str:
    lines = ["Main keys (all of them, with their values: runner --cfg job)"]
    for key in MAIN_KEYS:
        node, _, name = key.rpartition(".")
        lines += entry(key, _meanings(keys.node_of(node) or Recipe)[name], 36)
    nodes = ", ".join((*keys.FACTORY_NODES, *(f"{name}.<x>" for name in keys.NAMED_NODES)))
    how = f"a registered factory for {nodes}; its arguments are set beside it"
    lines += entry("<node>.name", how, 36)
    lines += entry("<node>._target_", "the same by dotted name, of a trusted package", 36)
    return "\n".join(lines) + "\n"


def entries(node: str, kind: type) -> list[str]:
    """Return lines with the meaning of the fields of a node."""
    meanings = _meanings(kind).items()
    return [line for name, text in meanings for line in entry(f"{node}.{name}", text, 36)]


def entry(head: str, meaning: str, indent: int = 16) -> Iterator[str]:
    """Yield the lines of a word and its meaning, which begins at the column `indent`."""
    lines = textwrap.wrap(meaning, WIDTH - indent) or [""]
    yield f"  {head:<{indent - 3}} {lines[0]}"
    for line in lines[1:]:
        yield " " * indent + line


def _meanings(kind: object) -> dict[str, str]:
    """Return the description of each argument from a docstring."""
    documentation = inspect.getdoc(kind) or ""
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", documentation, re.M)
    return {name: " ".join(words.split()).replace("None:", "null:") for name, words in found}

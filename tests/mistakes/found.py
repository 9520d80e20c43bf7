"""Mistakes that were once answered wrongly: each is made in every run of the tests."""

from __future__ import annotations

from dataclasses import replace

from tests.mistakes import listed, users
from tests.mistakes.cases import FAILED, REFUSED, Mistake

KIND = "found"
PROJECT = "pyproject.toml"


def _line(line: str, *names: str | tuple[str, ...], **more: object) -> Mistake:
    return Mistake(KIND, tuple(line.split()), names, **more)  # type: ignore[arg-type]


_JOINED = ("samples cannot be collated", "collate_fn")
_SIZED = (
    "class Rows(Dataset):\n        def __getitem__(self, i): return ROWS[i]\n"
    "        def __len__(self): "
)

DATA = (
    users.data("return Data([torch.zeros(n + 1) for n in range(9)])", *_JOINED, **users.LATE),
    users.data("return Data([{'x': X[0]}, {'y': X[0]}] * 8)", *_JOINED, **users.LATE),
    users.data("return Data([(X[0], None)] * 8)", *_JOINED, **users.LATE),
    users.data(
        "return Data([torch.zeros(n + 1) for n in range(9)])",
        *_JOINED,
        arguments=("dataloader.num_workers=1",),
        **users.LATE,
    ),
    users.data("return Data(train=(row for row in ROWS))", "train", "IterableDataset"),
    users.data("return Data(ROWS, iter(ROWS))", "validation", "IterableDataset"),
    *(
        users.data(f"{_SIZED}return {size}\n    return Data(Rows())", "train", "__len__")
        for size in ("-5", "2.0")
    ),
)
METHODS = tuple(
    users.one_class("objective Square", body, *names)
    for body, *names in (
        ('mode = "maximize"', "Bad.mode='maximize'", "min, max"),
        ("mode = max", "Bad.mode", "min, max"),
        ("monitor = None", "Bad.monitor"),
        ("def losses(self, batch): return batch", "Bad.losses", "losses(self, model, batch)"),
        ("def summarize(self): return {}", "Bad.summarize", "summarize(self, values)"),
    )
)
FILES = (
    listed.own("resume: runs/digits/x\n", "resume='runs/digits/x'", "resume: auto"),
    listed.own("precision: bf16\n", "precision: bf16", "override /precision"),
    listed.own("tracker: tensorboard\n", "tracker: tensorboard", "override /tracker"),
    listed.own("fsdp: full_shard\n", "fsdp", "override /fsdp"),
    listed.own("trainer: 3\n", "trainer: 3", "keys below it"),
)
PROJECTS = (
    Mistake(KIND, (), ("./mine", "package"), {PROJECT: '[tool.runner]\nimports = ["./mine"]\n'}),
    Mistake(KIND, (), (PROJECT, "TOML"), {PROJECT: "[tool.runner]\nimports = []".encode("utf-16")}),
)
LINES = (
    _line("fsdp=zero3", "fsdp=zero3", "deepspeed=zero3"),
    _line("deepspeed=full_shard", "deepspeed=full_shard", "fsdp=full_shard"),
    _line("callbacks.x.name=early_stop", "@register.callback("),
    _line("optimizer=null", "an optimizer"),
    _line("-m seed=range(0)", "seed=range(0)", "no values"),
    _line("-m seed=glob(*)", "seed=glob(*)"),
    _line(
        "trainer.max_steps=1 checkpoint.project.project_dir=/dev/null/x",
        "checkpoint.project.project_dir",
        "/dev/null/x",
    ),
    # A model of torch's alone that does not fit the data: no frame of the user's, and few of ours.
    users.mistake(
        '@register.model("bad")\ndef bad():\n    return nn.Linear(3, 1)\n',
        "mat1 and mat2",
        "RUNNER_FULL_TRACEBACK=1",
        arguments=("objective.name=classification",),
        **users.LATE,
    ),
)

ALL = tuple(replace(one, kind=KIND) for one in (*DATA, *METHODS, *FILES, *PROJECTS, *LINES))
assert all(mistake.code in (REFUSED, FAILED) for mistake in ALL)

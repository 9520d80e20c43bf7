"""Mistakes in a user's own code: a small package, with one thing wrong in it."""

from __future__ import annotations

from typing import Any

from tests.mistakes.cases import FAILED, REFUSED, Mistake

PROJECT = '[tool.runner]\nimports = ["mine"]\n'
# Imports torch inside of functions, where the mistakes do.
BASE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from runner import Callback, Data, Objective, Step, register

X = torch.linspace(-1, 1, 128).reshape(32, 4)
ROWS = TensorDataset(X, X.sum(1, keepdim=True))

@register.model("net")
def net():
    return nn.Linear(4, 1)

@register.data("table")
def table():
    return Data(train=ROWS, validation=ROWS)

@register.objective("square")
class Square(Objective):
    def losses(self, model, batch):
        return (model(batch[0]) - batch[1]).pow(2).sum(1)
"""
ARGUMENTS = (
    *("model.name=net", "data.name=table", "objective.name=square", "tracker.log_with=[]"),
    *("checkpoint=none", "trainer.epochs=1", "trainer.global_batch_size=8", "trainer.log_every=1"),
)


def mistake(
    code: str,
    *names: str | tuple[str, ...],
    ends: int = REFUSED,
    late: bool = False,
    arguments: tuple[str, ...] = (),
) -> Mistake:
    """One piece of code that registers `bad`, and the command line that uses it."""
    node = code.partition("@register.")[2].partition("(")[0]
    chosen = {
        "": (),
        "callback": ("callbacks.bad.name=bad",),
        "step": (
            *("step.name=bad", "model=null", "objective=null", "optimizer=null", "scheduler=null"),
        ),
    }.get(node, (f"{node}.name=bad",))
    own = [key for key in ("model", "objective") if node == "step"] + [node]
    base = [a for a in ARGUMENTS if a.partition(".")[0] not in own]
    files = {"pyproject.toml": PROJECT, "mine.py": BASE + code}
    return Mistake("user's code", (*base, *chosen, *arguments), names, files, {}, ends, late)


def data(body: str, *names: str | tuple[str, ...], **more: Any) -> Mistake:
    """A factory of data with this body, whose lines after the first are indented."""
    return mistake(f'@register.data("bad")\ndef bad():\n    {body}\n', *names, **more)


def one_class(head: str, body: str, *names: str | tuple[str, ...], **more: Any) -> Mistake:
    """A registered class ``Bad``; `head` is its node and its base: "step Step"."""
    node, _, base = head.partition(" ")
    code = f'@register.{node}("bad")\nclass Bad{f"({base})" if base else ""}:\n    {body}\n'
    return mistake(code, *names, **more)


def _returned(node: str, value: str, *names: str) -> Mistake:
    """A factory that returns `value`."""
    code = f'\n@register.{node}("bad")\ndef bad(*given):\n    return {value}\n'
    return mistake(code, "bad", "returned", *names)


RETURNED = (
    _returned("model", "None", "model", "None", "torch.nn.Module"),
    _returned("model", "{'net': net()}", "model", "dict", "torch.nn.Module"),
    _returned("model", "[net()]", "model", "list", "torch.nn.Module"),
    _returned("model", "nn.Linear", "model", "class Linear", "torch.nn.Module"),
    _returned("model", "nn.ReLU()", "model", "ReLU", "no trainable parameters"),
    _returned("model", "net().requires_grad_(False)", "model", "no trainable parameters"),
    _returned("data", "None", "data", "None", "runner.Data"),
    _returned("data", "[1, 2, 3]", "data", "list", "runner.Data"),
    _returned("data", "ROWS", "data", "TensorDataset", "runner.Data"),
    _returned("data", "DataLoader(ROWS)", "data", "DataLoader", "runner.Data"),
    _returned("data", "{'train': ROWS}", "data", "dict", "runner.Data"),
    _returned("data", "(ROWS, ROWS)", "data", "tuple", "runner.Data"),
    _returned("data", "Data(train=None)", "data", "train", "None"),
    _returned("data", "Data(train=DataLoader(ROWS))", "data", "train", "DataLoader"),
    _returned("data", "Data(ROWS, DataLoader(ROWS))", "data", "validation", "DataLoader"),
    _returned("data", "Data(train=3)", "data", "train", "int"),
    _returned("data", "Data(train=[])", "data", "train", "empty"),
    _returned("data", "Data(ROWS, validation=[])", "data", "validation", "empty"),
    _returned("data", "Data(ROWS, collate_fn=3)", "data", "collate_fn", "int"),
    _returned("objective", "None", "objective", "None", "runner.Objective"),
    _returned("objective", "0.5", "objective", "float", "runner.Objective"),
    _returned("objective", "Square", "objective", "class Square", "runner.Objective"),
    _returned("objective", "nn.CrossEntropyLoss()", "objective", "CrossEntropyLoss"),
    _returned("objective", "Objective()", "objective", "losses"),
    _returned("optimizer", "None", "optimizer", "None", "torch.optim.Optimizer"),
    _returned("optimizer", "torch.optim.SGD", "optimizer", "class SGD"),
    _returned("optimizer", "3", "optimizer", "int", "torch.optim.Optimizer"),
    _returned("scheduler", "None", "scheduler", "None"),
    _returned("scheduler", "[1]", "scheduler", "list"),
    _returned("callback", "None", "callbacks.bad", "None", "runner.Callback"),
    _returned("callback", "print", "callbacks.bad", "runner.Callback"),
    _returned("callback", "Callback", "callbacks.bad", "class Callback"),
    _returned("step", "None", "step", "None", "runner.Step"),
    _returned("step", "net()", "step", "Linear", "runner.Step"),
)

_ROWS = "class Rows(Dataset):\n        def "
_TRAIN = "    return Data(train=Rows())"

CLASSES = (
    data(
        f"{_ROWS}__getitem__(self, index):\n            return ROWS[index]\n{_TRAIN}",
        *("data.name=bad", "train", "__len__"),
    ),
    data(
        f"{_ROWS}__len__(self):\n            return 8\n{_TRAIN}",
        *("data.name=bad", "train", "__getitem__"),
    ),
    data(
        f"class Rows(IterableDataset):\n        pass\n{_TRAIN}",
        *("abstract method", "__iter__"),
        ends=FAILED,
    ),
    one_class(
        "callback Callback",
        "def on_train_batch_end(self, loop):\n        pass",
        *("callbacks.bad", "on_train_batch_end", "on_evaluate"),
    ),
    one_class(
        "callback Callback",
        "def on_steps(self, loop):\n        pass",
        *("callbacks.bad", "on_steps", "'on_step'"),
    ),
    one_class(
        "callback", "def on_step(self, loop):\n        pass", "callbacks.bad", "runner.Callback"
    ),
    one_class(
        "callback Callback",
        "def on_step(self):\n        pass",
        *("callbacks.bad", "on_step", "loop"),
    ),
    one_class(
        "objective Square",
        "def summarise(self, values):\n        return {'loss': 0.0}",
        *("objective.name=bad", "summarise", "'summarize'"),
    ),
    one_class(
        "objective Objective",
        "def loss(self, model, batch):\n        return model(batch[0])",
        *("objective.name=bad", "losses"),
    ),
    one_class(
        "step Step",
        "def train(self, a, w, t):\n        pass",
        *("step.name=bad", "evaluate", "summarize"),
    ),
    one_class(
        "step Step",
        "def train(self, a, w, t):\n        pass\n"
        "    def evaluate(self, batch):\n        pass\n"
        "    def summarize(self, values):\n        pass",
        *("step.name=bad", "models"),
    ),
    mistake(
        '@register.model("bad")\ndef bad(width):\n    return nn.Linear(4, width)\n',
        *("model.width", "bad"),
    ),
    mistake(
        '@register.model("net")\ndef other():\n    return nn.Linear(4, 1)\n', "net", "another name"
    ),
    mistake("import not_there_at_all\n", "not_there_at_all", "Install"),
)

METHODS = tuple(
    one_class(
        "objective Square",
        f"def {method}:\n        return {value}",
        *("Bad", method.partition("(")[0], "returned"),
        late=True,
    )
    for method, values in (
        (
            "summarize(self, values)",
            ("None", "'good'", "0.5", "{'loss': 'small'}", "{'loss': values['loss']}"),
        ),
        ("evaluate(self, model, batch)", ("None", "0.5", "{'loss': 0.5}")),
        (
            "losses(self, model, batch)",
            ("None", "0.5", "model(batch[0]).mean()", "model(batch[0]).detach()[:, 0]"),
        ),
        ("weights(self, batch)", ("3",)),
    )
    for value in values
)

_NO_GOOD = 'raise ValueError("no good")'
LATE: dict[str, Any] = {"ends": FAILED, "late": True}

RAISED = (
    *(
        mistake(
            f'\n@register.{node}("bad")\ndef bad(*given):\n    {_NO_GOOD}\n',
            *("ValueError: no good", "mine.py", "bad"),
            ends=FAILED,
        )
        for node in ("model", "data", "objective", "optimizer", "scheduler", "callback", "step")
    ),
    mistake("\n1 / 0\n", "ZeroDivisionError", "mine.py", ends=FAILED),
    mistake("\ndef broken(:\n", "SyntaxError", "mine.py", ends=FAILED),
    mistake("\nfrom torch import nothing_there\n", "ImportError", "mine.py", ends=FAILED),
    one_class(
        "model nn.Module",
        "def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(4, 1)\n"
        "    def forward(self, x):\n        return self.a(x[:, :3])",
        *("RuntimeError: mat1 and mat2", "mine.py"),
        **LATE,
    ),
    *(
        data(
            f"{_ROWS}__len__(self):\n            return 8\n"
            f"        def __getitem__(self, index):\n            raise KeyError(index)\n{_TRAIN}",
            *("KeyError", "mine.py"),
            arguments=arguments,
            **LATE,
        )
        for arguments in ((), ("dataloader.num_workers=1",))
    ),
    *(
        one_class(
            "callback Callback",
            f"def {hook}:\n        {_NO_GOOD}",
            *("ValueError: no good", "mine.py"),
            **LATE,
        )
        for hook in ("on_start(self, loop)", "on_step(self, loop)", "on_log(self, loop, values)")
    ),
    one_class(
        "objective Square",
        'def summarize(self, values):\n        return {"x": values["nothing"]}',
        *("KeyError: 'nothing'", "mine.py"),
        **LATE,
    ),
    one_class(
        "objective Square",
        "def losses(self, model, batch):\n"
        "        return super().losses(model, batch) * float('nan')",
        *("loss=nan at step 1", "trainer.stop_on_nan"),
        **LATE,
    ),
)

ALL = (*RETURNED, *CLASSES, *METHODS, *RAISED)

"""Factories by name, for keys such as `model.name=cnn`. Free of torch.

A user registers with ``@register.model("my_model")`` in a package that the project trusts
(`[tool.runner] imports` in its pyproject.toml). Built-in factories are listed here by dotted name
and imported when first used, so that names can be listed without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accel.machine.errors import ConfigError, nearest
from accel.machine.imports import load_attribute

F = TypeVar("F", bound=Callable[..., object])


class Registry:
    """The factories for the node `kind`; built-in ones are ``"module:attribute"`` by name."""

    def __init__(self, kind: str, builtin: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._builtin = dict(builtin or {})
        self._factories: dict[str, Callable[..., object]] = {}

    def __call__(self, name: str) -> Callable[[F], F]:
        """Return a decorator that registers a function, class or other callable as `name`.

        Raises:
            ConfigError: if another factory has that name.
        """

        def decorate(factory: F) -> F:
            origin = taken = _origin(factory)
            if name in self.names():
                taken = self._builtin.get(name) or _origin(self._factories[name])
            if taken != origin:
                raise ConfigError.of(
                    f"@register.{self.kind}({name!r}) on {origin}",
                    f"the name belongs to {taken}",
                    "Choose another name.",
                )
            self._factories[name] = factory
            return factory

        return decorate

    def names(self) -> list[str]:
        """Return every known name, sorted."""
        return sorted({*self._builtin, *self._factories})

    def get(self, name: str, key: str = "") -> Callable[..., object]:
        """Return the factory called `name`, importing it if it is built in.

        Raises:
            ConfigError: if there is none; the message names the node `key` and the nearest.
        """
        self.require(name, key)
        if name not in self._factories:
            self._factories[name] = load_attribute(self._builtin[name])
        return self._factories[name]

    def built_in(self, name: str) -> str | None:
        """Return ``"module:attribute"`` of a built-in factory, or None."""
        return self._builtin.get(name)

    def require(self, name: str, key: str = "") -> None:
        """Raise if there is no factory called `name`; nothing is imported.

        Raises:
            ConfigError: naming the nearest.
        """
        if name not in self.names():
            decorator = self.kind.removesuffix("s")
            raise ConfigError.of(
                f"{key or self.kind}.name={name!r}",
                f"no {self.kind} factory has that name",
                f"{nearest(name, self.names())} Register your own with "
                f"@register.{decorator}({name!r}) in a package named by [tool.runner] imports.",
            )


def _origin(factory: object) -> str:
    if not hasattr(factory, "__qualname__"):  # a partial, or an instance with `__call__`
        return repr(factory)
    return f"{factory.__module__}:{factory.__qualname__}"


class _Register:
    """The registries, one attribute per kind."""

    model = Registry(
        "model",
        {
            "cnn": "runner.builtin.digits:cnn",
            "byte_gpt": "runner.builtin.bytes_gpt:byte_gpt",
        },
    )
    data = Registry(
        "data",
        {
            "digits": "runner.builtin.digits:digits",
            "stdlib_bytes": "runner.builtin.bytes_gpt:stdlib_bytes",
        },
    )
    objective = Registry(
        "objective",
        {
            "classification": "runner.builtin.digits:Classification",
            "next_byte": "runner.builtin.bytes_gpt:NextByte",
        },
    )
    step = Registry(
        "step",
        {
            "supervised": "runner.training.step:SupervisedStep",
            "gan": "runner.builtin.gan:GANStep",
        },
    )
    optimizer = Registry("optimizer", {"adamw": "runner.builtin.optimizers:adamw"})
    scheduler = Registry(
        "scheduler",
        {
            "cosine": "runner.builtin.optimizers:cosine",
            "linear": "runner.builtin.optimizers:linear",
            "constant": "runner.builtin.optimizers:constant",
        },
    )
    callback = Registry(
        "callbacks",
        {
            "early_stopping": "runner.callbacks.early_stopping:EarlyStopping",
            "text_sample": "runner.builtin.bytes_gpt:TextSample",
        },
    )


register = _Register()

"""Queries of DeepSpeed's configuration, and filling its open values by hand.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from accel.config.deepspeed_json import AUTO, Config, set_at, value_at
from accel.machine.errors import ConfigError, Problem


class FilledConfig(ABC):
    """Mixin of DeepSpeed's plugin: what its configuration says, and "auto" values given by hand."""

    @property
    @abstractmethod
    def deepspeed_config(self) -> Config:
        """DeepSpeed's configuration, which may be changed."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Name of the configuration in messages."""

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return a value of the configuration.

        Args:
            ds_key_long: key with dots, such as ``"zero_optimization.stage"``.
            default: what is returned where it is not set.
        """
        found = value_at(self.deepspeed_config, ds_key_long)
        return default if found is None else found

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value of the configuration is to be resolved from the run.

        Args:
            ds_key_long: key with dots.
        """
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self,
        ds_key_long: str,
        mismatches: list[str] | None = None,
        must_match: bool = True,
        **kwargs: object,
    ) -> None:
        """Fill a value of the configuration that is "auto", or compare it with the given one.

        Args:
            ds_key_long: key with dots.
            mismatches: takes a line for a value that differs; None: it is an error.
            must_match: whether it is compared.
            kwargs: values by key with dots: ``**{"optimizer.params.lr": 1e-3}``.

        Raises:
            ConfigError: if the value is "auto" and not given, or differs.
        """
        found = self.get_value(ds_key_long)
        if found == AUTO:
            if ds_key_long not in kwargs:
                remedy = f"Give it, or write a value for {ds_key_long} into the configuration."
                raise ConfigError.of(f'{ds_key_long}="auto"', "its value is not given", remedy)
            set_at(self.deepspeed_config, ds_key_long, kwargs[ds_key_long])
            return
        given = kwargs.get(ds_key_long)
        if not must_match or None in (found, given) or found == given:
            return
        if mismatches is None:
            value, rule = f"{ds_key_long}={found!r}", f"{given!r} is given for it, too"
            raise ConfigError.of(value, rule, 'Make them equal, or write "auto".')
        mismatches.append(f"{ds_key_long}={found!r} in the configuration, and {given!r} is given")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, object] | None = None,
        must_match: bool = True,
        **kwargs: object,
    ) -> None:
        """Fill every value of the configuration that is "auto", and compare the others.

        Args:
            prefix: dotted key of `config`, with a dot at its end; "": the full configuration.
            mismatches: takes a line for each value that differs; None: they are one error.
            config: the section of the configuration to go through; None: all of it.
            must_match: whether values are compared.
            kwargs: values by key with dots.

        Raises:
            ConfigError: naming the values that differ, or one that is "auto" and not given.
        """
        found: list[str] = [] if mismatches is None else mismatches
        for name, value in list((self.deepspeed_config if config is None else config).items()):
            key = f"{prefix}{name}"
            if isinstance(value, Mapping):
                self.deepspeed_config_process(f"{key}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(key, found, must_match, **kwargs)
        if mismatches is None:
            rule, remedy = "given in two places with different values", "Make them equal."
            ConfigError.raise_if([Problem(line, rule, remedy) for line in found])

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Switch the number format of a run on in the configuration, where that leaves it open.

        Args:
            mixed_precision: no, fp16 or bf16.

        Raises:
            ConfigError: if the configuration switches another format on.
        """
        for name in ("fp16", "bf16"):
            key, wanted = f"{name}.enabled", name == str(mixed_precision)
            found = self.get_value(key)
            if found in (None, AUTO) and (wanted or found == AUTO):
                set_at(self.deepspeed_config, key, wanted)
            elif found and not wanted and str(mixed_precision) != "no":
                value = f"mixed_precision={str(mixed_precision)!r}"
                remedy = f'Write "auto" for {key}, or give mixed_precision={name!r}.'
                raise ConfigError.of(value, f"{self.place} enables {name}", remedy)

"""Fields that nobody gave: they read as the value that holds, and still count as not given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, Self


@dataclass
class FieldDefaults:
    """Mixin of a dataclass whose fields are None by default: show their meaning, remember the gap.

    `dataclasses.replace` hands `_defaulted` on, so that a replaced object knows what was not given;
    a value that equals the default counts as not given there, and as given in an assignment.
    """

    _defaulted: InitVar[Mapping[str, object] | None] = field(default=None, kw_only=True)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in self._shown():
            self._keep({key: held for key, held in self._shown().items() if key != name})

    def given(self, field: str) -> Any:
        """Return the value that an argument or an environment variable gave a field, or None.

        Args:
            field: its name.
        """
        return None if field in self._shown() else vars(self)[field]

    def given_fields(self) -> dict[str, Any]:
        """Return the fields by name, None where nobody gave one."""
        names = [one.name for one in dataclasses.fields(self)]
        return {name: self.given(name) for name in names}

    def with_given(self, **changes: object) -> Self:
        """Return a copy with further fields given.

        Args:
            changes: values by field.
        """
        return type(self)(**{**self.given_fields(), **changes})

    def _shown(self) -> Mapping[str, object]:
        """Return the values that fields show, though nobody gave them."""
        return vars(self).get("_defaulted") or {}

    def _keep(self, shown: Mapping[str, object]) -> None:
        vars(self)["_defaulted"] = shown

    def _hide_defaults(self, shown: Mapping[str, object] | None) -> None:
        """Set fields to None that have the value which they showed by default."""
        self._keep({})
        for name, value in (shown or {}).items():
            if vars(self)[name] == value:
                vars(self)[name] = None

    def _show_defaults(self, values: Mapping[str, object]) -> None:
        """Let fields that are None, or showed another default, read as `values`."""
        shown = self._shown()
        missing = [name for name in values if name in shown or vars(self)[name] is None]
        self._keep({**shown, **{name: values[name] for name in missing}})
        vars(self).update({name: values[name] for name in missing})

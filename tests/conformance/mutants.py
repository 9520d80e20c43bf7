"""Mutants: each documented thing replaced by one that does nothing, in this process.

Functions are changed in place (their code object), so that every reference to them is changed,
wherever it was imported to. There is no way back: apply a mutant in a forked process.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import types
from collections.abc import Callable
from typing import Any

from tests.conformance.rows import REQUIRED, NoOp, Row, find, function_of

_HANDLERS: dict[str, Callable[..., Any]] = {}


def apply(row: Row) -> None:
    """Turn this process into the mutant of `row`.

    Raises:
        LookupError: if there is nothing to change: the row does not fit the code.
    """
    if row.kind == "call":
        _disable(row)
    elif row.kind in ("parameter", "choice"):
        for function in _takers(row):
            change = _forget_argument if row.kind == "parameter" else _refuse_value
            change(inspect.unwrap(function), row)
    elif row.kind == "value":
        _remove_member(find(row.name), row.part)
    else:
        _blind(row)


# -- callables -------------------------------------------------------------------------------


def _nothing(kind: NoOp, skips: int) -> Callable[..., Any]:
    """Return what stands for a callable whose first `skips` arguments are self or cls."""

    def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args[skips:], *kwargs.values()]
        return given[0] if given else None

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if kind is NoOp.NONE:
            return None
        if kind is NoOp.FIRST:
            return first(args, kwargs)
        if kind is NoOp.CONTEXT:
            return contextlib.nullcontext()
        if kind is NoOp.FIRST_IN_CONTEXT:
            return contextlib.nullcontext(first(args, kwargs))
        if kind is NoOp.ALL:
            given = args[skips:]
            return given[0] if len(given) == 1 else given
        function = first(args, kwargs)
        return function if callable(function) else (lambda inner: inner)

    return stand_in


def _disable(row: Row) -> None:
    found = find(row.name)
    if inspect.isclass(found):
        if issubclass(found, enum.Enum):
            _remove_member(found, next(iter(found.__members__)))
            return
        for function in _constructors(found):
            makes = function.__name__ == "__new__"
            _replace(function, _bare_instance if makes else _nothing(NoOp.NONE, 1))
        return
    if isinstance(found, property):
        _blind(row)
        return
    function = function_of(found)
    if "owner" in vars(function):  # a facade's, which its instance may go round: see `connect`
        function = inspect.unwrap(function)
    skips = 1 if "." in row.name.partition(":")[2] and not isinstance(found, staticmethod) else 0
    _replace(function, _nothing(row.noop, skips))


def _bare_instance(kind: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(kind)


def _constructors(kind: type) -> list[types.FunctionType]:
    """Return the `__init__` and `__new__` of a class that are written in Python."""
    found = [getattr(kind, "__init__", None), getattr(kind, "__new__", None)]
    plain = [entry for entry in found if isinstance(entry, types.FunctionType)]
    if not plain:
        raise LookupError(f"{kind.__name__} has no constructor in Python")
    return plain


def _replace(function: Any, stand_in: Callable[..., Any]) -> types.FunctionType:
    """Let `function` do what `stand_in` does; return a function that does what it did."""
    if not isinstance(function, types.FunctionType):
        raise LookupError(f"{function!r} is no function written in Python")
    original = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    original.__kwdefaults__ = function.__kwdefaults__
    key = f"{function.__module__}.{function.__qualname__}.{len(_HANDLERS)}"
    _HANDLERS[key] = stand_in
    namespace: dict[str, Any] = {}
    exec(  # a function without free variables, whose code can take the place of any other
        "def trampoline(*args, **kwargs):\n"
        "    import tests.conformance.mutants as mutants\n"
        f"    return mutants._HANDLERS[{key!r}](*args, **kwargs)\n",
        namespace,
    )
    code = namespace["trampoline"].__code__
    function.__code__ = code.replace(co_freevars=function.__code__.co_freevars)
    function.__defaults__ = None
    function.__kwdefaults__ = None
    return original


# -- parameters ------------------------------------------------------------------------------


def _takers(row: Row) -> list[Any]:
    """Return the functions behind the name of `row` that take its parameter."""
    found = find(row.name)
    if inspect.isclass(found):
        functions = [f for f in _constructors(found) if _takes(f, row.part)]
    else:
        functions = [function_of(found)]
    if not any(_takes(function, row.part) for function in functions):
        raise LookupError(f"{row.name} has no parameter {row.part!r}")
    return functions


def _takes(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _forget_argument(function: Any, row: Row) -> None:
    signature = inspect.signature(function)
    value = None if row.default is REQUIRED else row.default

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if row.part not in signature.parameters:
            kwargs.pop(row.part, None)
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        parameter = signature.parameters[row.part]
        if parameter.kind is parameter.VAR_POSITIONAL:
            bound.arguments[row.part] = ()
        elif parameter.kind is parameter.VAR_KEYWORD:
            bound.arguments[row.part] = {}
        elif parameter.default is parameter.empty:
            bound.arguments[row.part] = value
        else:
            bound.arguments.pop(row.part, None)
        return original(*bound.args, **bound.kwargs)

    original = _replace(function, stand_in)


def _refuse_value(function: Any, row: Row) -> None:
    signature = inspect.signature(function)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments.get(row.part)
        several = isinstance(given, (list, tuple, set, dict))
        if row.value in given if several else given == row.value:
            raise ValueError(f"the mutant knows no {row.part}={row.value!r}")
        return original(*args, **kwargs)

    original = _replace(function, stand_in)


# -- attributes and values -------------------------------------------------------------------


class _Blind:
    """An attribute that takes values and reads as None."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else None

    def __set__(self, instance: Any, value: Any) -> None:
        """Forget the value."""


def _blind(row: Row) -> None:
    found = find(row.name)
    owner = found if inspect.isclass(found) else None
    name = row.part
    if owner is None:  # "accel:Accelerator.device" as an entry of its own
        path, _, name = row.name.rpartition(".")
        owner = find(path)
    setattr(owner, name, _Blind())


def _remove_member(kind: type[enum.Enum], name: str) -> None:
    member = kind._member_map_.pop(name)
    if name in kind._member_names_:
        kind._member_names_.remove(name)
    if member.name == name:  # not an alias
        kind._value2member_map_.pop(member.value)
    if name in vars(kind):
        type.__delattr__(kind, name)

"""Hooks: callbacks around the forward pass of a module, which also see its keyword arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo

from accel.machine.errors import StateError

Arguments = tuple[tuple[object, ...], dict[str, object]]
Method = TypeVar("Method", bound=Callable[..., Any])


def outside_graphs(method: Method) -> Method:
    """Decorate a method that no graph has a place for, as it reads files.

    `torch._dynamo`, which takes half a second to import, is left out where nothing is compiled.
    """
    disabled = _disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: object) -> object:
        return disabled(*args) if torch.compiler.is_compiling() else method(*args)

    return cast(Method, call)


class ModelHook:
    """Callbacks before and after the forward pass of a module; a subclass overrides some.

    `no_grad` says whether the forward pass computes no gradients. A hook that keeps tensors of its
    module has more methods: see `accel.weights.offload.AlignDevicesHook`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare a module when the hook is attached.

        Args:
            module: what the hook is attached to.
        """
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Return the arguments that the forward pass is called with.

        Args:
            module: what the hook is attached to.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output of the forward pass.

        Args:
            module: what the hook is attached to.
            output: what `forward` returned.
        """
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore a module when the hook is removed.

        Args:
            module: what the hook was attached to.
        """
        return module


class SequentialHook(ModelHook):
    """Several hooks, run one after the other.

    Args:
        hooks: in their order, which also is that after the forward pass.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # type: ignore[override] # it follows from the hooks
        """Whether one of the hooks has the forward pass compute no gradients."""
        return any(hook.no_grad for hook in self.hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare a module for each hook.

        Args:
            module: what the hook is attached to.
        """
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Return the arguments after each hook saw them.

        Args:
            module: what the hook is attached to.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        for position, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                _call(self.hooks[:position], "abort_forward", module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output after each hook saw it.

        Args:
            module: what the hook is attached to.
            output: what `forward` returned.
        """
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore a module for each hook.

        Args:
            module: what the hook was attached to.
        """
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def _call(hooks: Iterable[object], name: str, module: nn.Module) -> None:
    """Call a method of those hooks that have it."""
    for hook in hooks:
        method = getattr(hook, name, None)
        if method is not None:
            method(module)


class ExportError(StateError, AttributeError):
    """A model whose hooks no graph can hold; to who asks whether there is code, there is none."""


class HookedForward:
    """The forward pass of a module between the callbacks of its hook.

    An object and not a closure: a deep copy of the module, or one that was pickled, then runs its
    own forward pass and hook, not the original's.
    """

    def __init__(self, module: nn.Module) -> None:
        functools.update_wrapper(self, module.forward)
        self.module = module
        self.was_patched = "forward" in module.__dict__

    @property
    def __code__(self) -> NoReturn:
        """What `torch.export` asks for first, and a forward pass between hooks has not."""
        raise ExportError(
            f"torch.export of {type(self.module).__name__}: its hooks move inputs and read weights "
            "while it runs, for which a graph has no place. Export it after "
            "accel.hooks.remove_hook_from_submodules(model), with the weights in memory."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward: Callable[..., Any] = module.__dict__.get("_old_forward", module.forward)
        hook = getattr(module, "_hf_hook", None)
        if hook is None:  # removed, within this call or under a patch that keeps this `forward`
            return forward(*args, **kwargs)
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        try:
            with torch.no_grad() if hook.no_grad else nullcontext():
                output = forward(*args, **kwargs)
        except BaseException:
            _call(hooks_in(hook), "abort_forward", module)
            raise
        return hook.post_forward(module, output)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run a hook around the forward pass of a module.

    Args:
        module: the module; its `forward` is replaced until the hook is removed.
        hook: it is prepared for the module first.
        append: whether a hook that the module has is kept and runs before; else it is replaced.

    Returns:
        The module.
    """
    present = getattr(module, "_hf_hook", None)
    if present is not None and append:
        remove_hook_from_module(module)
        hook = SequentialHook(*hooks_in(present), hook)
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment] # a plain attribute of the module
    # A container such as ModuleList is not called: its `forward` cannot be pickled.
    runs = "forward" in module.__dict__ or type(module).forward is not nn.Module.forward
    if runs and not hasattr(module, "_old_forward"):
        hooked = HookedForward(module)
        module.__dict__ |= {"_old_forward": module.forward, "forward": hooked}
    return module


def hooks_of(module: nn.Module) -> tuple[ModelHook, ...]:
    """Return the hooks of a module, in their order."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else hooks_in(hook)


def hooks_in(hook: ModelHook) -> tuple[ModelHook, ...]:
    """Return the hooks that a hook runs in turn."""
    if not isinstance(hook, SequentialHook):
        return (hook,)
    return tuple(inner for one in hook.hooks for inner in hooks_in(one))


def check_removable(model: nn.Module) -> None:
    """Raise what a hook of a model's modules raises if it cannot be removed."""
    for module in model.modules():
        _call(hooks_of(module), "before_detach", module)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of a module, which gets the `forward` back that it had.

    Args:
        module: with or without a hook.
        recurse: whether the hooks of all submodules are removed, too.

    Returns:
        The module.
    """
    if recurse:
        check_removable(module)
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        hook.detach_hook(module)
        del module.__dict__["_hf_hook"]
    hooked = module.__dict__.get("forward")
    if isinstance(hooked, HookedForward):
        own = module.__dict__
        old = own.pop("_old_forward")
        del own["forward"]
        if hooked.was_patched:
            own["forward"] = old
    for child in module.children() if recurse else ():
        remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all its submodules.

    Args:
        module: with or without hooks.
    """
    remove_hook_from_module(module, recurse=True)

"""Checkpoints of a run, and exports of its models."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch.utils.hooks import RemovableHandle

from accel.checkpoint.contents import RunObjects
from accel.machine.errors import ArgumentTypeError, ConfigError, Problem, nearest

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.strategies.base import Objects, Strategy
    from accel.trackers.group import TrackerGroup

# What writes and reads is imported where it is first called: few scripts start with it, and the
# import of the engine is to be cheap.
_MAP_LOCATIONS = ("cpu", "on_device")


class CheckpointSession:
    """Saves and restores the state of a run, exports models: a part of the `Accelerator`."""

    comm: Communicator
    strategy: Strategy
    _objects: Objects

    def _start_checkpoints(self, trackers: TrackerGroup) -> None:
        accumulation: Any = self
        self._run = RunObjects(self.comm, self.strategy, self._objects, accumulation, trackers)
        self._save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()

    # -- states --------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        metadata: Mapping[str, object] | None = None,
        protected: Iterable[str | os.PathLike[str]] = (),
        **save_model_func_kwargs: object,
    ) -> str:
        """Save models, optimizers, schedulers, samplers, scaler, random states, registered objects.

        Call it on every process. The directory counts as a checkpoint only once everything is on
        the disk; cut off before, older checkpoints are untouched.

        Args:
            output_dir: where; created if it does not exist. Files of an earlier state in it are
                replaced, others stay. Under automatic naming it is not used: the directory is
                ``<project_dir>/checkpoints/checkpoint_<iteration>``, and the oldest above
                `total_limit` are deleted after the commit.
            safe_serialization: whether weights are safetensors, else `torch.save`.
            metadata: what the manifest is to tell of the run (step, sample counter, …), plain JSON.
            protected: checkpoints that `total_limit` must spare, such as the best.
            save_model_func_kwargs: arguments of a backend's own save function; none are known here.

        Returns:
            The path of the committed checkpoint.

        Raises:
            CheckpointError: on every process, if saving failed on any.
            ConfigError: for arguments that the backend does not know.

        Example:
            >>> accelerator.save_state("states/epoch_1", metadata={"epoch": 1})
        """
        from accel.checkpoint.save import SaveOptions, save

        _refuse(
            save_model_func_kwargs, "save_state", ("output_dir", "safe_serialization", "metadata")
        )
        options = SaveOptions(
            safe_serialization, metadata, tuple(protected), tuple(self._save_hooks.values())
        )
        return os.fspath(save(self._run, output_dir, options))

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, object] | None = None,
        *,
        strict: bool = True,
        map_location: str | None = None,
        trust_unverified: bool = False,
        **load_model_func_kwargs: object,
    ) -> str:
        """Restore what `save_state` saved, after verifying every file.

        Call it on every process, after preparing and registering the same objects. The number of
        processes may differ. Saved objects that are neither prepared nor registered here are not
        loaded, which the log tells. No file is read in a way that could run code.

        Args:
            input_dir: the checkpoint. None: under automatic naming, the newest complete one.
            load_kwargs: `map_location` as below, and `weights_only`, which is always True.
            strict: whether every weight of the models and of the checkpoint must match.
            map_location: "cpu" or "on_device"; weights are always read on the CPU first.
            trust_unverified: whether a directory in the documented layout without a manifest is
                loaded, such as another library's, which says nothing of the order of loaders.
            load_model_func_kwargs: arguments of a backend's own load function; none are known here.

        Returns:
            The path of the checkpoint that was loaded.

        Raises:
            CheckpointError: on every process, if it is missing, incomplete or altered, or does not
                fit the run. Objects may then be partly restored.
            ConfigError: for arguments that do not exist.
            StateError: on every process, if it holds models, optimizers or schedulers, and one has
                neither prepared nor registered any object, nor a hook that loads them itself.

        Example:
            >>> accelerator.register_for_checkpointing(my_state)
            >>> accelerator.load_state("states/epoch_1")
        """
        from accel.checkpoint.load import load

        known = ("input_dir", "load_kwargs", "strict", "map_location", "trust_unverified")
        _refuse(load_model_func_kwargs, "load_state", known)
        _check_reading({"map_location": map_location, **(load_kwargs or {})})
        hooks = tuple(self._load_hooks.values())
        loaded = load(
            self._run, input_dir, strict=strict, trust_unverified=trust_unverified, hooks=hooks
        )
        return os.fspath(loaded)

    def register_for_checkpointing(self, *objects: object) -> None:
        """Save and load `objects` with the state, in the order they are registered.

        Args:
            objects: each has `state_dict()`, which returns plain containers, numbers and tensors,
                and `load_state_dict(state)`.

        Raises:
            ConfigError: naming every one that lacks `state_dict` or `load_state_dict`.
        """
        problems = [
            Problem(
                f"object {index} ({type(entry).__name__})",
                "what is registered for checkpointing has state_dict() and load_state_dict(state)",
                "Add the two methods.",
            )
            for index, entry in enumerate(objects)
            if not all(callable(getattr(entry, n, None)) for n in ("state_dict", "load_state_dict"))
        ]
        ConfigError.raise_if(problems)
        self._run.objects.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` in `save_state` before anything is saved.

        `weights` are the models' state dicts; those that the hook removes from the list are not
        saved by the engine. What it writes into `output_dir` becomes part of the checkpoint (the
        directory is renamed when it is complete, so do not keep the path).

        Args:
            hook: called on every process, in the order of registration.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` in `load_state` before anything is loaded.

        Models that the hook removes from the list are not loaded by the engine.

        Args:
            hook: called on every process, in the order of registration.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        return _register(self._load_hooks, hook)

    # -- exports -------------------------------------------------------------------------------

    def save(
        self, obj: object, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False
    ) -> None:
        """Save an object once per run, or once per node with `save_on_each_node`.

        Args:
            obj: what `torch.save` takes; with `safe_serialization`, tensors by name.
            f: path (replaced whole, never in part) or open file.
            safe_serialization: whether to write safetensors.
        """
        from accel.checkpoint import export

        each_node = self._run.plan.project.save_on_each_node
        export.save(obj, f, each_node, safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Export a model's weights as one file, or as shards with an index.

        `load_checkpoint_in_model` loads them. Call it on every process; one writes (one of each
        node with `save_on_each_node`), and the others do not wait for it. Files of an earlier
        export in the folder are removed.

        Args:
            model: prepared or not.
            save_directory: created if it does not exist.
            max_shard_size: bytes per file, or e.g. "5GB" (10^9) or "5GiB" (2^30). A larger tensor
                has a file of its own.
            safe_serialization: whether files are safetensors, else what `torch.save` writes.

        Raises:
            CheckpointError: if safetensors cannot hold the model's state.
            ConfigError: if `max_shard_size` is no size.
        """
        from accel.checkpoint import export

        export.parse_size(max_shard_size)
        state = self.get_state_dict(model)
        if self._run.writes:
            export.export_model(state, save_directory, max_shard_size, safe_serialization)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's whole state dict. Call it on every process.

        Args:
            model: prepared or not.
            unwrap: whether names are those of the user's own module, without a wrapper's prefix.
                Tensors are the same, whole ones.
        """
        io = self._run.strategy.state
        state = io.model_state(model)
        if unwrap:
            return state
        own = io.unwrap(model)
        path = next(name for name, module in model.named_modules() if module is own)
        return {f"{path}.{name}" if path else name: value for name, value in state.items()}


def _refuse(arguments: Mapping[str, object], method: str, known: tuple[str, ...]) -> None:
    problems = [
        Problem(f"{method}({name}=…)", "no such argument", nearest(name, known))
        for name in arguments
    ]
    ConfigError.raise_if(problems)


def _check_reading(arguments: Mapping[str, object]) -> None:
    """Refuse arguments of `torch.load` that this engine cannot follow."""
    problems = []
    place = arguments.get("map_location")
    is_known = place is None or str(place) in _MAP_LOCATIONS
    if not is_known:
        rule = "it is 'cpu' or 'on_device'"
        problems.append(Problem(f"load_state(map_location={place!r})", rule, "Leave it out."))
    for name, value in arguments.items():
        what = f"load_state({name}={value!r})"
        if name == "weights_only" and value is not True:
            remedy = "Let classes that you trust in with torch.serialization.add_safe_globals([…])."
            problems.append(Problem(what, "nothing is read in a way that runs code", remedy))
        elif name not in ("map_location", "weights_only"):
            remedy = nearest(name, ("map_location", "weights_only"))
            problems.append(Problem(what, "no such argument", remedy))
    (ConfigError if is_known else ArgumentTypeError).raise_if(problems)


def _register(
    hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]
) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

"""Checkpoint directories on disk: names, atomic commit, verification, rotation. Free of torch.

A directory counts as a checkpoint from the moment its `manifest.json` is in place; the manifest
lists size and digest of every file and is written last.

- A new directory is written as ``.<name>.partial-<token>`` beside its final name, flushed, given
  its manifest and renamed. Cut off at any moment, it leaves the final name free and older
  checkpoints untouched.
- A directory that exists already (it may hold files of others, or be a mount point) is written
  through ``<name>/.partial-<token>``: the old manifest goes first, the files move, the new manifest
  moves last. Cut off in between, the directory has no manifest, so nobody takes it for complete;
  `repair` (called before it is next loaded or written) finishes the move.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from accel.machine.errors import CheckpointError, Problem

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
FOLDER = "checkpoints"
SCALER = "scaler.pt"
# Describes the files of a folder of sharded state.
METADATA = ".metadata"

_NUMBERED = re.compile(r"checkpoint_(\d+)")


# -- names ---------------------------------------------------------------------------------


def numbered(stem: str, suffix: str, index: int) -> str:
    """Return the name of the `index`-th file of a kind: ``model.bin``, ``model_1.bin``, …"""
    return f"{stem}{suffix}" if index == 0 else f"{stem}_{index}{suffix}"


def model_name(index: int, safe: bool = True) -> str:
    """Return the file name of the `index`-th model's weights."""
    return (
        numbered("model", ".safetensors", index)
        if safe
        else numbered("pytorch_model", ".bin", index)
    )


def sharded_model_name(index: int) -> str:
    """Return the name of the folder of the `index`-th model's sharded weights."""
    return f"pytorch_model_fsdp_{index}"


def sharded_optimizer_name(index: int) -> str:
    """Return the name of the folder of the `index`-th optimizer's sharded state."""
    return f"optimizer_{index}"


def random_states_name(rank: int) -> str:
    """Return the file name of a rank's random generators."""
    return f"random_states_{rank}.pkl"


def positions_name(rank: int, index: int) -> str:
    """Return the file name of the position of a rank's `index`-th loader, if that is stateful."""
    return numbered("dl_state_dict" + (f"_rank{rank}" if rank else ""), ".bin", index)


def scales_name(index: int) -> str:
    """Return the file name of the scales that layers in fp8 of the `index`-th model keep."""
    return numbered("fp8_scales", ".bin", index)


def custom_name(index: int) -> str:
    """Return the file name of the `index`-th object registered for checkpointing."""
    return f"custom_checkpoint_{index}.pkl"


def iteration_of(path: str | os.PathLike[str]) -> int | None:
    """Return n for a path that ends in ``checkpoint_<n>``, else None."""
    match = _NUMBERED.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the ``checkpoint_<n>`` directories in `folder`, complete or not, by ascending n."""
    root = Path(folder)
    found = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    ours = [(number, path) for path in found if (number := iteration_of(path)) is not None]
    return [path for _, path in sorted(ours)]


# -- manifest ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """The size (bytes) and the hexadecimal SHA-256 digest of one file in the manifest."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        files: by path relative to the checkpoint, with forward slashes.
        engine: what the engine recorded: world size, strategy, precision, numbers of objects.
        metadata: what the caller recorded: step, sample counter, …
    """

    files: dict[str, Entry]
    engine: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def dp_size(self) -> int:
        """Data-parallel size; the world size, if not recorded."""
        return int(self.engine.get("dp_size", self.engine["world_size"]))

    @property
    def draw_leaders(self) -> list[int]:
        """The lowest rank of each rank of draws; of each data-parallel one, if not recorded."""
        copies = self.engine["world_size"] // self.dp_size
        leaders = self.engine.get("dp_leaders", range(0, self.dp_size * copies, copies))
        return list(self.engine.get("draw_leaders", leaders))

    def to_json(self) -> str:
        """Return the text of `manifest.json`, its own digest included."""
        body = {
            "format": FORMAT_VERSION,
            "engine": self.engine,
            "metadata": self.metadata,
            "files": {
                name: {"size": entry.size, "sha256": entry.sha256}
                for name, entry in sorted(self.files.items())
            },
        }
        plain = json.loads(json.dumps(body))  # keys and tuples as they will be read back
        return json.dumps({**plain, "digest": _digest_of(plain)}, indent=2) + "\n"


def _digest_of(body: Mapping[str, object]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def broken(path: str | os.PathLike[str], rule: str, remedy: str) -> CheckpointError:
    """Return the error for a checkpoint at `path` that breaks `rule`."""
    return CheckpointError(Problem(f"checkpoint {os.fspath(path)!r}", rule, remedy))


_USE_ANOTHER = "Use another checkpoint: an older one may be complete."


def without_remedy(error: CheckpointError) -> str:
    """Return what is wrong with a checkpoint, for where another one is tried anyway."""
    return str(error).removesuffix(_USE_ANOTHER).rstrip()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint; the files that it lists are not looked at.

    Args:
        path: the checkpoint's directory.

    Raises:
        CheckpointError: if there is none, or it is altered or of a newer format.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        rule = (
            f"it has no {MANIFEST}, so its writing was cut off, or `save_state` did not write it"
            if Path(path).is_dir()
            else "there is no such directory"
        )
        raise broken(path, rule, _USE_ANOTHER)
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        digest = body.pop("digest")
        files = {name: Entry(**entry) for name, entry in body["files"].items()}
        manifest = Manifest(files, body["engine"], body["metadata"])
        version = body["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise broken(path, f"its {MANIFEST} cannot be read ({error})", _USE_ANOTHER) from error
    if digest != _digest_of(body) or not all(map(is_inside, files)):
        raise broken(path, f"its {MANIFEST} was altered", _USE_ANOTHER)
    if version != FORMAT_VERSION:
        rule = f"its format is {version}, this version reads {FORMAT_VERSION}"
        raise broken(path, rule, "Read it with the version that wrote it.")
    return manifest


def is_inside(name: str) -> bool:
    """Return whether a path relative to a folder stays inside of it."""
    pure = PurePosixPath(name)
    return bool(name) and not pure.is_absolute() and ".." not in pure.parts


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest after comparing every file's size and digest with it.

    Args:
        path: the checkpoint's directory.

    Raises:
        CheckpointError: naming every file that is missing or differs.
    """
    manifest = read_manifest(path)
    wrong = _differences([Path(path)], manifest)
    if wrong:
        raise broken(path, "; ".join(wrong), _USE_ANOTHER)
    return manifest


def _differences(places: list[Path], manifest: Manifest) -> list[str]:
    """Return what is wrong with the files of `manifest`, each looked for in `places` in order."""
    wrong = []
    for name, entry in manifest.files.items():
        file = next((place / name for place in places if (place / name).is_file()), None)
        if file is None:
            wrong.append(f"{name} is missing")
        elif file.stat().st_size != entry.size:
            wrong.append(f"{name} has {file.stat().st_size} bytes, not {entry.size}")
        elif file_digest(file) != entry.sha256:
            wrong.append(f"{name} was altered (its digest differs)")
    return wrong


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory is a checkpoint whose files all are as they were written.

    Args:
        path: the directory.
    """
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def newest_complete(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete ``checkpoint_<n>`` of the highest n; None if there is none.

    Broken ones are named in a warning and skipped.

    Args:
        folder: where they lie, such as ``<project_dir>/checkpoints``.
    """
    for path in reversed(checkpoints(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            logger.warning("Skipping a broken checkpoint. %s", without_remedy(error))
        else:
            return path
    return None


# -- commit --------------------------------------------------------------------------------


def tidy(final: str | os.PathLike[str]) -> None:
    """Finish or remove what earlier attempts to write `final` left behind."""
    target = Path(final)
    repair(target)
    beside = target.parent.glob(f".{glob.escape(target.name)}.partial-*")
    inside = target.glob(".partial-*") if target.is_dir() else iter(())
    for leftover in [*beside, *inside]:
        shutil.rmtree(leftover)


def stage(final: str | os.PathLike[str]) -> Path:
    """Create and return the directory to write in before `publish` gives it the name `final`.

    Raise `CheckpointError` if `final` exists and is no directory.
    """
    target = Path(final)
    if target.exists() and not target.is_dir():
        raise broken(target, "a file has that name", "Give the name of a directory.")
    token = os.urandom(4).hex()
    inside = target / f".partial-{token}"
    beside = target.parent / f".{target.name}.partial-{token}"
    staged = inside if target.is_dir() else beside
    staged.mkdir(parents=True)
    return staged


def seal(staged: Path, engine: Mapping[str, object], metadata: Mapping[str, object]) -> Manifest:
    """Flush every file in `staged` to the disk and write the manifest that lists them.

    Raise `CheckpointError` if `metadata` is no plain JSON.
    """
    for file in _files(staged):
        flush_file(file)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(entries(staged), {**engine, "created": created}, dict(metadata))
    try:
        text = manifest.to_json()
    except (TypeError, ValueError) as error:
        remedy = "Give numbers, strings, lists and mappings of them."
        raise broken(staged, f"its metadata cannot be written as JSON ({error})", remedy) from error
    (staged / MANIFEST).write_text(text, encoding="utf-8")
    flush_file(staged / MANIFEST)
    for folder in {file.parent for file in _files(staged)}:
        flush_directory(folder)
    return manifest


def entries(folder: Path) -> dict[str, Entry]:
    """Return size and digest of every file in `folder`, by relative path."""
    return {
        file.relative_to(folder).as_posix(): Entry(file.stat().st_size, file_digest(file))
        for file in _files(folder)
    }


def publish(staged: Path, final: str | os.PathLike[str]) -> None:
    """Give a sealed directory its final name, so that from now on it counts."""
    target = Path(final)
    if staged.parent == target:
        _merge(staged, target)
        return
    os.rename(staged, target)
    flush_directory(target.parent)


def _merge(staged: Path, final: Path) -> None:
    new = read_manifest(staged)
    old: set[str] = set()
    with contextlib.suppress(CheckpointError):  # then nothing there is known to be ours
        old = set(read_manifest(final).files)
    (final / MANIFEST).unlink(missing_ok=True)
    flush_directory(final)
    for name in new.files:
        # After an interruption, some files have moved already.
        if (staged / name).exists():
            (final / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged / name, final / name)
    for folder in {(final / name).parent for name in new.files}:
        flush_directory(folder)
    os.replace(staged / MANIFEST, final / MANIFEST)
    flush_directory(final)
    for name in old - set(new.files):
        (final / name).unlink(missing_ok=True)
    shutil.rmtree(staged)


def repair(final: str | os.PathLike[str]) -> bool:
    """Finish a write that was cut off while files moved into `final`; return whether one was."""
    target = Path(final)
    if not target.is_dir() or (target / MANIFEST).exists():
        return False
    for staged in target.glob(".partial-*"):
        if (staged / MANIFEST).exists() and not _differences(
            [staged, target], read_manifest(staged)
        ):
            logger.warning("Finishing the interrupted write of the checkpoint %s", target)
            _merge(staged, target)
            return True
    return False


def discard(staged: Path) -> None:
    """Remove what was written so far."""
    shutil.rmtree(staged, ignore_errors=True)


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Give a folder to write in, which takes the name `final` once all in it is on the disk."""
    tidy(final)
    staged = stage(final)
    try:
        yield staged
        for file in _files(staged):
            flush_file(file)
        publish(staged, final)
    finally:
        discard(staged)


# -- rotation ------------------------------------------------------------------------------


def prune(
    folder: str | os.PathLike[str],
    keep: int,
    protected: Iterable[str | os.PathLike[str]] = (),
) -> list[Path]:
    """Delete the oldest ``checkpoint_<n>`` so that the newest `keep` stay, and return what went.

    Call it after a commit only: what interrupted writes left behind goes too. Before anything is
    deleted, one checkpoint that stays is read back and verified; if none of them is complete,
    the newest complete one stays too.

    Args:
        folder: where they lie.
        keep: how many stay, at least 1.
        protected: further ones to spare, such as the best.
    """
    present = checkpoints(folder)
    spared = {Path(path).resolve() for path in protected}
    kept, old = present[-keep:], [p for p in present[:-keep] if p.resolve() not in spared]
    if old and not any(map(is_complete, reversed(kept))):
        newest = next(filter(is_complete, reversed(old)), None)
        old = [path for path in old if path != newest]
    for path in old:
        # The rename hides the full directory at once; removing its files does not.
        os.rename(path, path.with_name(f".{path.name}.partial-{os.urandom(4).hex()}"))
    for leftover in Path(folder).glob(".checkpoint_*.partial-*"):
        shutil.rmtree(leftover)
    return old


# -- small parts ---------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context that gives a path to write to, which takes the name `path` when all is written.

    A reader sees the old or the new content, never a part. What fails leaves nothing behind.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial-{os.urandom(4).hex()}")
    try:
        yield partial
        replace_file(partial, target)
    finally:
        with contextlib.suppress(OSError):  # read-only by now: what failed first is what matters
            partial.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write one file so that a reader sees its old or its new content, never a part."""
    with replacing(path) as partial:
        partial.write_bytes(content)


def replace_file(written: Path, final: Path) -> None:
    """Flush a file that was written under another name in the same folder, and rename it."""
    flush_file(written)
    os.replace(written, final)
    flush_directory(final.parent)


def flush_file(path: Path) -> None:
    """Wait until the content of `path` is on the disk."""
    # Windows wants a file that is open for writing; elsewhere it may be read-only.
    with path.open("rb+" if os.name == "nt" else "rb") as file:
        os.fsync(file.fileno())


def flush_directory(path: Path) -> None:
    """Wait until the names in the directory `path` are on the disk."""
    if os.name == "nt":  # directories cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

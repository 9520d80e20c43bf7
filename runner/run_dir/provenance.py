"""Which code a run was made from: git and sources of packages. Free of torch.

Nothing here ends or delays a run: git is asked by two commands at once, and everything that is read
has a limit, behind which the record says that it is not complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from runner.run_dir import json_files, lock, untracked_files
from runner.run_dir.json_files import Fields, JsonObject

logger = logging.getLogger(__name__)

ENVIRONMENT, DIFF = "environment.json", "git.diff"
GIT = ("git", "--no-optional-locks")  # another git command of the user's may hold the index
# What a user's configuration may change, so that `git apply` no longer takes the patch.
DIFF_FORMAT = ("-c", "diff.noprefix=false", "-c", "diff.relative=false")
GIT_SECONDS = 20.0
MOST_UNTRACKED = 200
MARKS = ("overrides.yaml", "sweep.json")  # a folder with one of them is a run's or a sweep's
MOST_DIFF_BYTES = 10_000_000
MOST_SOURCES, MOST_SOURCE_BYTES = 2_000, 20_000_000
PACKAGE = Path(__file__).resolve().parents[2]


def git_state(folder: str | os.PathLike[str], diff_to: Path | None = None) -> JsonObject:
    """Return commit, branch and uncommitted changes of the work tree that a folder lies in.

    Args:
        folder: any folder of the work tree.
        diff_to: where the uncommitted changes are written as a patch; None: nowhere. Of a larger
            patch than `MOST_DIFF_BYTES` only the names of the files are. Untracked Python files
            follow it, as far as `untracked_files.creation_patch` takes them.

    Returns:
        sha, branch, root, dirty (tracked files differ from the commit), diff_sha256, diff_bytes
        (both of tracked files), untracked (names, at most `MOST_UNTRACKED`, Python files first,
        without what runs and sweeps have written), num_untracked, num_untracked_python,
        untracked_sha256 (of its Python files), num_untracked_kept and untracked_bytes (of the
        Python files in the patch, and of that part of it). Without a work tree: `reason` alone.
    """
    status = _start(folder, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all")
    root = _start(folder, "rev-parse", "--show-toplevel")
    if status is None or root is None:
        return {"reason": "git is not installed"}
    text, top = _output(status), _output(root)
    if text is None or top is None:
        return {"reason": f"{os.fspath(folder)} lies in no git work tree, or git gave no answer"}
    found = _parsed(text.split("\0"))
    found["root"] = top.strip()
    patch = b""
    if found["dirty"]:
        changes, patch = _diff(folder, names_of_large=diff_to is not None)
        found |= changes
    untracked = _without_runs(found["untracked"])
    top_folder, sources = Path(found["root"]), untracked_files.python_files(untracked)
    created, num_created = untracked_files.creation_patch(top_folder, sources)
    if diff_to is not None and (patch or created):
        diff_to.write_bytes(patch + created)
    found["num_untracked"] = len(untracked)
    found["untracked_sha256"] = _digest_of_sources(top_folder, sources)
    sources_first = sorted(untracked, key=lambda name: not untracked_files.is_python(name))
    found["untracked"] = sources_first[:MOST_UNTRACKED]
    found |= {"num_untracked_python": len(sources), "num_untracked_kept": num_created}
    found["untracked_bytes"] = len(created)
    return found


def _start(folder: str | os.PathLike[str], *arguments: str) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            [*GIT, "-C", os.fspath(folder), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        logger.debug("git %s: %s", " ".join(arguments), error)
        return None


def _output(process: subprocess.Popen[bytes]) -> str | None:
    """Return the output of git; None if it failed, or gave no answer in time."""
    with process:
        try:
            out, _ = process.communicate(timeout=GIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    return None if process.returncode else out.decode("utf-8", errors="surrogateescape")


def _parsed(entries: Sequence[str]) -> JsonObject:
    """Return what `git status --porcelain=v2 --branch -z` lists.

    Source: https://git-scm.com/docs/git-status#_porcelain_format_version_2
    """
    found: JsonObject = {"sha": None, "branch": None, "dirty": False, "untracked": []}
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if entry.startswith("# branch.oid "):
            sha = entry.rpartition(" ")[2]
            found["sha"] = None if sha == "(initial)" else sha
        elif entry.startswith("# branch.head "):
            found["branch"] = entry.removeprefix("# branch.head ")
        elif kind in ("1", "2", "u"):
            found["dirty"] = True
        elif kind == "?":
            found["untracked"].append(rest)
    return found


def _without_runs(names: Sequence[str]) -> list[str]:
    """Return untracked files that lie in no run and no sweep, whose folder git need not ignore."""
    folders = {place for place, _, file in map(_split, names) if file in MARKS}
    kept = []
    for name in names:
        place, _, file = _split(name)
        while place and place not in folders:
            place = _split(place)[0]
        if not place and file != lock.FILE:
            kept.append(name)
    return kept


def _split(name: str) -> tuple[str, str, str]:
    return name.rpartition("/")


def _diff(folder: str | os.PathLike[str], names_of_large: bool) -> tuple[JsonObject, bytes]:
    """Return digest and size of the changes of tracked files, and the patch.

    In place of a patch that is too large stand the names of its files, if `names_of_large`.
    """
    plain = ("--no-color", "--no-ext-diff", "--no-textconv")
    process = _start(folder, *DIFF_FORMAT, "diff", "HEAD", "--binary", *plain)
    if process is None or process.stdout is None:
        return {}, b""
    with process:
        patch = process.stdout.read(MOST_DIFF_BYTES + 1)
        complete = len(patch) <= MOST_DIFF_BYTES
        if not complete:
            process.kill()
    if process.returncode and complete:  # no commit to compare with
        return {}, b""
    digest = hashlib.sha256(patch).hexdigest()
    found = {"diff_sha256": digest, "diff_bytes": len(patch), "diff_complete": complete}
    if not complete:
        names = _start(folder, "diff", "HEAD", "--stat", *plain) if names_of_large else None
        listed = None if names is None else _output(names)
        patch = (listed or "").encode(errors="surrogateescape")
    return found, patch


def runner_checkout() -> JsonObject | None:
    """Return the state of the checkout that `runner` and `accel` come from; None: installed."""
    if not (PACKAGE / ".git").exists():
        return None
    found = git_state(PACKAGE)
    return None if "reason" in found else found


# -- sources -------------------------------------------------------------------------------


def package_digests(packages: Iterable[str]) -> dict[str, str | None]:
    """Return a digest of the Python files of each package; None: it is too large, or not found.

    Nothing is imported.
    """
    return {name: _package_digest(name) for name in packages}


def _package_digest(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError) as error:
        logger.debug("%s: %s", name, error)
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    if not folders:
        file = Path(spec.origin or "")
        return _digest_of_sources(file.parent, [file.name]) if file.is_file() else None
    root = Path(folders[0])
    names = []
    for path in root.rglob("*.py"):
        names.append(str(path.relative_to(root)))
        if len(names) > MOST_SOURCES:
            return None
    return _digest_of_sources(root, sorted(names))


def _digest_of_sources(root: Path, names: Iterable[str]) -> str | None:
    """Return a digest of the Python files among `names`; None: there are none, or too many."""
    digest, size = hashlib.sha256(), 0
    chosen = [name for name in names if name.endswith(".py")]
    if not chosen or len(chosen) > MOST_SOURCES:
        return None
    for name in chosen:
        with contextlib.suppress(OSError):  # removed meanwhile
            content = (root / name).read_bytes()
            size += len(content)
            if size > MOST_SOURCE_BYTES:
                return None
            digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape"))
            digest.update(content)
    return digest.hexdigest()


# -- differences ---------------------------------------------------------------------------


def code_differences(then: Fields, now: Fields) -> list[str]:
    """Return how the code of two recorded environments differs, a sentence each; [] if it does not.

    Args:
        then: content of a run's environment.json.
        now: that of another, or of this process.
    """
    lines = _git_differences(then, now, "git", "the project")
    lines += _git_differences(then, now, "runner_git", "runner's checkout")
    changed = changed_packages(then, now)
    return lines + [f"the Python files of the package {package} differ" for package in changed]


def code_id(recorded: Fields) -> str:
    """Return a short name of recorded code, equal for equal code; empty: none is known.

    It begins with the project's commit, and has a digest of all that `code_differences` compares.
    """
    states = {key: recorded.get(key) or {} for key in ("git", "runner_git")}
    parts: JsonObject = {
        key: [git.get("sha"), git.get("diff_sha256"), git.get("untracked_sha256")]
        for key, git in states.items()
        if "dirty" in git
    }
    parts |= {f"package {name}": digest for name, digest in (recorded.get("code") or {}).items()}
    if not parts:
        return ""
    digest = json_files.digest(parts)
    return f"{states['git']['sha'][:8]}-{digest[:6]}" if states["git"].get("sha") else digest[:8]


def changed_packages(then: Fields, now: Fields) -> list[str]:
    """Return the packages, recorded in both environments, whose Python files differ."""
    before, after = then.get("code") or {}, now.get("code") or {}
    return [name for name in before if name in after and before[name] != after[name]]


def _git_differences(then: Fields, now: Fields, key: str, whose: str) -> list[str]:
    before, after = then.get(key) or {}, now.get(key) or {}
    known = "dirty" in before, "dirty" in after
    if known == (False, False):
        return []
    if not all(known):
        where = "then" if known[1] else "now"
        return [f"{whose} has no git state {where}: its code cannot be compared by commit"]
    lines = []
    if before.get("sha") != after.get("sha"):
        lines.append(f"{whose} was at commit {short_sha(before)}, and is at {short_sha(after)}")
    if before["dirty"] != after["dirty"] or _changed(before, after, "diff_sha256"):
        lines.append(f"{whose}: {_changes(before)} then, {_changes(after)} now")
    if _changed(before, after, "untracked_sha256"):
        lines.append(f"{whose}: {_other_untracked(before, after)}")
    return lines


def _changed(before: Fields, after: Fields, key: str) -> bool:
    # Runs of earlier versions have not recorded it.
    return key in before and key in after and before[key] != after[key]


def _changes(git: Fields) -> str:
    if not git["dirty"]:
        tracked = " of tracked files" if untracked_files.described(git) else ""
        return f"no uncommitted changes{tracked}"
    return f"uncommitted changes ({git.get('diff_bytes', '?')} bytes)"


def _other_untracked(before: Fields, after: Fields) -> str:
    was, present = untracked_files.described(before), untracked_files.described(after)
    if was == present:
        return f"the contents differ of {present}"
    return f"{was or 'no untracked Python files'} then, {present or 'none'} now"


def uncommitted(git: Fields) -> str:
    """Return e.g. "uncommitted changes (1 untracked Python file: new.py)"; empty without any."""
    untracked = untracked_files.described(git)
    if not untracked:
        return "uncommitted changes" if git["dirty"] else ""
    tracked = "tracked files, and " if git["dirty"] else ""
    return f"uncommitted changes ({tracked}{untracked})"


def not_kept(git: Fields) -> list[str]:
    """Return which uncommitted changes are too large for the patch of a run; [] if none are."""
    lines = []
    if not git.get("diff_complete", True):
        lines.append(f"of tracked files names only (more than {MOST_DIFF_BYTES:,} bytes)")
    number = untracked_files.number_of(git)
    kept = git.get("num_untracked_kept")
    if kept is not None and kept < number:
        limits = (
            f"{untracked_files.MOST_BYTES:,} bytes in all, {untracked_files.MOST_FILES:,} files"
        )
        lines.append(f"{kept} of {number} untracked Python files (limits: {limits}, text only)")
    return lines


def short_sha(git: Fields) -> str:
    """Return the first digits of a recorded commit, or that there was none."""
    return str(git["sha"])[:10] if git.get("sha") else "no commit"


def described_git(git: Fields | None, kept: bool = True) -> str:
    """Return e.g. "1a2b3c4d5e on main, with uncommitted changes (git.diff)".

    Args:
        git: a recorded git state.
        kept: whether its uncommitted changes are kept in `git.diff`.
    """
    if not git or "dirty" not in git:
        return (git or {}).get("reason") or "no git work tree"
    parts = [f"{short_sha(git)} on {git.get('branch')}"]
    if git["dirty"]:
        only = "" if git.get("diff_complete", True) else ", names only"
        parts.append("with uncommitted changes" + (f" ({DIFF}{only})" if kept else ""))
    untracked = untracked_files.described(git)
    if untracked:
        parts.append(untracked + (f" ({_where_untracked(git)})" if kept else ""))
    others = (git.get("num_untracked") or 0) - untracked_files.number_of(git)
    if others > 0:
        parts.append(f"{others} {'other ' if untracked else ''}untracked files")
    return ", ".join(parts)


def _where_untracked(git: Fields) -> str:
    number, kept = untracked_files.number_of(git), git.get("num_untracked_kept")
    if not kept:
        return "not kept"
    return DIFF if kept == number else f"{kept} of them in {DIFF}"


def version_differences(then: Fields, now: Fields) -> list[str]:
    """Return how the versions of packages and of Python differ in two recorded environments."""
    lines = []
    before, after = then.get("packages") or {}, now.get("packages") or {}
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            was, present = before.get(name) or "not installed", after.get(name) or "not installed"
            lines.append(f"{name} was {was}, and is {present}")
    return lines + _changes_of(then, now, (("python", "Python"),))


def machine_differences(then: Fields, now: Fields) -> list[str]:
    """Return how versions and machine of two recorded environments differ."""
    machine = (
        *(("platform", "the platform"), ("cpu", "the CPU")),
        *(("cpu_count", "the number of CPUs"), ("device", "the accelerator")),
    )
    return version_differences(then, now) + _changes_of(then, now, machine)


def _changes_of(then: Fields, now: Fields, keys: Iterable[tuple[str, str]]) -> list[str]:
    return [
        f"{what} was {_plain(then[key])}, and is {_plain(now.get(key))}"
        for key, what in keys
        if key in then and then[key] != now.get(key)
    ]


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={item}" for name, item in value.items() if name != "names")
    return str(value)

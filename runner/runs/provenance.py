"""Record which code a run was made from: commit, uncommitted changes, sources of packages.

Git has a time limit, and patches have a size limit, so that recording delays no run. Free of torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from accel.machine import env
from runner.runs import json_files
from runner.runs.json_files import Fields, JsonObject

logger = logging.getLogger(__name__)

DIFF = "git.diff"
GIT = ("git", "--no-optional-locks")  # another git command of the user's may hold the index
# What a user's configuration may change, so that `git apply` no longer takes the patch.
DIFF_FORMAT = ("-c", "diff.noprefix=false", "-c", "diff.relative=false")
TOP_LEVEL = ("rev-parse", "--show-toplevel")
STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all")
PLAIN = ("--no-color", "--no-ext-diff", "--no-textconv")
MARK_NEW = (
    *("--literal-pathspecs", "add", "--intent-to-add"),
    *("--pathspec-from-file=-", "--pathspec-file-nul"),
)
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # what a first commit is compared with
GIT_SECONDS = 20.0
MOST_DIFF_BYTES = 10_000_000
MOST_SOURCES, MOST_SOURCE_BYTES = 2_000, 20_000_000
MOST_NAMES = 3


def git_state(folder: str | os.PathLike[str], diff_to: Path | None = None) -> JsonObject:
    """Return commit, branch and uncommitted changes of the work tree that a folder lies in.

    Args:
        folder: any folder of the work tree.
        diff_to: file for the uncommitted changes as a patch for `git apply`, untracked Python files
            included; None: none is written. A patch above `MOST_DIFF_BYTES` is left out.

    Returns:
        sha, branch, dirty (tracked files differ from the commit), untracked (names of Python
        files), diff_sha256, diff_complete. Without a work tree: `reason` alone.
    """
    try:
        root, status = (_git(os.fspath(folder), *one) for one in (TOP_LEVEL, STATUS))
    except FileNotFoundError:
        return {"reason": "git is not installed"}
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("%s", error)
        return {"reason": f"{os.fspath(folder)} lies in no git work tree, or git gave no answer"}
    found = _parsed(os.fsdecode(status).split("\0"))
    patch = b""
    if found["dirty"] or found["untracked"]:
        patch = _patch(os.fsdecode(root).strip(), found["sha"] or EMPTY_TREE, found["untracked"])
    found["diff_sha256"] = hashlib.sha256(patch).hexdigest() if patch else None
    found["diff_complete"] = len(patch) <= MOST_DIFF_BYTES
    if diff_to is not None and patch and found["diff_complete"]:
        diff_to.write_bytes(patch)
    return found


def _git(folder: str, *arguments: str, given: bytes = b"", **variables: str) -> bytes:
    """Return the output of git; a SubprocessError if it fails or gives no answer in time."""
    return subprocess.run(
        [*GIT, "-C", folder, *arguments],
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**env.copy(), **variables},
        timeout=GIT_SECONDS,
        check=True,
    ).stdout


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
        elif kind == "?" and rest.endswith(".py"):
            found["untracked"].append(rest)
    return found


def _patch(root: str, commit: str, untracked: Sequence[str]) -> bytes:
    """Return the uncommitted changes and new files as a patch, cut off one byte behind the limit.

    New files are marked in a copy of the index, so that `git diff` has them, too.
    """
    with tempfile.TemporaryDirectory() as place:
        index = Path(place, "index")
        variable = {"GIT_INDEX_FILE": str(index)}
        try:
            own = os.fsdecode(_git(root, "rev-parse", "--git-path", "index")).strip()
            with contextlib.suppress(FileNotFoundError):  # nothing was ever added
                shutil.copy2(Path(root, own), index)  # git compares its time with the files'
            if untracked:
                _git(root, *MARK_NEW, given=os.fsencode("\0".join(untracked)), **variable)
            command = [*GIT, "-C", root, *DIFF_FORMAT, "diff", commit, "--binary", *PLAIN]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, env=env.copy() | variable
            ) as process:
                assert process.stdout is not None
                patch = process.stdout.read(MOST_DIFF_BYTES + 1)
                process.kill()
                return patch
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("The uncommitted changes could not be recorded: %s", error)
            return b""


# -- sources of packages -------------------------------------------------------------------


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
    names = sorted(str(one.relative_to(root)) for one in root.rglob("*.py"))
    return _digest_of_sources(root, names)


def _digest_of_sources(root: Path, names: Sequence[str]) -> str | None:
    """Return a digest of files; None: there are none, or too many."""
    digest, size = hashlib.sha256(), 0
    if not names or len(names) > MOST_SOURCES:
        return None
    for name in names:
        with contextlib.suppress(OSError):  # removed meanwhile
            content = (root / name).read_bytes()
            size += len(content)
            if size > MOST_SOURCE_BYTES:
                return None
            digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape"))
            digest.update(content)
    return digest.hexdigest()


# -- in words ------------------------------------------------------------------------------


def code_differences(then: Fields, now: Fields) -> list[str]:
    """Return how the code of two recorded environments differs, a sentence each; [] if it does not.

    Args:
        then: content of a run's environment.json.
        now: that of another, or of this process.
    """
    before, after = then.get("code") or {}, now.get("code") or {}
    changed = [name for name in before if name in after and before[name] != after[name]]
    return _git_differences(then.get("git") or {}, now.get("git") or {}) + [
        f"the Python files of the package {package} differ" for package in changed
    ]


def code_id(recorded: Fields) -> str:
    """Return a short name of recorded code, equal for equal code; empty: none is known.

    It begins with the project's commit, and has a digest of all that `code_differences` compares.
    """
    git = recorded.get("git") or {}
    parts = [git.get("sha"), git.get("diff_sha256")]
    if "dirty" not in git and not recorded.get("code"):
        return ""
    digest = json_files.digest([parts, recorded.get("code")])
    return f"{git['sha'][:8]}-{digest[:6]}" if git.get("sha") else digest[:8]


def _git_differences(before: Fields, after: Fields) -> list[str]:
    known = "dirty" in before, "dirty" in after
    if known == (False, False):
        return []
    if not all(known):
        where = "then" if known[1] else "now"
        return [f"the project has no git state {where}: its code cannot be compared by commit"]
    lines = []
    if before.get("sha") != after.get("sha"):
        lines.append(f"the project was at commit {short_sha(before)}, and is at {short_sha(after)}")
    if before.get("diff_sha256") != after.get("diff_sha256"):
        was, present = uncommitted(before), uncommitted(after)
        same = "of other contents " if was == present else ""
        lines.append(f"the project had {was}, and has {present} {same}".rstrip())
    return lines


def uncommitted(git: Fields) -> str:
    """Return e.g. "uncommitted changes (1 untracked Python file: new.py)"."""
    names = git.get("untracked") or []
    if not names:
        return "uncommitted changes" if git.get("dirty") else "no uncommitted changes"
    listed = ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")
    found = f"{len(names)} untracked Python file{'' if len(names) == 1 else 's'}: {listed}"
    return f"uncommitted changes ({'tracked files, and ' if git.get('dirty') else ''}{found})"


def short_sha(git: Fields) -> str:
    """Return the first digits of a recorded commit, or that there was none."""
    return str(git["sha"])[:10] if git.get("sha") else "no commit"


def described_git(git: Fields | None) -> str:
    """Return e.g. "1a2b3c4d5e on main, with uncommitted changes (git.diff)"."""
    if not git or "dirty" not in git:
        return (git or {}).get("reason") or "no git work tree"
    where = f"{short_sha(git)} on {git.get('branch')}"
    if not git["dirty"] and not git.get("untracked"):
        return where
    is_kept = git.get("diff_complete", True)
    kept = DIFF if is_kept else f"not kept: more than {MOST_DIFF_BYTES:,} bytes"
    return f"{where}, with {uncommitted(git)} ({kept})"

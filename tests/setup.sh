#!/usr/bin/env bash
# Print the path of a Python that has what `run`, `test` or `check` needs, installing it if need be.
# Progress goes to stderr. See the head of the Makefile for which Python is taken.
set -euo pipefail
cd "$(dirname "$0")/.."
purpose=${1:?run, test or check}

suitable() { # has this Python a torch that the project supports?
  "$1" -c 'import sys
from importlib.metadata import version
sys.exit(sys.version_info < (3, 11) or tuple(map(int, version("torch").split(".")[:2])) < (2, 9))' 2>/dev/null
}

missing() { # the requirements of this purpose that this Python lacks, one a line
  "$1" - "$purpose" <<'PY'
import re, sys, tomllib
from importlib.metadata import PackageNotFoundError, version

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = list(project["dependencies"])
if sys.argv[1] in project["optional-dependencies"]:
    wanted += project["optional-dependencies"][sys.argv[1]]
for line in wanted:
    name = re.match(r"[\w-]+", line).group()
    if name == "deepspeed":  # imported only when asked for
        continue
    try:
        version(name)
    except PackageNotFoundError:
        print(line.split(";")[0].strip())
PY
}

active=${VENV:-${VIRTUAL_ENV:-${CONDA_PREFIX:-}}}
if [ -n "${VENV:-}" ] && [ ! -x "$VENV/bin/python" ]; then
  echo "VENV=$VENV: there is no $VENV/bin/python. Name the folder of an environment." >&2
  exit 2
fi
if [ -n "$active" ] && suitable "$active/bin/python"; then
  python=$active/bin/python
  lacking=$(missing "$python")
  if [ -n "$lacking" ]; then
    echo "Adding to $active: $(echo $lacking)" >&2
    torch=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
    printf 'torch==%s\n' "$torch" > "${TMPDIR:-/tmp}/torch-constraint.$$"
    mapfile -t lines <<< "$lacking"
    "$python" -m pip install -q -c "${TMPDIR:-/tmp}/torch-constraint.$$" "${lines[@]}" >&2
    rm -f "${TMPDIR:-/tmp}/torch-constraint.$$"
  fi
  echo "$python"
  exit
fi

if [ -n "${VENV:-}" ]; then
  folder=$VENV
else
  folder=$PWD/.venv
fi
if [ ! -x "$folder/bin/python" ]; then
  host=$(command -v python3 || true)
  if [ -z "$host" ] || ! "$host" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "python3 is $("$host" --version 2>/dev/null || echo missing): Python 3.11 or newer is needed. Install it, or name an environment with VENV=<folder>." >&2
    exit 2
  fi
  echo "Creating $folder" >&2
  "$host" -m venv "$folder"
fi

# One stamp per purpose: nothing is installed twice while pyproject.toml and constraints.txt stay.
stamp=$folder/.installed-$purpose-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
  extras=; [ "$purpose" = run ] || extras="[$purpose]"
  echo "Installing from constraints.txt (a few minutes the first time)" >&2
  "$folder/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt torch >&2
  "$folder/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -e ".$extras" >&2
  touch "$stamp"
fi
echo "$folder/bin/python"

#!/usr/bin/env bash
# Makes the virtual environment ready and prints the path of its Python: bash scripts/setup.sh [EXTRA ...]
#
# Once the environment is up to date this costs a fraction of a second: a stamp in it records the Python version,
# this checkout, the extras and a hash of pyproject.toml and constraints.txt.
#
#   PYTHON                     interpreter to make the environment with (default: the first that runs and is in range)
#   STABILITY_LAB_VENV         the environment's folder (default: .venv in the checkout)
#   STABILITY_LAB_TORCH_INDEX  a further package index, for another build of torch
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${STABILITY_LAB_VENV:-$root/.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
venv_python="$venv/bin/python"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Some interpreters on a PATH are shims that fail when called, and some lack venv: only a try tells.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

minor_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.11, 3.12 or 3.13 with the venv module."
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python3.11 python3.12 python3.13; do
        if usable "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no working Python 3.11, 3.12 or 3.13 with the venv module was found on PATH: install one, or set PYTHON."
}

# Prints what the environment must match, then what it holds (base and extras); fails where its Python does not work.
inspect() {
    "$venv_python" - "$root" "$venv/stability-lab-stamp" <<'PY'
import hashlib, pathlib, sys

root, stamp = map(pathlib.Path, sys.argv[1:])
if not (3, 11) <= sys.version_info[:2] < (3, 14):
    sys.exit(1)
digest = hashlib.sha256()
for name in ("pyproject.toml", "constraints.txt"):
    digest.update((root / name).read_bytes())
key = f"{sys.version.split()[0]} {digest.hexdigest()} {root}"
lines = stamp.read_text().splitlines() if stamp.exists() else []
print(key)
print(lines[1] if len(lines) == 2 and lines[0] == key else "nothing")
PY
}

# An environment with an extra too many serves as well, so that the two scripts do not undo each other's work.
missing() {
    local part
    for part in "${wanted[@]}"; do
        case " $1 " in *" $part "*) ;; *) return 0 ;; esac
    done
    return 1
}

wanted=(base "$@")
if [ -n "${PYTHON:-}" ] && [ -x "$venv_python" ]; then
    asked="$(minor_version "$PYTHON")"
    held="$(minor_version "$venv_python")"
    if [ -n "$held" ] && [ "$asked" != "$held" ]; then
        die "PYTHON=$PYTHON is Python ${asked:-(it does not run)} but $venv holds $held:" \
            "remove that folder, or set STABILITY_LAB_VENV to another one."
    fi
fi

if ! state="$(inspect 2>/dev/null)"; then
    if [ -d "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        die "$venv is not a virtual environment and not empty: set STABILITY_LAB_VENV to another folder."
    fi
    python="$(find_python)"
    say "Making the environment $venv with $("$python" --version 2>&1); the first set-up takes some minutes."
    "$python" -m venv --clear "$venv" >&2 || die "could not make a virtual environment in $venv."
    state="$(inspect)"
fi
key="${state%%$'\n'*}"
held="${state##*$'\n'}"

if missing "$held"; then
    [ "$held" != nothing ] || held=""
    # shellcheck disable=SC2086  # held is a list of words
    parts="$(printf '%s\n' $held "${wanted[@]}" | sort -u | tr '\n' ' ')"
    parts="${parts% }"
    extras="${parts#base}"
    extras="${extras# }"
    target=".${extras:+[${extras// /,}]}"
    index=()
    [ -z "${STABILITY_LAB_TORCH_INDEX:-}" ] || index=(--extra-index-url "$STABILITY_LAB_TORCH_INDEX")
    say "Installing stability_lab and its pinned requirements ($parts) into $venv."
    rm -f "$venv/stability-lab-stamp"
    # A relative path, because pip splits the values of its environment variables at spaces.
    (cd "$root" && PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$venv_python" -m pip install -c constraints.txt ${index[@]+"${index[@]}"} -e "$target") >&2 ||
        die "pip could not install the requirements into $venv (its messages are above): check the package index" \
            "and the free disk space, then start this again."
    printf '%s\n%s\n' "$key" "$parts" >"$venv/stability-lab-stamp"
fi
printf '%s\n' "$venv_python"

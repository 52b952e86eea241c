#!/usr/bin/env bash
# Sets a fresh machine up, then runs tests:
#   bash scripts/test.sh                  the quick suite: whatever is neither slow nor for a GPU
#   bash scripts/test.sh ARGUMENTS        pytest with these arguments (paths are relative to the checkout)
#   bash scripts/test.sh --all ARGUMENTS  everything but the GPU tests, no oracle skipped, then linter and types
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$(bash "$root/scripts/setup.sh" dev)"
# Threads that wait by spinning make a shared machine ten times slower; waiting asleep costs an idle one some percent.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
cd "$root"
# One process a core; a test that is free goes to whichever process has nothing left to do.
parallel=(-n auto --dist worksteal)

if [ "$#" -eq 0 ]; then
    exec "$python" -m pytest "${parallel[@]}" -m "not slow and not gpu"
elif [ "$1" != --all ]; then
    exec "$python" -m pytest "$@"
fi
shift

failed=()
PYTHONPATH="$root/scripts${PYTHONPATH:+:$PYTHONPATH}" \
    "$python" -m pytest "${parallel[@]}" -p strict_oracles -m "not gpu" "$@" || failed+=(pytest)
"$python" -m ruff check || failed+=("ruff check")
"$python" -m ruff format --check || failed+=("ruff format")
"$python" -m pyright --pythonpath "$python" || failed+=(pyright)
if [ "${#failed[@]}" -gt 0 ]; then
    printf 'failed: %s\n' "$(IFS=,; printf '%s' "${failed[*]}")" >&2
    exit 1
fi

#!/usr/bin/env bash
# Everything that only a GPU can show, in one run below six minutes; docs/gpu/README.md says what.
#   bash scripts/gpu_check.sh                  with the packages that $PYTHON (default python3) has
#   bash scripts/gpu_check.sh --wheels DIR     and with the wheels in DIR (scripts/gpu_wheels.sh collects them)
#   bash scripts/gpu_check.sh --dry            rehearse on a CPU: tiny sizes, nothing is kept
#   bash scripts/gpu_check.sh --out FILE       where the JSON goes (default docs/gpu/DEVICE-DATE.json)
#   bash scripts/gpu_check.sh --only A,B       some of the sections environment, tests, speed, parts, ablation
# Nothing is installed into the Python: wheels go to a temporary folder. No network is used.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
wheels=""
arguments=()
while [ "$#" -gt 0 ]; do
    case "$1" in
    --wheels)
        [ "$#" -ge 2 ] || { echo "error: --wheels needs a folder" >&2; exit 2; }
        wheels="$2"
        shift 2
        ;;
    --wheels=*)
        wheels="${1#--wheels=}"
        shift
        ;;
    *)
        arguments+=("$1")
        shift
        ;;
    esac
done
"$python" -c 'import torch' 2>/dev/null || {
    echo "error: $python has no torch: set PYTHON, for example PYTHON=.venv/bin/python" >&2
    exit 2
}

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$wheels" ]; then
    files=("$wheels"/*.whl)
    [ -e "${files[0]}" ] || { echo "error: --wheels $wheels: no .whl file is there" >&2; exit 2; }
    "$python" -m pip install --quiet --no-index --no-deps --no-cache-dir --disable-pip-version-check \
        --target "$work/site" "${files[@]}"
    PYTHONPATH="$work/site:$PYTHONPATH"
fi
# Tokens and compiled kernels of this run end with it: a second run measures the same as the first.
export STABILITY_LAB_CACHE="$work/cache" TORCHINDUCTOR_CACHE_DIR="$work/inductor" TRITON_CACHE_DIR="$work/triton"
export TOKENIZERS_PARALLELISM=false
"$python" "$root/scripts/gpu_check.py" ${arguments[@]+"${arguments[@]}"}

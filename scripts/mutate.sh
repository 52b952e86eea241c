#!/usr/bin/env bash
# Breaks defining lines one at a time in a temporary copy of the checkout and expects the tests to notice.
#   bash scripts/mutate.sh          every mutant of scripts/mutants.py
#   bash scripts/mutate.sh zloss    those whose file or test contains the word
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$(bash "$root/scripts/setup.sh" dev)"
exec "$python" "$root/scripts/mutants.py" "$@"

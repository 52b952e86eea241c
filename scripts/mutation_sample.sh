#!/usr/bin/env bash
# Tries a random sample of mutants and prints the survivors and the share that the tests notice. By hand: it takes hours on two cores.
#   bash scripts/mutation_sample.sh                             60 mutants of judge, statistics, training and model
#   bash scripts/mutation_sample.sh judge --number 20 --seed 1  20 of one area, another sample
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$(bash "$root/scripts/setup.sh" dev mutation)"
exec "$python" "$root/scripts/mutation_sample.py" "$@"

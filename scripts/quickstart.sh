#!/usr/bin/env bash
# Sets a fresh machine up, then trains a small GPT with QK-norm on real text; further arguments go to the run:
#   bash scripts/quickstart.sh trainer.max_steps=100 seed=1
# The run is written below ./outputs of the folder in which this is started.
set -euo pipefail

python="$(bash "$(dirname "${BASH_SOURCE[0]}")/setup.sh")"
# Threads that wait by spinning make a shared machine ten times slower; waiting asleep costs an idle one some percent.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
exec "$python" -m stability_lab train +stabilizer=qknorm "$@"

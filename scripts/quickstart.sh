#!/usr/bin/env bash
# Sets a fresh machine up, then shows a run that breaks and the same run rescued. With arguments it trains a small GPT with
# QK-norm on real text instead, and they go to the run:
#   bash scripts/quickstart.sh trainer.max_steps=100 seed=1
# Runs are written below ./outputs of the folder in which this is started.
set -euo pipefail

python="$(bash "$(dirname "${BASH_SOURCE[0]}")/setup.sh")"
# Threads that wait by spinning make a shared machine ten times slower; waiting asleep costs an idle one some percent.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
if [ "$#" -eq 0 ]; then
    exec "$python" -m stability_lab demo
fi
exec "$python" -m stability_lab train +stabilizer=qknorm "$@"

#!/usr/bin/env bash
# epmoe over the processes of one machine: launch/torchrun.sh RANKS CONFIG [options of `epmoe run`]
# With --standalone torchrun takes a free port, so that several runs can share a machine.
set -euo pipefail
ranks=${1:?usage: $0 RANKS CONFIG [options of epmoe run]}
shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun --standalone --nproc-per-node "$ranks" -m epmoe run "$@"

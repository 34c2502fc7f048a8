#!/usr/bin/env bash
# epmoe under torchrun, on one machine: launch/torchrun.sh RANKS CONFIG [options of `epmoe run`]
# With --standalone torchrun takes a free port, so that several runs can share a machine.
#
# On several machines, the same command on each of them, with HEAD one of them and a free port of it:
#   NODES=2 HEAD=host0:29500 launch/torchrun.sh RANKS CONFIG [options of `epmoe run`]
# RANKS are those of one machine: `topology.ranks_per_node` of CONFIG, and `topology.ep_size` is NODES times as many.
set -euo pipefail
ranks=${1:?usage: $0 RANKS CONFIG [options of epmoe run]}
shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
where=(--standalone)
if [ "${NODES:-1}" != 1 ]; then
  where=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "${HEAD:?HEAD=HOST:PORT, one of the $NODES machines}" --rdzv-id epmoe)
fi
exec torchrun "${where[@]}" --nproc-per-node "$ranks" -m epmoe run "$@"

#!/usr/bin/env bash
# Tests of several nodes on the GPUs of one machine, which NCCL takes for two: their ranks have host ids of their own and
# reach one another by sockets. Run it as `tests/two_gpu_nodes.sh RANKS [ARGUMENTS OF PYTEST]`, RANKS 2 or 4.
set -euo pipefail
cd "$(dirname "$0")/.."
ranks=$1
shift
[ $# -gt 0 ] || set -- tests/distributed/test_two_levels.py tests/distributed/test_two_levels_cuda.py
export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
exec torchrun --standalone --nproc-per-node "$ranks" --no-python bash -c '
  export NCCL_HOSTID=node$((2 * RANK / WORLD_SIZE))
  exec "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider -m gpu "$@"
' pytest "$@"

#!/usr/bin/env bash
# Two machines on one, joined by a network of their own: tests/two_machines.sh RATE COMMAND...
#
# A machine is a network namespace with its own host name and boot id; a veth pair joins the two, and a token bucket
# shapes each end to RATE, such as 1gbit. COMMAND runs under torchrun with two ranks on each machine. Ranks of one
# machine share memory; between the machines there is gloo over TCP. Where namespaces cannot be made, which needs root,
# four ranks of this machine run COMMAND instead, and a line says so.
#
# tests/two_machines.sh RATE alone COMMAND... runs COMMAND once, outside of the machines, with the names of their
# namespaces in EPMOE_TEST_NAMESPACES; they are empty where namespaces cannot be made.
set -euo pipefail
rate=${1:?usage: $0 RATE COMMAND...}
shift

pair=epmoe$$
state=$(mktemp -d)
agents=()

remove() {
  for agent in "${agents[@]}"; do kill -KILL -- "-$agent" 2> /dev/null || true; done
  for n in 0 1; do ip netns del "$pair-$n" 2> /dev/null || true; done
  rm -rf "$state"
}
trap remove EXIT

make() {
  for n in 0 1; do
    ip netns add "$pair-$n" && ip -n "$pair-$n" link set lo up || return 1
    cat /proc/sys/kernel/random/uuid > "$state/boot_id$n"
  done
  printf '127.0.0.1 localhost\n192.0.2.1 machine0\n192.0.2.2 machine1\n' > "$state/hosts"
  ip link add wire0 netns "$pair-0" type veth peer name wire1 netns "$pair-1" || return 1
  for n in 0 1; do
    ip -n "$pair-$n" addr add "192.0.2.$((n + 1))/24" dev "wire$n"
    ip -n "$pair-$n" link set "wire$n" up
    # A bucket of 32 KiB: a larger one lets small slabs pass unshaped. Packets of several segments have to fit into it,
    # else the bucket takes them apart and falls short of the rate.
    ip -n "$pair-$n" link set "wire$n" gso_max_size 16384 || return 1
    ip netns exec "$pair-$n" tc qdisc add dev "wire$n" root tbf rate "$rate" burst 32kb latency 50ms || return 1
  done
}

# machine N COMMAND...
machine() {
  local n=$1
  shift
  ip netns exec "$pair-$n" unshare --uts --mount bash -euc '
    hostname "machine$1"
    mount --bind "$2/boot_id$1" /proc/sys/kernel/random/boot_id
    mount --bind "$2/hosts" /etc/hosts
    export GLOO_SOCKET_IFNAME="wire$1" TP_SOCKET_IFNAME="wire$1"
    shift 2
    exec "$@"' _ "$n" "$state" "$@"
}

if ! make 2> "$state/why"; then
  echo "SKIPPED: two machines, as namespaces cannot be made here ($(tail -n 1 "$state/why")); four ranks of one instead"
  [ "$1" != alone ] || { shift; EPMOE_TEST_NAMESPACES='' "$@"; exit; }
  torchrun --standalone --nproc-per-node 4 "$@"
  exit
fi

[ "$1" != alone ] || { shift; EPMOE_TEST_NAMESPACES="$pair-0 $pair-1" "$@"; exit; }

set -m # each agent gets a process group
for n in 0 1; do
  machine $n torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 192.0.2.1:29500 \
    --local-addr "192.0.2.$((n + 1))" "$@" > "$state/log$n" 2>&1 &
  agents+=($!)
done
failed=0
for agent in "${agents[@]}"; do wait "$agent" || failed=1; done
agents=()
cat "$state/log0"
[ $failed = 0 ] || tail -n 60 "$state/log1"
exit $failed

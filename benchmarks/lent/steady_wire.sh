#!/usr/bin/env bash
# Runs a command while loopback carries at most RATE, in both directions together: a wire whose speed does not move from call to call.
#   benchmarks/lent/steady_wire.sh RATE COMMAND [ARGUMENT...]         RATE as tc reads it: 40gbit
# Needs root and tc (iproute2; TC names another than the one on the path). Without a limit the same 32 MiB between two pretended
# nodes took 4.4 to 8.2 ms within one run.
set -uo pipefail

rate=${1:?a rate, for instance 40gbit}
shift
tc=${TC:-tc}
"$tc" qdisc add dev lo root tbf rate "$rate" burst 2mb latency 100ms || exit 1
trap '"$tc" -s qdisc show dev lo >&2; "$tc" qdisc del dev lo root' EXIT
"$@"

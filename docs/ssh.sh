#!/bin/bash
# An elastic run on machines that are reached by ssh, in a folder that they share; launchers elect their host in etcd.
#
#   NODES="node1 node2" ETCD=https://ETCD:2379 bash docs/ssh.sh data.source=corpus/ run_name=mine
#
# ssh must need no password. moe-train must be in the PATH of a login shell, and variables of etcdctl for users and
# certificates are set in the profile of the machines. Ctrl-C, or the loss of this terminal, ends the run on all of them.
set -u
: "${NODES:?name the machines, such as NODES='node1 node2'}"
: "${ETCD:?give the address of etcd, such as ETCD=https://HOST:2379}"
read -ra nodes <<< "$NODES"
id="${RDZV_ID:-ssh-$(date +%s)-$$}"
printf -v arguments '%q ' "$@"
pids=()
for node in "${nodes[@]}"; do
  ssh -tt -o BatchMode=yes -o ServerAliveInterval=5 "$node" "cd $(printf %q "$PWD") && exec bash -lc $(printf %q "exec moe-train \
    callbacks=fault_recovery elastic.settings.membership=etcd elastic.rdzv_endpoint=\"'$ETCD'\" elastic.rdzv_id=$id \
    elastic.num_nodes=${#nodes[@]} ${RANKS:+ranks=$RANKS} $arguments")" < /dev/null &
  pids+=($!)
done
trap 'kill "${pids[@]}" 2> /dev/null' INT TERM HUP
status=1
for pid in "${pids[@]}"; do
  wait "$pid" && status=0
done
exit "$status"

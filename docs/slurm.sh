#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --cpus-per-task=64 --gpus-per-node=8 --mem=0 --exclusive --no-kill --requeue
#
# An elastic run under SLURM: one job step per node, so that a lost node ends only its own step.
#
#   sbatch docs/slurm.sh data.source=corpus/ run_name=mine       # from a folder that the nodes share
#   ETCD=https://ETCD:2379 sbatch docs/slurm.sh ...              # launchers elect a rendezvous host; none is started
#
# --mem=0 requests all memory of a node. srun does not inherit --cpus-per-task from sbatch. The rendezvous host runs until a
# signal: the job stops it after the last step, and succeeds if any step has succeeded.
if [ -n "${ETCD:-}" ]; then
  rendezvous=(elastic.settings.membership=etcd "elastic.rdzv_endpoint='$ETCD'" elastic.rdzv_id="slurm-$SLURM_JOB_ID")
else
  host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  secret="$HOME/run-$SLURM_JOB_ID.secret"
  srun --nodes=1 --ntasks=1 --cpus-per-task=1 --nodelist="$host" --overlap \
    python -m moe_lightning.elastic.rendezvous_host --bind "$host:29510" --secret-file "$secret" &
  server=$!
  trap 'kill "$server" 2>/dev/null; wait "$server"; rm -f "$secret"' EXIT
  until [ -s "$secret" ]; do
    kill -0 "$server" || exit 1
    sleep 1
  done
  rendezvous=(elastic.rdzv_endpoint="$host:29510" elastic.secret_file="$secret")
fi

steps=()
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  srun --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --nodelist="$node" --overlap \
    ${SLURM_GPUS_ON_NODE:+--gpus="$SLURM_GPUS_ON_NODE"} moe-train callbacks=fault_recovery "${rendezvous[@]}" elastic.num_nodes="$SLURM_JOB_NUM_NODES" \
    ranks="${SLURM_GPUS_ON_NODE:-auto}" "$@" &
  steps+=($!)
done

status=1
for step in "${steps[@]}"; do
  wait "$step" && status=0
done
exit "$status"

#!/usr/bin/env bash
# Training on several GPU nodes under SLURM: one process a GPU, which JAX finds by itself.
#
#   sbatch --nodes=8 launch/slurm.sh --config=configs/vicuna33b.py --workdir=/shared/vicuna33b
#
# The workdir, the data and the model lie on a file system that all nodes see. SIGTERM comes two
# minutes before the time is over, or when the job is preempted: all processes save after the same
# step, and the job goes back into the queue. A node that fails ends the job, which then starts again
# from the last checkpoint.
#SBATCH --job-name=medusa
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

[ $# -gt 0 ] || { echo "usage: sbatch --nodes=N launch/slurm.sh --config=... --workdir=..." >&2; exit 2; }
. "${VENV:-.venv}/bin/activate"
# All of them or none: the others would wait for one that is gone.
status=0
srun --kill-on-bad-exit=1 python train.py "$@" || status=$?

workdir=$(printf '%s\n' "$@" | sed -n 's/^--workdir=//p')
[ -d "$workdir/export" ] && exit "$status"
case $status in
    1 | 2) ;; # a mistake, which the next attempt would make again
    *) [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ] || scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$status"

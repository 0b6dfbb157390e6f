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
# Preemption may signal this shell as well: its end would be the job's, before the processes have saved.
trap : TERM
# All of them or none: the others would wait for one that is gone. Since SLURM 22.05 srun no longer
# takes the number of CPUs from the job.
status=0
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py "$@" || status=$?

case $status in
    0 | 1 | 2) ;; # done, or a mistake, which the next attempt would make again
    *) [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ] || scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$status"

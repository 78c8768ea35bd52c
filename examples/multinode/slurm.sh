#!/usr/bin/env bash
# sbatch examples/multinode/slurm.sh --out /shared/runs/gpt
#
# One process for each GPU. Lightning finds out by itself who is where. Arguments are passed on to train.py; those of
# sbatch before the script's name (--nodes=4) go before the ones below.
#
# Five minutes before the time is over SLURM sends SIGUSR1 to all processes: they save together, Lightning asks SLURM to
# queue the job again, and it goes on from there. A job that is preempted gets a SIGTERM: all processes save and end, and
# --requeue queues it again. One that dies goes on from the last checkpoint when it is submitted again, on as many hosts
# or on others.
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=SIGUSR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
# SLURM runs a copy of this file from a folder of its own, so paths count from where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-$PWD}"
# Worth a look before the first training: srun python -m lightning_zero doctor
exec srun --kill-on-bad-exit=1 python examples/multinode/train.py "$@"

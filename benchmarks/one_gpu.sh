#!/usr/bin/env bash
# Runs a command whose N ranks share this machine's GPU, each on its part of the multiprocessors, under a new MPS server
# (a process that was killed may leave behind a server that no longer works).
#
#   benchmarks/one_gpu.sh 2 shardline bench overlap --model llama3 --flavor 8B --tp 2 --seq 8192
#   benchmarks/one_gpu.sh 4 python -m pytest tests/parity/test_fused_gpu.py -m slow
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 N COMMAND..." >&2; exit 2; }
ranks=$1
shift
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1
mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d
trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$folder"' EXIT
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / ranks)) "$@"

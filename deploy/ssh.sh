#!/bin/bash
# Starts one part of a training on each host, over ssh, and ends with the code of the first part, in
# the order of the hosts, that failed. Ctrl-C ends all parts.
#
#   bash deploy/ssh.sh host-a host-b                 # rank 0 is on host-a
#   FOLDER=/srv/ddp_mnist ARGS="--epochs 5" bash deploy/ssh.sh 192.168.1.201 192.168.1.202
#
# Each host has the repository in FOLDER, with its .venv made. The first name or address has to be
# one under which the other hosts reach the first. TARGET=doctor examines the hosts instead.

set -u
FOLDER=${FOLDER:-ddp_mnist}
TARGET=${TARGET:-train-multinode}
ARGS=${ARGS:-}
PORT=${MAIN_PROCESS_PORT:-}
PROCESSES=${NPROC_PER_NODE:-}

if [ "$#" -lt 2 ]; then
    echo "ssh.sh: give at least two hosts, the one of rank 0 first" >&2
    exit 2
fi

main=$1 rank=0 parts=()
trap 'kill "${parts[@]}" 2>/dev/null' INT TERM EXIT
for host in "$@"; do
    # -tt: a terminal there, so that the part ends when its ssh does.
    ssh -tt "$host" "cd $FOLDER && make --no-print-directory $TARGET MACHINE_RANK=$rank \
MAIN_PROCESS_IP=$main NUM_MACHINES=$# MAIN_PROCESS_PORT=$PORT NPROC_PER_NODE=$PROCESSES \
ARGS='$ARGS'" </dev/null &
    parts+=("$!")
    rank=$((rank + 1))
done

code=0
for part in "${parts[@]}"; do
    wait "$part"
    ended=$?
    if [ "$code" -eq 0 ]; then
        code=$ended
    fi
done
exit "$code"

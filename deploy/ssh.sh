#!/bin/bash
# Starts one part of a training on each host, over ssh, and ends with the first error among them.
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

if [ "$#" -lt 2 ]; then
    echo "ssh.sh: give at least two hosts, the one of rank 0 first" >&2
    exit 2
fi

main=$1 rank=0 parts=()
for host in "$@"; do
    # -tt: a terminal there, so that the part ends when this end of the line does.
    ssh -tt "$host" "cd $FOLDER && make --no-print-directory $TARGET MACHINE_RANK=$rank \
MAIN_PROCESS_IP=$main NUM_MACHINES=$# ARGS='$ARGS'" </dev/null &
    parts+=("$!")
    rank=$((rank + 1))
done

code=0
for part in "${parts[@]}"; do
    wait "$part" || code=$?
done
exit "$code"

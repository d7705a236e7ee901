#!/bin/bash
# Starts one part of a training on each host, over ssh, each line of output with its host in front.
#
#   bash deploy/ssh.sh host-a host-b                 # rank 0 is on host-a
#   FOLDER=/srv/ddp_mnist ARGS="--epochs 5" bash deploy/ssh.sh 192.168.1.201 192.168.1.202
#
# Each host has the repository in FOLDER, with its .venv made, and lets you in by a key. The first
# name or address has to be one under which the other hosts reach the first. TARGET=doctor examines
# the hosts instead.
#
# Ctrl-C is passed on to all parts, which save and end. When a part fails, the others have 10 s to
# end by themselves before they get a Ctrl-C, and a minute more before they are cut off. The exit
# code is 130 after Ctrl-C, else that of the part that failed first.

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

# FOLDER and ARGS are taken as typed: quotes in ARGS keep words together, and nothing in it is run.
# The shell of each host, and make's, take off a layer of quotes each; make takes $$ for $.
quoted() {
    local quote="'\\''"
    printf "'%s'" "${1//\'/$quote}"
}
if ! words=$(xargs -n 1 printf '%s\n' <<<"$ARGS"); then
    echo "ssh.sh: ARGS=$ARGS: close the quote" >&2
    exit 2
fi
args=
while IFS= read -r word && [ "$words" ]; do
    args+=" $(quoted "${word//\$/\$\$}")"
done <<<"$words"

hosts=("$@") parts=() labels=()
code=0 left=0 # the first failure, and how many seconds the parts have after it
pipes=$(mktemp -d) || exit 1
trap 'kill "${parts[@]}" 2>/dev/null; rm -r "$pipes"' EXIT
trap 'code=130 left=60; press_ctrl_c' INT
trap 'exit 143' TERM

label() {
    trap '' INT # the last lines come after it
    while IFS= read -r line || [ -n "$line" ]; do
        printf '%s: %s\n' "$1" "${line%$'\r'}" # a terminal ends lines with both
    done
}

press_ctrl_c() {
    local rank
    for rank in "${!parts[@]}"; do
        printf '\003' 1<>"$pipes/keys-$rank" # opened for both, it does not wait for a reader
    done
}

for rank in "${!hosts[@]}"; do
    host=${hosts[rank]}
    mkfifo "$pipes/keys-$rank" "$pipes/screen-$rank"
    label "$host" <"$pipes/screen-$rank" &
    labels+=("$!")
    # A terminal there (-tt) takes Ctrl-C, and the part ends when its ssh does; a dumb one has no
    # progress bar, whose lines could not be labelled. Nobody could answer a question (BatchMode). A
    # host that is down or is gone is given up after 10 s, or a minute.
    TERM=dumb ssh -tt -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=20 \
        -o LogLevel=ERROR "$host" "cd $(quoted "$FOLDER") && make --no-print-directory $(quoted "$TARGET") \
MACHINE_RANK=$rank MAIN_PROCESS_IP=${1##*@} NUM_MACHINES=$# MAIN_PROCESS_PORT=$PORT \
NPROC_PER_NODE=$PROCESSES ARGS=$(quoted "$args")" <>"$pipes/keys-$rank" >"$pipes/screen-$rank" 2>&1 &
    parts+=("$!")
done

running=("${!hosts[@]}")
while [ "${#running[@]}" -gt 0 ]; do
    sleep 1
    for rank in "${running[@]}"; do
        if kill -0 "${parts[rank]}" 2>/dev/null; then continue; fi
        wait "${parts[rank]}"
        ended=$?
        unset "running[rank]"
        if [ "$ended" -eq 0 ] || [ "$code" -ne 0 ]; then continue; fi
        code=$ended left=70
        if [ "$code" -eq 255 ]; then
            echo "ssh.sh: ${hosts[rank]}: ssh ended with code 255; make \`ssh ${hosts[rank]} true\`" \
                "work without a question (ssh-copy-id installs a key), then start again" >&2
        fi
    done
    left=$((left - 1))
    if [ "$left" -eq 60 ]; then press_ctrl_c; fi
    if [ "$left" -eq 0 ]; then kill "${parts[@]}" 2>/dev/null; fi
done
wait "${labels[@]}"
exit "$code"

#!/bin/sh
# Checks whether the service of this container is ready. If it is not, prints the reason as one line
# and exits with 1.
#
#     probe.sh [FILE [SECONDS]]
#
# FILE is the service's --health-file, which it writes once a second. Its format is described in
# services/common/process/health_file.py. A line that is older than SECONDS is stale, but time in
# which the process waited for a processor does not count. Only builtins of the shell are used,
# because starting a program would take longer than the rest of the probe.
file=${1:-/tmp/health}
longest=${2:-10}

no() {
    echo "$1"
    exit 1
}

[ -r "$file" ] || no "the service has not yet written its health file $file"
read -r state pid beat ran waited < "$file"
[ "$state" = ready ] || no "the service is not ready, its state is $state"
read -r uptime _ < /proc/uptime
age=$((${uptime%%.*} - beat))
[ "$age" -le "$longest" ] && exit 0

# The line is too old. Either the service hangs, or it has waited for a processor.
[ -r "/proc/$pid/stat" ] || no "the process of the service has ended"
read -r stat < "/proc/$pid/stat"
ran_now=$ran waited_now=$waited
[ -r "/proc/$pid/schedstat" ] && read -r ran_now waited_now _ < "/proc/$pid/schedstat"
starved=$(((waited_now - waited) / 1000000000))
case ${stat##*) } in
    [Tt]*) no "the process of the service is stopped (SIGSTOP)" ;;
    # Linux counts a wait for a processor only when it is over.
    R*) starved=$((age - (ran_now - ran) / 1000000000)) ;;
esac
[ $((age - starved)) -le "$longest" ] || no "the service hangs: it has not updated its health file for $age s"

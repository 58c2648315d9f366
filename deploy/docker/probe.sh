#!/bin/sh
# Whether the service of this container is ready: exits with 0 if it is, else with 1 and one line.
#
#     probe.sh [FILE [SECONDS]]
#
# FILE is what the service writes once a second by --health-file; services/common/process/health_file.py
# describes it. A line that is older than SECONDS is stale, unless the process waited for a processor
# meanwhile. Only what the shell itself can do is used: to start a program costs more than all else.
file=${1:-/tmp/health}
longest=${2:-10}

no() {
    echo "$1"
    exit 1
}

[ -r "$file" ] || no "the service has not written $file"
read -r state pid beat ran waited < "$file"
[ "$state" = ready ] || no "the service is $state, and not ready"
read -r uptime _ < /proc/uptime
age=$((${uptime%%.*} - beat))
[ "$age" -le "$longest" ] && exit 0

# It is late: does it hang, or is it starved?
[ -r "/proc/$pid/stat" ] || no "the service has ended"
read -r stat < "/proc/$pid/stat"
ran_now=$ran waited_now=$waited
[ -r "/proc/$pid/schedstat" ] && read -r ran_now waited_now _ < "/proc/$pid/schedstat"
starved=$(((waited_now - waited) / 1000000000))
case ${stat##*) } in
    [Tt]*) no "the service is stopped" ;;
    R*) starved=$((age - (ran_now - ran) / 1000000000)) ;; # a wait is counted once it is over
esac
[ $((age - starved)) -le "$longest" ] || no "the service has stood still for $age s"

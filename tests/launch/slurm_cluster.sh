#!/usr/bin/env bash
# A Slurm cluster on this machine: a controller and two nodes, all of it in one folder. For tests; nothing in /etc changes.
#
#   slurm_cluster.sh install          apt-get install what it needs (as root)
#   slurm_cluster.sh start FOLDER     start it, or do nothing where it runs; then `export SLURM_CONF=FOLDER/slurm.conf`
#   slurm_cluster.sh node FOLDER N    start node N (1 or 2) again
#   slurm_cluster.sh stop FOLDER      end it and every job in it
#
# Partitions: `main` (may be preempted: 20 s of grace, then requeued), `hasty` (the same without grace), `urgent` (preempts both).
# SLURM_TEST_PORT (16810) is the first of five ports.
set -euo pipefail

port=${SLURM_TEST_PORT:-16810}
nodes=(127.0.0.1 127.0.0.2) # Names that resolve on every machine.

fail() {
  echo "slurm_cluster.sh: $1" >&2
  exit 1
}

configure() {
  local me
  me=$(id -un)
  cat >"$folder/slurm.conf" <<CONF
ClusterName=tfgpu
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it starts again (120 s by default).
AuthInfo=socket=$folder/munge/socket,cred_expire=6
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
MinJobAge=300
SlurmdTimeout=10
ReturnToService=2
PropagateResourceLimits=NONE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=${nodes[0]} NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=4 RealMemory=1000
NodeName=${nodes[1]} NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=4 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime=20 State=UP
PartitionName=hasty Nodes=ALL MaxTime=60 PriorityTier=1 GraceTime=0 State=UP
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=10 PreemptMode=OFF State=UP
CONF
  export SLURM_CONF=$folder/slurm.conf
}

alive() { # a pid file: is its process there?
  local pid
  pid=$(cat "$1" 2>/dev/null) && [[ -n $pid ]] && kill -0 "$pid" 2>/dev/null
}

start_munge() {
  alive "$folder/munge/pid" && return
  mkdir -p "$folder/munge"
  chmod 755 "$folder/munge"
  (umask 077 && head -c 128 /dev/urandom >"$folder/munge/key")
  munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munge/pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" --num-threads=2
}

start_node() {
  local name=${nodes[$1 - 1]}
  alive "$folder/slurmd-$name.pid" && return
  mkdir -p "$folder/spool-$name"
  slurmd -N "$name"
}

responding() {
  [[ $(sinfo --noheader --Node --partition=main --format=%T 2>/dev/null | grep -cxE 'idle|mixed|allocated') == 2 ]]
}

start() {
  for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || fail "there is no $program. Run: $0 install"
  done
  mkdir -p "$folder/state"
  configure
  start_munge
  alive "$folder/slurmctld.pid" || slurmctld
  start_node 1
  start_node 2
  for _ in $(seq 120); do
    responding && return
    sleep 0.5
  done
  tail -n 20 "$folder"/slurm*.log >&2
  fail "the nodes did not come up"
}

stop_daemon() { # a pid file; KILL after 10 s
  local pid
  alive "$1" || return 0
  pid=$(cat "$1")
  kill "$pid"
  for _ in $(seq 40); do
    kill -0 "$pid" 2>/dev/null || return 0
    sleep 0.25
  done
  kill -KILL "$pid" 2>/dev/null || true
}

stop() {
  [[ -e $folder/slurm.conf ]] || return 0
  export SLURM_CONF=$folder/slurm.conf
  if alive "$folder/slurmctld.pid"; then
    timeout 10 scancel --user="$(id -un)" || true
    for _ in $(seq 60); do
      [[ -n $(timeout 10 squeue --noheader 2>/dev/null) ]] || break
      sleep 0.5
    done
  fi
  for name in "${nodes[@]}"; do stop_daemon "$folder/slurmd-$name.pid"; done
  stop_daemon "$folder/slurmctld.pid"
  stop_daemon "$folder/munge/pid"
}

command=${1:-}
if [[ $command == install ]]; then
  apt-get update
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge
  exit
fi
[[ -n ${2:-} ]] || fail "usage: $0 install | start FOLDER | node FOLDER N | stop FOLDER"
mkdir -p "$2"
folder=$(cd "$2" && pwd)
export SLURM_CONF=$folder/slurm.conf
case $command in
  start) start ;;
  node) start_node "${3:?which node: 1 or 2}" ;;
  stop) stop ;;
  *) fail "unknown command '$command': install, start, node or stop" ;;
esac

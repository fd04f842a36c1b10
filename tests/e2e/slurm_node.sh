# A Slurm of one node, this machine, on ports of its own, with everything in a folder: source it, slurm_start FOLDER, slurm_stop.
# Needs Debian's slurm-wlm and munge (3.5 MB), no cgroups, no service, no root.

slurm_missing() { # the first program that is missing
    local program
    for program in munged slurmctld slurmd sbatch scontrol squeue; do
        PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || { echo "$program"; return; }
    done
}

slurm_pids=()
slurm_start() { # FOLDER: short, for a socket's name
    local folder=$1 host port
    PATH=$PATH:/usr/sbin
    host=$(hostname -s)
    port=$((20000 + RANDOM % 20000))
    mkdir -p "$folder/state" "$folder/spool"
    dd if=/dev/urandom of="$folder/munge.key" bs=128 count=1 status=none
    chmod 600 "$folder/munge.key"
    cat >"$folder/slurm.conf" <<CONF
ClusterName=kvlab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
MinJobAge=10
MaxJobCount=20000
MaxArraySize=10001
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF=$folder/slurm.conf
    munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" &>"$folder/munged.out" &
    slurm_pids+=($!)
    for _ in $(seq 100); do [[ -S $folder/munge.socket ]] && break; sleep 0.1; done
    slurmctld -D &>"$folder/slurmctld.out" &
    slurm_pids+=($!)
    slurmd -D &>"$folder/slurmd.out" &
    slurm_pids+=($!)
    slurm_node=$host
    for _ in $(seq 300); do [[ $(sinfo -h -o %T 2>/dev/null) == idle ]] && return 0; sleep 0.2; done
    echo "no node after a minute:"
    tail -n 5 "$folder"/*.log "$folder"/*.out
    return 1
}

slurm_stop() {
    local i
    for ((i = ${#slurm_pids[@]} - 1; i >= 0; i--)); do
        kill "${slurm_pids[i]}" 2>/dev/null || true
        wait "${slurm_pids[i]}" 2>/dev/null || true
    done
    slurm_pids=()
}

slurm_wait() { # SECONDS: until the queue is empty
    local end=$((SECONDS + $1)) queue
    until queue=$(squeue -h 2>/dev/null) && [[ -z $queue ]]; do # a busy controller may time out
        ((SECONDS < end)) || { echo "still in the queue after $1 s:"; squeue; return 1; }
        sleep 0.3
    done
}

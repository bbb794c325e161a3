"""The batch script of a Slurm job: one torchrun on each node, told once when it has to stop."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from draftworks.config.launchers import SlurmLauncherSpec
from draftworks.config.run_files import COPY_VARIABLE
from draftworks.errors import ConfigError
from resources.scheduler import JobRequest
from resources.torch_job import ONE_NODE, RunDir, TorchJob

LOST_NODE_EXIT = 75
"""Exit code of the script where a node began and has left no exit code of its torchrun: it was lost."""
STOPPED_EXIT = 76
"""Exit code of the script where a signal of Slurm stopped it before its torchruns were done: pre-emption, the time limit."""
SIGNAL_MARGIN_S = 30.0
"""Slurm looks at time limits twice a minute: the signal before the limit is asked for so many seconds earlier."""
_TORCHRUN_SHARE_OF_GRACE = 0.7
"""torchrun kills a stuck rank after this share of the grace, so that it can still exit in order itself."""
_MARKS = "nodes"
_OPTIONS = "OPTIONS_OF_TORCHRUN"


def locate_script(request: JobRequest) -> Path:
    """Return the path of a job's batch script, beside its log."""
    return request.files.path / "job.sh"


def list_begun(files: RunDir) -> list[Path]:
    """Return the marks of the nodes that have begun a job."""
    return list((files.path / _MARKS).rglob("*.began"))


def write_script(request: JobRequest, spec: SlurmLauncherSpec) -> Path:
    """Write the batch script, and make the folder in which its nodes record their exit codes; return the script's path."""
    path = locate_script(request)
    marks = request.files.path / _MARKS
    marks.mkdir(parents=True, exist_ok=True)
    text = "\n".join(
        [
            "#!/bin/bash",
            f"# A job of Draftworks, as it was submitted: sbatch {shlex.quote(str(path))}",
            *(f"#SBATCH {option}" for option in build_options(request, spec)),
            "",
            _BODY.format(
                path="" if spec.commands is None else f'export PATH={shlex.quote(spec.commands)}:"$PATH"\n',
                marks=shlex.quote(str(marks)),
                grace=max(1, math.ceil(spec.grace_s)),
                threads=spec.threads,
                shutdown=max(1, int(spec.grace_s * _TORCHRUN_SHARE_OF_GRACE)),
                setup="\n".join(f"    {line}" for line in spec.setup) or "    :",
                torchrun=_build_torchrun(request),
                ranks=shlex.quote(str(request.files.ranks)),
                variable=COPY_VARIABLE,
                python=shlex.quote(str(request.job.build_command()[0])),
                one_node=" ".join(ONE_NODE),
                cpus=_count_cpus(request.job, spec),
                lost=LOST_NODE_EXIT,
                stopped=STOPPED_EXIT,
            ),
        ]
    )
    path.write_text(text)
    return path


def build_options(request: JobRequest, spec: SlurmLauncherSpec) -> list[str]:
    """Return the options of sbatch for a job, quoted as its script needs them.

    Raises:
        ConfigError: the time limit leaves no time to work before the signal.
    """
    job = request.job
    fewest = min(request.min_nodes or job.nodes, job.nodes)
    log = str(request.files.log).replace("%", "%%")
    found: dict[str, str | None] = {
        "job-name": request.name,
        "comment": str(request.claim),
        "output": log if job.copies == 1 else f"{log.removesuffix('.log')}-copy%a.log",
        "open-mode": "append",
        "export": "ALL",
        "nodes": str(job.nodes) if fewest == job.nodes else f"{fewest}-{job.nodes}",
        "ntasks-per-node": "1",
        "cpus-per-task": str(_count_cpus(job, spec)),
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "mem": spec.memory,
    }
    if job.gpus_per_node and spec.gpus != "none":
        amount = f"{spec.gpu_type}:{job.gpus_per_node}" if spec.gpu_type else str(job.gpus_per_node)
        found[spec.gpus] = f"gpu:{amount}" if spec.gpus == "gres" else amount
    if spec.time_limit_s is not None:
        # Slurm counts in minutes.
        minutes = math.ceil(spec.time_limit_s / 60)
        before_s = math.ceil(spec.grace_s + SIGNAL_MARGIN_S)
        if before_s >= 60 * minutes:
            raise ConfigError(
                f"launcher: a time_limit_s of {spec.time_limit_s:g} is over before anything is done: a job gets the"
                f" signal to save {before_s} s before its limit (grace_s and {SIGNAL_MARGIN_S:g} s). Raise time_limit_s,"
                " or lower grace_s."
            )
        found["time"], found["signal"] = str(minutes), f"B:TERM@{before_s}"
    ours = [f"--{name}={shlex.quote(value)}" for name, value in found.items() if value is not None]
    if job.copies > 1:
        # An element can only be started again in its array if Slurm may requeue it, which it then does by itself too.
        return [*ours, f"--array=0-{job.copies - 1}", "--requeue", *spec.sbatch]
    return [*ours, "--no-requeue", *spec.sbatch]


def _count_cpus(job: TorchJob, spec: SlurmLauncherSpec) -> int:
    return spec.cpus_per_node or job.procs_per_node * spec.threads


def _build_torchrun(request: JobRequest) -> str:
    """Return torchrun's command line; the options that only the job's shell knows are in its array `options`."""
    command: Sequence[str] = request.job.build_command(f"--rdzv{_OPTIONS}")
    return " ".join('"${options[@]}"' if word == f"--rdzv{_OPTIONS}" else shlex.quote(word) for word in command)


# Slurm sends SIGTERM to every process of a cancelled job, several times; to those that srun started, but not to the script,
# at the begin of a pre-emption's grace; and to the script alone before a time limit. A second signal would cut torchrun's
# orderly end short. So torchrun and its ranks' start ignore SIGTERM, and the shell that started a torchrun answers the
# first SIGTERM with one SIGINT, which torchrun passes on to its ranks. The script hands what only it got to these shells.
_BODY = """\
{path}marks={marks}  # NODE.began, NODE.told when it has to stop, NODE.exit
ranks={ranks} job=$SLURM_JOB_ID
if [ -n "${{SLURM_ARRAY_TASK_ID:-}}" ]; then
    # One of several copies: its files are its own, and what an earlier start of it has left is put away.
    export {variable}=$SLURM_ARRAY_TASK_ID TORCHELASTIC_ERROR_FILE=${{TORCHELASTIC_ERROR_FILE%.json}}-copy$SLURM_ARRAY_TASK_ID.json
    own=copy$SLURM_ARRAY_TASK_ID earlier=${{marks%/*}}/earlier job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
    marks=$marks/$own ranks=$ranks/$own
    mkdir -p "$marks"
    if [ -e "$ranks" ]; then
        mkdir -p "$earlier" && mv "$ranks" "$(mktemp -d "$earlier/$own-XXXXXX")"
        rm -f "$TORCHELASTIC_ERROR_FILE"
    fi
fi
export OMP_NUM_THREADS={threads} TORCH_ELASTIC_SHUTDOWN_TIMEOUT={shutdown} PET_SIGNALS_TO_HANDLE=SIGINT
rm -f "$marks"/*
shopt -s nullglob

setup() {{
{setup}
}}

stop_torchrun() {{
    [ -z "$told" ] || return
    told=1
    : >"$marks/$SLURMD_NODENAME.told"
    [ -n "$torchrun" ] || return
    # Before there are ranks torchrun would ignore it, and nothing is lost by killing it.
    if compgen -G "$ranks"/'*/attempt_*' >/dev/null; then kill -INT $torchrun; else kill -KILL $torchrun; fi
}}

run_torchrun() {{
    local torchrun= told= code=143 options
    trap stop_torchrun TERM
    setup
    if [ "$SLURM_JOB_NUM_NODES" = 1 ]; then
        # Ranks of one node meet in a file on a disk of the node and open no port to others.
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        meeting=$(mktemp -d) && options=({one_node} "--rdzv-endpoint=$meeting/store" "--log-dir=$ranks")
    else
        local address is_host=false
        address=$(sed -n "s/^$SLURMD_NODENAME=//p" <<<"$NODE_ADDRESSES")
        [ "$SLURMD_NODENAME" = "$HEAD_NODE" ] && is_host=true
        options=(--nnodes="$SLURM_JOB_NUM_NODES" --rdzv-backend=c10d --rdzv-endpoint="$HEAD_ADDRESS:$HEAD_PORT"
            --rdzv-id="$job.${{SLURM_RESTART_COUNT:-0}}" --rdzv-conf="is_host=$is_host" --local-addr="$address"
            --log-dir="$ranks")
    fi
    echo "$SLURM_JOB_ID" >"$marks/$SLURMD_NODENAME.began"
    if [ -z "$told" ]; then
        (
            trap '' TERM
            exec {torchrun}
        ) &
        torchrun=$!
        [ -z "$told" ] || kill -KILL $torchrun
        while wait $torchrun; code=$?; kill -0 $torchrun 2>/dev/null; do :; done
    fi
    [ -z "${{meeting:-}}" ] || rm -rf "$meeting"
    echo "$code" >"$marks/.$SLURMD_NODENAME" && mv "$marks/.$SLURMD_NODENAME" "$marks/$SLURMD_NODENAME.exit"
    return "$code"
}}

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    # The nodes' addresses are those by which Slurm reaches them; names need not be known to every node.
    NODE_ADDRESSES=$(scontrol --oneliner show nodes "$SLURM_JOB_NODELIST" | sed -n 's/^NodeName=\\([^ ]*\\) .*NodeAddr=\\([^ ]*\\).*/\\1=\\2/p')
    HEAD_NODE=$SLURMD_NODENAME
    HEAD_ADDRESS=$(sed -n "s/^$HEAD_NODE=//p" <<<"$NODE_ADDRESSES")
    HEAD_PORT=$({python} -I -S -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    export NODE_ADDRESSES HEAD_NODE HEAD_ADDRESS HEAD_PORT
fi
export marks ranks job
srun --ntasks-per-node=1 --cpus-per-task={cpus} --mpi=none --kill-on-bad-exit=0 --wait=0 \\
    bash -c "$(declare -f setup stop_torchrun run_torchrun); run_torchrun" &
step=$!

stopped_at=
stop() {{
    [ -z "$stopped_at" ] || return
    stopped_at=$SECONDS
    scancel --signal=TERM "$job.0" 2>/dev/null
}}
trap stop TERM

# A torchrun that has failed lets those of other nodes wait for its ranks: after the grace they are stopped, then killed.
failed_at= told=()
while kill -0 $step 2>/dev/null; do
    sleep 1 &
    wait -n $step $! 2>/dev/null
    if [ -z "$failed_at" ] && grep -qvx 0 "$marks"/*.exit /dev/null; then
        failed_at=$SECONDS told=("$marks"/*.told)
    fi
    if [ -n "$failed_at" ] && [ $((SECONDS - failed_at)) -ge {grace} ]; then stop; fi
    if [ -n "$failed_at" ] && [ $((SECONDS - failed_at)) -ge $((2 * {grace})) ]; then scancel --signal=KILL "$job.0"; break; fi
done
wait $step
code=$?
# srun may be ended before the nodes are: what they save meanwhile must not be cut short.
[ -n "$failed_at" ] || told=("$marks"/*.told)
for _ in $(seq {grace}); do
    left= lost=
    for began in "$marks"/*.began; do
        [ ! -e "${{began%.began}}.exit" ] || continue
        # A node that was told to stop was there, and has only been killed.
        left=1
        [ -e "${{began%.began}}.told" ] || lost=1
    done
    [ -n "$left" ] && [ -n "$stopped_at" ] || break
    sleep 1
done
[ -z "$lost" ] || exit {lost}
[ "${{#told[@]}}" = 0 ] || [ "$code" = 0 ] || exit {stopped}
[ -z "$left" ] || [ "$code" != 0 ] || exit 1
exit "$code"
"""

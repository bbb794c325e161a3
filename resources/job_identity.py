"""The identity of a job: its output and its inputs."""

from __future__ import annotations

from pathlib import Path

from draftworks.config.run_files import CaptureRun, RegenerateRun, RunFile, TrainRun
from draftworks.storage.artifacts import PARTIAL
from draftworks.storage.files import read_bytes
from draftworks.storage.identity import digest
from resources.job_claims import CLAIM
from resources.scheduler import NAME_PREFIX
from resources.torch_job import JobIdentity

_MOST_BYTES = 16 << 20


def identify_job(asset: str, partition: str, run: RunFile, path: Path, role: str = "", copies: int = 1) -> JobIdentity:
    """Return the identity of the job that a run file describes.

    Its claim lies in the folder of the result that it builds, which has to have the same name whenever the job is started.
    The claim of a job that runs beside another lies beside its own output, which others read.

    Args:
        path: the saved run file.
        role: name of a job that runs beside that of the asset, among the others of the asset.
    """
    result = run.out.name.removesuffix(PARTIAL)
    text = read_bytes(path, _MOST_BYTES).decode()
    return JobIdentity(
        name=f"{NAME_PREFIX}{digest([asset, partition, result, role, text, *([] if copies == 1 else [copies])])}",
        claim=run.out.parent / f"{role}.{CLAIM}" if role else run.out / CLAIM,
        made=f"{partition}/{asset}/{role}" if role else f"{partition}/{asset}",
        progress=_list_progress_folders(run),
    )


def _list_progress_folders(run: RunFile) -> tuple[Path, ...]:
    """Return the folders with the progress of a program: a training's checkpoints, answers, captured features."""
    if isinstance(run, TrainRun):
        return (run.checkpoints,)
    if isinstance(run, RegenerateRun):
        return (run.answers,)
    return (run.store.root,) if isinstance(run, CaptureRun) else (run.out,)

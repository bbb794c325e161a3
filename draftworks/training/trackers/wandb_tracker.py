"""Reports a training to Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from draftworks.config.trackers import WandbSpec
from draftworks.training.trackers.tracker import Outcome, TrackedRun

FINISH_TIMEOUT_S = 60.0


class WandbTracker:
    """A run of Weights & Biases. Steps are the optimizer's; a step that the run has already is dropped by the server."""

    def __init__(self, spec: WandbSpec, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # pyright: ignore[reportMissingImports]

        folder = run.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)  # wandb would take the machine's folder of temporary files instead
        self._run: Any = wandb.init(
            project=spec.project,
            entity=spec.entity,
            id=run.id,
            name=run.name,
            group=run.tags["draft"],
            tags=[f"{name}:{value}"[:64] for name, value in run.tags.items()],
            config=dict(run.parameters),
            resume="allow",
            mode=spec.resolve_mode(os.environ),
            dir=str(folder),
            settings=wandb.Settings(
                silent=True,
                # The figures and nothing else: no output of the process, code, arguments or host.
                console="off",
                disable_git=True,
                save_code=False,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                finish_timeout=FINISH_TIMEOUT_S,
            ),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=0 if outcome is Outcome.FINISHED else 1)

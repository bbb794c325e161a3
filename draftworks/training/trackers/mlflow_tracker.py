"""Reports a training to MLflow. Only the client is used (mlflow-skinny has it), and none of its global state."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from draftworks.config.trackers import MlflowSpec
from draftworks.training.trackers.tracker import Outcome, TrackedRun

RUN_TAG = "draftworks.run"
MAX_VALUE = 500
PARAMETERS_PER_REQUEST = 100
_STATUSES = {Outcome.FINISHED: "FINISHED", Outcome.INTERRUPTED: "KILLED", Outcome.FAILED: "FAILED"}


class MlflowTracker:
    """A run of MLflow, found again by a tag with the training's id, since MLflow chooses the ids of runs itself."""

    def __init__(self, spec: MlflowSpec, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client: Any = MlflowClient(tracking_uri=spec.uri)
        experiment = self._find_experiment(spec.experiment)
        found = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {RUN_TAG: run.id, **{f"draftworks.{name}": value for name, value in run.tags.items()}}
            self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            self._log_parameters(run.parameters)

    def _find_experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return self._client.create_experiment(name)
            except Exception:  # another training may have made it meanwhile
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return found.experiment_id

    def _log_parameters(self, parameters: Mapping[str, object]) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        listed = [Param(name, str(value)[:MAX_VALUE]) for name, value in parameters.items()]
        for start in range(0, len(listed), PARAMETERS_PER_REQUEST):
            self._client.log_batch(self._id, params=listed[start : start + PARAMETERS_PER_REQUEST])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._id, _STATUSES[outcome])

"""Trackers of a training (wandb, MLflow, Trackio, TensorBoard): fed in the background, closed however it ends."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from draftworks.config.run_files import TRACKERS_FOLDER
from draftworks.config.trackers import MlflowSpec, TrackersSpec, TrackioSpec, WandbSpec, require_trackers
from draftworks.distributed.stop_signals import Interrupted
from draftworks.storage.files import publish_json, read_json
from draftworks.storage.words import mask_secrets
from draftworks.training.history import EvalPoint, TrainPoint, list_eval_scalars, list_train_scalars


class Outcome(StrEnum):
    """How a session of a training ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True)
class TrackedRun:
    """A training as trackers show it.

    Attributes:
        id: the same in every session of the training; letters, digits and hyphens.
        name: for people: target, strategy, draft.
        parameters: options and digests that decide the draft, flat, by dotted name. No text of the data.
        tags: target, strategy and draft.
        folder: for files that a tracker keeps beside the draft.
    """

    id: str
    name: str
    parameters: Mapping[str, str | int | float | bool]
    tags: Mapping[str, str]
    folder: Path


class Tracker(Protocol):
    """A run that is open in a tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the figures of an optimizer step."""

    def close(self, outcome: Outcome) -> None:
        """Send what is left, and mark how the session ended."""


def flatten_parameters(values: Mapping[str, object], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Return nested options flat, by dotted name; what is None is left out, and lists are joined by commas."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten_parameters(value, f"{prefix}{name}."))
        elif isinstance(value, (str, int, float, bool)):
            flat[f"{prefix}{name}"] = value
        elif isinstance(value, (list, tuple)):
            flat[f"{prefix}{name}"] = ",".join(map(str, value))
    return flat


FILE = "sent.json"
MAX_BYTES = 1 << 16


class SentSteps:
    """The last step that one tracker was told of, by series (`train`, `eval`), and the id of its run.

    Args:
        folder: of this tracker's own files beside the draft.
        identity: digest of the draft's inputs, with which a new id begins.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._path = folder / FILE
        self._record = self._read()
        if self._record is None:
            self._record = {"id": f"{identity}-{uuid.uuid4().hex[:6]}", "steps": {}}
            folder.mkdir(parents=True, exist_ok=True)
            publish_json(self._path, self._record)

    @property
    def run_id(self) -> str:
        return self._record["id"]

    def claim(self, series: str, step: int) -> bool:
        """Record that a step is being sent; False if it was sent before, by this process or an earlier one."""
        steps = self._record["steps"]
        if step <= steps.get(series, -1):
            return False
        steps[series] = step
        publish_json(self._path, self._record)
        return True

    def _read(self) -> Any:
        """Return the record; None if there is none, or none that can be read: then it is another run."""
        try:
            found = read_json(self._path, MAX_BYTES)
            steps = {str(name): int(step) for name, step in found["steps"].items()}
            return {"id": str(found["id"]), "steps": steps}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


TRAIN, EVAL = "train", "eval"
MAX_PROBLEM = 500
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "TRACKIO_WRITE_TOKEN")
"""Environment variables that the libraries read; their values are shown in no warning."""


@dataclass(frozen=True)
class _Figures:
    """Figures of one step, for one series."""

    series: str
    step: int
    values: Mapping[str, float]


class BackgroundTracker:
    """A `TrainingObserver` that hands figures to a tracker. The first error of the tracker is its last: a warning.

    Args:
        kind: name of the tracker, for warnings.
        sent: what the tracker was told before.
        open_tracker: called in the thread with the run's id; it may be slow, and may fail.
        warn: called from the caller's thread only.
    """

    def __init__(
        self,
        kind: str,
        sent: Callable[[], SentSteps],
        open_tracker: Callable[[str], Tracker],
        warn: Callable[[str], None],
    ) -> None:
        self._kind = kind
        self._make_sent = sent
        self._open = open_tracker
        self._warn = warn
        self._queue: SimpleQueue[_Figures | Outcome] = SimpleQueue()
        self._problem: str | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {kind}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def on_train(self, point: TrainPoint, total_steps: int) -> None:
        self._put(_Figures(TRAIN, point.step, list_train_scalars(point)))

    def on_eval(self, point: EvalPoint) -> None:
        self._put(_Figures(EVAL, point.step, list_eval_scalars(point)))

    def end(self, outcome: Outcome) -> None:
        """Let the tracker end after everything that it was given."""
        self._put(outcome)

    def wait(self, timeout_s: float) -> None:
        """Wait for that, at most `timeout_s`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._problem is None:
            self._problem = f"not done within {timeout_s:.0f} s: its last points may be missing"
        self._warn_once()

    def _put(self, item: _Figures | Outcome) -> None:
        if self._problem is None:
            self._queue.put(item)
        self._warn_once()

    def _warn_once(self) -> None:
        if self._problem is not None and not self._warned:
            self._warned = True
            self._warn(f"warning: tracker {self._kind}: {self._problem}. The training goes on without it")

    def _run(self) -> None:
        try:
            sent = self._make_sent()
            tracker = self._open(sent.run_id)
            while not isinstance(item := self._queue.get(), Outcome):
                if sent.claim(item.series, item.step):
                    tracker.log(item.step, item.values)
            tracker.close(item)
        except (Exception, SystemExit) as error:
            self._problem = describe_problem(error, os.environ)


def describe_problem(error: BaseException, environment: Mapping[str, str]) -> str:
    """Return an error in words, without the value of any key, token or password of the environment."""
    return mask_secrets(f"{type(error).__name__}: {error}", environment, SECRETS)[:MAX_PROBLEM]


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


class TrackioTracker:
    """A run of Trackio. Runs have no ids there, so the id is part of the name."""

    def __init__(self, spec: TrackioSpec, run: TrackedRun) -> None:
        if spec.folder is not None:
            os.environ["TRACKIO_DIR"] = spec.folder  # read once, when the library is imported
        import trackio  # pyright: ignore[reportMissingImports]

        self._run: Any = trackio.init(
            project=spec.project,
            name=f"{run.tags['target']}-{run.tags['strategy']}-{run.id}",
            group=run.tags["draft"],
            config={**run.parameters, **run.tags},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish()


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


CLOSE_S, INTERRUPTED_CLOSE_S = 90.0, 5.0
"""A process that was asked to stop has seconds until it is killed."""


@dataclass(frozen=True)
class TrackedDraft:
    """The draft that is trained, as trackers are told of it.

    Attributes:
        digest: by which people know the draft.
        identity: digest of everything that decides its weights.
        out: folder of the draft.
    """

    target: str
    strategy: str
    digest: str
    identity: str
    parameters: Mapping[str, str | int | float | bool]
    out: Path

    @property
    def name(self) -> str:
        return f"{self.target}/{self.strategy}/{self.digest}"

    def make_run(self, run_id: str) -> TrackedRun:
        tags = {"target": self.target, "strategy": self.strategy, "draft": self.digest}
        return TrackedRun(run_id, self.name, self.parameters, tags, self.out / TRACKERS_FOLDER)


def make_trackers(spec: TrackersSpec, draft: TrackedDraft, warn: Callable[[str], None]) -> list[BackgroundTracker]:
    """Return an observer for each tracker that is on.

    Raises:
        ConfigError: a package or a key is missing.
    """
    require_trackers(spec, "training.trackers")

    def make(kind: str) -> BackgroundTracker:
        return BackgroundTracker(
            kind,
            partial(SentSteps, draft.out / TRACKERS_FOLDER / kind, draft.identity),
            lambda run_id: open_tracker(spec, kind, draft.make_run(run_id)),
            warn,
        )

    return [make(kind) for kind in spec.list_kinds()]


def open_tracker(spec: TrackersSpec, kind: str, run: TrackedRun) -> Tracker:
    """Return the run as it is open in one tracker."""
    if kind == "wandb" and spec.wandb is not None:
        return WandbTracker(spec.wandb, run)
    if kind == "mlflow" and spec.mlflow is not None:
        return MlflowTracker(spec.mlflow, run)
    assert kind == "trackio"
    assert spec.trackio is not None
    return TrackioTracker(spec.trackio, run)


@contextmanager
def report_to(trackers: list[BackgroundTracker]) -> Iterator[None]:
    """Context in which trackers are open; they are told how it ends."""
    for each in trackers:
        each.start()
    outcome, timeout_s = Outcome.FAILED, CLOSE_S
    try:
        yield
        outcome = Outcome.FINISHED
    except Interrupted:
        outcome, timeout_s = Outcome.INTERRUPTED, INTERRUPTED_CLOSE_S
        raise
    finally:
        for each in trackers:
            each.end(outcome)
        deadline = time.monotonic() + timeout_s
        for each in trackers:
            each.wait(max(0.0, deadline - time.monotonic()))

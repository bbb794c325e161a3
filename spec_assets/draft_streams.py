"""Streams of features to a training: producers beside it, in the same step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import ProduceRun, StreamPlace
from draftworks.config.streaming import StreamFollower, StreamingSpec, require_one_schedule
from draftworks.storage.atomic import publish_json
from draftworks.storage.identity import digest
from draftworks.storage.regular_files import read_json
from resources.companions import Companion
from resources.job_claims import CLAIM
from resources.workspace import Workspace
from spec_assets.common import make_companion
from spec_assets.features import PLANNED
from spec_assets.left_out import copy_plan
from spec_assets.metadata import format_bytes
from spec_assets.stream_services import RESTARTS, locate_database, make_stream_place, make_stream_services

if TYPE_CHECKING:
    from spec_assets.draft_inputs import DraftInputs

STREAM = "stream"
"""Key of the producers' figures in a draft's summary."""
TOGETHER = "together"
"""Key in it of the strategies whose drafts were trained from the stream, each capture having served all of them."""
TRAINER_WAITED = "waited_for_features_s"
"""Key of the trainer's own waiting in it, as `draftworks.programs.train` reports it."""


_GIVE_UP_S = 120.0
"""How long a step repeats a call of its control server that cannot be reached, as it cannot start it again meanwhile."""
SHARED_LOCK = "shared.lock"
"""Held by the step that trains drafts of a target from one stream."""
DRAFTS = "drafts.json"
"""In the folder of a stream that several drafts follow: the digests of their identities, by strategy."""


@dataclass(frozen=True)
class StreamReader:
    """A draft that reads a stream: the name of its strategy, its inputs and its identity."""

    name: str
    inputs: DraftInputs
    identity: Mapping[str, Any]

    @property
    def digest(self) -> str:
        return digest(dict(self.identity))

    def to_follower(self) -> StreamFollower:
        training, samples = self.inputs.training, self.inputs.train_features.summary["samples"]
        steps = training.make_stream_steps(samples)
        return StreamFollower(name=self.name, streams=list(self.inputs.feature_versions), steps=steps)


@dataclass(frozen=True)
class DraftStream:
    """The stream of a training, or of several; without `place`, features are stored and nothing runs beside it.

    Attributes:
        beside: producers, and what serves them and the trainers.
        out: folder of the producers' figures.
        plan: the stream's own copy of the planned features.
    """

    place: StreamPlace | None = None
    beside: Sequence[Companion] = ()
    out: Path | None = None
    plan: Path | None = None

    def place_of(self, name: str) -> StreamPlace | None:
        """Return the place as the training of one strategy finds it."""
        if self.place is None or not self.place.followers:
            return self.place
        return self.place.model_copy(update={"consumer": name})

    def give_up(self, name: str, failure: dg.Failure) -> None:
        """Give up the claims of a training that has failed, so that neither producers nor trainings wait for it."""
        from draftworks.stream.stream_rounds import find_newest_run
        from draftworks.stream.training_stream import open_controller

        if self.place is not None and self.place.followers:
            controller = open_controller(self.place, retry_s=_GIVE_UP_S)
            reason = f"it has failed: {(failure.description or '').partition(chr(10))[0]}"
            find_newest_run(controller).record_left(reason, name)
            controller.close()

    def summarize(self, trained: Sequence[str]) -> dict[str, Any]:
        """Return the producers' figures for the summary of each of the drafts that were trained."""
        if self.out is None:
            return {}
        workers = [read_json(path) for path in sorted(self.out.glob("*.json"))]
        names = ("captured_samples", "captured_tokens", "captured_bytes", "waited_s", "seconds")
        figures = {name: sum(each[name] for each in workers) for name in names}
        together = {TOGETHER: sorted(trained)} if len(trained) > 1 else {}
        return {STREAM: {"producers": len(workers), **figures, **together}}


@contextmanager
def open_stream(
    context: dg.AssetExecutionContext, workspace: Workspace, target: TargetSpec, readers: Sequence[StreamReader]
) -> Iterator[DraftStream]:
    """Context of trainings with their stream, if their features are only planned. The first reader is the step's own.

    The stream's store and its database belong to these trainings. They stay after an interruption; `remove_streams`
    removes them.

    Raises:
        ConfigError: the trainings take different samples at a step.
    """
    inputs = readers[0].inputs
    if not is_planned(inputs):
        yield DraftStream()
        return
    digests = {each.name: each.digest for each in readers}
    folder = locate_streams(workspace, target) / (readers[0].digest if len(readers) == 1 else digest(digests))
    producers = folder / "producers"
    producers.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(f"*{CLAIM}")):  # else producers may live, or have ended with nobody to read their figures
        for path in producers.glob("*.json"):
            path.unlink()
    followers = [each.to_follower() for each in readers]
    if len(readers) > 1:
        require_one_schedule(followers)
        publish_json(folder / DRAFTS, digests)
    streams = list(dict.fromkeys(stream for each in followers for stream in each.streams))
    capture = target.capture
    settings = target.streaming or StreamingSpec()
    settings = settings.resolve_keep(count_stream_bytes(inputs, streams), capture.budget_gb)
    database = locate_database(folder, settings, workspace)
    place = make_stream_place(folder, settings, database)
    place = place.model_copy(update={"max_failed_share": capture.max_failed_share})
    plan = copy_plan(inputs.train_features.path, folder / "plan")
    if len(readers) > 1:
        place = place.model_copy(update={"followers": followers})
        _count_all_in(database, place)
    run = ProduceRun(
        out=producers,
        target=inputs.files,
        tokens=inputs.train_tokens.path,
        features=plan,
        streams=streams,
        capture=capture,
        sglang=workspace.sglang,
        steps=max((each.steps for each in followers), key=lambda steps: steps.total_steps),
        stream=place,
    )
    python = workspace.find_python(capture)
    beside = make_companion(
        context, workspace, "produce", run, capture.processes, capture.device, python, restarts=RESTARTS
    )
    services = make_stream_services(context, workspace, database, run)
    yield DraftStream(place, (*services, beside), producers, plan)


def _count_all_in(database: Path, place: StreamPlace) -> None:
    """Let all followers of a stream take part, those too that failed in an earlier attempt; no process uses it yet."""
    if database.exists():
        from draftworks.stream.controller import DataFlowController
        from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore
        from draftworks.stream.stream_rounds import find_newest_run

        controller = DataFlowController(place.run_id, SQLiteMetadataStore(database))
        for each in place.followers:
            find_newest_run(controller).record_left("", each.name)
        controller.close()


def locate_streams(workspace: Workspace, target: TargetSpec) -> Path:
    return workspace.var / "streams" / target.name


def is_planned(inputs: DraftInputs) -> bool:
    """Whether the features of a draft are captured while it is trained."""
    return bool(inputs.train_features.summary.get(PLANNED))


def remove_streams(workspace: Workspace, target: TargetSpec, trained: Sequence[StreamReader]) -> None:
    """Remove the streams of drafts that are trained, those too that they began to follow together with others."""
    done = {each.digest for each in trained}
    for folder in locate_streams(workspace, target).glob("*/"):
        drafts = read_json(folder / DRAFTS) if (folder / DRAFTS).exists() else {"": folder.name}
        if done & set(drafts.values()):
            shutil.rmtree(locate_database(folder, target.streaming or StreamingSpec(), workspace).parent, True)
            shutil.rmtree(folder, ignore_errors=True)


def count_stream_bytes(inputs: DraftInputs, streams: Sequence[str]) -> int:
    """Return the bytes of all features of some streams; streams of a target are equally wide."""
    summary = inputs.train_features.summary
    return summary["bytes"] * len(streams) // len(summary["streams"])


def describe_stream(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata of a streamed training: what its producers captured, and how much of their time they waited."""
    stream = summary.get(STREAM)
    if stream is None:
        return {}
    busy = max(stream["seconds"] - stream["waited_s"], 1e-9)
    return {
        **({"streamed_together": ", ".join(stream[TOGETHER])} if TOGETHER in stream else {}),
        "streamed_samples": stream["captured_samples"],
        "streamed_tokens": stream["captured_tokens"],
        "streamed_bytes": format_bytes(stream["captured_bytes"]),
        "producer_tokens_per_s": round(stream["captured_tokens"] / busy),
        "producer_waiting_share": round(stream["waited_s"] / max(stream["seconds"], 1e-9), 3),
        "trainer_waited_s": summary.get(TRAINER_WAITED),
    }

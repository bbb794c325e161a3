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
from draftworks.config.run_files import ProduceRun, StreamPlace, StreamSteps
from draftworks.config.streaming import StreamingSpec
from draftworks.storage.identity import digest
from draftworks.storage.regular_files import read_json
from resources.companions import Companion
from resources.workspace import Workspace
from spec_assets.common import make_companion
from spec_assets.features import PLANNED
from spec_assets.metadata import format_bytes
from spec_assets.stream_services import RESTARTS, make_stream_place, make_stream_services

if TYPE_CHECKING:
    from spec_assets.drafts import DraftInputs

STREAM = "stream"
"""Key of the producers' figures in a draft's summary."""
TRAINER_WAITED = "waited_for_features_s"
"""Key of the trainer's own waiting in it, as `draftworks.programs.train` reports it."""


@dataclass(frozen=True)
class DraftStream:
    """The stream of one training; without `place`, its features are stored and nothing runs beside it.

    Attributes:
        beside: producers, and what serves them and the trainer.
        out: folder of the producers' figures.
    """

    place: StreamPlace | None = None
    beside: Sequence[Companion] = ()
    out: Path | None = None

    def summarize(self) -> dict[str, Any]:
        """Return the producers' figures for the draft's summary."""
        if self.out is None:
            return {}
        workers = [read_json(path) for path in sorted(self.out.glob("*.json"))]
        names = ("captured_samples", "captured_tokens", "captured_bytes", "waited_s", "seconds")
        return {STREAM: {"producers": len(workers), **{name: sum(each[name] for each in workers) for name in names}}}


@contextmanager
def open_stream(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    target: TargetSpec,
    inputs: DraftInputs,
    identity: Mapping[str, Any],
) -> Iterator[DraftStream]:
    """Context of a training with its stream, if its features are only planned.

    The stream's store and its database belong to this training. They stay after an interruption, and go when it is done.
    """
    if not inputs.train_features.summary.get(PLANNED):
        yield DraftStream()
        return
    folder = workspace.var / "streams" / target.name / digest(dict(identity))
    producers = folder / "producers"
    producers.mkdir(parents=True, exist_ok=True)
    for path in producers.glob("*.json"):
        path.unlink()
    training, capture = inputs.training, target.capture
    samples = inputs.train_features.summary["samples"]
    settings = target.streaming or StreamingSpec()
    place = make_stream_place(folder, settings.resolve_keep(count_stream_bytes(inputs), capture.budget_gb))
    run = ProduceRun(
        out=producers,
        target=inputs.files,
        tokens=inputs.train_tokens.path,
        features=inputs.train_features.path,
        streams=list(inputs.feature_versions),
        capture=capture,
        sglang=workspace.sglang,
        steps=StreamSteps(
            global_batch_size=training.global_batch_size,
            seed=training.seed,
            total_steps=training.count_steps(samples // training.global_batch_size),
        ),
        stream=place,
    )
    python = workspace.find_python(capture)
    beside = make_companion(
        context, workspace, "produce", run, capture.processes, capture.device, python, restarts=RESTARTS
    )
    services = make_stream_services(context, workspace, folder, place)
    yield DraftStream(place, (*services, beside), producers)
    shutil.rmtree(folder, ignore_errors=True)


def count_stream_bytes(inputs: DraftInputs) -> int:
    """Return the bytes of all features that the draft reads; streams of a target are equally wide."""
    summary = inputs.train_features.summary
    return summary["bytes"] * len(inputs.feature_versions) // len(summary["streams"])


def describe_stream(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata of a streamed training: what its producers captured, and how much of their time they waited."""
    stream = summary.get(STREAM)
    if stream is None:
        return {}
    busy = max(stream["seconds"] - stream["waited_s"], 1e-9)
    return {
        "streamed_samples": stream["captured_samples"],
        "streamed_bytes": format_bytes(stream["captured_bytes"]),
        "producer_tokens_per_s": round(stream["captured_tokens"] / busy),
        "producer_waiting_share": round(stream["waited_s"] / max(stream["seconds"], 1e-9), 3),
        "trainer_waited_s": summary.get(TRAINER_WAITED),
    }

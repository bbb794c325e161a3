"""Streams of features to a training: producers and services beside it, in the same step."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from draftworks.config.features import StreamFollower, StreamingSpec, require_one_schedule
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import ArrivalSource, MemoryRun, ProduceRun, StoreSpec, StreamPlace
from draftworks.errors import ConfigError
from draftworks.fleet.staleness import ARRIVED
from draftworks.storage.files import publish_file, publish_json, read_json
from draftworks.storage.identity import digest
from draftworks.stream.control_wire import TOKEN_ENV, load_token
from resources.companions import Companion
from resources.job_claims import CLAIM
from resources.torch_job import TorchJob
from resources.workspace import Workspace
from spec_assets.common import locate_step_folder, make_companion
from spec_assets.draft_inputs import copy_plan
from spec_assets.features import PLANNED
from spec_assets.metadata import format_bytes

if TYPE_CHECKING:
    from draftworks.planning.identities import DraftInputs


RESTARTS = 10
"""How often a service or a producer that was killed is started again."""
MOONCAKE = "mooncake"
_DATABASE, _TOKEN_FILE, _ADDRESS_FILE = "control.sqlite", "control.token", "control.address"
_ENDING_S = 10.0
"""Seconds in which the control server of a run that was killed has ended."""


def locate_database(folder: Path, settings: StreamingSpec, workspace: Workspace) -> Path:
    """Return the database of the stream whose files are in `folder`; alone in a folder, if it is elsewhere."""
    if settings.control_folder is None:
        return folder / _DATABASE
    return workspace.registry.resolve_path(settings.control_folder) / f"{folder.parent.name}-{folder.name}" / _DATABASE


def make_stream_place(folder: Path, settings: StreamingSpec, database: Path) -> StreamPlace:
    """Return the place of a training's stream, whose other files are in `folder`.

    Raises:
        ConfigError: the control server is to listen on an address that this machine does not have.
    """
    store = StoreSpec(
        kind=settings.store.kind,
        root=folder / ("memory" if settings.store.kind == MOONCAKE else "features"),
        timeout_s=settings.store.timeout_s,
        put_timeout_s=settings.timeout_s,
    )
    if settings.control is None:
        return StreamPlace(database=database, store=store, settings=settings)
    token_file = None if TOKEN_ENV in os.environ else obtain_token_file(folder / _TOKEN_FILE)
    control = choose_endpoint(settings.control.listen, folder / _ADDRESS_FILE)
    return StreamPlace(control=control, token_file=token_file, store=store, settings=settings)


def make_stream_services(
    context: dg.AssetExecutionContext, workspace: Workspace, database: Path, run: ProduceRun
) -> list[Companion]:
    """Return the processes that serve a stream, with the producers of `run`, until its training is over."""
    place, services = run.stream, []
    if place.control is not None:
        secret = () if place.token_file is None else ("--token-file", str(place.token_file))
        job = TorchJob("draftworks.programs.control", (str(database), "--listen", place.control, *secret))
        own = locate_step_folder(context, workspace) / "control"
        services.append(Companion(job, own, serves=True, restarts=RESTARTS))
    if place.store.kind == MOONCAKE:
        memory = MemoryRun(out=run.out, features=run.features, streams=run.streams, steps=run.steps, stream=place)
        services.append(make_companion(context, workspace, "memory", memory, 1, "cpu", serves=True, restarts=RESTARTS))
    return services


def choose_endpoint(listen: str, kept: Path) -> str:
    """Return the address with a port that is free now, if it has port 0: the one in the file `kept`, or else a new one.

    The port is kept, so that a server that is started again is found by jobs of the stream that have outlived the run that
    started them, and so that their run files are the same. A server that is about to end is waited for.

    Raises:
        ConfigError: this machine does not have the address.
    """
    host, _, port = listen.rpartition(":")
    if int(port):
        return listen
    try:
        before = kept.read_text(encoding="utf-8").strip() if kept.exists() else ""
        if before.rpartition(":")[0] == host and _wait_until_free(before):
            return before
        chosen = f"{host}:{_find_port(host, 0)}"
    except OSError as error:
        raise ConfigError(
            f"streaming.control.listen: expected an address of this machine, on which the launcher runs, found {listen!r}: "
            f"{error}"
        ) from error
    with publish_file(kept) as staging:
        staging.write_text(f"{chosen}\n", encoding="utf-8")
    return chosen


def obtain_token_file(path: Path) -> Path:
    """Return the file of a stream's secret, which only this user can read; write a new one unless it is there.

    It stays the same for all starts of a stream, as its jobs may outlive the run that started them.
    """
    if _is_private(path):
        with suppress(ConfigError):
            load_token(path)
            return path
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_hex(32))
    return path


def _is_private(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600 and found.st_uid == os.getuid()


def _wait_until_free(endpoint: str) -> bool:
    """Whether a port can be listened on, at the latest after `_ENDING_S` seconds."""
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + _ENDING_S
    while True:
        try:
            return port.isdecimal() and _find_port(host, int(port)) == int(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                return False
        time.sleep(0.1)


def _find_port(host: str, port: int) -> int:
    """Return the port if it is free, or a free one for port 0. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), port), family=family) as probe:
        return int(probe.getsockname()[1])


STREAM = "stream"
"""Key of the producers' figures in a draft's summary."""
TOGETHER = "together"
"""Key in it of the strategies whose drafts were trained from the stream, each capture having served all of them."""
ORDER = "order"
"""Key in a draft's summary of the digest of what each step took, as `draftworks.programs.train` reports it."""
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
    """Context of trainings with their stream, if their features are only planned or their samples still come. The first reader is the step's own.

    The stream's store and its database belong to these trainings. They stay after an interruption; `remove_streams`
    removes them.

    Raises:
        ConfigError: the trainings take different samples at a step.
    """
    inputs = readers[0].inputs
    if not is_planned(inputs) and not target.arrives:
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
        vllm=workspace.vllm,
        steps=max((each.steps for each in followers), key=lambda steps: steps.total_steps),
        stream=place,
        source=make_source(folder / "rows", target, workspace) if settings.arrives else None,
    )
    python = workspace.find_python(capture)
    beside = make_companion(
        context, workspace, "produce", run, capture.processes, capture.device, python, restarts=RESTARTS
    )
    services = make_stream_services(context, workspace, database, run)
    yield DraftStream(place, (*services, beside), producers, plan)


def make_source(rows: Path, target: TargetSpec, workspace: Workspace) -> ArrivalSource:
    """Return the source of a training in arrival order, whose rows are written down in the folder `rows`."""
    iterator = None if target.streaming is None else target.streaming.source
    return ArrivalSource(
        rows=rows,
        root=workspace.registry.root,
        dataset=workspace.registry.load_dataset(target.dataset) if iterator is None else None,
        iterator=iterator,
        responses=target.responses,
        data=target.data,
        max_length=target.max_length,
    )


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
        **({} if ORDER not in summary else {ORDER: summary[ORDER]}),
        **{f"source_{name}": count for name, count in summary.get(ARRIVED, {}).items()},
    }

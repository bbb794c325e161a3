"""Streamed over Mooncake is stored: on two ranks, bit for bit, whichever of the processes is killed meanwhile."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import dagster as dg
import psutil
import pytest
from coverings import gate_or_long
from forked_ranks import ForkedRanks
from stream_cast import RANKS, Kill, StreamCast
from stream_toys import TRAINING, StreamFiles
from waiting import HANG_S, meanwhile, wait_until

from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.config.features import ControlSpec, StreamingSpec, StreamStoreSpec
from draftworks.config.launchers import LocalLauncherSpec
from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import StoreSpec, TargetFiles
from draftworks.errors import StoreLostError
from draftworks.features.open_store import open_store
from draftworks.stream.controller import DataFlowController
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore
from resources.companions import Companion
from resources.deployment_launcher import make_launcher
from resources.torch_job import TorchJob
from resources.workspace import Workspace
from spec_assets.draft_streams import locate_database, make_stream_place, make_stream_services

pytestmark = pytest.mark.mooncake
SHORT, LONG = (
    TRAINING.model_copy(update={"epochs": epochs, "save_every": 4, "keep_checkpoints": 1}) for epochs in (3, 7)
)
SETTINGS = StreamingSpec(watermark={"samples": 8}, timeout_s=HANG_S, lease_s=4, keep="capture_again")
"""Producers are needed until the last step."""


def train_stored(files: StreamFiles, training: TrainingSpec) -> str:
    """Return the digest of the weights of the stored training on two ranks."""
    files.capture("train")
    path = files.train_run("stored", streamed=False, training=training).save(files.folder / "run.yaml")
    ranks = ForkedRanks.start("draftworks.programs.train", [str(path)], RANKS, files.folder / "r", files.folder / "log")
    assert ranks.wait(HANG_S) == [0] * RANKS, (files.folder / "log").read_text()
    return json.loads((files.folder / "stored" / "config.json").read_text())["weights_digest"]


@pytest.fixture(scope="module")
def stored(tiny_target, tiny_engine, tmp_path_factory) -> str:
    """Weights of the stored short training."""
    return train_stored(StreamFiles(tmp_path_factory.mktemp("stored"), tiny_target, lambda: tiny_engine).make(), SHORT)


@pytest.fixture
def cast(stream_files: StreamFiles) -> StreamCast:
    return StreamCast(replace(stream_files, settings=SETTINGS), SHORT)


@pytest.mark.long
def test_streamed_over_mooncake_is_stored(cast: StreamCast, stored: str):
    assert cast.train()["weights_digest"] == stored
    assert cast.deaths == {}


@pytest.mark.parametrize(
    ("victim", "program"),
    gate_or_long(
        [
            *(("owner", None), ("master", None), ("memory", "memory")),
            *(("control", "control"), ("produce", "produce"), ("train", "train")),
        ],
        [("master", None)],
    ),
)
def test_a_kill_changes_nothing(cast: StreamCast, stored: str, victim: str, program: str | None):
    assert cast.train([Kill(victim, step=5)])["weights_digest"] == stored
    assert cast.killed == [victim]
    assert cast.deaths == ({} if program is None else {program: 1})


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_kills_at_random_times_change_nothing(
    cast: StreamCast, tiny_target: TargetFiles, tiny_engine: HFTargetEngine, tmp_path: Path, seed: int
):
    drawn = random.Random(seed)
    names = ["owner", "master", "memory", "control", "produce", "train"]
    drawn.shuffle(names)
    kills = [
        Kill(name, 2 + 2 * number + drawn.randrange(2), drawn.uniform(0, 0.3)) for number, name in enumerate(names)
    ]
    stored = train_stored(StreamFiles(tmp_path / "stored", tiny_target, lambda: tiny_engine).make(), LONG)
    assert replace(cast, training=LONG).train(kills)["weights_digest"] == stored
    assert cast.killed == names


def find_owners(folder: Path) -> Iterator[psutil.Process]:
    """Yield the processes that own the memory of the store in a folder."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[-2:] == ["draftworks.mooncake.owner", str(folder.resolve())]:
                yield process


def kill_owner(database: Path, folder: Path, step: int = 4) -> None:
    """Kill the owner of a store's memory once the training has done some steps."""

    def has_come_so_far() -> bool:
        if not database.exists():
            return False
        with closing(SQLiteMetadataStore(database)) as store:
            return DataFlowController("draft", store).read_progress().acked_step >= step

    wait_until(has_come_so_far)
    next(find_owners(folder)).kill()


def test_a_step_runs_memory_and_control_server_beside_the_training(stream_files: StreamFiles, stored: str, tmp_path):
    """As the step of a draft does it, with the launcher that looks after them; one is killed meanwhile."""
    (tmp_path / "deployment.yaml").write_text("var: var\n")
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "tiny.yaml").write_text("{model: models/tiny, dataset: stdlib}\n")
    workspace, folder = Workspace(registry_root=str(tmp_path)), tmp_path / "var"
    folder.mkdir()
    settings = SETTINGS.model_copy(update={"store": StreamStoreSpec(kind="mooncake"), "control": ControlSpec()})
    database = locate_database(folder, settings, workspace)
    place = make_stream_place(folder, settings, database)
    produce = stream_files.produce_run("producer", SHORT).model_copy(update={"stream": place})
    train = stream_files.train_run("step", training=SHORT, stream=place)
    producer = TorchJob("draftworks.programs.produce", (str(produce.save(tmp_path / "produce.yaml")),))
    trainer = TorchJob("draftworks.programs.train", (str(train.save(tmp_path / "train.yaml")),), procs_per_node=RANKS)

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["tiny"]))
    def eagle3_draft(context) -> dg.MaterializeResult:
        services = make_stream_services(context, workspace, database, produce)
        beside = [*services, Companion(producer, tmp_path / "produce")]
        launcher = make_launcher(LocalLauncherSpec())
        with meanwhile(lambda: kill_owner(database, folder / "memory")):
            job = launcher.run(context, trainer, run_dir=tmp_path / "runs", companions=beside)
        return dg.MaterializeResult(metadata={"weights": job.report["weights_digest"], **job.metadata})

    (made,) = dg.materialize([eagle3_draft], partition_key="tiny").get_asset_materialization_events()
    metadata = made.materialization.metadata
    assert metadata["weights"].value == stored
    assert {"log_memory", "log_control", "log_produce"} <= set(metadata)
    assert "The store is started again" in Path(metadata["log_memory"].value).read_text()
    assert list(find_owners(folder / "memory")) == []


def test_a_store_that_does_not_run_is_one_error_in_the_given_time(tmp_path: Path):
    with pytest.raises(StoreLostError, match=r"address\.json does not run, and was not started within 0\.5 s"):
        open_store(StoreSpec(kind="mooncake", root=tmp_path, timeout_s=0.5))

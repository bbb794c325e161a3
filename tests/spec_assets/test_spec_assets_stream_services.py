"""Where a stream's control plane and memory are, and which processes serve them."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from draftworks.config.run_files import MemoryRun, ProduceRun, StreamSteps, TargetFiles
from draftworks.config.streaming import StreamingSpec
from draftworks.dataflow.control_wire import TOKEN_ENV, load_token
from draftworks.errors import ConfigError
from resources.companions import Companion
from resources.workspace import Workspace
from spec_assets.stream_services import choose_endpoint, locate_database, make_stream_place, make_stream_services

CONTEXT = SimpleNamespace(
    run=SimpleNamespace(run_id="0123456789"),
    partition_key="small",
    asset_key=dg.AssetKey("eagle3_draft"),
    op_execution_context=SimpleNamespace(op_handle=SimpleNamespace(name="eagle3_draft")),
)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    (tmp_path / "deployment.yaml").write_text("var: var\n")
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "small.yaml").write_text("model: m\ndataset: d\n")
    return Workspace(registry_root=str(tmp_path))


def serve(workspace: Workspace, tmp_path: Path, target: TargetFiles, **streaming) -> tuple[ProduceRun, list[Companion]]:
    settings, folder = StreamingSpec(**streaming), tmp_path / "var" / "streams" / "small" / "0123"
    folder.mkdir(parents=True)
    database = locate_database(folder, settings, workspace)
    run = ProduceRun(
        out=tmp_path,
        target=target,
        tokens=tmp_path,
        features=tmp_path,
        streams=["last"],
        capture={},
        steps=StreamSteps(global_batch_size=1, seed=0, total_steps=1),
        stream=make_stream_place(folder, settings, database),
    )
    return run, make_stream_services(CONTEXT, workspace, database, run)


def test_by_default_the_processes_open_the_database_themselves(workspace, tmp_path: Path, tiny_target):
    run, services = serve(workspace, tmp_path, tiny_target)
    assert run.stream.database == tmp_path / "var" / "streams" / "small" / "0123" / "control.sqlite"
    assert run.stream.store.kind == "shared_dir"
    assert services == []


def test_a_control_server_gets_the_database_and_the_others_its_address(workspace, tmp_path: Path, tiny_target):
    run, (server,) = serve(workspace, tmp_path, tiny_target, control={}, control_folder="here")
    place = run.stream
    assert place.database is None
    assert server.serves
    assert server.job.args[:3] == (str(tmp_path / "here" / "small-0123" / "control.sqlite"), "--listen", place.control)
    assert not place.control.endswith(":0")
    assert len(load_token(place.token_file)) == 64
    assert stat.S_IMODE(place.token_file.stat().st_mode) == 0o600


def test_a_secret_of_the_environment_is_used(workspace, tmp_path: Path, tiny_target, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TOKEN_ENV, "a secret of this installation")
    run, (server,) = serve(workspace, tmp_path, tiny_target, control={"listen": "127.0.0.1:7420"})
    assert run.stream.token_file is None
    assert run.stream.control == server.job.args[2] == "127.0.0.1:7420"


def test_memory_runs_beside_a_stream_over_mooncake(workspace, tmp_path: Path, tiny_target):
    run, (memory,) = serve(workspace, tmp_path, tiny_target, store={"kind": "mooncake", "timeout_s": 7}, timeout_s=9)
    assert memory.serves
    assert (run.stream.store.kind, run.stream.store.timeout_s, run.stream.store.put_timeout_s) == ("mooncake", 7, 9)
    assert MemoryRun.load(Path(memory.job.args[0])).stream == run.stream


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"expected an address of this machine.* found '203\.0\.113\.7:0'"):
        choose_endpoint("203.0.113.7:0")

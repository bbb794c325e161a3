"""Where a stream's control plane and memory are, and which processes serve them."""

from __future__ import annotations

import socket
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from draftworks.config.features import StreamingSpec
from draftworks.config.run_files import MemoryRun, ProduceRun, StreamSteps, TargetFiles
from draftworks.errors import ConfigError
from draftworks.stream.control_wire import TOKEN_ENV, load_token
from resources.companions import Companion
from resources.workspace import Workspace
from spec_assets.draft_streams import (
    choose_endpoint,
    locate_database,
    make_stream_place,
    make_stream_services,
    obtain_token_file,
)

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
    folder.mkdir(parents=True, exist_ok=True)
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


def test_an_address_of_another_machine_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"expected an address of this machine.* found '203\.0\.113\.7:0'"):
        choose_endpoint("203.0.113.7:0", tmp_path / "control.address")


def test_a_stream_that_is_started_again_has_the_same_jobs(workspace, tmp_path: Path, tiny_target):
    first, _ = serve(workspace, tmp_path, tiny_target, control={})
    secret = load_token(first.stream.token_file)
    again, _ = serve(workspace, tmp_path, tiny_target, control={})
    assert again == first
    assert load_token(again.stream.token_file) == secret


def test_a_kept_port_is_waited_for_and_given_up_if_another_program_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kept = tmp_path / "control.address"
    first = choose_endpoint("127.0.0.1:0", kept)
    taken = socket.create_server(("127.0.0.1", int(first.rpartition(":")[2])))
    ending = threading.Timer(0.5, taken.close)
    ending.start()
    assert choose_endpoint("127.0.0.1:0", kept) == first
    ending.join()
    monkeypatch.setattr("spec_assets.draft_streams._ENDING_S", 0.0)
    with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
        other = choose_endpoint("127.0.0.1:0", kept)
        assert other != first
    assert choose_endpoint("127.0.0.1:0", kept) == other
    assert choose_endpoint("127.0.0.2:0", kept).startswith("127.0.0.2:")


@pytest.mark.parametrize("damage", ["readable", "short", "link"])
def test_a_secret_that_cannot_be_trusted_is_made_anew(tmp_path: Path, damage: str):
    path = obtain_token_file(tmp_path / "control.token")
    before = path.read_text()
    if damage == "readable":
        path.chmod(0o644)
    elif damage == "short":
        path.write_text("short")
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    assert obtain_token_file(path) == path
    assert len(load_token(path)) == 64
    assert path.read_text() != before
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert not path.is_symlink()

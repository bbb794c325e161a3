"""Master and owner of the memory: started, watched, ended with their parent, started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import psutil
import pytest
from mooncake_toys import SHORT_TTL_S, build_options, running_mooncake
from processes import lives, wait_until_ended
from waiting import HANG_S, wait_until

from draftworks.errors import ConfigError, StoreError, StoreLostError
from draftworks.mooncake.address import MooncakeAddress
from draftworks.mooncake.client import MooncakeClient
from draftworks.mooncake.service import MooncakeOptions, MooncakeService

pytestmark = pytest.mark.mooncake
PARENT = """
import sys, time
from pathlib import Path
from mooncake_toys import build_options
from draftworks.mooncake.service import MooncakeService
service = MooncakeService(build_options(), Path(sys.argv[1]))
service.start()
print(service.pid("master"), service.pid("owner"), flush=True)
time.sleep(600)
"""


def test_others_find_it_by_its_address_file_while_it_runs(tmp_path: Path):
    with running_mooncake(tmp_path) as service:
        address = MooncakeAddress.read(service.address_file)
        assert address == service.address
        assert address.uri == "mooncake://toys"
        client = MooncakeClient(address)
        record = client.read_owner()
        assert (record.pid, record.segment_bytes, record.lease_ttl_s) == (service.pid("owner"), 64 << 20, 0.5)
        processes = [psutil.Process(service.pid(name)) for name in ("master", "owner")]
        listening = [c.laddr.ip for c in processes[0].net_connections() if c.status == "LISTEN"]
        assert listening == ["127.0.0.1"] * 2
    assert not any(map(lives, processes))
    with pytest.raises(StoreError, match="address of a running Mooncake service, found none"):
        MooncakeAddress.read(service.address_file)


@pytest.mark.parametrize(("victim", "named"), [("owner", "the process that owns its memory"), ("master", "its master")])
def test_a_death_is_told_at_once_and_an_empty_store_starts_at_the_same_address(tmp_path: Path, victim: str, named: str):
    lost, reasons = Event(), []
    service = MooncakeService(build_options(), tmp_path, lambda reason: (reasons.append(reason), lost.set()))
    try:
        address = service.start()
        service.check()
        os.kill(service.pid(victim), signal.SIGKILL)
        assert lost.wait(HANG_S)
        assert not service.address_file.exists()
        with pytest.raises(
            StoreLostError, match=f"toys is lost: {named} .*ended with code -9. The end of .*{victim}.log"
        ):
            service.check()
        assert reasons[0].startswith(named)
        assert service.restart() == address
        service.check()
        client = MooncakeClient(address)
        record = client.read_owner()
        assert sorted(client.list_keys(record.metrics)) == [f"toys/alive/{record.incarnation}", "toys/owner"]
        client.close()
    finally:
        service.stop()
    assert len(reasons) == 1


def test_an_owner_that_the_master_has_given_up_ends_itself(tmp_path: Path):
    with running_mooncake(tmp_path, client_ttl_s=SHORT_TTL_S) as service:
        client = MooncakeClient(service.address)
        os.kill(service.pid("owner"), signal.SIGSTOP)
        wait_until(lambda: client.exist(["toys/owner"]) != [True], "that the master gives its owner up")
        os.kill(service.pid("owner"), signal.SIGCONT)
        wait_until(lambda: service.find_problem() is not None, "the end of the owner")
        with pytest.raises(StoreLostError, match="the master has forgotten this process's memory"):
            service.check()


def test_both_processes_end_with_a_killed_parent(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    assert all(map(lives, children))
    parent.kill()
    parent.wait()
    wait_until_ended(*children)


def test_memory_that_there_is_not_is_told_with_the_owners_log(tmp_path: Path):
    service = MooncakeService(MooncakeOptions(1 << 46, timeout_s=5.0, start_timeout_s=HANG_S), tmp_path)
    with pytest.raises(StoreLostError, match=r"owns its memory has ended with code 3.*owner.log(?s:.*)code -600"):
        service.start()
    with pytest.raises(StoreLostError, match="does not run"):
        service.check()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"segment_bytes": 100}, "expected at least"),
        ({"store_id": "a/b"}, "found 'a/b'"),
        ({"lease_ttl_s": 0}, "lease_ttl_s"),
    ],
)
def test_wrong_options_are_refused(wrong: dict, told: str):
    with pytest.raises(ConfigError, match=told):
        MooncakeOptions(**{"segment_bytes": 64 << 20, **wrong})


@pytest.mark.parametrize("master", ["", "host", "host:x", "host:0", "host:99999"])
def test_wrong_addresses_are_refused(master: str):
    with pytest.raises(ConfigError, match="expected host:port"):
        MooncakeAddress(master, "toys")

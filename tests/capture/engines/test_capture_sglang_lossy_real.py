"""Real SGLang with settings that lose hidden states: they are refused, losses are noticed; a killed owner leaves nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import sglang_toys
from capture_toys import random_rows
from processes import ending, wait_until_ended
from sglang_toys import CHUNK, capture_spec, sglang_engine
from waiting import HANG_S

from draftworks.capture.engine import make_engine_identity
from draftworks.capture.engines.server_hosts import ExternalHost
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, EngineError
from draftworks.sglang.client import SGLangClient
from draftworks.storage.identity import LayerTap

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

ROWS = [row.input_ids.tolist() for row in random_rows(9, seed=3, longest=100)]


@dataclass(frozen=True)
class LossyServer:
    """A server that another process owns, with the settings of `lossy_options`."""

    url: str
    spool: Path
    owner: subprocess.Popen[str]
    processes: list[psutil.Process]


@pytest.fixture(scope="module")
def lossy(tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LossyServer]:
    folder = tmp_path_factory.mktemp("sglang") / "lossy"
    folder.mkdir()
    command = [sys.executable, sglang_toys.__file__, str(folder), tiny_target.model_dump_json()]
    with ending(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)) as owner:
        assert owner.stdout is not None
        url, pid = owner.stdout.readline().split()
        server = psutil.Process(int(pid))
        yield LossyServer(url, folder / "spool", owner, [server, *server.children(recursive=True)])


def connect_to_lossy(lossy: LossyServer, target: TargetFiles) -> SGLangEngine:
    """An engine on the lossy server, without the checks of the server's settings."""
    host = ExternalHost(SGLangClient(lossy.url, HANG_S), lossy.spool, (1, 3))
    return SGLangEngine(target, make_engine_identity(capture_spec()), host, attempts=1)


def test_a_set_up_that_loses_hidden_states_is_refused(lossy, tiny_target, tmp_path):
    with pytest.raises(EngineError, match=r"(?s)--disable-radix-cache.*--chunked-prefill-size -1"):
        sglang_engine(tiny_target, tmp_path, (LayerTap(2), LayerTap(4)), url=lossy.url, spool=str(lossy.spool))


def test_the_processes_of_a_server_on_a_cpu_share_its_imports(lossy):
    """CPU seconds: the one that only turns tokens into text has hardly any of its own."""
    server, *others = (sum(process.cpu_times()[:2]) for process in lossy.processes)
    assert min(others) < server / 4


def test_rows_lost_to_chunks_are_noticed(lossy, tiny_target):
    row = next(row for row in ROWS if len(row) > 2 * CHUNK)
    with pytest.raises(CaptureError, match=rf"sequence of {len(row)} tokens in chunks of \[16, "):
        connect_to_lossy(lossy, tiny_target).capture([row], [])


def test_rows_lost_to_the_prefix_cache_are_noticed(lossy, tiny_target):
    row, engine = list(range(100, 100 + CHUNK - 2)), connect_to_lossy(lossy, tiny_target)
    assert len(engine.capture([row], [])[0]["last"]) == len(row)
    with pytest.raises(CaptureError, match=rf"took 13 of a sequence's {len(row)} tokens from its prefix cache"):
        engine.capture([row], [])


def test_a_killed_owner_leaves_no_process(lossy):
    assert all(process.is_running() for process in lossy.processes)
    assert len(lossy.processes) >= 3
    lossy.owner.kill()
    lossy.owner.wait()
    wait_until_ended(*lossy.processes)

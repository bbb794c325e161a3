"""Real SGLang whose hook puts into a real Mooncake: the features are those of transformers, and nothing is left there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_toys
import torch
from capture_toys import capture_run, random_rows
from mooncake_harness import is_object
from mooncake_toys import running_mooncake
from sglang_toys import SGLANG, sglang_engine

from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.capture.session import capture_features
from draftworks.config.run_files import TargetFiles
from draftworks.mooncake.address import MooncakeAddress
from draftworks.mooncake.client import MooncakeClient
from draftworks.storage.identity import LayerTap

pytestmark = [pytest.mark.sglang, pytest.mark.mooncake, pytest.mark.timeout(1800)]
TAPS = (LayerTap(2), LayerTap(4))


@pytest.fixture(scope="module")
def python_with_both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the libraries of SGLang's environment and the Mooncake of this one."""
    import mooncake

    folder = tmp_path_factory.mktemp("both")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site_of = "import sysconfig; print(sysconfig.get_path('purelib'))"
    sites = [
        subprocess.run([python, "-c", site_of], capture_output=True, text=True, check=True).stdout.strip()
        for python in (folder / "bin" / "python", SGLANG.python)
    ]
    beside = f"import site; site.addsitedir({sites[1]!r})\n{Path(mooncake.__path__[0]).parent}\n"
    (Path(sites[0]) / "beside.pth").write_text(beside)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def address_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with running_mooncake(tmp_path_factory.mktemp("mooncake")) as service:
        yield service.address_file


@pytest.fixture(scope="module")
def engine(
    python_with_both: Path, address_file: Path, tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_toys, "SGLANG", SGLANG.model_copy(update={"python": str(python_with_both)}))
        folder = tmp_path_factory.mktemp("sglang")
        engine = sglang_engine(tiny_target, folder, TAPS, mooncake=str(address_file))
    yield engine
    engine.close()


def test_features_come_through_mooncake_and_leave_nothing_there(
    engine: SGLangEngine, address_file: Path, tiny_target: TargetFiles, tiny_engine: HFTargetEngine, tmp_path: Path
):
    rows = random_rows(12, longest=60)
    run = capture_run(tiny_target, tmp_path, backend="sglang_server")
    assert capture_features(run, lambda: engine, rows).captured == len(rows)
    for row, found in zip(rows, engine.capture([row.input_ids.tolist() for row in rows], TAPS), strict=True):
        expected = tiny_engine.capture([row.input_ids.tolist()], TAPS)[0]
        for name, stream in expected.items():
            assert torch.allclose(found[name], stream, atol=2e-4)
    assert not list(engine.spool.iterdir())
    client = MooncakeClient(MooncakeAddress.read(address_file))
    keys = client.list_keys(client.read_owner().metrics)
    assert not list(filter(is_object, keys))

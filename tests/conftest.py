"""Fixtures shared by all rooms: the embedded tiny target, and real SGLang that serves it."""

from __future__ import annotations

import base64
import functools
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest
import warm_starts
from dagster_state import forget_instance
from hypothesis import HealthCheck, settings
from seconds_by_room import SecondsByRoom

from draftworks.config.run_files import TargetFiles
from draftworks.targets.resolve import digest_target_files

if TYPE_CHECKING:
    from leftovers import LeftoverWatch
    from slurm_cluster import SlurmCluster

    from draftworks.capture.engines.sglang_engine import SGLangEngine

# The same few examples in every run: what is random may fail by chance on something old. `make test-long` draws new ones,
# and more (--hypothesis-profile long). No example is wrong because it was slow: machines do other work too.
for name, examples, steps in (("gate", 25, 20), ("long", 200, 50)):
    settings.register_profile(
        name,
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=name == "gate",
        database=None,
        print_blob=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("gate")

pytest_plugins = ["leftovers_check"]

# Contracts are asked in modules that are no tests themselves.
pytest.register_assert_rewrite("store_harness", "store_contract", "store_keyed_contract")

ROOT = Path(__file__).resolve().parents[1]
EMPTY_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)
"""A picture of one pixel."""
SHARED = frozenset({"finished", "tiny_sglang", "sglang_judge", "vllm_judge"})
"""Costly fixtures of a whole session."""


def pytest_configure(config: pytest.Config) -> None:
    """In the background, as by `make test &`, SIGINT is ignored: Dagster would have SIGTERM ignored too, in all children.

    Programs start warm, unless WARM=0 asks for real starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    warm_starts.install_unless_unwanted()
    config.pluginmanager.register(SecondsByRoom(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that nobody waits for it at the end: all that shares a costly fixture, then the
    modules with slow tests.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    shared = {item.path for item in items if not SHARED.isdisjoint(getattr(item, "fixturenames", ()))}
    # Modules stay whole: a fixture of one that was left would be made again.
    items.sort(key=lambda item: (item.path not in shared, item.path not in slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Workers share the tests by module, see the Makefile: pytest-xdist's groups are lost on pytest 9.2."""
    if config.getvalue("dist") != "loadfile":
        return None
    from shared_fixture_scheduling import SharedFixtureScheduling

    return SharedFixtureScheduling(config, log, SHARED)


@pytest.fixture(autouse=True)
def no_dagster_instance_left() -> Iterator[None]:
    yield
    forget_instance()


@pytest.fixture(scope="session", autouse=True)
def no_picture_is_drawn() -> Iterator[pytest.MonkeyPatch]:
    """In the processes of tests a figure is made and saved as an empty picture: drawing takes longer than many a report.

    A test of pictures asks for `pictures`; programs that tests start draw as ever.
    """
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("matplotlib") is not None:  # a machine with a GPU may be without
            patch.setattr("matplotlib.figure.Figure.savefig", _save_empty)
        yield patch


@pytest.fixture
def pictures(no_picture_is_drawn: pytest.MonkeyPatch) -> Iterator[None]:
    """Figures are drawn."""
    no_picture_is_drawn.undo()
    yield
    no_picture_is_drawn.setattr("matplotlib.figure.Figure.savefig", _save_empty)


def _save_empty(self: object, stream: IO[bytes], **_: object) -> None:
    stream.write(EMPTY_PNG)


@pytest.fixture
def real_starts() -> Iterator[None]:
    """Programs are executed, with all that they import: for one test of each kind in which processes die."""
    warm_starts.uninstall()
    yield
    warm_starts.install_unless_unwanted()


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return ROOT / "registry" / "models" / "tiny"


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path) -> TargetFiles:
    return digest_target_files(
        TargetFiles(
            name="tiny",
            model=str(tiny_folder),
            tokenizer=str(tiny_folder),
            digest="",
            tokenizer_digest="",
            num_layers=8,
            hidden_size=128,
            vocab_size=2048,
            context=512,
        )
    )


@pytest.fixture(scope="session")
def family_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TargetFiles]:
    """Makes a tiny random model of a family (see model_families.FAMILIES), each once. Nobody writes into its folder."""
    from model_families import save_family

    folder = tmp_path_factory.mktemp("families")
    return functools.cache(lambda name: save_family(name, folder / name))


@pytest.fixture(scope="session")
def mtp_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TargetFiles]:
    """Makes a tiny random target with an MTP layer (see mtp_toys.KINDS), each once. Nobody writes into its folder."""
    from mtp_toys import save_target_with_mtp

    folder = tmp_path_factory.mktemp("mtp")
    return functools.cache(lambda kind: save_target_with_mtp(kind, folder / kind))


@pytest.fixture(scope="session")
def tiny_sglang(
    tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory, leftover_watch: LeftoverWatch
) -> Iterator[SGLangEngine]:
    """A server of real SGLang, started once, that captures every tap it can; a test may have it started again."""
    from sglang_toys import list_servers, sglang_engine, taps_of

    engine = sglang_engine(tiny_target, tmp_path_factory.mktemp("sglang") / "tiny", taps_of(tiny_target))
    leftover_watch.excuse(lambda: list_servers(engine))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def slurm(leftover_watch: LeftoverWatch) -> Iterator[SlurmCluster]:
    """A real Slurm of two nodes, see slurm_cluster; a test that disturbs it puts it right again."""
    from slurm_cluster import find_daemons, slurm_cluster

    with slurm_cluster() as cluster:
        leftover_watch.excuse(lambda: find_daemons(f"{cluster.folder}:"))
        yield cluster

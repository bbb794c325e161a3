"""Fixtures shared by all rooms: the embedded tiny target, and real SGLang that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from draftworks.runs import TargetFiles

if TYPE_CHECKING:
    from draftworks.capture.sglang_engine import SGLangEngine

# Examples are drawn on machines that do other work too: no example is wrong because it was slow.
settings.register_profile("unhurried", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

ROOT = Path(__file__).resolve().parents[1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several workers share the tests: a module stays together, and so does all that looks at the one finished run.

    That is the longest group, so it comes first, then the modules with slow tests: nobody waits for them at the end.
    """
    if not config.pluginmanager.hasplugin("xdist"):  # a machine with the engine alone
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (not _looks_at_the_finished_run(item), item.path not in slow))
    for item in items:
        group = "finished" if _looks_at_the_finished_run(item) else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))


def _looks_at_the_finished_run(item: pytest.Item) -> bool:
    return "finished" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return ROOT / "registry" / "models" / "tiny"


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path) -> TargetFiles:
    return TargetFiles(
        name="tiny",
        model=str(tiny_folder),
        tokenizer=str(tiny_folder),
        digest="0123456789abcdef",
        tokenizer_digest="fedcba9876543210",
        num_layers=8,
        hidden_size=128,
        vocab_size=2048,
        context=512,
    )


@pytest.fixture(scope="session")
def tiny_sglang(tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """A server of real SGLang, started once, that captures every tap it can."""
    from sglang_toys import sglang_engine, taps_of

    engine = sglang_engine(tiny_target, tmp_path_factory.mktemp("sglang") / "tiny", taps_of(tiny_target))
    yield engine
    engine.close()

"""Which strategies the entries of a registry use, whatever else their text mentions."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.config.registry_files import TargetSpec
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import list_used_strategies

ENTRY = "model: m\ndataset: d\n"


class CountingRegistry(Registry):
    """Registry that notes which entries are parsed."""

    parsed: list[str]

    def load_target(self, name: str) -> TargetSpec:
        self.__dict__.setdefault("parsed", []).append(name)
        return super().load_target(name)


@pytest.fixture
def registry(tmp_path: Path) -> CountingRegistry:
    (tmp_path / "targets").mkdir()
    return CountingRegistry(tmp_path)


def write(registry: Registry, **entries: str) -> None:
    for name, text in entries.items():
        (registry.root / "targets" / f"{name}.yaml").write_text(text)


@pytest.mark.parametrize(
    ("text", "used"),
    [
        (ENTRY, ["eagle3"]),
        (ENTRY + "# strategies: of the default\n", ["eagle3"]),
        (ENTRY + "strategies: {}\n", []),
        (ENTRY + "strategies: {dflash2: {}}\n", ["dflash2"]),
        (ENTRY + "# or eagle3, and mtp\nstrategies:\n  dflash: {}\n", ["dflash"]),
        (ENTRY + "'strategies':\n  ? domino\n  : {}\n", ["domino"]),
        ("{model: m, dataset: d, strategies: {peagle: {}}}", ["peagle"]),
        ("model: eagle3/mtp\ndataset: d\nstrategies: {xpress: {}}\n", ["xpress"]),
        (ENTRY + "max_lenght: 3\nstrategies: {dspark: {}, domino: {}}\n", ["domino", "dspark"]),
        (ENTRY + "max_lenght: 3\n", ["eagle3"]),
        (ENTRY + "strategies: {dspark: [}\n", ["dspark"]),
        (ENTRY + "strategies: {eagle: {}}\n", []),
        ("\xff\xfe", ["eagle3"]),
    ],
)
def test_an_entry_uses_what_it_names_and_one_with_a_mistake_all_that_it_mentions(registry, text, used):
    write(registry, one=text)
    assert list_used_strategies(registry) == used


def test_what_any_entry_uses_is_used(registry):
    write(registry, a=ENTRY, b=ENTRY + "strategies: {mtp: {}}\n", c=ENTRY + "strategies: {mtp: {}, dflash: {}}\n")
    assert list_used_strategies(registry) == ["dflash", "eagle3", "mtp"]


def test_a_registry_without_entries_uses_none(registry):
    assert list_used_strategies(registry) == []


def test_what_is_no_file_uses_what_an_empty_entry_would(registry):
    (registry.root / "targets" / "folder.yaml").mkdir()
    assert list_used_strategies(registry) == ["eagle3"]


def test_only_an_entry_that_may_name_another_strategy_is_parsed(registry):
    write(registry, **{f"t{number}": ENTRY + "strategies: {eagle3: {}, mtp: {}}\n" for number in range(20)})
    write(registry, u=ENTRY + "strategies: {dflash: {}}\n", v=ENTRY)
    list_used_strategies(registry)
    assert registry.parsed == ["t0", "u"]

"""The code location that `draftworks run --registry` and `draftworks ui --registry` write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dagster._core.code_pointer import FileCodePointer
from dagster._core.workspace.load import location_origins_from_yaml_paths

from draftworks.programs.code_location import write_code_location
from draftworks.programs.start import CHECKOUT
from draftworks.targets.registry import Registry


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    root = tmp_path / 'it\'s \\\\ "ours" {x}' / "fleet"
    (root / "targets").mkdir(parents=True)
    (root / "targets" / "small.yaml").write_text("model: /nowhere\ndataset: chats\n")
    return Registry(root)


def test_dagster_finds_the_targets_of_the_folder(registry: Registry):
    location = write_code_location(registry, CHECKOUT)
    assert location.definitions.is_relative_to(registry.resolve_var_folder())
    definitions = FileCodePointer(str(location.definitions), "defs", None).load_target()
    [target_model] = [each for each in definitions.resolve_all_asset_specs() if each.key.path == ["target_model"]]
    assert target_model.partitions_def.get_partition_keys() == ["small"]


def test_the_checkouts_own_registry_is_not_read(registry: Registry, monkeypatch):
    monkeypatch.delitem(sys.modules, "spec_assets.definitions", raising=False)
    location = write_code_location(registry, CHECKOUT)
    FileCodePointer(str(location.definitions), "defs", None).load_target()
    assert "spec_assets.definitions" not in sys.modules


def test_the_ui_shows_the_location_by_the_name_of_the_folder(registry: Registry):
    location = write_code_location(registry, CHECKOUT)
    [origin] = location_origins_from_yaml_paths([str(location.workspace)])
    assert origin.location_name == "fleet"
    assert Path(origin.loadable_target_origin.python_file) == location.definitions
    assert origin.loadable_target_origin.working_directory == str(CHECKOUT)


def test_a_location_that_is_there_is_not_written_again(registry: Registry):
    location = write_code_location(registry, CHECKOUT)
    before = [path.stat().st_mtime_ns for path in (location.definitions, location.workspace)]
    again = write_code_location(registry, CHECKOUT)
    assert [path.stat().st_mtime_ns for path in (again.definitions, again.workspace)] == before

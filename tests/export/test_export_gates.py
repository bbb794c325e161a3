"""Gates catch every error in exported files that the loaders of servers do not report.
A format of another package is written, checked, read and imported like the built-in ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import cover, gate_or_long
from export_damages import ALL, DAMAGES, Damage
from export_toys import FORMATS, Toys

from draftworks.config.strategies import register_strategy, resolve_export, resolve_strategy
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft, read_checkpoint
from draftworks.export.conventions import GATE_MEANINGS, READABLE
from draftworks.export.export_format import load_format
from draftworks.export.exporting import export_draft
from draftworks.export.gates import GATES, ExportedDraft, GateResult, check_export, run_gate
from draftworks.strategies.eagle3.options import EAGLE3

Config = dict[str, Any]


@dataclass(frozen=True)
class Exported:
    """An export that passes all gates, and the gates over damaged copies of it."""

    toys: Toys
    format: str
    dtype: torch.dtype = torch.bfloat16

    @property
    def folder(self) -> Path:
        return self.toys.folder / self.format

    @cached_property
    def draft(self) -> CanonicalDraft:
        return self.toys.draft(FORMATS[self.format], name=FORMATS[self.format])

    @cached_property
    def strategy(self) -> DraftStrategy:
        return self.draft.build_strategy(self.dtype)

    def gates(self, folder: Path) -> dict[str, GateResult]:
        export_format = load_format(FORMATS[self.format], self.format)
        return {gate.name: gate for gate in check_export(folder, export_format, self.draft, self.strategy, self.dtype)}

    @cached_property
    def opened(self) -> ExportedDraft:
        found, export_format = read_checkpoint(self.folder), load_format(FORMATS[self.format], self.format)
        values = (export_format, self.draft, self.strategy, self.dtype, found.config, found.tensors)
        return ExportedDraft(self.folder, *values)

    def passes(self, gate: str, **changes: Any) -> bool:
        """Whether a gate passes with another `config` or other `tensors`."""
        return run_gate(gate, replace(self.opened, **changes)).passed


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """Sound exports by format."""
    toys = Toys.make(tmp_path_factory.mktemp("gates"))
    made = {name: Exported(toys, name) for name in ALL}
    for name, exported in made.items():
        export_draft(exported.draft, name, exported.folder)
    return made


CAUGHT = [(name, damage) for damage in DAMAGES for name in damage.formats]


def questions_of(cell: tuple[str, Damage]) -> Iterator[tuple[str, str]]:
    """What a damaged export asks: whether the damage is noticed in a format of each library, and each gate's word for each format.

    Logits are computed by a reader of the strategy's own.
    """
    name, damage = cell
    yield damage.name, FORMATS[name] if damage.gate == "same_logits" else name.split("_")[0]
    yield damage.gate, name


IN_GATE = cover(CAUGHT, questions_of)


@pytest.mark.parametrize("name", ALL)
def test_an_export_passes_all_gates(exports: dict[str, Exported], name: str):
    exported = exports[name]
    gates = exported.gates(exported.folder)
    assert list(gates) == [READABLE, *GATES] == list(GATE_MEANINGS)
    assert {name for name, gate in gates.items() if not gate.passed} == set()
    assert 0 <= gates["same_logits"].figures["largest_difference"] < 2e-5


@pytest.mark.parametrize(("name", "damage"), gate_or_long(CAUGHT, IN_GATE), ids=str)
def test_a_silent_failure_is_caught(exports: dict[str, Exported], name: str, damage: Damage, tmp_path: Path):
    damage.do(exports[name].folder, tmp_path / "damaged")
    gates = exports[name].gates(tmp_path / "damaged")
    assert list(gates) == [READABLE, *GATES]
    assert not gates[damage.gate].passed
    assert gates[damage.gate].description
    json.dumps([dict(gate.figures) for gate in gates.values()], allow_nan=False)


def altered(config: Config) -> Iterator[Config]:
    """The config with one value, at any depth, removed, null or another one. The provenance is for people."""
    for key, value in config.items():
        if key == "provenance":
            continue
        yield {name: each for name, each in config.items() if name != key}
        if isinstance(value, dict):
            yield from ({**config, key: inner} for inner in altered(value))
        elif value is not None:
            yield {**config, key: None}
            yield {**config, key: another(value)}
        else:
            yield {**config, key: 1}


def another(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return {int: lambda: value + 1, float: lambda: value * 2 + 1, str: lambda: value + "x", list: lambda: value[1:]}[
        type(value)
    ]()


@pytest.mark.parametrize("name", ALL)
def test_no_value_of_config_json_can_be_missing_or_another(exports: dict[str, Exported], name: str):
    exported = exports[name]
    assert exported.passes("config_round_trip")
    changed = list(altered(dict(exported.opened.config)))
    assert len(changed) > 60
    for config in changed:
        assert not exported.passes("config_round_trip", config=config), config


@pytest.mark.parametrize("name", ALL)
def test_no_tensor_can_be_missing_or_of_another_shape_or_dtype(exports: dict[str, Exported], name: str):
    exported, tensors = exports[name], dict(exports[name].opened.tensors)
    for key, tensor in tensors.items():
        assert not exported.passes("key_set", tensors={one: each for one, each in tensors.items() if one != key})
        assert not exported.passes("shapes", tensors={**tensors, key: torch.cat([tensor, tensor])})
        assert not exported.passes("tensors_equal", tensors={**tensors, key: tensor.to(torch.int32)})


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_files_that_cannot_be_read_fail_one_gate(
    exports: dict[str, Exported], tmp_path: Path, file: str, spoil: Callable[[Path], Any]
):
    exported = exports["sglang_eagle3"]
    shutil.copytree(exported.folder, tmp_path / "damaged")
    spoil(tmp_path / "damaged" / file)
    (gate,) = exported.gates(tmp_path / "damaged").values()
    assert (gate.name, gate.passed) == (READABLE, False)
    assert file in gate.description


HERE = Path(__file__).parent


def test_a_plugged_in_format_passes_every_gate_and_comes_back(tmp_path: Path):
    command = [sys.executable, str(HERE / "plugin_worker.py"), str(tmp_path)]
    paths = [HERE / "plugin", HERE.parent / "toys"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert list(report["gates"]) == list(GATE_MEANINGS)
    assert report["failed"] == {}
    assert report["layer_ids"] == [layer - 1 for layer in report["taps"]]
    assert report["imported"] == ["fused", "fused_eagle3"]
    assert report["same"]


def test_a_format_whose_name_is_taken_is_refused():
    """Otherwise its drafts would be counted and read as drafts of the other strategy."""
    with pytest.raises(ConfigError, match="export format 'sglang_eagle3' belongs to strategy 'eagle3'"):
        register_strategy(replace(EAGLE3, name="late"))
    with pytest.raises(ConfigError, match="unknown strategy 'late'"):
        resolve_strategy("late")


def test_layers_are_counted_in_a_known_way_or_not_at_all():
    with pytest.raises(ConfigError, match="counting: expected one of layers_passed, layer_output, found 'from_1'"):
        replace(resolve_export("sglang_eagle3"), counting="from_1")

"""The examples that stand in the documents: files of a registry, run config, entry points, code."""

from __future__ import annotations

import tomllib
from pathlib import Path

import dagster as dg
import pytest
import yaml
from documents import ROOT, Block, blocks

from draftworks.config.operations import DeploymentSpec
from draftworks.config.registry_files import DatasetSpec, EvalSpec, Spec, TargetSpec
from draftworks.config.strategies import PLUGINS, resolve_strategy
from draftworks.config.strict_yaml import load_yaml

RUN_CONFIG, WORKFLOW = {"ops"}, {"name", True, "jobs"}  # YAML reads the key `on` as true
KINDS: list[type[Spec]] = [EvalSpec, DatasetSpec, DeploymentSpec, TargetSpec]
LEFT_OUT = {"model": "models/tiny", "dataset": "stdlib"}
"""What a part of a target does not repeat."""


def kind_of(keys: set[str]) -> type[Spec]:
    """The kind of registry file that may have these keys."""
    found = [kind for kind in KINDS if keys <= kind.model_fields.keys()]
    assert found, f"keys of no registry file: {sorted(keys)}"
    return found[0]


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_examples_in_yaml_are_valid(block: Block, tmp_path: Path):
    values = yaml.safe_load(block.text)
    if values.keys() <= RUN_CONFIG:
        from spec_assets.definitions import defs

        dg.validate_run_config(defs.resolve_job_def("everything"), values)
        return
    if values.keys() == WORKFLOW:
        return
    kind = kind_of(set(values))
    path = tmp_path / "example.yaml"
    path.write_text(yaml.safe_dump((LEFT_OUT if kind is TargetSpec else {}) | values))
    spec = load_yaml(path, kind, **({} if kind is DeploymentSpec else {"name": "example"}))
    for name, entry in spec.strategies.items() if isinstance(spec, TargetSpec) else ():
        strategy = resolve_strategy(name)
        strategy.parse_options(entry.options, str(block))
        for each in entry.export.formats or ():
            strategy.export(each)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_entry_points_are_of_the_group_that_is_read(block: Block):
    assert tomllib.loads(block.text)["project"]["entry-points"].keys() == {PLUGINS}


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_code_is_that_of_a_plugin_or_an_example_which_the_tests_run(block: Block):
    run = [path for pattern in ("*/plugin/*.py", "*/example_*.py") for path in (ROOT / "tests").glob(pattern)]
    assert any(block.text.strip() in path.read_text() for path in run)


def test_there_are_examples_of_each_kind():
    assert {block.language for kind in ("yaml", "toml", "python", "bash") for block in blocks(kind)} == {
        *("yaml", "toml", "python", "bash")
    }

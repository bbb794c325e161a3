"""The code location loads quickly, without heavy modules, whatever the registry holds."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
import yaml

from draftworks.config.strategies import list_strategies
from spec_assets.code_location import build_definitions
from spec_assets.definitions import REGISTRY

HEAVY = ("torch", "transformers", "sglang", "pyarrow", "matplotlib")

LOAD = """
import sys
from pathlib import Path
from spec_assets.code_location import build_definitions
defs = build_definitions(Path(sys.argv[1]))
assert len(defs.resolve_all_asset_specs()) >= 12
print([name for name in sys.argv[2:] if name in sys.modules])
"""


def loaded_heavy_modules(registry: Path) -> str:
    command = [sys.executable, "-c", LOAD, str(registry), *HEAVY]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_definitions_are_loadable():
    dg.Definitions.validate_loadable(build_definitions(REGISTRY))


def test_loading_imports_no_heavy_module():
    assert loaded_heavy_modules(REGISTRY) == "[]"


def test_a_thousand_targets_load_in_a_few_times_what_importing_dagster_takes(tmp_path: Path):
    """CPU time of whole processes; 1.9 times was measured."""
    (tmp_path / "targets").mkdir()
    for number in range(1000):
        (tmp_path / "targets" / f"target-{number:04}.yaml").write_text("model: m\ndataset: d\n")

    def load() -> None:
        assert loaded_heavy_modules(tmp_path) == "[]"

    def import_dagster() -> None:
        subprocess.run([sys.executable, "-c", "import dagster"], check=True)

    assert children_seconds(load) < 4 * children_seconds(import_dagster)


def children_seconds(work: Callable[[], None]) -> float:
    """Return the CPU time of the processes that it ran."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def test_every_registry_entry_is_a_partition(site):
    (site.registry / "targets" / "second.yaml").write_text("not: [valid")
    partitions = {
        spec.key.to_user_string(): spec.partitions_def for spec in site.definitions().resolve_all_asset_specs()
    }
    assert [partitions.pop(name) for name in ("leaderboard", "fleet")] == [None, None]
    assert {tuple(found.get_partition_keys()) for found in partitions.values()} == {("second", "small")}


def test_a_broken_entry_stops_its_own_target_only(site):
    (site.registry / "targets" / "second.yaml").write_text("model: [")
    assert site.run("resolve").success
    broken = site.run("resolve", partition="second")
    assert "second.yaml: not valid YAML" in broken.failure_data_for_node("recipe").user_failure_data.description


ODD = {
    "date": "description: 2025-02-30\nmodel: [m]\n",
    "number": "max_length: " + "9" * 5000,
    "depth": "[" * 50_000,
    "aliases": "a: &a [x]\n" + "".join(f"{n}: &a [{','.join(['*a'] * 9)}]\n" for n in range(30)),
    "twice": "model: a\nmodel: b\n",
}


def test_odd_files_take_no_other_target_down(site):
    """In a process of its own, since such a file may crash the interpreter."""
    for name, text in ODD.items():
        (site.registry / "targets" / f"{name}.yaml").write_text(text)
    (site.registry / "targets" / "folder.yaml").mkdir()
    (site.registry / "targets" / "a...b.yaml").write_text("model: m\n")
    (site.registry / "targets" / "dangling.yaml").symlink_to("nowhere")
    os.mkfifo(site.registry / "targets" / "pipe.yaml")
    assert loaded_heavy_modules(site.registry) == "[]"
    assert site.run("resolve").success
    for name in (*ODD, "folder", "dangling", "pipe"):
        run = site.run("resolve", partition=name, asset_selection=[dg.AssetKey("target_model")])
        broken = run.failure_data_for_node("target_model")
        said = broken.user_failure_data.description
        assert f"{name}.yaml: " in said, said
        assert len(said) < 1000, said


def test_the_jobs_are_those_of_the_design():
    names = {job.name for job in build_definitions(REGISTRY).resolve_all_job_defs()} - {"__ASSET_JOB"}
    trainings = {"train_eagle3", "train_dflash"}
    rest = {
        "resolve",
        "prepare",
        "evaluate",
        "serve",
        "leaderboard",
        "page",
        "judge_fp8",
        "compare_thinking",
        "prune",
        "everything",
    }
    assert names == trainings | rest


@pytest.mark.parametrize("used", [[], ["mtp"], ["dflash", "eagle3"]])
def test_of_strategies_that_no_target_uses_there_are_no_assets_checks_and_jobs(site, used: list[str]):
    entry = yaml.safe_load(site.target_file.read_text())
    site.target_file.write_text(yaml.safe_dump({**entry, "strategies": {name: {} for name in used}}))
    defs = site.definitions()
    graph = defs.resolve_asset_graph()
    assets = {key.to_user_string() for key in graph.get_all_asset_keys()}
    checked = {key.asset_key.to_user_string() for key in graph.asset_check_keys}
    jobs = {job.name for job in defs.resolve_all_job_defs()}
    words = {word for name in assets | checked | jobs for word in name.split("_")}
    assert words & set(list_strategies()) == set(used)
    assert {f"{name}_draft" for name in used} <= checked
    assert {f"train_{name}" for name in used} <= jobs


def test_without_any_strategy_there_is_a_leaderboard(site):
    site.target_file.write_text("model: m\ndataset: d\nstrategies: {}\n")
    assert site.run("leaderboard", partition=None).success


@pytest.mark.parametrize(("job", "asset"), [("judge_fp8", "fp8_gate"), ("compare_thinking", "thinking_comparison")])
def test_a_comparison_of_trainings_and_what_it_reads_are_made_by_a_job_of_their_own(site, job: str, asset: str):
    defs = site.definitions()
    jobs = {name: defs.resolve_job_def(name).asset_layer for name in (job, "everything")}
    made = {name: {key.to_user_string() for key in layer.selected_asset_keys} for name, layer in jobs.items()}
    assert made[job] - made["everything"] == {asset}
    assert {"tokenized_train", "heldout_eval_features"} <= made[job]
    assert "training_features" not in made[job]


def test_the_inputs_are_part_of_every_job(site):
    defs = site.definitions()
    for name in ("resolve", "prepare", "train_eagle3", "evaluate", "serve", "judge_fp8", "everything"):
        keys = {key.to_user_string() for key in defs.resolve_job_def(name).asset_layer.selected_asset_keys}
        assert {"target_model", "dataset", "recipe"} <= keys, name


@pytest.mark.parametrize("path", ["workspace.yaml", ".dagster/dagster.yaml"])
def test_telemetry_is_off_and_the_code_location_is_found_from_anywhere(path):
    text = (REGISTRY.parent / path).read_text()
    if path == "workspace.yaml":
        assert "relative_path: spec_assets/definitions.py" in text
    else:
        assert text.count("enabled: false") >= 2

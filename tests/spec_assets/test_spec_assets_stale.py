"""After a change of an option Dagster marks exactly those assets as stale that read the option."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest
import yaml
from coverings import gate_or_long
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from draftworks.storage.names import TARGET_MODEL, of_strategy
from draftworks.targets.registry import Registry
from spec_assets.unused import find_unused_assets

TWO_STRATEGIES = """
  dflash:
    options: {block_size: 3, num_layers: 1, layer_ids: [2, 4, 5], num_anchors: 8, mask_token_id: 0, intermediate_size: 32}
    training: {global_batch_size: 8, micro_batch_size: 4, epochs: 1, lr: 0.002, compute_dtype: float32, device: cpu}
"""
DATA_AND_FEATURES = {
    "conversations",
    "responses",
    "heldout_responses",
    "tokenized_train",
    "vocab_mapping",
    "training_features",
    "heldout_eval_features",
}
STRATEGIES = ("eagle3", "dflash")
OF_STRATEGIES = {name for strategy in STRATEGIES for name in of_strategy(strategy)[:4]}
CHANGES: dict[str, tuple[str, Any, set[str]]] = {
    "learning rate": ("strategies.eagle3.training.lr", 0.001, {"eagle3_draft"}),
    "learning rate of the other": ("strategies.dflash.training.lr", 0.001, {"dflash_draft"}),
    "option of one strategy": ("strategies.eagle3.options.ttt_length", 3, {"eagle3_draft"}),
    "formats": ("strategies.dflash.export", {"formats": ["zlab_dflash"]}, {"dflash_export"}),
    "data": ("data.max_conversations", 40, DATA_AND_FEATURES),
    "capture": ("capture.dtype", "bfloat16", DATA_AND_FEATURES),
    "taps": ("strategies.dflash.options.layer_ids", [2, 3, 5], {*DATA_AND_FEATURES, "dflash_draft"}),
    "vocabulary": ("strategies.eagle3.options.draft_vocab_size", 128, {*DATA_AND_FEATURES, "eagle3_draft"}),
    "evaluation": (
        "evaluation.resamples",
        177,
        {of_strategy(strategy).report for strategy in STRATEGIES},
    ),
    "what decides no result": ("strategies.eagle3.training.log_every", 3, set()),
}
IN_GATE = {"option of one strategy", "formats", "taps", "vocabulary", "evaluation", "what decides no result"}


@pytest.fixture(scope="module")
def two_strategies(shared_site):
    shared_site.target_file.write_text(shared_site.target_file.read_text() + TWO_STRATEGIES)
    return shared_site


def change(site: Any, key: str, value: Any) -> None:
    target = yaml.safe_load(site.target_file.read_text())
    *parents, name = key.split(".")
    entry = target
    for parent in parents:
        entry = entry.setdefault(parent, {})
    entry[name] = value
    site.target_file.write_text(yaml.safe_dump(target))


def look_at_options(site: Any, instance: dg.DagsterInstance) -> None:
    """Materialize the inputs without `target_model`, whose checks take long and which no option changes."""
    inputs = site.definitions().resolve_job_def("resolve").asset_layer.selected_asset_keys
    looked_at = [key for key in inputs if key != dg.AssetKey(TARGET_MODEL)]
    assert site.run("resolve", instance=instance, asset_selection=looked_at).success


def make_the_rest(site: Any, instance: dg.DagsterInstance) -> None:
    """Record all assets but the inputs as made from the recorded inputs, without computing them."""
    graph = site.definitions().resolve_asset_graph()
    for key in graph.toposorted_asset_keys:
        node = graph.get(key)
        if node.group_name == "inputs" or key == dg.AssetKey("leaderboard"):
            continue
        tags = {"dagster/data_version": "v", "dagster/code_version": node.code_version}
        for parent in node.parent_keys:
            made = instance.get_latest_data_version_record(parent, partition_key="small")
            version = "v" if made is None else made.event_log_entry.tags["dagster/data_version"]
            tags[f"dagster/input_data_version/{parent.to_user_string()}"] = version
            tags[f"dagster/input_event_pointer/{parent.to_user_string()}"] = (
                "NULL" if made is None else str(made.storage_id)
            )
        instance.report_runless_asset_event(dg.AssetMaterialization(key, partition="small", tags=tags))


def stale(site: Any, instance: dg.DagsterInstance) -> set[str]:
    graph = site.definitions().resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    registry = Registry(site.registry)
    unused = find_unused_assets(registry.load_target("small"), registry)
    keys = [key for key in graph.get_all_asset_keys() if graph.get(key).group_name != "inputs"]
    return {
        key.to_user_string()
        for key in keys
        if key != dg.AssetKey("leaderboard")
        and key.to_user_string() not in unused
        and resolver.get_status(key, "small") == StaleStatus.STALE
    }


@pytest.mark.parametrize("listed_by", ["other", "small"])
def test_a_new_eval_set_concerns_the_reports_of_targets_that_list_it(two_strategies, tmp_path, listed_by: str):
    site = two_strategies.copy(tmp_path)
    other = site.target_file.with_name("other.yaml")
    other.write_text(site.target_file.read_text())
    reports = {of_strategy(strategy).report for strategy in STRATEGIES}
    with dg.DagsterInstance.ephemeral() as instance:
        look_at_options(site, instance)
        make_the_rest(site, instance)
        assert stale(site, instance) == set()
        (site.registry / "evals").mkdir(exist_ok=True)
        dataset = yaml.safe_load(site.target_file.read_text())["dataset"]
        (site.registry / "evals" / "gold.yaml").write_text(f"dataset: {dataset}\n")
        path = site.target_file.with_name(f"{listed_by}.yaml")
        path.write_text(path.read_text() + "\nevals: [gold]\n")
        assert stale(site, instance) & reports == (reports if listed_by == "small" else set())


@pytest.mark.parametrize("changed", gate_or_long(CHANGES, IN_GATE))
def test_a_changed_option_makes_stale_what_reads_it_and_nothing_else(two_strategies, tmp_path, changed):
    site = two_strategies.copy(tmp_path)
    key, value, expected = CHANGES[changed]
    with dg.DagsterInstance.ephemeral() as instance:
        look_at_options(site, instance)
        make_the_rest(site, instance)
        assert stale(site, instance) == set()
        change(site, key, value)
        look_at_options(site, instance)
        assert stale(site, instance) == expected

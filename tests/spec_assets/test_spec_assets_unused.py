"""Assets that a target does not use start no process, print nothing, and are not missing."""

from __future__ import annotations

import dagster as dg
import pytest
from test_spec_assets_command_line import execute

from draftworks.config.strategies import list_strategies
from draftworks.storage.names import of_strategy
from draftworks.targets.registry import Registry
from spec_assets.unused import UNUSED, UnusedAsset, find_unused_assets, record_unused

OTHERS = sorted(set(list_strategies()) - {"eagle3"})
EVERYTHING_OF_OTHERS = {name for strategy in OTHERS for name in of_strategy(strategy)}

PLANNED = (dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED, dg.DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED)
"""Events of the run's creation, before its target is read."""


def unused_of(site, more: str = "", change: tuple[str, str] = ("", "")) -> dict[str, str]:
    site.target_file.write_text(site.target_file.read_text().replace(*change) + more)
    registry = Registry(site.registry)
    return find_unused_assets(registry.load_target("small"), registry)


def test_a_target_lacks_all_of_the_strategies_that_it_does_not_use_and_what_it_has_not_asked_for(site):
    assert set(unused_of(site)) == EVERYTHING_OF_OTHERS | {
        "eagle3_serving",
        "fp8_gate",
        "thinking_comparison",
        "eagle3_promoted",
        "eagle3_decision",
        "eagle3_observed",
    }


@pytest.mark.parametrize(
    ("more", "change", "more_or_less"),
    [
        ("", ("{loop: {prompts: 2}}", "{serving: {prompts: 2}}"), {"eagle3_serving"}),
        ("", ("{loop: {prompts: 2}}", "{serving: {prompts: 2, format: zlab_dflash}}"), set()),
        ("", ("  eagle3:\n", "  eagle3:\n    export: {formats: []}\n"), {"eagle3_export"}),
        ("", (", draft_vocab_size: 256", ""), set()),
        ("", ("{dtype: float32", "{storage: fp8, dtype: bfloat16"), {"fp8_gate"}),
        ("mix: {shares: {thinking: {on: 0.5, off: 0.5}}}\n", ("", ""), {"thinking_comparison"}),
        ("service: {}\n", ("", ""), {"eagle3_promoted"}),
        ("service: {}\ndecision: {}\n", ("", ""), {"eagle3_promoted", "eagle3_decision"}),
        (
            "servers: [{name: a, url: 'https://a', kind: vllm, strategy: eagle3}]\n",
            ("", ""),
            {"eagle3_observed"},
        ),
    ],
)
def test_what_a_target_wants_decides_what_it_has(site, more, change, more_or_less):
    usual = (
        EVERYTHING_OF_OTHERS
        | {"eagle3_serving", "fp8_gate", "eagle3_promoted", "eagle3_decision"}
        | {"eagle3_observed", "thinking_comparison"}
    )
    assert set(unused_of(site, more, change)) == usual ^ more_or_less


def test_an_eval_set_is_used_by_the_targets_that_list_it(site):
    (site.registry / "evals").mkdir()
    (site.registry / "evals" / "extra.yaml").write_text("dataset: chats\n")
    of_extra = {"extra_set", "extra_responses", "extra_eval_features"}
    assert of_extra <= set(unused_of(site))
    assert not of_extra & set(unused_of(site, "evals: [extra]\n"))


def test_a_target_without_strategies_has_no_vocabulary(site):
    text = site.target_file.read_text()
    site.target_file.write_text(text[: text.index("strategies:")] + "strategies: {}\n")
    assert "vocab_mapping" in unused_of(site)


def test_it_is_recorded_once_for_each_reason():
    one = UnusedAsset(dg.AssetKey("domino_draft"), "small", "not used")
    with dg.DagsterInstance.ephemeral() as instance:
        for reason in ("not used", "not used", "used no more"):
            record_unused(instance, [one._replace(reason=reason)])
        record_unused(instance, [one._replace(target="other")])
        records = instance.fetch_materializations(one.asset, limit=10).records
    found = [(record.partition_key, record.asset_materialization.metadata[UNUSED].value) for record in records]
    assert found == [("other", "not used"), ("small", "used no more"), ("small", "not used")]


def test_a_run_begins_no_step_of_an_unused_strategy_says_nothing_of_it_and_leaves_no_partition_missing(site):
    (site.registry / "targets" / "other.yaml").write_text("model: m\ndataset: d\nstrategies: {domino: {}}\n")
    finished = execute(site, "train_domino", "small")
    assert finished.returncode == 0, finished.stderr
    assert "domino_" not in finished.stderr + finished.stdout
    with dg.DagsterInstance.from_config(str(site.root / "dagster_home")) as instance:
        (run,) = instance.get_runs()
        events = [log.dagster_event for log in instance.all_logs(run.run_id) if log.dagster_event is not None]
        made = {name: instance.get_materialized_partitions(dg.AssetKey(name)) for name in of_strategy("domino")[:3]}
    assert set(map(str, made.values())) == {"{'small'}"}, made
    begun = {event.step_key for event in events if event.event_type not in PLANNED and event.step_key is not None}
    assert begun == {"target_model", "dataset", "recipe"}

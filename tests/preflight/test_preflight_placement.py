"""Where jobs run fits what they do: batches divide by nodes, and hosts reach a stream's addresses."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from draftworks.preflight.findings import Findings
from draftworks.preflight.machine import check_placement


def check(fleet, launcher: dict[str, Any], **entry: Any) -> Findings:
    (fleet.registry.root / "deployment.yaml").write_text(yaml.safe_dump({"launcher": {"kind": "slurm", **launcher}}))
    fleet.write(**entry)
    findings = Findings()
    check_placement(fleet.registry.load_target("small"), fleet.registry, findings)
    return findings


def training(**values: Any) -> dict[str, Any]:
    return {"eagle3": {"options": {"draft_vocab_size": 64}, "training": values}}


@pytest.mark.parametrize(
    ("nodes", "values", "problem"),
    [
        (
            2,
            {"global_batch_size": 8, "micro_batch_size": 8},
            "is not a multiple of micro_batch_size 8 x 2 nodes x processes 1",
        ),
        (
            3,
            {"global_batch_size": 8, "processes": 2},
            "is not a multiple of micro_batch_size 1 x 3 nodes x processes 2 = 6",
        ),
        (16, {"global_batch_size": 8, "pack_tokens": 96}, "gives 16 ranks less than a sample each"),
        (2, {"global_batch_size": 8, "micro_batch_size": 4}, None),
        (3, {"global_batch_size": 8, "pack_tokens": 96}, None),
        (1, {"global_batch_size": 8, "micro_batch_size": 8}, None),
    ],
)
def test_a_batch_that_the_nodes_cannot_share_is_refused(fleet, nodes, values, problem):
    errors = check(fleet, {"programs": {"train": {"nodes": nodes}}}, strategies=training(**values)).errors
    assert len(errors) == (problem is not None)
    assert all(f"strategies.eagle3.training: global_batch_size 8 {problem}" in error for error in errors)


def test_a_batch_that_fewer_nodes_could_not_share_is_a_warning(fleet):
    found = check(
        fleet, {"programs": {"train": {"nodes": 4, "min_nodes": 2}}}, strategies=training(global_batch_size=8)
    )
    assert [one.severity for one in found.found] == ["warning"]
    assert "goes on with 3 of 4 nodes" in found.found[0].text


@pytest.mark.parametrize(
    ("streaming", "messages"),
    [
        ({"control": {}}, ["streaming.control.listen: 127.0.0.1:0 is reached from the launcher's own host only"]),
        ({"control": {"listen": "10.0.0.1:0"}}, []),
        ({}, ["streaming.control: null"]),
        (
            {"control": {"listen": "10.0.0.1:0"}, "store": {"kind": "mooncake"}},
            ["streaming.store.host: 127.0.0.1 is reached"],
        ),
        (None, []),
    ],
)
def test_addresses_that_other_hosts_do_not_reach_are_warnings(fleet, streaming, messages):
    found = check(fleet, {}, streaming=streaming)
    assert found.errors == []
    assert len(found.found) == len(messages)
    assert all(message in one.text for message, one in zip(messages, found.found))


def test_on_one_machine_they_are_none(fleet):
    assert check(fleet, {"kind": "local"}, streaming={"control": {}}).found == []

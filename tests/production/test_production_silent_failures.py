"""Each way in which a draft comes to nothing without an error is named by what can be read of the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftworks.production.serving_facts import ServingFacts
from draftworks.production.silent_failures import CAUSES, DraftOnDisk, Evidence, find_causes, is_silent
from draftworks.service.register import ServedDraft

VLLM = 'vllm serve target --speculative-config \'{"model": "DRAFT_FOLDER", "method": "eagle3", "num_speculative_tokens": 5}\''
SGLANG = "python -m sglang.launch_server --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT_FOLDER"
SGLANG += " --speculative-num-draft-tokens 6"
FORMATS = {"speculators_eagle3": {"vLLM, target first": VLLM}, "sglang_eagle3": {"SGLang": SGLANG}}
RIGHT = ServingFacts("vllm", "0.32.0", "eagle3", draft_tokens=5)


class Site:
    """An export in two forms, and folders that servers may be given."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in FORMATS:
            self.write(
                f"var/export/{name}",
                {
                    "eagle_aux_hidden_state_layer_ids": [1, 3],
                    "architectures": [name],
                    "provenance": {"target_digest": "t1"},
                },
            )
        made = {name: {"commands": commands} for name, commands in FORMATS.items()}
        (root / "var" / "export" / "artifact.json").write_text(json.dumps({"summary": {"formats": made}}))
        served = ServedDraft("d1", "export", dict.fromkeys(FORMATS, ""), "v", "w", "t1", "r")
        self.draft = DraftOnDisk.read(root / "var", served)

    def write(self, name: str, config: dict[str, Any], weight: float = 1.0) -> str:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {"embed_tokens.weight": 1.0, "fc.weight": weight, "q.weight": weight, "norm.weight": 1.0}
        save_file({n: np.full((30, 30), v, np.float32) for n, v in tensors.items()}, folder / "model.safetensors")
        return str(folder)

    def explain(self, facts: ServingFacts, accepted: float = 0.0, **more: Any) -> list[str]:
        evidence = Evidence.gather(accepted, 500, 1.0, facts, self.draft, **more)
        return [each.name for each in find_causes(evidence)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def serve(name: str) -> Callable[[Site], ServingFacts]:
    return lambda site: replace(RIGHT, draft=str(site.root / "var" / "export" / name))


def serve_other_layers(site: Site) -> ServingFacts:
    config = json.loads((site.root / "var/export/speculators_eagle3/config.json").read_text())
    return replace(RIGHT, draft=site.write("layers", {**config, "eagle_aux_hidden_state_layer_ids": [1, 2]}))


def serve_zeros(site: Site) -> ServingFacts:
    config = json.loads((site.root / "var/export/speculators_eagle3/config.json").read_text())
    return replace(RIGHT, draft=site.write("zeros", config, 0.0))


def serve_stale(site: Site) -> ServingFacts:
    return replace(RIGHT, draft=site.write("old", {"provenance": {"target_digest": "t0"}}))


def serve_other(site: Site) -> ServingFacts:
    return replace(RIGHT, draft=site.write("other", {"provenance": {"target_digest": "t1"}, "hidden_size": 1}))


def serve_by_v1(site: Site) -> ServingFacts:
    return replace(RIGHT, draft=site.write("v1", {"architectures": ["DFlash2DraftModel"]}), runner="v1")


PLANTED: dict[str, Callable[[Site], ServingFacts]] = {
    "another way of drafting": lambda site: replace(RIGHT, method="eagle"),
    "other layers": serve_other_layers,
    "another engine's form": serve("sglang_eagle3"),
    "another model runner": serve_by_v1,
    "empty weights": serve_zeros,
    "a stale draft": serve_stale,
    "another draft": serve_other,
    "exchanged weights": lambda site: replace(RIGHT, weight_version="d0"),
    "fewer proposals": lambda site: replace(RIGHT, draft_tokens=1),
}


def test_each_row_of_the_table_is_planted():
    assert list(PLANTED) == [cause.name for cause in CAUSES]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_failure_is_named_first(site: Site, name: str):
    assert site.explain(PLANTED[name](site))[0] == name


@pytest.mark.parametrize(
    ("accepted", "expected"), [(0.0, "weights in the server's memory"), (0.2, "nothing that can be read")]
)
def test_a_server_that_is_as_it_should_be_is_accused_of_nothing(site: Site, accepted: float, expected: str):
    for facts in (RIGHT, serve("speculators_eagle3")(site), replace(RIGHT, weight_version="d1"), ServingFacts("vllm")):
        assert site.explain(facts, accepted) == [expected]
    right = ServingFacts("sglang", None, "EAGLE3", str(site.root / "var/export/sglang_eagle3"), 5)
    assert site.explain(replace(right, weight_version="default"), accepted) == [expected]


def test_proposals_that_are_counted_say_more_than_those_that_are_set(site: Site):
    assert site.explain(RIGHT, proposed=2.5) == ["fewer proposals"]
    assert site.explain(replace(RIGHT, draft_tokens=1), proposed=5.0) == ["weights in the server's memory"]


def test_little_is_said_only_of_enough_passes_far_below_the_promise():
    assert is_silent(0.02, 100, None)
    assert is_silent(0.4, 100, 1.0)
    assert not is_silent(0.0, 99, 1.0)
    assert not is_silent(0.6, 1000, 1.0)
    assert not is_silent(0.06, 1000, None)


def test_without_a_draft_in_service_nothing_is_made_up():
    evidence = Evidence.gather(0.0, 500, None, replace(RIGHT, method="eagle", draft="/nowhere"), None)
    assert [each.name for each in find_causes(evidence)] == ["weights in the server's memory"]

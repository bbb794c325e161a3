"""What a streamed training keeps is decided by the budget, unless the target says it; what arrival order needs is said."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from draftworks.config.features import StreamingSpec, UntilSpec
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import StoreSpec, StreamPlace


@pytest.mark.parametrize(("nbytes", "kept"), [(2_000_000_000, "until_last_use"), (2_000_000_001, "capture_again")])
def test_auto_keeps_features_that_fit_into_the_budget(nbytes: int, kept: str):
    assert StreamingSpec().resolve_keep(nbytes, budget_gb=2.0).keep == kept


@pytest.mark.parametrize("keep", ["until_last_use", "capture_again"])
def test_what_the_target_says_is_not_changed(keep: str):
    assert StreamingSpec(keep=keep).resolve_keep(10**15, budget_gb=1.0).keep == keep


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"watermark": {"samples": 0}},
            {"watermark": {"samples": None}},
            {"keep": "always"},
            {"timeout_s": 0},
            {"lease": 3},
        ),
        *({"control": {"listen": listen}} for listen in ("", "host", "host:x", ":1", "host:70000", "a b:1")),
    ],
)
def test_impossible_settings_are_refused(wrong: dict):
    with pytest.raises(ValidationError):
        StreamingSpec(**wrong)


@pytest.mark.parametrize("control_plane", [{}, {"database": "plane.db", "control": "10.0.0.1:7420"}])
def test_a_stream_has_one_control_plane(control_plane: dict):
    with pytest.raises(ValidationError, match="expected either database or control"):
        StreamPlace(store=StoreSpec(root="features"), **control_plane)


ARRIVAL = {"order": "arrival", "until": {"steps": 4}, "vocabulary_samples": 100}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"until": None}, "needs an end"),
        ({"until": {}}, "expected one of steps, samples or source, found none"),
        ({"until": {"steps": 4, "source": True}}, "found source and steps"),
        ({"vocabulary_samples": None}, "number of rows that are prepared before"),
        ({"share": True}, "have a stream each"),
        ({"store": {"kind": "mooncake"}}, "needs shared_dir"),
        ({"order": "planned"}, "until has no effect on order planned"),
    ],
)
def test_arrival_order_says_what_it_lacks(changed: dict, words: str):
    with pytest.raises(ValidationError, match=words):
        StreamingSpec(**{**ARRIVAL, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"strategies": {"eagle3": {"training": {"epochs": 3}}}}, r"epochs: in arrival order .* found 3"),
        ({"strategies": {"eagle3": {"training": {"max_steps": 3}}}}, "streaming.until says where"),
        ({"streaming": {**ARRIVAL, "until": {"samples": 7}}}, "at least training.global_batch_size, 8, found 7"),
        ({"mix": {"datasets": ["other"]}}, "mix: a training in arrival order"),
        (
            {"responses": {"endpoint": {"base_urls": ["http://a/v1"], "server": "vllm"}}},
            "the engine of capture answers",
        ),
    ],
)
def test_a_target_says_what_does_not_go_with_arrival_order(changed: dict, words: str):
    with pytest.raises(ValidationError, match=words):
        TargetSpec(**{"name": "a", "model": "m", "dataset": "d", "streaming": ARRIVAL, **changed})


@pytest.mark.parametrize(("until", "steps"), [({"steps": 5}, 5), ({"samples": 21}, 2), ({"source": True}, None)])
def test_the_end_is_so_many_steps_unless_the_source_says_it(until: dict, steps: int | None):
    assert UntilSpec(**until).count_steps(global_batch_size=8) == steps

"""Slim references say exactly what they were made from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from dataflow_toys import toy_slim_ref
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureSpec, SampleRef
from draftworks.stream.ref_set import RefEncoder, RefSet, decode_ref

TEXT = st.text(max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
METADATA = st.dictionaries(TEXT, PLAIN, max_size=3)


@st.composite
def sample_refs(draw: st.DrawFn) -> SampleRef:
    tokens = draw(st.integers(0, 9))
    size = st.integers(0, 9) | st.just(tokens)
    names = draw(st.lists(TEXT, unique=True, max_size=3))
    specs = {
        name: FeatureSpec(
            draw(st.just(name) | TEXT),
            tuple(draw(st.lists(size, max_size=3))),
            draw(st.sampled_from(("bfloat16", "float32"))),
            draw(st.sampled_from(("cpu", "cuda"))),
            draw(st.booleans()),
            draw(st.none() | st.just("logits")),
            draw(METADATA),
        )
        for name in draw(st.permutations([*names, "extra"]))
    }
    return SampleRef(
        draw(TEXT),
        draw(TEXT),
        draw(TEXT),
        draw(TEXT),
        {name: draw(TEXT) for name in names},
        specs,
        strategy=draw(TEXT),
        target_model_version=draw(TEXT),
        draft_weight_version=draw(st.none() | TEXT),
        tokenizer_version=draw(TEXT),
        num_tokens=tokens,
        estimated_bytes=draw(st.integers(0, 2**60)),
        metadata=draw(METADATA),
    )


@given(st.lists(sample_refs(), max_size=5))
def test_a_set_of_any_references_round_trips(refs: list[SampleRef]) -> None:
    packed = RefSet.of(refs)
    found = packed.refs()
    assert found == tuple(refs)
    assert [list(ref.feature_specs) for ref in found] == [list(ref.feature_specs) for ref in refs]
    assert [ref.to_json() for ref in found] == [ref.to_json() for ref in refs]
    assert "\n" not in "".join([*packed.headers, *(line for _, line in packed.lines)])


def test_samples_of_any_length_share_one_header_and_lines_are_short() -> None:
    refs = [toy_slim_ref(f"s{length}", "t", length) for length in range(1, 40) if length != 16]
    packed = RefSet.of(refs)
    assert len(packed.headers) == 1
    assert max(len(line) for _, line in packed.lines) < len(refs[0].to_json()) / 5


def test_sets_are_told_apart() -> None:
    ref = toy_slim_ref("a")
    others = [replace(ref, run_id="b"), replace(ref, feature_keys={"hf2": "k"}), replace(ref, tokenizer_version="2")]
    assert len(RefSet.of([ref, *others]).headers) == 4


@pytest.mark.parametrize("where", ["sample_id", "num_tokens", "metadata", "feature_keys"])
def test_tensors_are_refused(where: str) -> None:
    tensor = torch.ones((2,))
    value = {"metadata": {"x": tensor}, "feature_keys": {"hf2": tensor}}.get(where, tensor)
    with pytest.raises(TypeError):
        RefEncoder().encode(replace(toy_slim_ref("a"), **{where: value}))


def test_damage_is_one_clear_error() -> None:
    slim = RefEncoder().encode(toy_slim_ref("a"))
    for line in (slim.line[:-3], "[]", "7", '{"a": 1}', '["a", "t", ["k"], 5, 6]', "[" * 5000):
        with pytest.raises(StoreError, match="line is damaged"):
            decode_ref(slim.header, line)
    for header in (slim.header[:-1], "{}", "[1]", json.dumps({**json.loads(slim.header), "schema_version": 2})):
        with pytest.raises(StoreError, match="header"):
            decode_ref(header, slim.line)
    with pytest.raises(StoreError, match="another one"):
        RefSet((slim.header,), ((1, slim.line),)).refs()

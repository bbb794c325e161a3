"""Streams in float8_e4m3fn with a scale per token: error bounds, special values, and hostile bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from features_toys import ToyTokens, pad_collate, toy_ref
from hypothesis import example, given
from hypothesis import strategies as st

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureSpec, SampleRef
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.tensor_bytes import (
    MIN_SCALE,
    SCALE_BYTES,
    decode_features,
    decode_stream,
    encode_stream,
    make_random_stored,
)
from draftworks.features.wrapped_store import JoinedStore, RoundedStore


def round_trip(stream: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return decode_stream(encode_stream(stream), "here", dtype)


def with_scale(scale: float) -> torch.Tensor:
    """Stored ones with another scale at position 1."""
    stored = encode_stream(torch.ones(3, 8))
    stored.view(torch.uint8)[1, 8:] = torch.tensor([scale]).view(torch.uint8)
    return stored


@example(686, 1e-9, torch.float32)  # bfloat16 adds 2^-8 of the value there
@given(st.integers(0, 2**31), st.sampled_from([1e-9, 1.0, 3e4, 1e30]), st.sampled_from([torch.bfloat16, torch.float32]))
def test_a_normal_value_is_off_by_a_sixteenth_at_most_and_others_by_less_than_that_of_the_smallest_normal(
    seed: int, size: float, dtype: torch.dtype
):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 1, (5, 33), generator=generator).float())
    stream = (torch.randn(5, 33, generator=generator) * spread * size).to(dtype)
    scales = (stream.float().abs().amax(dim=1, keepdim=True) / 448).clamp(min=MIN_SCALE)
    found = round_trip(stream, torch.float32)
    assert torch.equal(round_trip(stream, torch.bfloat16), found.bfloat16())
    error, normal = (found - stream.float()).abs(), stream.float().abs() >= 2**-6 * scales
    assert bool((error <= 2**-4 * stream.float().abs())[normal].all())
    assert bool((error <= 2**-9 * scales)[~normal].all())


def test_the_largest_values_are_kept_and_a_power_of_two_changes_nothing():
    stream = torch.tensor([[448.0, -448.0, 1.0, 0.0], [7.0, -3.5, 1.75, 0.875]])
    assert torch.equal(round_trip(stream), stream)
    assert torch.equal(round_trip(stream * 2**20), stream * 2**20)


def test_a_position_has_its_own_scale():
    stream = torch.randn(4, 16)
    loud = stream.clone()
    loud[2] *= 1e6
    assert torch.equal(round_trip(loud)[[0, 1, 3]], round_trip(stream)[[0, 1, 3]])


def test_decoding_does_not_depend_on_how_many_positions_are_converted_at_a_time():
    stream = torch.randn(5000, 3)
    assert torch.equal(round_trip(stream)[4321:], round_trip(stream[4321:]))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_empty_streams_stay_empty(shape: tuple[int, int]):
    assert round_trip(torch.zeros(shape)).shape == shape


def test_zeros_stay_zeros_and_values_too_small_become_zeros():
    stream = torch.tensor([[0.0, -0.0, 0.0], [1e-40, -1e-38, 0.0], [1.0, 1e-9, 0.0]])
    assert torch.equal(round_trip(stream), torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))


def test_nan_and_infinity_become_nan_and_leave_the_other_values_alone():
    stream = torch.tensor([[torch.nan, 2.0, 1.0], [torch.inf, 2.0, 1.0], [1.0, -torch.inf, torch.nan]])
    found = round_trip(stream)
    assert torch.equal(found.isnan(), ~stream.isfinite())
    assert torch.equal(found[0:2, 1:], stream[0:2, 1:])
    assert float(found[2, 0]) == 1.0
    assert bool(round_trip(torch.full((2, 3), torch.nan)).isnan().all())


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -1.0, 0.0, MIN_SCALE / 2, 3e38])
def test_a_scale_that_no_writer_stores_is_refused_with_its_position(scale: float):
    with pytest.raises(StoreError, match=r"sample s, feature hf2: the scale of position 1 is .*expected 1e-12 to"):
        decode_features({"hf2": with_scale(scale)}, "sample s")


@given(st.binary(min_size=60, max_size=60))
def test_any_bytes_are_decoded_or_refused(content: bytes):
    stored = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(5, 12).view(torch.float8_e4m3fn)
    try:
        found = decode_stream(stored, "here", torch.float32)
    except StoreError:
        return
    assert found.shape == (5, 8)
    assert not bool(found.isinf().any())


@pytest.mark.parametrize(
    "stored",
    [torch.zeros(3, 8), torch.zeros(12, dtype=torch.float8_e4m3fn), torch.zeros(2, 3, dtype=torch.float8_e4m3fn)],
    ids=["dtype", "dimensions", "width"],
)
def test_what_is_no_encoded_stream_is_refused(stored: torch.Tensor):
    with pytest.raises(StoreError, match=r"expected float8_e4m3fn of shape \(positions, hidden size \+ 4\)"):
        decode_stream(stored, "here")
    with pytest.raises(ValueError, match="expected a stream of shape"):
        encode_stream(torch.zeros(3))


def test_random_numbers_in_place_of_a_lost_feature_can_be_decoded():
    assert make_random_stored((3, 8), "bfloat16").dtype == torch.bfloat16
    decoded = decode_stream(make_random_stored((3, 8 + SCALE_BYTES), "float8_e4m3fn"), "here")
    assert decoded.shape == (3, 8)
    assert bool((decoded.float().norm(dim=1) > 0).all())


class TestStoredFeatures:
    """A loader decodes whatever a store returns, and the store compares the bytes that it has."""

    @pytest.fixture
    def refs(self, tmp_path: Path) -> list[SampleRef]:
        store = LocalFeatureStore(tmp_path)
        refs = []
        for ref in map(toy_ref, range(3)):
            stream = torch.randn(ref.num_tokens, 8, generator=torch.Generator().manual_seed(ref.num_tokens))
            refs.append(store.put(ref, {"hf2": encode_stream(stream), "last": stream.bfloat16()}))
        store.flush()
        return refs

    def test_a_loader_returns_bfloat16_of_the_stream_s_width(self, tmp_path: Path, refs: list[SampleRef]):
        assert refs[0].feature_specs["hf2"] == FeatureSpec("hf2", (3, 12), "float8_e4m3fn")
        assert refs[0].estimated_bytes == 3 * 12 + 3 * 8 * 2
        store = JoinedStore(LocalFeatureStore(tmp_path), ToyTokens(refs))
        (batch,) = FeatureDataLoader.for_evaluation(refs, store, 3, pad_collate)
        assert batch["hf2"].shape == batch["last"].shape == (3, 5, 8)
        assert batch["hf2"].dtype == batch["last"].dtype == torch.bfloat16
        assert torch.allclose(batch["hf2"].float(), batch["last"].float(), rtol=2**-4 + 2**-8, atol=1e-4)

    @pytest.mark.parametrize(("storage", "rounded"), [("fp8", {"hf2", "last"}), ("fp8_taps", {"hf2"})])
    def test_a_rounded_store_reads_plain_features_as_they_would_be_stored(self, tmp_path: Path, storage, rounded):
        store, ref = LocalFeatureStore(tmp_path), toy_ref(1)
        plain = {name: torch.randn(ref.num_tokens, 8).bfloat16() for name in ref.feature_keys}
        found, _ = RoundedStore(store, storage).get(store.put(ref, plain))
        expected = {
            name: decode_stream(encode_stream(plain[name]), name) if name in rounded else plain[name] for name in plain
        }
        assert all(torch.equal(found[name], expected[name]) for name in plain)
        assert not torch.equal(found["hf2"], plain["hf2"])

    def test_an_altered_scale_is_found_by_the_store_s_checksum(self, tmp_path: Path, refs: list[SampleRef]):
        stored = LocalFeatureStore(tmp_path).get(refs[0])[0]["hf2"].view(torch.uint8)[0].numpy().tobytes()
        (path,) = (tmp_path / "shards").glob("*.safetensors")
        content = path.read_bytes()
        assert content.count(stored) == 1
        path.write_bytes(content.replace(stored, stored[:-1] + bytes([stored[-1] ^ 1])))
        with pytest.raises(StoreError, match="is altered"):
            LocalFeatureStore(tmp_path).get(refs[0])

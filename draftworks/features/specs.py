"""Specs of tensors that are put into a store, and their comparison with what is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureSpec, SampleRef

if TYPE_CHECKING:
    from torch import Tensor


def fill_in_ref(
    ref: SampleRef, tensors: Mapping[str, Tensor], uri: str, keys: Mapping[str, str] | None = None
) -> SampleRef:
    """Return the ref of a sample after `tensors` were put: store, shapes, dtypes and bytes filled in.

    Args:
        keys: the features' keys in the store, where they differ from those that the ref has.
    """
    specs = {**ref.feature_specs, **{name: _describe(ref, name, tensor) for name, tensor in tensors.items()}}
    size = sum(spec.nbytes for spec in specs.values())
    keys = ref.feature_keys if keys is None else keys
    return replace(ref, feature_store_uri=uri, feature_keys=keys, feature_specs=specs, estimated_bytes=size)


def require_all_features(ref: SampleRef, tensors: Mapping[str, Tensor]) -> None:
    """Raise StoreError unless `tensors` are all features of the ref: a generation of a sample is put at once."""
    if tensors.keys() != ref.feature_keys.keys():
        raise StoreError(
            f"sample {ref.sample_id}: expected the features {sorted(ref.feature_keys)} at once, since they are one "
            f"generation of the sample, found {sorted(tensors)}"
        )


def require_spec(spec: FeatureSpec | None, shape: tuple[int, ...], dtype: str, where: str) -> None:
    """Raise StoreError that begins with `where` unless what is stored has the shape and dtype of a ref's spec, if any."""
    if spec is not None and (tuple(spec.shape), spec.dtype) != (shape, dtype):
        raise StoreError(f"{where}: expected shape {tuple(spec.shape)} of {spec.dtype}, found {shape} of {dtype}")


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe(ref: SampleRef, name: str, tensor: Tensor) -> FeatureSpec:
    """Return the ref's spec of a feature (its `target_repr`) with the shape and dtype of `tensor`."""
    known = ref.feature_specs.get(name, FeatureSpec(name, (), ""))
    return replace(known, shape=tuple(tensor.shape), dtype=dtype_name(tensor))

"""Specs of tensors that are put into a store, and their comparison with what is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureSpec, SampleRef

if TYPE_CHECKING:
    from torch import Tensor


def fill_in_ref(ref: SampleRef, tensors: Mapping[str, Tensor], uri: str) -> SampleRef:
    """Return the ref of a sample after `tensors` were put: store, shapes, dtypes and bytes filled in."""
    specs = {**ref.feature_specs, **{name: _describe(ref, name, tensor) for name, tensor in tensors.items()}}
    size = sum(spec.nbytes for spec in specs.values())
    return replace(ref, feature_store_uri=uri, feature_specs=specs, estimated_bytes=size)


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

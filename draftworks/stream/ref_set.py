"""Slim references: what the samples of a set have in common is written once, and each sample is a short JSON line.

The header of a set holds the run, the store, the strategy, the versions and the specs; a dimension that equals the
sample's number of tokens is null in it. A line is `[sample id, source task, keys, tokens, bytes]`, with the sample's
metadata as a sixth item if it has any. `SampleRef.to_json` repeats all of this for every sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from draftworks.errors import StoreError
from draftworks.features.contracts import SCHEMA_VERSION, FeatureSpec, SampleRef, assert_no_tensors
from draftworks.storage.files import parse_json

_COMMON = (
    *("run_id", "feature_store_uri", "strategy", "schema_version"),
    *("target_model_version", "draft_weight_version", "tokenizer_version"),
)
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_escape = json.encoder.encode_basestring_ascii  # as _encode writes text, without its overhead


@dataclass(frozen=True)
class SlimRef:
    """One sample as the header of its set and its own line, both JSON."""

    header: str
    line: str


@dataclass(frozen=True)
class RefSet:
    """References as the distinct headers, and for each sample the index of its header and its line."""

    headers: tuple[str, ...]
    lines: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, refs: Iterable[SampleRef]) -> RefSet:
        encoder, indices, lines = RefEncoder(), {}, []
        for ref in refs:
            slim = encoder.encode(ref)
            lines.append((indices.setdefault(slim.header, len(indices)), slim.line))
        return cls(tuple(indices), tuple(lines))

    def refs(self) -> tuple[SampleRef, ...]:
        """Return the references again. Raises StoreError as `decode_ref`, or for a line without a header."""
        if any(not 0 <= index < len(self.headers) for index, _ in self.lines):
            raise StoreError(f"a set of references has {len(self.headers)} headers, and a line names another one")
        return tuple(decode_ref(self.headers[index], line) for index, line in self.lines)


class RefEncoder:
    """Encodes references; remembers the headers that it has written."""

    def __init__(self) -> None:
        self._headers: dict[tuple[Any, ...], str] = {}

    def encode(self, ref: SampleRef) -> SlimRef:
        """Return the slim form. Raises TypeError for tensors, ValueError or TypeError for values that JSON lacks."""
        tokens = ref.num_tokens
        if type(tokens) is not int or type(ref.estimated_bytes) is not int:
            assert_no_tensors(ref, "ref")
            raise TypeError(f"sample {ref.sample_id}: expected whole numbers of tokens and bytes, found {tokens!r}")
        common = (
            *(ref.run_id, ref.feature_store_uri, ref.strategy, ref.schema_version),
            *(ref.target_model_version, ref.draft_weight_version, ref.tokenizer_version),
            tuple(ref.feature_keys),
            tuple([_template(name, spec, tokens) for name, spec in ref.feature_specs.items()]),
        )
        header = self._headers.get(common)
        if header is None:
            header = self._headers[common] = _write_header(ref)
        keys = ",".join(map(_escape, ref.feature_keys.values()))
        line = f"[{_escape(ref.sample_id)},{_escape(ref.source_task_id)},[{keys}],{tokens:d},{ref.estimated_bytes:d}"
        if ref.metadata:
            assert_no_tensors(ref.metadata, "metadata")
            line += "," + _encode(dict(ref.metadata))
        return SlimRef(header, line + "]")


def decode_ref(header: str, line: str) -> SampleRef:
    """Return the reference of a slim form. Raises StoreError if a part is damaged or of another schema."""
    common = _read_header(header)
    try:
        sample_id, task_id, keys, tokens, nbytes, *metadata = json.loads(line)
        if len(keys) != len(common.names) or not isinstance(tokens, int):
            raise ValueError(f"{len(keys)} keys for {len(common.names)} features")
        return SampleRef(
            sample_id=sample_id,
            source_task_id=task_id,
            feature_keys=dict(zip(common.names, keys)),
            feature_specs=common.specs(tokens),
            num_tokens=tokens,
            estimated_bytes=nbytes,
            metadata=metadata[0] if metadata else {},
            **common.fields,
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"a sample's line is damaged ({error}): {line[:80]!r}") from error


class _Header:
    """A parsed header. Samples of equal length share their specs."""

    def __init__(self, fields: dict[str, Any], names: list[str], specs: dict[str, dict[str, Any]]) -> None:
        self.fields = fields
        self.names = names
        self._templates = specs
        self._by_length: dict[int, dict[str, FeatureSpec]] = {}

    def specs(self, tokens: int) -> dict[str, FeatureSpec]:
        found = self._by_length.get(tokens)
        if found is None:
            found = {name: _fill_in(template, tokens) for name, template in self._templates.items()}
            if len(self._by_length) < 4096:
                self._by_length[tokens] = found
        return dict(found)


@lru_cache(maxsize=64)
def _read_header(header: str) -> _Header:
    try:
        values = parse_json(header)
        fields = {name: values[name] for name in _COMMON}
        if fields["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema {fields['schema_version']}, expected {SCHEMA_VERSION}")
        return _Header(fields, list(values["features"]), dict(values["specs"]))
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"the header of a set of references is damaged ({error!r}): {header[:80]!r}") from error


def _template(name: str, spec: FeatureSpec, tokens: int) -> tuple[Any, ...]:
    """Return what decides a spec's part of the header, hashable."""
    meta = _encode(dict(spec.target_meta)) if spec.target_meta else ""
    shape = tuple([None if size == tokens else size for size in spec.shape])
    return name, spec.name, shape, spec.dtype, spec.device_hint, spec.required, spec.target_repr, meta


def _write_header(ref: SampleRef) -> str:
    assert_no_tensors(ref)
    specs = {name: _describe_spec(spec, ref.num_tokens) for name, spec in ref.feature_specs.items()}
    return _encode(
        {name: getattr(ref, name) for name in _COMMON} | {"features": list(ref.feature_keys), "specs": specs}
    )


def _describe_spec(spec: FeatureSpec, tokens: int) -> dict[str, Any]:
    return {
        "name": spec.name,
        "shape": [None if size == tokens else size for size in spec.shape],
        "dtype": spec.dtype,
        "device_hint": spec.device_hint,
        "required": spec.required,
        "target_repr": spec.target_repr,
        "target_meta": dict(spec.target_meta),
    }


def _fill_in(template: Mapping[str, Any], tokens: int) -> FeatureSpec:
    shape = tuple([tokens if size is None else size for size in template["shape"]])
    return FeatureSpec(**{**template, "shape": shape})

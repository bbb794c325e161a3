"""Forms of references as lines of text, for channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from draftworks.dataflow.ref_set import RefEncoder, decode_ref
from draftworks.features.contracts import SampleRef

EncodeRef = Callable[[SampleRef], list[str]]
"""From a reference to its lines, without newlines; the last one is the reference, others are what it needs before it."""
DecodeRef = Callable[[str], SampleRef | None]
"""From a line to its reference; None for a line that only later lines need. Raises ValueError or a DraftworksError."""


class RefCodec(Protocol):
    """A form of lines. An encoder and a decoder may remember earlier lines, so each serves one pass over a file."""

    @property
    def name(self) -> str:
        """Written into the channel, so that a reader of another form refuses it."""
        ...

    def make_encoder(self) -> EncodeRef:
        """Return a function that raises TypeError for a reference with tensors."""
        ...

    def make_decoder(self) -> DecodeRef: ...


class WholeRefs:
    """Each line is a whole `SampleRef` as JSON."""

    name = "sample_ref.1"

    def make_encoder(self) -> EncodeRef:
        return lambda ref: [ref.to_json()]

    def make_decoder(self) -> DecodeRef:
        return _read_whole_ref


class SlimRefs:
    """The slim form of `ref_set`: a line with what references have in common wherever that changes, and short lines."""

    name = "slim_ref.1"

    def make_encoder(self) -> EncodeRef:
        encoder, last = RefEncoder(), ""

        def encode(ref: SampleRef) -> list[str]:
            nonlocal last
            slim = encoder.encode(ref)
            if slim.header == last:
                return [slim.line]
            last = slim.header
            return [slim.header, slim.line]

        return encode

    def make_decoder(self) -> DecodeRef:
        header = ""

        def decode(line: str) -> SampleRef | None:
            nonlocal header
            if line.startswith("{"):
                header = line
                return None
            if not header:
                raise ValueError("a sample's line before the line with what samples have in common")
            return _require_plain(decode_ref(header, line))

        return decode


def _read_whole_ref(line: str) -> SampleRef:
    try:
        return _require_plain(SampleRef.from_json(line))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a reference ({error!r})") from error


def _require_plain(ref: SampleRef) -> SampleRef:
    """Return the reference if what a stream counts by has the right types; else ValueError."""
    if not isinstance(ref.sample_id, str) or not isinstance(ref.estimated_bytes, int):
        raise ValueError("its id is no text, or its bytes are no number")
    return ref

"""Forms of references as lines of text, for channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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

    def make_encoder(self) -> EncodeRef: ...

    def make_decoder(self) -> DecodeRef: ...


class WholeRefs:
    """Each line is a whole `SampleRef` as JSON. Raises TypeError for a reference with tensors."""

    name = "sample_ref.1"

    def make_encoder(self) -> EncodeRef:
        return lambda ref: [ref.to_json()]

    def make_decoder(self) -> DecodeRef:
        return _read_whole_ref


def _read_whole_ref(line: str) -> SampleRef:
    try:
        return SampleRef.from_json(line)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a reference ({error!r})") from error

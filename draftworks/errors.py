"""Errors that are meant for a person: each says what, where, expected, found, and what to do."""

from __future__ import annotations


class DraftworksError(Exception):
    """Something the user can put right. Programs print its message alone; anything else prints a traceback."""


class ConfigError(DraftworksError):
    """A registry entry, run file or option is wrong."""


class DataError(DraftworksError):
    """Conversations, tokenizer or chat template cannot give training data."""


class StoreError(DraftworksError):
    """A stored artefact is missing, truncated, altered or of another schema."""


class StoreFullError(StoreError, MemoryError):
    """A feature store has no room now. Nothing is stored or lost, and the same put may succeed after others consumed."""


class StoreLostError(StoreError):
    """A feature store whose memory or master has died or cannot be reached: what it held has to be made again."""


class CaptureError(DraftworksError):
    """The target gave features that cannot be right, or would not fit."""


class EngineError(DraftworksError):
    """The engine that runs the target cannot be started, reached or trusted. Nothing is wrong with any one sample."""


class PassingTroubleError(EngineError):
    """The engine lives and could not do it this time: it is asked again after a while, and not started again."""


class AbortedRequestError(PassingTroubleError):
    """The engine gave up a request: by chance, or because of what one sample asks of it."""


class UnsoundEngineError(EngineError):
    """The engine answers, and gives something else than the registry asks for: asking again is in vain."""


class LauncherError(DraftworksError):
    """A scheduler refused a job, cannot be reached, or says something about a job that cannot be."""


class TrainingError(DraftworksError):
    """Training cannot go on: nothing to train on, or numbers that are not finite."""

"""A small made-up target with its vocabulary mapping and random samples."""

from draft_fixtures import make_sample, make_strategy, parts, vocab

__all__ = ["make_sample", "make_strategy", "parts", "vocab"]

"""Figures of a stream while it runs: how far producers are ahead, how fast they are, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from draftworks.features.contracts import KeyedFeatureStore
from draftworks.stream.streaming_plan import StreamingPlan

NOTABLE_SHARE = 0.05
"""From this share of the time on, the trainer's waiting is worth a word."""


class StreamReport:
    """Measures what producers captured ahead of the training, and who waited since the measurement before.

    Args:
        plan: of the whole stream.
        read_waited_s: returns the seconds that the trainer has waited for features in all.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        plan: StreamingPlan,
        store: KeyedFeatureStore,
        read_waited_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._store = store
        self._read_waited_s = read_waited_s
        self._clock = clock
        self._before: tuple[float, float, int] | None = None

    def measure(self, step: int) -> dict[str, Any]:
        """Return the figures after a step, by name.

        `ahead_samples` and `ahead_mb` are captured and not used by any step yet; `captured_tokens/s` is what the stream
        delivers since the last measurement; `waiting` is the side that waits.
        """
        self._store.refresh()
        due = self._plan.find_ahead(step)
        missing = set(self._store.find_missing(key for ref in due for key in ref.feature_keys.values()))
        ahead = [ref for ref in due if missing.isdisjoint(ref.feature_keys.values())]
        figures = {
            "ahead_samples": len(ahead),
            "ahead_mb": round(sum(ref.estimated_bytes for ref in ahead) / 1e6, 1),
        }
        tokens = self._plan.count_new_tokens(step) + sum(ref.num_tokens for ref in ahead)
        now, waited_s = self._clock(), self._read_waited_s()
        if self._before is not None:
            elapsed = max(now - self._before[0], 1e-9)
            share = (waited_s - self._before[1]) / elapsed
            figures["captured_tokens/s"] = round(max(tokens - self._before[2], 0) / elapsed)
            figures["waiting"] = f"trainer:{min(share, 1):.0%}" if share > NOTABLE_SHARE else self._name_other(missing)
        self._before = (now, waited_s, tokens)
        return figures

    @staticmethod
    def _name_other(missing: set[str]) -> str:
        """Return who waits if the trainer does not: producers that have filled their window."""
        return "nobody" if missing else "producers"

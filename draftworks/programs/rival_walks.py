"""Rung 3 of what proposes without a model, for the evaluation program: from the cache, or measured by all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from draftworks.data.conversations import read_summary
from draftworks.data.tokenized import TokenizedSet
from draftworks.distributed.collectives import gather_from_ranks, get_rank, get_world_size, run_on_rank_0
from draftworks.evaluation.measurement_cache import MeasurementCache
from draftworks.evaluation.rivals.measurement import RivalCache, RivalIdentity, RivalLookup, Rivals, RivalWalk
from draftworks.programs.assembly import Samples
from draftworks.storage.identity import digest


@dataclass(frozen=True)
class RivalRun:
    """Measures the rivals of every draft of one target on one eval set.

    Attributes:
        train_tokens: folder of the tokenized training set.
        cache_folder: where walks are kept; None measures every time.
        log: prints a line; called on every rank.
    """

    samples: Samples
    train_tokens: Path
    vocab_size: int
    draft_tokens: int
    cache_folder: Path | None
    log: Callable[[str], None]

    def measure(self) -> Mapping[str, RivalWalk]:
        """Return the walk of every rival. A collective.

        Raises:
            StoreError: the folder of the cache cannot be used.
        """
        cache, identity = run_on_rank_0(self._open_cache), self._make_identity()
        found = run_on_rank_0(lambda: RivalLookup() if cache is None else cache.find(identity))
        if found.walks is not None:
            return found.walks
        if found.problem is not None:
            self.log(f"what proposes without a model is measured anew: {found.problem}")
        started = time.perf_counter()
        walks = self._replay()
        self.log(f"{', '.join(walks)}: replayed in {time.perf_counter() - started:.1f} s")
        run_on_rank_0(lambda: None if cache is None else cache.store(identity, walks))
        return walks

    def _replay(self) -> dict[str, RivalWalk]:
        rivals = Rivals.after(TokenizedSet.open(self.train_tokens), self.vocab_size)
        names = [ref.sample_id for ref in self.samples.refs]
        share = map(self.samples.tokens.by_id, names[get_rank() :: get_world_size()])
        shares = gather_from_ranks(rivals.measure(share, self.draft_tokens))
        return {name: RivalWalk.of(one for found in shares for one in found[name]) for name in rivals.start}

    def _make_identity(self) -> RivalIdentity:
        return RivalIdentity(
            eval_tokens=self.samples.tokens.digest,
            training_tokens=read_summary(self.train_tokens, "a tokenized set")["digest"],
            samples=digest(sorted(ref.sample_id for ref in self.samples.refs)),
            draft_tokens=self.draft_tokens,
        )

    def _open_cache(self) -> RivalCache | None:
        return None if self.cache_folder is None else RivalCache(MeasurementCache.open(self.cache_folder, "rivals"))

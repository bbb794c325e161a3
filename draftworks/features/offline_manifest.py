"""Lists a stored feature set as references, for training without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef
from draftworks.features.manifest import read_feature_set


class OfflineManifestReader:
    """References of the samples of a feature set folder (`manifest`). Its features are not opened, nor looked for.

    Args:
        folder: the feature set.
        run_id: id of the run that reads it; the source task of its n-th sample is `{run_id}:{n as eight digits}`.
        strategy: name of the strategy that reads it.
        streams: names of the features that the strategy reads; None for all that the set has.
    """

    def __init__(
        self, folder: Path, run_id: str = "", strategy: str = "", streams: Sequence[str] | None = None
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._strategy = strategy
        self._streams = streams

    def read(self) -> list[SampleRef]:
        """Return the references in the set's order, with the set's sample ids, which its tokens have too.

        Raises:
            StoreError: the feature set is missing or damaged, or lacks one of the streams.
        """
        manifest = read_feature_set(self._folder)
        streams = tuple(manifest.streams if self._streams is None else self._streams)
        missing = [name for name in streams if name not in manifest.streams]
        if missing:
            raise StoreError(
                f"feature set {self._folder} has no streams {missing}, it has {sorted(manifest.streams)}. "
                f"Capture the features for strategy {self._strategy or 'that reads them'}"
            )
        return [self._claim(ref.select(streams), index) for index, ref in enumerate(manifest.refs)]

    def _claim(self, ref: SampleRef, index: int) -> SampleRef:
        return replace(ref, run_id=self._run_id, source_task_id=f"{self._run_id}:{index:08d}", strategy=self._strategy)

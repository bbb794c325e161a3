"""The record of what trackers were told of a training, beside its draft, so that a restart repeats no step.

A step is recorded before it is sent: a process that is killed between the two loses a point of a curve, and none is ever
sent twice. The record lives as long as the files of the training: a training that starts over is another run.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from draftworks.storage.atomic import publish_json
from draftworks.storage.regular_files import read_json

FILE = "sent.json"
MAX_BYTES = 1 << 16


class SentSteps:
    """The last step that one tracker was told of, by series (`train`, `eval`), and the id of its run.

    Args:
        folder: of this tracker's own files beside the draft.
        identity: digest of the draft's inputs, with which a new id begins.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._path = folder / FILE
        self._record = self._read()
        if self._record is None:
            self._record = {"id": f"{identity}-{uuid.uuid4().hex[:6]}", "steps": {}}
            folder.mkdir(parents=True, exist_ok=True)
            publish_json(self._path, self._record)

    @property
    def run_id(self) -> str:
        return self._record["id"]

    def claim(self, series: str, step: int) -> bool:
        """Record that a step is being sent; False if it was sent before, by this process or an earlier one."""
        steps = self._record["steps"]
        if step <= steps.get(series, -1):
            return False
        steps[series] = step
        publish_json(self._path, self._record)
        return True

    def _read(self) -> Any:
        """Return the record; None if there is none, or none that can be read: then it is another run."""
        try:
            found = read_json(self._path, MAX_BYTES)
            steps = {str(name): int(step) for name, step in found["steps"].items()}
            return {"id": str(found["id"]), "steps": steps}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

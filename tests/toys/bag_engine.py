"""A target engine of one's own: a decaying bag of words instead of a transformer, exact and alike in every batch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from draftworks.capture.engine import TargetEngine
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import CaptureError, EngineError


class BagEngine(TargetEngine):
    """Options: `sleep` seconds for each batch; `bad` ids of a sample, and `how` it fails: refused, error or kill."""

    backend = "custom"

    def __init__(self, target: TargetFiles, options: Mapping[str, Any]) -> None:
        parts = TargetParts.load(target)
        self.embedding, self.head = parts.embedding.float(), parts.head.float()
        self.options = options

    def make_streams(self, ids: Sequence[int], taps: Sequence[Any]) -> dict[str, torch.Tensor]:
        state, states = torch.zeros(self.embedding.shape[1]), []
        for row in self.embedding[torch.tensor(list(ids))]:
            state = 0.5 * state + row
            states.append(state)
        bag = torch.stack(states)
        last = bag / (bag.norm(dim=-1, keepdim=True) + 1e-3)
        return {**{tap.name: torch.tanh(bag * tap.hf_index) for tap in taps}, "last": last}

    def capture(self, sequences, taps):
        time.sleep(self.options.get("sleep", 0.0))
        if any(list(ids) == self.options.get("bad") for ids in sequences):
            how = self.options["how"]
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"refused": CaptureError, "error": EngineError}[how]("no engine likes this sample")
        return [self.make_streams(ids, taps) for ids in sequences]

    def logits(self, sequences):
        return [self.head_logits(self.make_streams(ids, ())["last"]) for ids in sequences]

    def head_logits(self, last):
        return last @ self.head.T

    def generate(self, prompts, sampling, sample_ids, max_total, turn=0, end_ids=()):
        raise NotImplementedError


def load(target, capture, device, place):
    return BagEngine(target, capture.custom.options)

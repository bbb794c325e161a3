"""Rung 4 over many prompts, which the ranks share, and the cache of its measurements.

Rung 4 is the only rung that runs the target, so it is measured once per draft, prompts and decoding, for any number of
reports. An entry records the device and time of its timings.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftworks.capture.batch_notes import Progress, ProgressCallback
from draftworks.config.decoding import Decoding
from draftworks.config.run_files import TargetFiles
from draftworks.data.tokenized import TokenRow
from draftworks.distributed.collectives import broadcast_from_rank_0, gather_from_ranks, get_rank, get_world_size
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import DraftworksError
from draftworks.evaluation.ladder.answer_walk import find_answer_spans
from draftworks.evaluation.ladder.decoding import DecodingLimits, add_gap, decode, has_recurrent_state, speculate
from draftworks.evaluation.ladder.measurement import LoopMeasurement, TimingContext
from draftworks.evaluation.ladder.prompt_acceptance import AnswerTrace, Difference, PromptAcceptance, first_difference
from draftworks.evaluation.measurement_cache import MeasurementCache
from draftworks.storage.identity import LayerTap, digest


@dataclass(frozen=True)
class Prompt:
    """Tokens of a sample before its first answer."""

    sample_id: str
    tokens: tuple[int, ...]


def select_prompts(samples: Iterable[TokenRow], count: int) -> list[Prompt]:
    """Return the prompts of the first `count` samples by id; ids are hashes, so every draft gets the same prompts.

    Samples without a prompt or without an answer are skipped.
    """
    prompts = []
    for sample in sorted(samples, key=lambda sample: sample.sample_id):
        begin = next((span[0] for span in find_answer_spans(sample.loss_mask)), 0)
        if begin > 0 and len(prompts) < count:
            prompts.append(Prompt(sample.sample_id, tuple(sample.input_ids[:begin].tolist())))
    return prompts


LOOP_REVISION = 1
"""Increase it when a change of this module, of `decoding` or of a drafter changes the counts for the same inputs."""
_RECURRENT_REVISION = 2
"""For targets with recurrent layers: revision 1 did not restore their state after a rejected token."""


def get_loop_revision(target: TargetFiles) -> int:
    """Return the revision of the loop's code for this target. Reads the target's config."""
    return _RECURRENT_REVISION if has_recurrent_state(target) else LOOP_REVISION


@dataclass(frozen=True)
class DecodingLoop:
    """A target and its draft, decoding together.

    Attributes:
        draft_tokens: tokens proposed per pass.
        max_length: length at which samples of the eval set were cut, so that both rungs end answers there; None if
            they were not cut.
    """

    model: PreTrainedModel
    strategy: DraftStrategy
    taps: Sequence[LayerTap]
    limits: DecodingLimits
    draft_tokens: int
    seed: int
    max_length: int | None = None

    def measure(
        self,
        prompts: Sequence[Prompt],
        decoding: Decoding,
        walks: Mapping[str, AnswerTrace] | None = None,
        progress: ProgressCallback = lambda now: None,
    ) -> LoopMeasurement:
        """Decode every prompt with and without the draft, one prompt at a time; ranks share them. A collective.

        Args:
            walks: rung 3 of these prompts' answers by sample id, to list differences; at temperature 0 only.
            progress: told after every prompt of this rank.
        """
        share = prompts[get_rank() :: get_world_size()]
        for prompt in share[:1]:
            self._measure_prompt(prompt, decoding)  # warm-up: the first prompt also pays for one-time setup
        started, mine = time.monotonic(), []
        for done, prompt in enumerate(share, start=1):
            mine.append(self._measure_prompt(prompt, decoding, None if walks is None else walks[prompt.sample_id]))
            tokens, seconds = sum(part.tokens + part.plain_tokens for part in mine), time.monotonic() - started
            progress(Progress("prompts", done, len(share), done / len(share), tokens, seconds))
        shares = gather_from_ranks(mine)
        parts = sorted((part for share in shares for part in share), key=lambda part: part.acceptance.sample_id)
        found = tuple(part.difference for part in parts if part.difference is not None)
        return LoopMeasurement(
            decoding,
            tuple(part.acceptance for part in parts),
            seconds=sum(part.seconds for part in parts),
            plain_seconds=sum(part.plain_seconds for part in parts),
            tokens=sum(part.tokens for part in parts),
            plain_tokens=sum(part.plain_tokens for part in parts),
            differences=None if walks is None else found,
            timing_context=broadcast_from_rank_0(current_timing_context(self.model.device)),
        )

    def _measure_prompt(self, prompt: Prompt, decoding: Decoding, walk: AnswerTrace | None = None) -> _Part:
        limits = self.limits
        if self.max_length is not None:
            limits = limits.within(self.max_length - len(prompt.tokens))
        plain = decode(self.model, prompt.tokens, limits, decoding, self._generator(prompt))
        speculative = speculate(
            self.model,
            self.strategy,
            self.taps,
            prompt.tokens,
            limits,
            self.draft_tokens,
            decoding,
            self._generator(prompt),
            prompt.sample_id,
        )
        difference = None if walk is None else self._find_difference(prompt, walk, speculative.trace)
        return _Part(
            speculative.acceptance,
            speculative.seconds,
            plain.seconds,
            len(speculative.tokens),
            len(plain.tokens),
            difference,
        )

    def _find_difference(self, prompt: Prompt, walk: AnswerTrace, loop: AnswerTrace) -> Difference | None:
        found = first_difference(prompt.sample_id, walk, loop)
        if found is None:
            return None
        return add_gap(found, self.model, self.strategy, self.taps, prompt.tokens, loop.answer)

    def _generator(self, prompt: Prompt) -> torch.Generator:
        """Seeded by (seed, sample id), so what a prompt draws does not depend on other prompts or on the ranks."""
        return torch.Generator(self.model.device).manual_seed(int(digest([self.seed, prompt.sample_id])[:15], 16))


def current_timing_context(device: torch.device) -> TimingContext:
    """Return this device and the current time."""
    threads = torch.get_num_threads()
    cpu = f"{platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return TimingContext(name, datetime.now(UTC).replace(microsecond=0))


@dataclass(frozen=True)
class _Part:
    """Rung 4 of one prompt; see `LoopMeasurement`."""

    acceptance: PromptAcceptance
    seconds: float
    plain_seconds: float
    tokens: int
    plain_tokens: int
    difference: Difference | None


@dataclass(frozen=True)
class LoopIdentity:
    """Everything that decides the result of a loop by one decoding; the report and the machine are not part of it.

    Attributes:
        weights_digest: of the draft; `strategy` and `options` are its other parts.
        prompts: digest of sample ids and tokens, and of the walks that the loop is compared with.
        stop_ids, max_new_tokens, max_length: where answers end.
        seed: of the random draws above temperature 0.
        revision: of the loop's code.
    """

    weights_digest: str
    strategy: str
    options: Mapping[str, Any]
    target_digest: str
    prompts: str
    decoding: Decoding
    draft_tokens: int
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    max_length: int | None
    compute_dtype: str
    seed: int
    revision: int

    def to_json(self) -> dict[str, Any]:
        """Return all values, those of the decoding beside the others: for greedy decoding `temperature` alone."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values |= value.to_json() if isinstance(value, Decoding) else {field.name: value}
        return {**values, "options": dict(self.options), "stop_ids": list(self.stop_ids)}

    @property
    def key(self) -> str:
        return digest(self.to_json())


@dataclass(frozen=True)
class LoopLookup:
    """Result of a look-up: the stored measurement; or the problem of an entry that cannot be used; or neither."""

    measurement: LoopMeasurement | None = None
    problem: str | None = None


@dataclass(frozen=True)
class LoopCache:
    """A folder of rung 4 measurements, see `MeasurementCache`."""

    kept: MeasurementCache

    @classmethod
    def open(cls, folder: Path) -> LoopCache:
        """Open the folder, and make it if it does not exist.

        Raises:
            StoreError: it is a file, or cannot be written to; checked here because decoding may take hours.
        """
        return cls(MeasurementCache.open(folder, "loop"))

    @property
    def folder(self) -> Path:
        return self.kept.folder

    def path(self, identity: LoopIdentity) -> Path:
        return self.kept.path(identity.to_json())

    def find(self, identity: LoopIdentity) -> LoopLookup:
        """Look up the measurement of an identity. A damaged entry, or one of another identity, is not used."""
        found = self.kept.find(identity.to_json())
        if found.values is None:
            return LoopLookup(problem=found.problem)
        try:
            return LoopLookup(_measurement(found.values))
        except (ValueError, LookupError, TypeError, DraftworksError) as error:
            return LoopLookup(problem=f"{self.path(identity)} cannot be read: {error!r}")

    def store(self, identity: LoopIdentity, measured: LoopMeasurement) -> Path:
        """Publish an entry atomically, replacing an existing one.

        Raises:
            StoreError: it cannot be written.
        """
        values = {**measured.to_json(), "prompts": [asdict(prompt) for prompt in measured.prompts]}
        return self.kept.store(identity.to_json(), values)


def _measurement(values: Mapping[str, Any]) -> LoopMeasurement:
    prompts = (PromptAcceptance(**{**each, "histogram": tuple(each["histogram"])}) for each in values["prompts"])
    return LoopMeasurement.from_json(values, tuple(prompts))

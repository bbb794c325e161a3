"""The steps of one way to keep features: tokens, seconds, devices and bytes of each result that is not there yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from draftworks.config.capture import CaptureSpec
from draftworks.config.data import THINKING
from draftworks.config.features import StreamingSpec, UntilSpec
from draftworks.config.registry_files import TrainingSpec
from draftworks.config.strategies import resolve_strategy
from draftworks.planning.amounts import (
    Amount,
    count_mean_tokens,
    count_token_bytes,
    count_training_tokens,
    find_distinct_share,
)
from draftworks.planning.estimates import NOTHING, Estimate, Source
from draftworks.planning.identities import TRAIN
from draftworks.planning.rates import Program, ProgramRate, count_ranks, find_device, find_rate
from draftworks.planning.subject import Found, PlanSubject
from draftworks.storage.identity import digest
from draftworks.storage.names import (
    FP8_GATE,
    HELDOUT_RESPONSES,
    RESPONSES,
    TRAINING_FEATURES,
    of_eval_set,
    of_strategy,
)
from draftworks.targets.registry import HELDOUT

Way = Literal["stored", "fp8", "streamed"]
WAYS: tuple[Way, ...] = ("stored", "fp8", "streamed")


@dataclass(frozen=True)
class PlannedStep:
    """One result that a run makes.

    Attributes:
        key: equal for results that targets share, which are made once.
        tokens: of all its work, the part included that exists.
        made_share: share of the work that exists, 0 to 1.
        seconds: of what is left to do.
        devices: GPUs, or processes on the CPU.
        nbytes: bytes of the features that it stores, those that exist included.
    """

    asset: str
    key: str
    tokens: Estimate
    made_share: float
    seconds: Estimate
    devices: int
    source: Source
    nbytes: Estimate = NOTHING

    @property
    def gpu_hours(self) -> Estimate:
        return self.seconds * (self.devices / 3600)

    @property
    def is_made(self) -> bool:
        return self.made_share >= 1.0

    @property
    def new_bytes(self) -> Estimate:
        """Bytes of the features that are not stored yet."""
        return self.nbytes * (1.0 - self.made_share)


@dataclass(frozen=True)
class StepPlanner:
    """Plans the steps of one way to keep features.

    Attributes:
        strategies: whose drafts are planned.
        trainings: settings of each training, in place of those of the registry where they differ.
        anew: drafts are trained again, even if they exist.
    """

    subject: PlanSubject
    amounts: Mapping[str, Amount]
    way: Way
    strategies: tuple[str, ...]
    trainings: Mapping[str, TrainingSpec]
    anew: bool = False

    @property
    def capture(self) -> CaptureSpec:
        """Settings of the capture of training features: those of the registry, with the storage of this way."""
        capture = self.subject.target.capture
        if self.way == "streamed":
            return capture
        if self.way == "stored":
            return capture.as_plain()
        storage = "fp8_taps" if capture.storage == "plain" else capture.storage
        return capture.model_copy(update={"storage": storage, "dtype": "bfloat16"})

    @property
    def asks_for_fp8(self) -> bool:
        """Whether the target's entry stores features in fp8."""
        return self.subject.target.capture.storage != "plain"

    def list_steps(self) -> Iterator[PlannedStep]:
        """Yield the steps in the order in which a run makes them."""
        yield self._plan_answers(TRAIN, RESPONSES)
        for name in self.subject.eval_sets:
            asset = HELDOUT_RESPONSES if name == HELDOUT else of_eval_set(name).responses
            yield self._plan_answers(name, asset)
        for name in self.subject.eval_sets:
            yield self._plan_eval_features(name)
        if self.way == "fp8" and self.asks_for_fp8:
            yield self.plan_gate()
        yield self._plan_features()
        for number, strategy in enumerate(self.strategies):
            yield from self._plan_draft(strategy, leads=number == 0)

    def estimate_new_bytes(self) -> dict[str, Estimate]:
        """Return the bytes of each set of features that is not stored yet, by its asset."""
        steps = [*map(self._plan_eval_features, self.subject.eval_sets), self._plan_features()]
        return {each.asset: each.new_bytes for each in steps if each.new_bytes.high}

    def count_peak_bytes(self, steps: tuple[PlannedStep, ...]) -> Estimate:
        """Return the bytes of features that are stored at most: all of them, or what a stream holds."""
        total = sum((each.nbytes for each in steps), NOTHING)
        return total if self.way != "streamed" else total + self._hold_stream()

    @cached_property
    def _changed_subject(self) -> PlanSubject:
        """The subject with the settings of this way and of these trainings."""
        target = self.subject.target
        changed = {
            name: entry.model_copy(update={"training": self.trainings.get(name, entry.training)})
            for name, entry in target.strategies.items()
        }
        return self.subject.change(target.model_copy(update={"capture": self.capture, "strategies": changed}))

    @cached_property
    def _features(self) -> Found:
        return self._changed_subject.find_features()

    @property
    def _train(self) -> Amount:
        return self.amounts[TRAIN]

    def _find_rate(self, program: Program, strategy: str = "") -> ProgramRate:
        subject = self.subject
        ranks = self._count_ranks(program, strategy)
        return find_rate(subject, program, find_device(subject, program, strategy), ranks, strategy)

    def _count_ranks(self, program: Program, strategy: str = "") -> int:
        if program in ("train", "evaluate") and strategy in self.trainings:
            nodes = self.subject.registry.resolve_launcher(self.subject.target, program).nodes
            return nodes * self.trainings[strategy].processes
        return count_ranks(self.subject, program, strategy)

    def _plan_step(
        self,
        asset: str,
        decided_by: object,
        program: Program,
        tokens: Estimate,
        made_share: float,
        strategy: str = "",
        nbytes: Estimate = NOTHING,
    ) -> PlannedStep:
        """Return the step of a program whose work grows with tokens; `decided_by` as `_make_key` takes it."""
        rate, left = self._find_rate(program, strategy), tokens * (1.0 - made_share)
        return PlannedStep(
            asset=asset,
            key=self._make_key(asset, decided_by),
            tokens=tokens,
            made_share=made_share,
            seconds=NOTHING if made_share >= 1.0 else rate.estimate_seconds(left),
            devices=self._count_ranks(program, strategy),
            source=rate.source,
            nbytes=nbytes,
        )

    def _plan_answers(self, name: str, asset: str) -> PlannedStep:
        amount = self.amounts[name]
        share = amount.find_made_share(amount.found)
        step = self._plan_step(asset, self._data_key(name), "regenerate", amount.generated, share)
        if name == TRAIN and self.subject.target.responses.endpoint is not None:
            step = replace(step, devices=0)
        taken = Source("counted", "the data's own answers are taken")
        return step if amount.generated.high else replace(step, seconds=NOTHING, source=taken)

    def _plan_eval_features(self, name: str) -> PlannedStep:
        asset, tokens = of_eval_set(name).features, self.amounts[name].tokens
        plain = self.subject.target.capture.as_plain()
        key = [self._data_key(name), self.subject.taps, plain.to_identity()]
        nbytes = tokens * count_token_bytes(self.subject, plain)
        return self._plan_step(asset, key, "capture", tokens, self.subject.find_made_share(asset), nbytes=nbytes)

    def _plan_features(self) -> PlannedStep:
        streamed, amount = self.way == "streamed", self._train
        key = [self._data_key(TRAIN), self.subject.taps, self.capture.to_identity(), streamed]
        if streamed:
            return self._plan_step(TRAINING_FEATURES, key, "capture", NOTHING, 0.0)
        share, nbytes = amount.find_made_share(self._features), self._count_stored_bytes()
        return self._plan_step(TRAINING_FEATURES, key, "capture", amount.tokens, share, nbytes=nbytes)

    def _count_stored_bytes(self) -> Estimate:
        """Return the bytes of the training features: those of the set that exists, or by the samples that repeat."""
        exact = self._features.exact
        if exact is not None:
            return Estimate.exactly(exact.summary["bytes"])
        per_token = count_token_bytes(self.subject, self.capture)
        return self._train.tokens * (per_token * find_distinct_share(self.subject))

    def plan_gate(self) -> PlannedStep:
        """Plan the comparison that fp8 needs: a plain capture of a sample, and trainings and reports with each seed."""
        gates, amount = self.subject.target.gates, self._train
        storage = self.capture.storage
        made = gates.fp8_ungated or self._has_gate(storage)
        mean = count_mean_tokens(amount)
        sample = mean.times(amount.samples.cap(gates.fp8_samples))
        capture = self._find_rate("capture")
        seconds, source = capture.estimate_seconds(sample), capture.source
        target = self.subject.target
        plain = self.subject.change(target.model_copy(update={"capture": target.capture.as_plain()})).find_features()
        runs = 2 * gates.fp8_seeds
        for strategy in self.strategies:
            seconds += self._estimate_sample_training(strategy, gates.fp8_steps) * runs
            source = source.or_worse(self._find_rate("train", strategy).source)
        return PlannedStep(
            asset=FP8_GATE,
            key=self._make_key(FP8_GATE, [self.subject.target.name, storage]),
            tokens=sample,
            made_share=1.0 if made else 0.0,
            seconds=NOTHING if made else seconds,
            devices=max(self._count_ranks("train", strategy) for strategy in self.strategies),
            source=source,
            nbytes=NOTHING
            if made or plain.exact
            else sample * count_token_bytes(self.subject, self.capture.as_plain()),
        )

    def _has_gate(self, storage: str) -> bool:
        """Whether plain features were compared with those of a storage for the target's weights, as trainings ask."""
        files, found = self.subject.files, self.subject.list_results(FP8_GATE)
        wanted = (None if files is None else files.digest, storage)
        return any((each.identity.get("target"), each.identity.get("storage")) == wanted for each in found)

    def estimate_thinking_comparison(self) -> Estimate:
        """Return the seconds of `compare_thinking`: captures of three sets, and trainings and reports on them with each
        seed. Nothing for data without shares of both kinds."""
        target = self.subject.target
        settings, shares = target.comparison, target.mix.shares.get(THINKING, {}) if target.mix else {}
        if not shares or not min(shares.values()):
            return NOTHING
        tokens = (self._train.tokens * min(shares.values())).cap(settings.tokens)
        seconds = self._find_rate("capture").estimate_seconds(tokens) * 3
        for strategy in self.strategies:
            seconds += self._estimate_sample_training(strategy, settings.steps) * (3 * settings.seeds)
        return seconds

    def _estimate_sample_training(self, strategy: str, steps: int) -> Estimate:
        """Return the seconds of a training of so many steps, and of its report."""
        train, evaluate = self._find_rate("train", strategy), self._find_rate("evaluate", strategy)
        tokens = count_mean_tokens(self._train) * (steps * self.trainings[strategy].global_batch_size)
        return train.estimate_seconds(tokens) + evaluate.estimate_seconds(self.amounts[HELDOUT].tokens)

    def _plan_draft(self, strategy: str, leads: bool) -> Iterator[PlannedStep]:
        names, key, asked = of_strategy(strategy), self.subject.target.name, self._changed_subject
        draft, report, export = (
            float(not self.anew and asked.find(each) is not None) for each in (names.draft, names.report, names.export)
        )
        tokens = count_training_tokens(self.trainings[strategy], self._train, self._until)
        step = self._plan_step(names.draft, key, "train", tokens, draft, strategy)
        yield self._add_stream(step, strategy, leads) if self.way == "streamed" and not step.is_made else step
        heldout = sum((self.amounts[name].tokens for name in self.subject.eval_sets), NOTHING)
        measured = self._plan_step(names.report, key, "evaluate", heldout, report, strategy)
        yield replace(measured, devices=self._count_ranks("train", strategy))
        if self.subject.target.strategies[strategy].export.formats != [] and resolve_strategy(strategy).exports:
            yield self._plan_step(names.export, key, "export", NOTHING, export, strategy)

    def _add_stream(self, step: PlannedStep, strategy: str, leads: bool) -> PlannedStep:
        """Return a training with its capture beside it. Drafts that share a stream follow that of the first."""
        streaming = self.subject.target.streaming
        if streaming is not None and streaming.share and not leads:
            return step
        rate = self._find_rate("capture")
        captured = self._count_captured(strategy)
        beside = rate.estimate_seconds(captured)
        train, on_gpu = step.seconds, self.subject.uses_gpu(self.capture.device)
        slower = Estimate(
            max(train.low, beside.low),
            max(train.value, beside.value) if on_gpu else train.value + beside.value,
            train.high + beside.high,
        )
        devices = step.devices + self._count_ranks("capture")
        return replace(step, seconds=slower, devices=devices, source=step.source.or_worse(rate.source))

    def _count_captured(self, strategy: str) -> Estimate:
        """Return the tokens that producers capture for a training: each sample once, or again in each epoch."""
        trained = count_training_tokens(self.trainings[strategy], self._train, self._until)
        if self._keeps_stream() and self._until is None:
            tokens = self._train.tokens
            return Estimate(
                min(trained.low, tokens.low), min(trained.value, tokens.value), min(trained.high, tokens.high)
            )
        return trained

    @property
    def _until(self) -> UntilSpec | None:
        streaming = self.subject.target.streaming
        return None if streaming is None else streaming.until

    def _keeps_stream(self) -> bool:
        settings = self.subject.target.streaming or StreamingSpec()
        nbytes = self._train.tokens.value * count_token_bytes(self.subject, self.capture)
        return settings.resolve_keep(round(nbytes), self.capture.budget_gb).keep == "until_last_use"

    def _hold_stream(self) -> Estimate:
        """Return the bytes that a stream holds at most: what is kept for later epochs, or what producers are ahead with."""
        per_token = count_token_bytes(self.subject, self.capture)
        whole = self._train.tokens * (per_token * find_distinct_share(self.subject))
        if self._keeps_stream() and any(self.trainings[name].epochs > 1 for name in self.strategies):
            return whole
        limits = (self.subject.target.streaming or StreamingSpec()).watermark
        batch = max(self.trainings[name].global_batch_size for name in self.strategies)
        of_sample = count_mean_tokens(self._train) * per_token
        window = whole
        for limit in (limits.samples, None if limits.steps is None else limits.steps * batch):
            if limit is not None:
                held = of_sample * limit
                window = Estimate(min(window.low, held.low), min(window.value, held.value), min(window.high, held.high))
        return window if limits.bytes is None else window.cap(limits.bytes)

    def _data_key(self, name: str) -> list[object]:
        """Return what decides the answers of a part of the data, but for the target's weights."""
        target = self.subject.target
        dataset = target.dataset if name in (TRAIN, HELDOUT) else self.subject.registry.load_eval_set(name).dataset
        return [name, dataset, target.data.to_identity(), target.responses.to_identity(), target.max_length]

    def _make_key(self, asset: str, decided_by: object) -> str:
        target, files = self.subject.target, self.subject.files
        weights = [target.model, target.revision] if files is None else files.digest
        return f"{asset} {digest([weights, target.capture.engine, decided_by])}"

"""`python -m draftworks.programs.evaluate FILE`: measure a draft on all rungs, beside what costs nothing.

That is the same draft untrained, and what proposes without a model, on the walk. A table of bigrams is measured on rungs
0 and 1 too, if the draft proposes a chain of tokens as the table does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from draftworks.capture.batch_notes import ProgressCallback
from draftworks.config.decoding import GREEDY, Decoding, describe_servers
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import EvaluateRun
from draftworks.config.strategies import resolve_strategy
from draftworks.data.chat import ChatTokenizer
from draftworks.data.slices import THINKING, THINKING_PAIR
from draftworks.data.tokenized import TokenizedSet
from draftworks.distributed.collectives import open_process_group, run_on_rank_0
from draftworks.drafts.draft_io import load_draft
from draftworks.drafts.strategy import ChainStrategy, DraftStrategy, StepContext
from draftworks.evaluation.acceptance_length import NAME, format_length
from draftworks.evaluation.baselines import BigramDraft
from draftworks.evaluation.evaluator import Evaluator, Forward, collate_labels, count_labels
from draftworks.evaluation.labels import LabelCounts
from draftworks.evaluation.ladder.decoding import DecodingLimits
from draftworks.evaluation.ladder.loop import (
    DecodingLoop,
    LoopCache,
    LoopIdentity,
    LoopLookup,
    Prompt,
    get_loop_revision,
    select_prompts,
)
from draftworks.evaluation.ladder.measurement import DraftMeasurement, LoopMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import AnswerTrace, join_samples, micro_mean
from draftworks.evaluation.ladder.replay import replay_all
from draftworks.evaluation.ladder.statistics import Resampling
from draftworks.evaluation.report.report import NOT_MEASURED, Report
from draftworks.evaluation.report.slices import read_sample_columns
from draftworks.evaluation.report.thinking import list_asked_samples
from draftworks.evaluation.report.writing import save_report
from draftworks.evaluation.result import EvalResult
from draftworks.evaluation.rivals.loops import LOOP_SHARE, RUNS_IN_LOOP, measure_repetition_of
from draftworks.evaluation.rivals.names import BIGRAM
from draftworks.evaluation.rivals.proposers import BigramTable
from draftworks.features.loader import FeatureDataLoader
from draftworks.programs.assembly import (
    Draft,
    Samples,
    build_draft,
    build_evaluation_loader,
    get_peak_rss_bytes,
    make_empty_heldout_error,
    open_samples,
)
from draftworks.programs.program import ProgramContext, run_program
from draftworks.programs.rival_walks import RivalRun
from draftworks.storage.identity import digest


@dataclass(frozen=True, eq=False)
class Rung4:
    """Measures rung 4 of one draft.

    Attributes:
        weights_digest: of the draft in `draft.strategy`.
        walks: rung 3 of the prompts' answers, by sample id.
        log: prints a line; called on every rank.
        progress: told of every prompt.
    """

    run: EvaluateRun
    draft: Draft
    weights_digest: str
    prompts: Sequence[Prompt]
    walks: Mapping[str, AnswerTrace]
    draft_tokens: int
    device: torch.device
    log: Callable[[str], None]
    progress: ProgressCallback

    def measure(self) -> tuple[LoopMeasurement, ...]:
        """Return a measurement per decoding, from the cache or by decoding. A collective.

        Raises:
            StoreError: the folder of the cache cannot be used.
        """
        if not self.prompts:
            return ()
        decodings = self.run.evaluation.loop.list_decodings(self.run.strategy)
        identities = [self._make_identity(decoding) for decoding in decodings]
        cache = run_on_rank_0(self._open_cache)
        found: list[LoopLookup] = run_on_rank_0(
            lambda: [LoopLookup() if cache is None else cache.find(i) for i in identities]
        )
        loops = []
        for identity, one in zip(identities, found):
            if one.problem is not None:
                self.log(f"rung 4 is measured anew: {one.problem}")
            measured = one.measurement or self._decode_and_store(identity, cache)
            loops.append(measured)
            self.log(_format_measurement(self.run.strategy, measured, cached=one.measurement is not None))
        return tuple(loops)

    def _decode_and_store(self, identity: LoopIdentity, cache: LoopCache | None) -> LoopMeasurement:
        """Decode, and store the measurement at once, so that a later interruption does not lose it."""
        walks = self.walks if identity.decoding == GREEDY else None
        measured = self._loop.measure(self.prompts, identity.decoding, walks, self.progress)
        run_on_rank_0(lambda: None if cache is None else cache.store(identity, measured))
        return measured

    @cached_property
    def _loop(self) -> DecodingLoop:
        """The loop with the target, which is loaded on first use."""
        from draftworks.capture.engines.hf import load_hf_engine

        run, target = self.run, self.run.target
        engine = load_hf_engine(target, CaptureSpec(compute_dtype=run.evaluation.loop.compute_dtype), self.device)
        taps = resolve_strategy(run.strategy).taps(target.num_layers, self.draft.options)
        return DecodingLoop(
            engine.model, self.draft.strategy, taps, self._limits, self.draft_tokens, run.seed, run.max_length
        )

    @cached_property
    def _limits(self) -> DecodingLimits:
        return DecodingLimits(self.run.max_new_tokens, ChatTokenizer.load(self.run.target).eos_ids)

    def _make_identity(self, decoding: Decoding) -> LoopIdentity:
        return LoopIdentity(
            weights_digest=self.weights_digest,
            strategy=self.run.strategy,
            options=self.draft.options.to_identity(),
            target_digest=self.run.target.digest,
            prompts=self._digest_prompts(compared=decoding == GREEDY),
            decoding=decoding,
            draft_tokens=self.draft_tokens,
            stop_ids=tuple(self._limits.stop_ids),
            max_new_tokens=self._limits.max_new_tokens,
            max_length=self.run.max_length,
            compute_dtype=self.run.evaluation.loop.compute_dtype,
            seed=self.run.seed,
            revision=get_loop_revision(self.run.target),
        )

    def _digest_prompts(self, compared: bool) -> str:
        """Return the digest of the prompts, and of the walks if the loop is compared with them."""
        asked = [[prompt.sample_id, list(prompt.tokens)] for prompt in self.prompts]
        return digest(
            [asked, [self.walks[prompt.sample_id].to_json() for prompt in self.prompts] if compared else None]
        )

    def _open_cache(self) -> LoopCache | None:
        return None if self.run.loop_cache is None else LoopCache.open(self.run.loop_cache)


def _format_measurement(strategy: str, loop: LoopMeasurement, cached: bool) -> str:
    rule = loop.decoding.rule
    text = (
        f"{NAME} {format_length(micro_mean(loop.prompts) or 0.0, 3)} in the real loop, {loop.decoding.describe()}"
        f"{'' if rule is None else f', by {rule} ({describe_servers(strategy, rule)})'} (rung 4)"
    )
    if not cached or loop.timing_context is None:
        return text
    return f"{text}; cached, measured on {loop.timing_context.device} at {loop.timing_context.date:%Y-%m-%d %H:%M %Z}"


def evaluate(run: EvaluateRun, ctx: ProgramContext) -> dict[str, Any]:
    """Evaluate the draft and its baselines on the eval set; rank 0 writes the report into `run.out`."""
    started = time.perf_counter()
    with open_process_group(run.device) as device:
        draft = build_draft(run.target, run.strategy, run.options, run.vocab_mapping, run.seed)
        draft.strategy.model.to(device)
        samples = open_samples(run.heldout, run.store, draft.strategy, run.target)
        repeated = {row.sample_id: measure_repetition_of(row) for row in samples.tokens}
        columns = _select_columns(samples.tokens, run.evaluation.slices).assign(**_name_loops(repeated))
        absent = tuple(name for name in run.evaluation.slices if name not in columns)
        measurements = _EvaluationRun(run, ctx, draft, samples, device)
        untrained = measurements.measure_replayed_rungs("untrained")
        # No digest is required: a re-evaluation measures an old draft on new weights of its target.
        config = load_draft(run.draft, draft.strategy, target_digest=None)
        drafts = {"trained": measurements.measure_every_rung("trained", config.weights_digest), "untrained": untrained}
        drafts |= measurements.measure_rivals()
        labels = measurements.count_labels()
    agreement = None if labels is None else labels.agreement
    provenance = {
        "target_digest": run.target.digest,
        "trained_for_target_digest": config.target_digest,
        "weights_digest": config.weights_digest,
        "eval_tokens": samples.tokens.digest,
        "eval_features": samples.manifest.version_of(draft.strategy.feature_names),
        "untrained_seed": run.seed,
        "not_measured": {
            name: samples.tokens.summary[name] for name in NOT_MEASURED if samples.tokens.summary.get(name)
        },
    }
    report = Report(
        target=run.target.name,
        strategy=run.strategy,
        eval_set=run.eval_set,
        drafts=drafts,
        draft_tokens=measurements.draft_tokens,
        label_agreement=agreement,
        labels=labels,
        greedy_answers=run.greedy_answers,
        answers=run.answers,
        columns=columns,
        absent_columns=absent,
        asked=list_asked_samples(samples.tokens),
        repeated=repeated,
        resampling=Resampling(run.evaluation.confidence, run.evaluation.resamples),
        provenance=provenance,
    )
    if ctx.is_main:
        save_report(report, run.out)
    return {
        "drafts": {name: measured.metrics() for name, measured in drafts.items()},
        "label_agreement": agreement,
        "draft_tokens": measurements.draft_tokens,
        **({} if report.thinking is None else {"thinking": report.thinking.to_json()}),
        "seconds": time.perf_counter() - started,
        "peak_rss_bytes": get_peak_rss_bytes(),
    }


@dataclass(frozen=True)
class _EvaluationRun:
    """Measurements of one run's draft on its eval set. Every method is a collective."""

    run: EvaluateRun
    ctx: ProgramContext
    draft: Draft
    samples: Samples
    device: torch.device

    @property
    def strategy(self) -> DraftStrategy:
        return self.draft.strategy

    @property
    def draft_tokens(self) -> int:
        """Tokens to propose per pass: the configured number, limited by what the draft can propose."""
        configured = self.run.evaluation.draft_tokens or self.strategy.draft_tokens
        return min(configured, self.strategy.max_draft_tokens or configured)

    def build_loader(self) -> FeatureDataLoader:
        loader = build_evaluation_loader(self.samples, self.strategy, self.run.micro_batch_size, self.ctx)
        loader.prepare_for(self.device)
        return loader

    def measure_accuracy(self, name: str, forward: Forward) -> EvalResult:
        """Measure rungs 0 and 1; rung 1 also at the temperatures of rung 4 that sample, by the rules of servers.

        Raises:
            DataError: no sample has a token to measure on.
        """
        ctx = StepContext(training=False, served=self.run.evaluation.loop.list_simulated(self.run.strategy))
        with self.ctx.doing(f"{name}: losses and accuracy (rungs 0 and 1)"):
            result = Evaluator(self.device).run(forward, self.build_loader(), ctx)
        if result is None:
            raise make_empty_heldout_error(self.run.heldout)
        length = format_length(result.simulated_acc_len, 3)
        self._log(f"{name}: {NAME} {length}, simulated (rung 1), accuracy {result.avg_acc:.3f}")
        return result

    def measure_replayed_rungs(self, name: str) -> DraftMeasurement:
        """Measure rungs 0 to 3, without a forward pass of the target."""
        return self._measure_with_replay(name).measured

    def measure_every_rung(self, name: str, weights_digest: str) -> DraftMeasurement:
        """Measure rungs 0 to 4. Rung 4 runs the target, unless its measurement is in the loop cache."""
        captured = [self.samples.tokens.by_id(ref.sample_id) for ref in self.samples.refs]
        prompts = select_prompts(captured, self.run.evaluation.loop.prompts)
        found = self._measure_with_replay(name, trace_ids={prompt.sample_id for prompt in prompts})
        rung4 = Rung4(
            self.run,
            self.draft,
            weights_digest,
            prompts,
            found.traces,
            self.draft_tokens,
            self.device,
            log=lambda text: self._log(f"{name}: {text}"),
            progress=lambda now: self.ctx.report_progress({"rung": 4, **now.summarize()}),
        )
        with self.ctx.doing(f"{name}: decoding with the target (rung 4)"):
            return replace(found.measured, loops=rung4.measure())

    def _measure_with_replay(self, name: str, trace_ids: Collection[str] = ()) -> _Measured:
        result = self.measure_accuracy(name, self.strategy.forward_loss)
        with self.ctx.doing(f"{name}: replaying the answers (rungs 2 and 3)"):
            found = replay_all(self.strategy, self.build_loader(), self.draft_tokens, self.device, trace_ids)
        measured = DraftMeasurement(
            result,
            blocks=tuple(one.blocks for one in found),
            walk=tuple(one.walk for one in found),
            walk_by_position=join_samples(one.walk_by_position for one in found),
        )
        walk = micro_mean(measured.walk)
        if walk is not None:
            self._log(f"{name}: {NAME} {format_length(walk, 3)} (walk, rung 3; {self.draft_tokens} proposed per pass)")
        return _Measured(
            measured, {one.walk.sample_id: one.first_answer for one in found if one.first_answer is not None}
        )

    def measure_rivals(self) -> dict[str, DraftMeasurement]:
        """Return what proposes without a model: walks, and rungs 0 and 1 of bigrams beside a draft that makes chains."""
        walks = RivalRun(
            self.samples,
            self.run.train_tokens,
            self.draft.parts.vocab_size,
            self.draft_tokens,
            self.run.rival_cache,
            self._log,
        ).measure()
        for name, one in walks.items():
            self._log(f"{name}: {NAME} {format_length(micro_mean(one.walk), 3)} (walk, rung 3)")
        measured = {
            name: DraftMeasurement(None, walk=one.walk, walk_by_position=one.walk_by_position)
            for name, one in walks.items()
        }
        if not isinstance(self.strategy, ChainStrategy):
            return measured
        return measured | {BIGRAM: replace(measured[BIGRAM], result=self.measure_accuracy(BIGRAM, self.build_bigram()))}

    def build_bigram(self) -> BigramDraft:
        """Return the bigram baseline, measured at the same positions and draft steps as the draft."""
        assert isinstance(self.strategy, ChainStrategy)
        table = BigramTable.count(TokenizedSet.open(self.run.train_tokens), self.draft.parts.vocab_size)
        return BigramDraft(table, self._head, self.strategy.chain_label_mask)

    def count_labels(self) -> LabelCounts | None:
        """Count the labels that are the target's argmax, from `last`; None if `last` was not captured.

        `last` is captured for every sample, also for strategies that do not read it.
        """
        manifest = self.samples.manifest
        if "last" not in manifest.streams or not manifest.identity.last_normed:
            return None
        answers = FeatureDataLoader.for_evaluation(
            [ref.select(("last",)) for ref in manifest.refs],
            self.samples.store,
            self.run.micro_batch_size,
            collate_labels,
            rank=self.ctx.rank,
            world=self.ctx.world_size,
        )
        return count_labels(answers, self._head, self.device)

    @property
    def _head(self) -> Tensor:
        return self.draft.parts.head.to(self.device)

    def _log(self, text: str) -> None:
        if self.ctx.is_main:
            self.ctx.log(text)


@dataclass(frozen=True)
class _Measured:
    """Rungs 0 to 3 of a draft, and the traces of the walks that rung 4 is compared with, by sample id."""

    measured: DraftMeasurement
    traces: Mapping[str, AnswerTrace]


def _select_columns(tokens: TokenizedSet, by: list[str]) -> pd.DataFrame:
    """Return those of the columns to slice by that this eval set has, indexed by sample id. All have `length`, in tokens.

    Eval data that was asked with thinking on and off is sliced by that too.
    """
    frame = read_sample_columns(tokens)
    asked = [THINKING] if THINKING_PAIR in frame.columns and THINKING not in by else []
    return frame.loc[:, [*(name for name in by if name in frame.columns), *asked]]


def _name_loops(repeated: Mapping[str, float]) -> dict[str, pd.Series]:
    """Return the column that says whether the answers of a sample run in a loop."""
    return {RUNS_IN_LOOP: pd.Series({name: "yes" if share >= LOOP_SHARE else "no" for name, share in repeated.items()})}


if __name__ == "__main__":
    run_program(EvaluateRun, evaluate)

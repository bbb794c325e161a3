"""Puts drafts into service and takes them back: judged by the rule, replaced by compare-and-swap."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from draftworks.bundle.description import BundleSubject
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.service import ServiceSpec
from draftworks.data.slices import SLICE_COLUMNS
from draftworks.errors import StoreError
from draftworks.evaluation.report.comparison import SliceDifference, WalkComparison, WalkPair, compare_reports
from draftworks.evaluation.report.slice_changes import LEAST_PROMPTS, resample_enough
from draftworks.service.bundling import find_subject, store_bundle
from draftworks.service.candidate import (
    Accepted,
    Candidate,
    RefusedError,
    find_candidate,
    forget_accepted,
    save_accepted,
)
from draftworks.service.register import (
    Bundle,
    Canary,
    ConflictError,
    EvalFigures,
    InService,
    ServedDraft,
    ServiceRegister,
    require_present,
)
from draftworks.service.rule import (
    CONFIDENCE,
    Compared,
    Margins,
    Ranked,
    Verdict,
    describe_figures,
    judge_eval_set,
    judge_slices,
    rank_earlier,
    was_measured,
)
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.names import of_strategy
from draftworks.storage.records import ReportIdentity, choose_name
from draftworks.targets.registry import Registry


@dataclass(frozen=True)
class Request:
    """A request to promote or take back a draft.

    Attributes:
        why: reason, for the record.
        expected: name of the draft that is to be replaced, or its begin; None: the one that is in service when it is asked.
        force: overrules the rule; gates, weights of the target and files are checked all the same.
        share: of a canary; None for all requests.
    """

    who: str
    why: str = ""
    expected: str | None = None
    force: bool = False
    share: float | None = None


@dataclass(frozen=True)
class Judgement:
    """A candidate with the rule's figures of it.

    Attributes:
        current: the record in service while it was judged.
    """

    candidate: Candidate
    current: InService | None
    figures: tuple[EvalFigures, ...]

    @property
    def accepted(self) -> bool:
        return all(Verdict(one.verdict).accepts for one in self.figures)

    @property
    def is_in_service(self) -> bool:
        """Whether the candidate gets all requests already, as it is exported now."""
        now, served = self.current, self.candidate.served
        if now is None or now.canary is not None:
            return False
        return (now.draft.digest, now.draft.formats) == (served.digest, served.formats)

    def describe(self) -> str:
        return "\n".join(describe_figures(one) for one in self.figures)


@dataclass(frozen=True)
class _JudgedSet:
    """The figures of one eval set, and the walks behind them; None if nothing was compared."""

    figures: EvalFigures
    walks: WalkPair | None


@dataclass(frozen=True)
class Service:
    """The drafts of one strategy of a target, and the one in service.

    Attributes:
        files: the target as it is now.
    """

    registry: Registry
    target: TargetSpec
    files: TargetFiles
    strategy: str
    artifacts: ArtifactStore

    @property
    def register(self) -> ServiceRegister:
        return ServiceRegister(self.artifacts.root, self.target.name, self.strategy)

    @property
    def settings(self) -> ServiceSpec:
        return self.target.service or ServiceSpec()

    def judge(self, digest: str | None = None) -> Judgement:
        """Judge a draft, the newest one by default.

        Raises:
            RefusedError: it cannot be put into service, whatever the rule says.
        """
        candidate = find_candidate(self.artifacts, self.target, self.files, self.strategy, digest)
        history = self.register.read_history()
        found = [self._judge_on(name, candidate, history) for name in candidate.eval_sets]
        differences = self._examine_slices({each.figures.eval_set: each.walks for each in found})
        figures = judge_slices([each.figures for each in found], differences, self.settings.slice_margin)
        return Judgement(candidate, history[-1] if history else None, figures)

    def accept(self, judgement: Judgement) -> None:
        """Mark a judged draft as accepted, for somebody to promote. Raises RefusedError if the rule does not."""
        if not judgement.accepted:
            raise RefusedError(self._explain_refusal(judgement))
        digest = judgement.candidate.served.digest
        save_accepted(self.register, Accepted.of(judgement.current, digest, judgement.figures))

    def promote(self, judgement: Judgement, request: Request) -> InService:
        """Put a judged draft into service, or give it a share of the requests; return the record.

        Raises:
            RefusedError: the rule does not accept it, or a canary has nothing to stand beside.
            ConflictError: another draft was put into service meanwhile, or another one than expected is.
        """
        seen, served = judgement.current, judgement.candidate.served
        expected = self._expect(request, seen)
        if seen is not None and judgement.is_in_service and request.share is None:
            return seen
        if not judgement.accepted and not request.force:
            raise RefusedError(self._explain_refusal(judgement))
        if not judgement.accepted and not request.why:
            raise RefusedError("the rule is only overruled with a reason, for the record: --why")
        if request.share is not None and not 0 < request.share < 1:
            raise RefusedError(f"a canary's share: expected a number between 0 and 1, found {request.share:g}")
        if request.share is not None and seen is None:
            raise RefusedError("a canary stands beside a draft in service, and there is none: promote one first")
        if request.share is not None and seen is not None and seen.draft.digest == served.digest:
            raise RefusedError(f"draft {served.digest} is in service: it cannot be its own canary")
        if self.settings.bundle:
            served = replace(served, bundle=self.bundle(served))

        def make(now: InService | None) -> InService:
            if (now and now.number) != (seen and seen.number):
                raise ConflictError(
                    f"target {self.target.name}, {self.strategy}: another draft was put into service while this one was "
                    "judged: nothing is changed, ask again"
                )
            require_present(self.artifacts.root, served)
            if judgement.accepted:
                self.accept(judgement)
            if request.share is not None and now is not None:
                made = self._follow(now, "canary", request, judgement)
                return replace(made, canary=Canary(served, request.share))
            made = replace(self._follow(now, "promote", request, judgement), draft=served)
            if now is None or now.draft.digest == served.digest:  # the same draft, exported again
                return made
            return replace(made, previous=now.draft.digest, rollback_to=now.number)

        done = self.register.replace(expected, make)
        assert done is not None
        forget_accepted(self.register)
        return done

    def bundle(self, served: ServedDraft) -> Bundle:
        """Return the stored bundle of a draft, see `draftworks.service.bundling`."""
        return store_bundle(self.artifacts, self.find_subject(served))

    def _forget_pruned_bundle(self, served: ServedDraft) -> ServedDraft:
        there = served.bundle is not None and (self.artifacts.root / served.bundle.path).is_dir()
        return served if there else replace(served, bundle=None)

    def find_subject(self, served: ServedDraft) -> BundleSubject:
        """Return what the bundle of a draft is made from. Raises as `draftworks.service.bundling.find_subject`."""
        return find_subject(self.artifacts, self.registry, self.target, self.files, self.strategy, served)

    def rollback(self, request: Request, digest: str | None = None) -> InService:
        """Take back the last promotion: end a canary, or put the draft before into service; return the record.

        Args:
            digest: name, or its begin, of a draft that was in service before; by default the one that the last promotion replaced.

        Raises:
            RefusedError: there is nothing to go back to, its export is gone or damaged, or it was trained for other
                weights than the target has (unless forced).
        """
        history = self.register.read_history()
        if not history:
            raise RefusedError(
                f"target {self.target.name} has no {self.strategy} draft in service: nothing to take back"
            )
        seen = history[-1]
        goal = None if seen.canary is not None and digest is None else self._find_goal(history, digest)
        if goal is not None:
            self._require_usable(goal, history, request)

        def make(now: InService | None) -> InService:
            if now is None or now.number != seen.number:
                raise ConflictError(
                    f"target {self.target.name}, {self.strategy}: another draft was put into service meanwhile: nothing is "
                    "changed, ask again"
                )
            if goal is None:
                return replace(self._follow(now, "end_canary", request, None), figures=())
            require_present(self.artifacts.root, goal.draft)
            made = self._follow(now, "rollback", request, None)
            return replace(
                made,
                draft=self._forget_pruned_bundle(goal.draft),
                previous=now.draft.digest,
                rollback_to=goal.rollback_to,
                figures=(),
            )

        done = self.register.replace(self._expect(request, seen), make)
        assert done is not None
        forget_accepted(self.register)
        return done

    def _judge_on(self, eval_set: str, candidate: Candidate, history: Sequence[InService]) -> _JudgedSet:
        target_digest = self.files.digest
        ranked = rank_earlier(history, target_digest, eval_set)
        compared: dict[str, Compared] = {}
        walks: WalkPair | None = None
        weights = {record.draft.digest: record.draft.weights for record in history}
        for earlier in ranked:
            found = self._compare(eval_set, candidate, earlier, weights[earlier.digest])
            same = weights[earlier.digest] == candidate.served.weights
            paired = found.paired
            values = (None, None) if paired is None else (paired.a, paired.b)
            compared[earlier.digest] = Compared(paired, *values, found.reason, same)
            if paired is not None:
                walks = found.pair
                break
        margins = Margins(self.settings.select_margin(eval_set), self.settings.least_prompts)
        is_known = was_measured(history, target_digest, eval_set)
        return _JudgedSet(judge_eval_set(eval_set, ranked, compared, margins, is_known), walks)

    def _compare(self, eval_set: str, candidate: Candidate, earlier: Ranked, weights: str) -> WalkComparison:
        """Compare with the newest report of a draft's weights that has prompts in common."""
        reason = f"draft {earlier.digest} has no report any more"
        for report in self._list_reports(weights):
            found = compare_reports(self.artifacts, candidate.report, report, eval_set, CONFIDENCE)
            if found.paired is not None:
                return found
            reason = f"draft {earlier.digest}: {found.reason}"
        return WalkComparison(reason=reason)

    def _examine_slices(self, walks: Mapping[str, WalkPair | None]) -> dict[str, list[SliceDifference]]:
        """Return the difference to the reference in every slice of each eval set that has one."""
        by = tuple(dict.fromkeys([*SLICE_COLUMNS, *self.target.evaluation.slices]))
        slices = [
            (name, one, each.resampling)
            for name, each in walks.items()
            if each is not None
            for one in each.list_slices(by, LEAST_PROMPTS)
        ]
        found: dict[str, list[SliceDifference]] = {}
        for name, one, resampling in slices:
            found.setdefault(name, []).append(one.compare(resample_enough(resampling, len(slices))))
        return found

    def _list_reports(self, weights: str) -> list[Artifact]:
        reports = self.artifacts.list_all(of_strategy(self.strategy).report, self.target.name)
        return [report for report in reports if ReportIdentity.of(report).draft == weights]

    def _explain_refusal(self, judgement: Judgement) -> str:
        refused = [describe_figures(one) for one in judgement.figures if not Verdict(one.verdict).accepts]
        verdicts = {one.verdict for one in judgement.figures if not Verdict(one.verdict).accepts}
        todo = (
            "Measure on more prompts, or on the prompts of the draft before; or"
            if verdicts == {Verdict.UNDECIDED}
            else "Train a better draft, or"
        )
        return (
            f"target {self.target.name}, {self.strategy}: draft {judgement.candidate.served.digest} is not promoted, "
            f"nothing is changed:\n" + "\n".join(refused) + f"\n{todo} overrule the rule with --force --why REASON"
        )

    def _follow(self, now: InService | None, action: str, request: Request, judgement: Judgement | None) -> InService:
        """Return the record after `now` with the same draft and no canary."""
        draft = now.draft if now is not None else judgement.candidate.served if judgement is not None else None
        assert draft is not None
        return InService(
            number=1 if now is None else now.number + 1,
            target=self.target.name,
            strategy=self.strategy,
            action=action,  # pyright: ignore[reportArgumentType] - one of the literals
            draft=draft,
            previous=None if now is None else now.previous,
            rollback_to=None if now is None else now.rollback_to,
            who=request.who,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            why=request.why,
            forced=request.force and (judgement is None or not judgement.accepted),
            figures=() if judgement is None else judgement.figures,
        )

    def _expect(self, request: Request, seen: InService | None) -> str | None:
        """Return the draft that has to be in service when the record is replaced.

        Raises:
            ConflictError: the draft that was asked for is not the one in service.
        """
        if request.expected is None:
            return None if seen is None else seen.draft.digest
        if seen is None:
            raise ConflictError(
                f"target {self.target.name}, {self.strategy}: expected draft {request.expected} in service, found none: "
                "nothing is changed"
            )
        expected, reason = request.expected, ""
        try:
            expected = choose_name(expected, read_served_names(self.register.read_history()))
        except StoreError as error:
            reason = f" ({error})"
        if expected != seen.draft.digest:
            raise ConflictError(
                f"target {self.target.name}, {self.strategy}: expected draft {expected} in service, found draft "
                f"{seen.draft.digest}: nothing is changed{reason}"
            )
        return expected

    def _find_goal(self, history: Sequence[InService], digest: str | None) -> InService:
        seen = history[-1]
        if digest is None:
            found = next((one for one in history if one.number == seen.rollback_to), None)
            if found is None:
                raise RefusedError(
                    f"target {self.target.name}, {self.strategy}: draft {seen.draft.digest} is the first one: there is "
                    "nothing to go back to"
                )
            return found
        try:
            digest = choose_name(digest, read_served_names(history))
        except StoreError as error:
            raise RefusedError(
                f"draft {digest} was never in service for {self.target.name}, {self.strategy}: {error}. Put another one "
                "into service with draftworks promote"
            ) from None
        if digest == seen.draft.digest:
            raise RefusedError(f"draft {digest} is in service already: nothing is changed")
        return [one for one in history if one.draft.digest == digest][-1]

    def _require_usable(self, goal: InService, history: Sequence[InService], request: Request) -> None:
        """Raise RefusedError unless the draft of a former record can serve again."""
        draft = goal.draft
        root = self.artifacts.root
        export = next(
            (
                one
                for one in self.artifacts.list_all(of_strategy(self.strategy).export, self.target.name)
                if one.path.relative_to(root).as_posix() == draft.path and one.data_version == draft.version
            ),
            None,
        )
        damage = None if export is None else export.find_damage(self.artifacts.digests.of_file)
        if export is None or damage is not None:
            there = {one.draft.digest for one in history if (root / one.draft.path).is_dir()} - {draft.digest}
            raise RefusedError(
                f"draft {draft.digest}: its export {root / draft.path} "
                f"{'is not there any more: it was pruned' if export is None else f'is damaged ({damage})'}. Nothing is "
                f"changed. Still there of those that were in service: {', '.join(sorted(there)) or 'none'}"
            )
        if draft.target_digest != self.files.digest and not request.force:
            raise RefusedError(
                f"draft {draft.digest} was trained for the weights {draft.target_digest}, the target's are "
                f"{self.files.digest} now. Nothing is changed. --force puts it into service all the same"
            )


def read_served_names(history: Sequence[InService]) -> dict[str, str]:
    """Return the data version of each draft that was in service, by its name."""
    return {one.draft.digest: one.draft.weights for one in history}


def name_user() -> str:
    """Return who asks where nothing else is said: user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"

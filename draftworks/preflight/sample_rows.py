"""A sample of a data set as a run parses and tokenizes it: first rows, their columns, tokens and lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from draftworks.capture.answers.dialogue import require_questions
from draftworks.config.registry_files import DatasetSpec, TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer, OutsideVocabulary
from draftworks.data.conversations import Conversation, Scalar, select
from draftworks.data.datasets import RawRow, detect_kind, is_json_list, read_rows
from draftworks.data.formats import RowError, find_unread_keys, parse_conversation, parse_tokens, read_columns
from draftworks.data.prepare import split_parts
from draftworks.data.served.loading import REJECTED, drop_beginnings, read_served
from draftworks.data.sources import SERVED, find_dataset_files
from draftworks.data.split import is_held_out
from draftworks.data.tokenized import TokenRow
from draftworks.data.tokenizing import encode_own_answers
from draftworks.errors import DataError
from draftworks.preflight.findings import Findings
from draftworks.storage.words import shorten
from draftworks.targets.registry import Registry

SAMPLE_ROWS = 64
"""Number of data rows that are read from each data set."""
MAX_JSON_LIST_BYTES = 256 << 20
"""Largest JSON list in bytes; larger ones are skipped, as such a file has to be read whole for its first rows."""


@dataclass
class Sample:
    """The first data rows of a data set.

    Attributes:
        kind: "tokens" for tokenized data, as `detect_kind` returns it; empty if no file was looked at.
        items: parsed rows: token rows or conversations.
        reasons: for each rejected row, why it cannot be used.
        outside: how many of them are sound but for ids that the target's vocabulary does not have.
        skipped: files that were not looked at.
        whole: whether these are all rows of the data set.
        unread: keys of usable rows and their turns that are not read, each with the number of rows that have it.
    """

    kind: str
    items: list[Any] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    outside: int = 0
    skipped: list[Path] = field(default_factory=list)
    whole: bool = False
    unread: Counter[str] = field(default_factory=Counter)

    @property
    def rows(self) -> int:
        return len(self.items) + len(self.reasons)


def read_sample(dataset: DatasetSpec, root: Path, files: TargetFiles) -> Sample:
    """Return the first `SAMPLE_ROWS` data rows, from as many files as necessary.

    Raises:
        DataError: no file, an unreadable one, or no row whose format is recognised.
    """
    if dataset.format == SERVED:
        return _read_served_sample(dataset, root)
    paths = find_dataset_files(dataset, root)
    skipped = [path for path in paths if not _can_be_streamed(path)]
    if len(skipped) == len(paths):
        return Sample("", skipped=skipped)
    sample = Sample(detect_kind(dataset, root), skipped=skipped)
    expected = None if dataset.format == "auto" else dataset.format
    for path in (path for path in paths if path not in skipped):
        for row in islice(read_rows(path), SAMPLE_ROWS - sample.rows):
            if not isinstance(row, RawRow):
                sample.reasons.append(str(row))
                continue
            try:
                tokens = sample.kind == "tokens"
                sample.items.append(
                    parse_tokens(row.value, files.vocab_size) if tokens else parse_conversation(row.value, expected)
                )
                sample.unread.update(find_unread_keys(row.value))
            except (RowError, RecursionError) as error:
                sample.reasons.append(f"{row.file}:{row.line}: {error}")
                sample.outside += sample.kind == "tokens" and _is_sound(row.value)
        if sample.rows >= SAMPLE_ROWS:
            break
    sample.whole = sample.rows < SAMPLE_ROWS and not skipped
    return sample


def _is_sound(row: Any) -> bool:
    """Whether a row is tokenized rightly for some vocabulary."""
    with suppress(RowError, RecursionError):
        return bool(parse_tokens(row))
    return False


def read_usable(dataset: DatasetSpec, root: Path, kind: str) -> Iterator[Conversation | TokenRow]:
    """Yield the rows of a data set that can be used, whatever their ids are; of files that cannot be streamed, none.

    Raises:
        DataError: a file cannot be read to its end.
    """
    expected = None if dataset.format in ("auto", SERVED) else dataset.format
    for path in filter(_can_be_streamed, find_dataset_files(dataset, root)):
        for row in read_rows(path):
            with suppress(RowError, RecursionError):
                if isinstance(row, RawRow):
                    yield parse_tokens(row.value) if kind == "tokens" else parse_conversation(row.value, expected)


def _read_served_sample(dataset: DatasetSpec, root: Path) -> Sample:
    """Return the first rows of served prompts, redacted. Reasons do not quote a row."""
    sample, rows = Sample("conversations"), 0
    for row in read_served(dataset, root, SAMPLE_ROWS):
        rows += 1
        if row.conversation is not None:
            sample.items.append(row.conversation)
        elif row.outcome == REJECTED:
            sample.reasons.append(f"{row.file}:{row.line}: {row.reason}")
    sample.items, sample.whole = drop_beginnings(sample.items), rows < SAMPLE_ROWS
    return sample


def find_absent_columns(columns: Collection[str], dataset: DatasetSpec, root: Path) -> set[str]:
    """Return the columns that no row of a data set has. Reads until each was seen: the whole data set for a wrong name.

    Raises:
        DataError: a file cannot be read to its end.
    """
    return _find_absent(columns, dataset, root, lambda found: found.keys())


def find_absent_values(column: str, values: Collection[str], dataset: DatasetSpec, root: Path) -> set[str]:
    """Return the values of a column, as text, that no row of a data set has. Reads and raises as `find_absent_columns`."""
    return _find_absent(values, dataset, root, lambda found: {str(found[column])} if column in found else ())


def _find_absent(
    wanted: Collection[str], dataset: DatasetSpec, root: Path, select: Callable[[Mapping[str, Scalar]], Iterable[str]]
) -> set[str]:
    left = set(wanted)
    for path in find_dataset_files(dataset, root):
        if not _can_be_streamed(path):
            return set()  # not known, and no reason to refuse
        for row in read_rows(path):
            if isinstance(row, RawRow) and isinstance(row.value, dict):
                left.difference_update(select(read_columns(row.value)))
            if not left:
                return left
    return left


def _can_be_streamed(path: Path) -> bool:
    return path.suffix.lower() != ".json" or path.stat().st_size <= MAX_JSON_LIST_BYTES or not is_json_list(path)


@dataclass(frozen=True)
class RowTokens:
    """Token counts of one row.

    Attributes:
        prompt_key: of what the row is held out by.
        problem: why it cannot be asked, or is no token row; the counts are 0 then.
        answer_problem: why its own answers cannot be learnt; None where the target answers instead.
        prompt: tokens before the first answer; 0 for a row that is tokenized already.
        length: tokens of the row with its own answers, before any cut; of its longest sample, where it gives several.
        supervised: tokens to learn within `max_length`, of its own answers.
        answers: answers that the target is asked for.
        outside: whether the problem is an id that the target's vocabulary does not have.
    """

    id: str
    prompt_key: str
    problem: str | None = None
    answer_problem: str | None = None
    prompt: int = 0
    length: int = 0
    supervised: int = 0
    answers: int = 0
    outside: bool = False


@dataclass
class SampleTokens:
    """Token counts of the rows of a sample, without repetitions, and occurrences of each token id."""

    rows: dict[str, RowTokens] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class DataUse:
    """Rows of a sample that a run uses in one way.

    Attributes:
        what: how messages call them.
        asked: whether the target answers them; otherwise their own answers are taken.
        trained: whether drafts are trained on them.
        whole: whether the run uses these and no other in this way; otherwise they are the first ones, of any part.
        eval_set: the eval set that they are, if they are whole.
    """

    what: str
    rows: tuple[RowTokens, ...]
    asked: bool
    trained: bool = False
    whole: bool = False
    eval_set: str | None = None


def tokenize_sample(sample: Sample, chat: ChatTokenizer | None, target: TargetSpec) -> SampleTokens:
    """Tokenize the rows of a sample; `chat` is needed for conversations only."""
    found = SampleTokens()
    for item in sample.items:
        if isinstance(item, TokenRow):
            supervised = int(item.loss_mask[: target.max_length].sum())
            found.rows[item.id] = RowTokens(item.id, item.prompt_key, length=len(item), supervised=supervised)
            found.counts.update(item.input_ids.tolist())
            continue
        assert chat is not None, "a set of conversations is looked at only where the chat template could be loaded"
        try:
            found.rows[item.id] = _count_conversation(item, chat, target, found.counts)
        except DataError as error:
            outside = isinstance(error, OutsideVocabulary)
            found.rows[item.id] = RowTokens(item.id, item.prompt_key, str(error), outside=outside)
    return found


def _count_conversation(
    conversation: Conversation, chat: ChatTokenizer, target: TargetSpec, counts: Counter[int]
) -> RowTokens:
    chat = chat.choose(conversation)
    questions = require_questions(conversation.turns)
    chat.require_words(questions[0].turns)
    prompt = chat.encode_prompt(questions[0].turns)
    row = RowTokens(conversation.id, conversation.prompt_key, prompt=len(prompt), answers=len(questions))
    try:
        answers = encode_own_answers(chat, conversation, target.data.only_last_turn)
    except DataError as error:
        counts.update(prompt)
        if target.responses.mode == "regenerate":
            return row
        return replace(row, answer_problem=str(error), outside=isinstance(error, OutsideVocabulary))
    for answer in answers:
        counts.update(answer.input_ids.tolist())
    supervised = sum(int(answer.loss_mask[: target.max_length].sum()) for answer in answers)
    return replace(row, length=max(map(len, answers)), supervised=supervised)


def list_uses(
    name: str, sample: Sample, rows: Mapping[str, RowTokens], target: TargetSpec, registry: Registry
) -> list[DataUse]:
    """Return the uses of a data set. Where all rows are known they are those of each part; otherwise the first ones.

    Held-out prompts and eval sets are always answered by the target, unless they are tokenized already.
    """
    trained, asked = name in target.training_datasets, sample.kind != "tokens"
    regenerated = target.responses.mode == "regenerate" and asked
    sound = (
        len(sample.reasons) <= target.data.max_rejected_share * sample.rows
    )  # otherwise rows are to be repaired first
    if not (sample.whole and sound) or target.mix is not None:
        what, first = f"its first {len(rows):,} rows", tuple(rows.values())
        uses = [DataUse(what, first, asked=True, trained=trained and regenerated)] if asked else []
        keeps_answers = (trained or not asked) and not regenerated
        return [*uses, DataUse(what, first, asked=False, trained=trained)] if keeps_answers else uses
    items, uses = list({item.id: item for item in sample.items}.values()), []

    def use(chosen: Iterable[Conversation | TokenRow], what: str, asked: bool, eval_set: str | None = None) -> DataUse:
        members = tuple(rows[each.id] for each in chosen)
        return DataUse(
            f"the {len(members):,} rows {what}", members, asked, eval_set is None, whole=True, eval_set=eval_set
        )

    if trained:
        parts = split_parts(select(items, target.data.max_conversations), target.data.held_out_share)
        uses = [use(parts["train"], "to train on", regenerated), use(parts["heldout"], "held out", asked, "heldout")]
    for each in target.evals:
        spec = registry.load_eval_set(each)
        if spec.dataset == name:
            part = items if spec.part == "all" else split_parts(items, target.data.held_out_share)["heldout"]
            uses.append(use(select(part, spec.max_conversations), f"of eval set {each}", asked, each))
    return uses


_WARNING_SHARE = 0.5
"""Share of lost or cut rows in a sample above which a warning is given, whatever is allowed."""


def check_lengths(where: str, use: DataUse, target: TargetSpec, findings: Findings) -> None:
    """Check one use of a data set. What is not certain from the rows that are known is a warning."""
    if not use.rows:
        return
    usable = _check_rejected(where, use, target, findings)
    if not usable:
        return
    if use.asked and target.responses.max_new_tokens == 1:
        findings.error(
            f"{where}: responses.max_new_tokens is 1: a draft proposes what follows the first token of an answer, so nothing "
            "could be measured. Raise it"
        )
        return
    cut = [] if use.asked else [row.length for row in usable if row.length > target.max_length]
    if len(cut) > _WARNING_SHARE * len(usable):
        findings.warning(
            f"{where}: max_length {target.max_length} cuts {len(cut)} of {use.what}, the longest of {max(cut):,} tokens: "
            "tokens after the cut are not learnt"
        )
    if use.trained:
        _check_packing(where, use, usable, target, findings)
    _check_supervised_share(where, use, usable, target, findings)


def count_least_tokens(row: RowTokens, asked: bool, max_length: int) -> int:
    """Return the tokens that the sample of a row has at least."""
    return row.prompt + 1 if asked else min(row.length, max_length)


def _explain_loss(row: RowTokens, asked: bool, max_length: int) -> str | None:
    """Return why a run gets no sample of a row; None if it gets one."""
    if row.problem is not None or (row.answer_problem is not None and not asked):
        return row.problem or row.answer_problem
    if asked and row.prompt >= max_length:
        return f"a prompt of {row.prompt:,} tokens leaves no room within max_length {max_length}"
    if not asked and not row.supervised:
        return f"no supervised token in the first {max_length} of {row.length:,}"
    return None


def shorten_reason(reason: str, most: int) -> str:
    """Return why a row cannot be used, of the file its name alone."""
    place, colon, said = reason.partition(": ")
    return shorten(f"{Path(place).name}{colon}{said}", most)


def _check_rejected(where: str, use: DataUse, target: TargetSpec, findings: Findings) -> Sequence[RowTokens]:
    """Check the share of rows that give no sample, as the run does; return the others."""
    losses = {row.id: _explain_loss(row, use.asked, target.max_length) for row in use.rows}
    usable = [row for row in use.rows if losses[row.id] is None]
    reasons = [reason for reason in losses.values() if reason is not None]
    total, limit = len(use.rows), target.data.max_rejected_share
    if not usable and all(row.problem or (row.answer_problem and not use.asked) for row in use.rows):
        findings.error(f"{where}: none of {use.what}: {reasons[0]}")
    elif not usable and use.asked:
        findings.error(
            f"{where}: the prompts of {use.what} leave no room for an answer within max_length {target.max_length}. Raise "
            f"max_length, or take shorter conversations"
        )
    elif not usable and use.whole:
        findings.error(f"{where}: none of {use.what} gives a sample: {reasons[0]}. Raise max_length")
    elif len(reasons) > min(limit, _WARNING_SHARE) * total:
        report = findings.error if use.whole and len(reasons) > limit * total else findings.warning
        report(
            f"{where}: {len(reasons):,} of {use.what} give no sample ({len(reasons) / total:.1%}; allowed: {limit:.1%}, "
            f"data.max_rejected_share): {shorten_reason(reasons[0], 80)}"
        )
    return usable


def _check_packing(
    where: str, use: DataUse, usable: Sequence[RowTokens], target: TargetSpec, findings: Findings
) -> None:
    """Report samples that are longer than the packed rows, which would end the training."""
    if target.mix is not None or (target.data.max_conversations is not None and not use.whole):
        return  # which rows are trained on is not known
    known = [row for row in usable if use.whole or not is_held_out(row.prompt_key, target.data.held_out_share)]
    lengths = [count_least_tokens(row, use.asked, target.max_length) for row in known]
    for name, entry in target.strategies.items():
        training = entry.training
        if training.pack_tokens is None or training.pack_overlong != "refuse":
            continue
        over = [length for length in lengths if length > training.pack_tokens]
        if over:
            findings.error(
                f"{where}: {len(over):,} of {use.what} have up to {max(over):,} tokens, more than pack_tokens "
                f"{training.pack_tokens} of {name}, and the training ends there. Raise it, or set pack_overlong to own_row"
            )


def _check_supervised_share(
    where: str, use: DataUse, usable: Sequence[RowTokens], target: TargetSpec, findings: Findings
) -> None:
    """Report a share of supervised tokens that is too small even if every answer is as long as it may be."""
    least = target.data.min_supervised_share
    learnt = [_count_most_learnt(row, use.asked, target) for row in usable]
    tokens = [
        row.prompt + most if use.asked else min(row.length, target.max_length) for row, most in zip(usable, learnt)
    ]
    if sum(learnt) >= least * sum(tokens):
        return
    # a server may refuse some prompts, and the share is larger if these have the longest
    refused = int(target.data.max_rejected_share * len(usable)) if use.asked else 0
    over = sorted(most - least * total for most, total in zip(learnt, tokens))
    report = findings.error if use.whole and sum(over[refused:]) < 0 else findings.warning
    longer = f" with responses.max_new_tokens {target.responses.max_new_tokens}" if use.asked else ""
    report(
        f"{where}: of {use.what}{longer}, at most {sum(learnt) / sum(tokens):.1%} of tokens are supervised, and the run stops "
        f"below {least:.1%} (data.min_supervised_share)"
    )


def _count_most_learnt(row: RowTokens, asked: bool, target: TargetSpec) -> int:
    """Return the tokens of a row that are supervised at most."""
    if not asked:
        return row.supervised
    most = target.responses.max_new_tokens * (1 if target.data.only_last_turn else row.answers)
    return min(most, target.max_length - row.prompt) if row.answers == 1 else most

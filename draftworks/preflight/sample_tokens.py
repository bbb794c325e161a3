"""Token counts of the first rows of a data set, and the uses that a run makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from draftworks.capture.answers.dialogue import require_questions
from draftworks.config.registry_files import TargetSpec
from draftworks.data.chat import ChatTokenizer, OutsideVocabulary
from draftworks.data.conversations import Conversation, select
from draftworks.data.own_answers import encode_own_answers
from draftworks.data.prepare import split_parts
from draftworks.data.token_rows import TokenRow
from draftworks.errors import DataError
from draftworks.preflight.sample_rows import Sample
from draftworks.targets.registry import Registry


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
        own = encode_own_answers(chat, conversation, target.data.only_last_turn)
    except DataError as error:
        counts.update(prompt)
        if target.responses.mode == "regenerate":
            return row
        return replace(row, answer_problem=str(error), outside=isinstance(error, OutsideVocabulary))
    for sample in own:
        counts.update(sample.input_ids.tolist())
    supervised = sum(int(sample.loss_mask[: target.max_length].sum()) for sample in own)
    return replace(row, length=max(map(len, own)), supervised=supervised)


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
        own = (trained or not asked) and not regenerated
        return [*uses, DataUse(what, first, asked=False, trained=trained)] if own else uses
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

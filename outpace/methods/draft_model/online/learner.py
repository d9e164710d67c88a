"""Learning while serving: the draft model is distilled on what the target refused of it.

    observe   verified passes -> logits of refused tokens, which wait (`inbox`)
    read      logits -> distributions -> pieces of text, per branch
    round     learn from some pieces -> judge on held-out requests -> a version, or none
    review    a version that drafts is compared with its parent on what came since; it may go back

A branch is the drafter of one key's texts on one topic; nothing goes from branch to branch. All
work is done in units of milliseconds inside ``step``, on the caller's thread. So whoever serves
decides when there is time. Observing a pass costs a copy. What is learned depends on the
observations, the seed and the number of units between them, and on no clock.

Requests that are held out are recorded whole and never learned from: on refused tokens alone any
change looks like progress. A version is judged as it is stored, in bfloat16.

Texts stay in memory and go with the process. On the disk are versions (`outpace.train.versions`).

Paper: Online Speculative Decoding, Liu et al. 2023, arXiv:2310.07177. As in its text, the distribution that
teaches is that of the refused token itself. The other changes are the held-out judgement, several uses of
an observation, and a share of accepted tokens against forgetting.

Shape letters: R judged tokens, K entries of a distribution, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from outpace.config import MethodSpec, build, data_folder
from outpace.drafters.trained import WEIGHTS, find, is_drafter, read_tensors
from outpace.errors import ModelError
from outpace.methods.draft_model.drafter import DraftModel, DraftModelConfig
from outpace.methods.draft_model.online.data import Branch, Buffer, Marks, OnlineConfig, Text, Version
from outpace.methods.draft_model.online.inbox import Inbox
from outpace.methods.draft_model.online.net import Desk
from outpace.methods.draft_model.online.topics import TOPICS, Router, read_topics, write_topics
from outpace.models.base import Target
from outpace.models.lock import Lock
from outpace.train.memory import keep_freed_memory
from outpace.train.versions import BASE, Versions, digest_of
from outpace.types import ROOT, Outcome

SURE = 2.0
"""Standard errors by which a version must be worse than its parent to go back."""


@dataclass(slots=True)
class Tally:
    """What was done since the process began."""

    texts: int = 0
    rows: int = 0
    """Judged tokens that came to learn from."""
    held_rows: int = 0
    """Judged tokens that came to judge by."""
    units: int = 0
    updates: int = 0
    versions: int = 0
    rolled_back: int = 0
    seconds: float = 0.0
    """Spent on learning."""
    acceptance: float = 0.0
    """Held out, of the drafter that won the last judgement."""


class OnlineLearner:
    """Learns a draft model from verified passes. One thread at a time.

    Args:
        base: the drafter folder that learning starts from.
        folder: of what is learned; made if absent, and locked.
        spec: method spec under which the drafter drafts, as outcomes name it.

    Raises:
        ModelError: a drafter of another target, damaged files, or a folder in use.
    """

    Config = OnlineConfig

    def __init__(
        self,
        target: Target,
        base: Path,
        folder: Path,
        config: OnlineConfig,
        *,
        spec: str = "draft_model",
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target, self.base, self.config, self.spec = target, base, config, spec
        self.folder, self._now = folder, now
        self.desk = Desk(base, target, config)
        self.tally = Tally()
        self._about = {
            "method": "draft_model",
            "target": target.name,
            "target_digest": target.digest,
            "base": digest_of(base / WEIGHTS),
        }
        self._coins = np.random.default_rng(config.seed)
        self._branches: dict[str, Branch] = {}
        """Least lately used first."""
        self._inbox = Inbox(config.top, target.dtype, self._collect)
        self._reads = False
        """Whether the last unit was one of reading."""
        self._work: Iterator[Version | None] | None = None
        self._seated: Branch | None = None
        self._lock = Lock(folder, f"another server learns in {folder}; stop it, or serve without --learn")
        try:
            self._routers = read_topics(folder / TOPICS, config.topics)
        except BaseException:
            self._lock.release()
            raise
        keep_freed_memory()

    @classmethod
    def open(
        cls, target: Target, spec: str, config: OnlineConfig, folder: Path | None = None
    ) -> OnlineLearner:
        """Learn for the drafter of a method spec.

        Args:
            folder: None: in the user's data folder, by target and drafter.

        Raises:
            ModelError: a method that does not learn, or as the constructor.
        """
        parsed = MethodSpec.parse(spec)
        if parsed.name != "draft_model":
            raise ModelError(f"--learn is for draft_model, not for {parsed.name}; name draft_model")
        own = build(DraftModelConfig, parsed.split()[0], f"drafter {parsed.name!r}")
        if own.layers is not None or (own.model is not None and not is_drafter(own.model)):
            raise ModelError(
                f"--learn needs a draft model that outpace train made, not {parsed}; make one "
                f"with: outpace train draft_model --model {target.name}"
            )
        base = find("draft_model", target, own.model)
        if folder is None:
            folder = data_folder() / "learned" / target.digest / digest_of(base / WEIGHTS)[:16]
        return cls(target, base, folder, config, spec=str(parsed))

    # What is seen.

    def begin(self, key: str, prompt: Sequence[int]) -> Text:
        """A sequence begins. Reads its branch's drafter from the disk if it was not in memory."""
        router = self._routers.setdefault(_name(key), Router(self.config.topics))
        branch = self._branch(f"{_name(key)}-{router.route(prompt)}")
        self.tally.texts += 1
        digest = hashlib.sha256(f"{self.config.seed} {key} {list(prompt)}".encode()).digest()
        held = int.from_bytes(digest[:8], "big") < self.config.held_out * 2**64
        return Text(branch, held, Marks(prompt))

    def observe(self, texts: Sequence[Text], outcomes: Sequence[Outcome]) -> None:
        """Take in a pass: what was emitted, and the logits of tokens that this drafter guessed.

        Cost: a copy of the rows of logits that are remembered; if many wait, those are read.
        """
        rows: list[Tensor] = []
        places: list[tuple[Text, int]] = []
        for text, outcome in zip(texts, outcomes, strict=True):
            first = len(text.marks.ids)
            text.marks.ids.extend(outcome.verdict.emitted)
            mine = outcome.drafter == self.spec and len(outcome.draft) and not outcome.forced
            if not mine or text.source.closed:
                continue
            text.marks.greedy = all(group.law is None for group in outcome.draft.groups)
            wanted = self._wanted(text, outcome)
            at = [0, *(node + 1 for node in outcome.verdict.kept)]
            rows += [outcome.scored.logits_TV[at[i]] for i in wanted]
            places += [(text, first + i) for i in wanted]
        if rows:
            self._inbox.put(rows, places)

    def _wanted(self, text: Text, outcome: Outcome) -> list[int]:
        """Which of the emitted tokens to remember: all that were judged, or what was refused."""
        verdict, draft = outcome.verdict, outcome.draft
        last = verdict.kept[-1] if verdict.kept else ROOT
        refused = not verdict.censored and last in draft.groups_of
        judged = range(len(verdict.kept) + refused)[: len(verdict.emitted)]
        if text.held:
            return list(judged)
        return [i for i in judged if i == len(verdict.kept) or self._coins.random() < self.config.anchor]

    def end(self, text: Text) -> None:
        """A sequence has ended, or is begun anew; what it said is kept."""
        self._inbox.end(text)

    def _collect(self, text: Text, end: bool) -> None:
        piece = text.marks.piece(self.config.piece, self.config.context, end)
        branch = text.source
        if piece is None or branch.closed:
            return
        if text.held:
            branch.held.add(piece)
            self.tally.held_rows += piece.rows
            return
        branch.train.add(piece)
        self.tally.rows += piece.rows
        most = self.config.repeats * self.config.rows
        branch.credit = min(most, branch.credit + self.config.repeats * piece.rows)

    def _branch(self, name: str) -> Branch:
        branch = self._branches.pop(name, None)
        if branch is None:
            versions = Versions(self.folder / name, self._about, self.config.kept)
            branch = Branch(name, versions, Buffer(self.config.rows), Buffer(self.config.held_rows))
            branch.drafter = self._load(versions)
            while len(self._branches) >= self.config.branches:
                idle = [one for one in self._branches.values() if one is not self._seated]
                if not idle:
                    break
                idle[0].closed = True
                del self._branches[idle[0].name]
        self._branches[name] = branch
        return branch

    # What is learned.

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do. Cost: a look at every branch."""
        return bool(self._inbox) or self._work is not None or self._due() is not None

    def step(self, budget_s: float) -> Version | None:
        """Work for about so many seconds, at least one unit if there is one.

        Returns:
            A version that is to draft from now on, as soon as it is there; the texts of its branch
            that begin later have it already.

        Raises:
            OSError: a version cannot be written. The old one drafts on; what was learned stays, and is
                judged again after the next round.
        """
        began = self._now()
        version = None
        try:
            while version is None:
                branch = self._due() if self._work is None else self._seated
                # In turns: if more comes than is read, there has to be time to learn from it.
                self._reads = bool(self._inbox) and (branch is None or not self._reads)
                if self._reads:
                    self._inbox.read()
                    self.tally.units += 1
                elif branch is None:
                    break
                else:
                    version = self._learn(branch)
                if self._now() - began >= budget_s:
                    break
        except BaseException:
            self._work = self._seated = None
            raise
        finally:
            self.tally.seconds += self._now() - began
        return version

    def _learn(self, branch: Branch) -> Version | None:
        """Do the next unit of what is done for a branch."""
        if self._work is None:
            self._seated = branch
            self._work = (self._review if self._to_review(branch) else self._round)(branch)
        try:
            version = next(self._work)
        except StopIteration:
            self._work = self._seated = None
            return None
        self.tally.units += 1
        return version

    def _due(self) -> Branch | None:
        """The branch with most to learn from; one whose version is to be reviewed comes first."""
        best, most = None, float(self.config.round_rows)
        for branch in self._branches.values():
            if self._to_review(branch):
                return branch
            if branch.credit >= most and branch.held.rows >= self.config.least_held:
                best, most = branch, branch.credit
        return best

    def _to_review(self, branch: Branch) -> bool:
        fresh = branch.held.added - branch.seen_at
        return branch.versions.current != BASE and fresh >= self.config.least_held

    def _round(self, branch: Branch) -> Iterator[Version | None]:
        """Learn, judge, and give a version if it is better; each turn is a unit."""
        config, desk, versions = self.config, self.desk, branch.versions
        desk.seat(self._folder_of(branch, versions.current), branch.training)
        yield None
        learned = 0
        while learned < config.round_rows:
            rows = 0
            for _ in range(config.update_units):
                rows += desk.learn(branch.train.pick(config.unit_tokens, self._coins, config.replay))
                yield None
            learned += rows
            if not desk.update(rows):
                branch.training, branch.credit = None, 0.0
                return
            self.tally.updates += 1
        branch.credit = max(0.0, branch.credit - learned)
        branch.training, candidate = desk.training(), desk.stored()
        pieces = list(branch.held.pieces)
        yield None
        new = yield from desk.judge(candidate, pieces)
        old = yield from desk.judge(self._weights(branch, versions.current), pieces)
        gain, error = new.over(old)
        self.tally.acceptance = new.mean if gain > error else old.mean
        if gain <= error:
            branch.failures += gain <= 0
            if branch.failures >= config.patience:
                branch.training, branch.failures = None, 0
            return
        desk.put(candidate)
        note = {
            "acceptance": new.mean,
            "before": old.mean,
            "held_rows": sum(new.rows),
            "seen_rows": branch.train.added,
        }
        # Before the version: a branch never lacks its topic.
        write_topics(self.folder / TOPICS, self._routers, config.topics)
        number = versions.add(lambda folder: desk.objective.save(folder, note), note)
        self._change(branch)
        self.tally.versions += 1
        yield Version(
            branch=branch.name, number=number, drafter=branch.drafter, acceptance=new.mean, before=old.mean
        )

    def _review(self, branch: Branch) -> Iterator[Version | None]:
        """Compare the version that drafts with its parent on what came since; maybe go back."""
        desk, versions = self.desk, branch.versions
        pieces = branch.held.since(branch.seen_at)
        branch.seen_at = branch.held.added
        own = yield from desk.judge(self._weights(branch, versions.current), pieces)
        parent = yield from desk.judge(self._weights(branch, versions.parent), pieces)
        self.tally.acceptance = own.mean
        loss, error = parent.over(own)
        if loss <= SURE * error:
            return
        number = versions.back()
        branch.training = None
        self._change(branch)
        self.tally.rolled_back += 1
        self.tally.acceptance = parent.mean
        yield Version(
            branch=branch.name,
            number=number,
            drafter=branch.drafter,
            acceptance=parent.mean,
            before=own.mean,
            back=True,
        )

    def _change(self, branch: Branch) -> None:
        branch.failures, branch.seen_at = 0, branch.held.added
        branch.drafter = self._load(branch.versions)

    def _load(self, versions: Versions) -> DraftModel | None:
        """The drafter of the current version; None if that is the one learning started from."""
        if versions.current == BASE:
            return None
        config = DraftModelConfig(model=str(versions.path(versions.current)))
        return DraftModel.load(config, self.target)

    def _folder_of(self, branch: Branch, number: int) -> Path:
        return self.base if number == BASE else branch.versions.path(number)

    def _weights(self, branch: Branch, number: int) -> dict[str, Tensor]:
        return read_tensors(self._folder_of(branch, number))

    # What stays, and what is told.

    def counts(self) -> Mapping[str, float]:
        """What was done since the process began, and what is in memory."""
        return {
            **asdict(self.tally),
            "branches": len(self._branches),
            "kept_rows": sum(b.train.rows + b.held.rows for b in self._branches.values()),
        }

    def close(self) -> None:
        """Forget the texts and give the folder up; versions stay."""
        self._work = self._seated = None
        self._inbox.clear()
        for branch in self._branches.values():
            branch.closed = True
        self._branches.clear()
        self._lock.release()


def _name(key: str) -> str:
    """A folder name that does not tell the key."""
    return hashlib.sha256(f"key {key}".encode()).hexdigest()[:16]

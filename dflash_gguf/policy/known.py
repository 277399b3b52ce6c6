"""What was learned about drafting with one engine, and what it may still lose."""

from __future__ import annotations

import math

from ..draft.promise import Promise, Trust
from .costs import Costs, Round
from .times import Median

SHARE = 0.01
"""Share of the running time that drafting may lose, and that deciding may take."""
AHEAD, SAVED = 64, 8.0
"""Plain rounds whose share may be lost at once, and how many times that can be saved."""
SUSPENDED = 4.0
"""Times what a round is expected to take, beyond which the process or the machine stood still. Such
a time is nobody's debt: it would take a hundred times as long to earn."""
TRUSTED = 8.0
"""Accepted candidates that trust in copies begins with: so many missing ones halve it. Two long
copies that fail at a process's beginning shall not keep all others from being verified."""
OWED = 16.0
"""Tokens of plain decoding that copies may have lost, however much the next ones promise: a long
one that fails costs ten. Copies that are always wrong beyond their first token lose 2 % of 2,000
rounds at most, and those that are right after 16 wrong ones are soon verified again."""
MOST_KEPT = 256
"""Rounds after which a decision is made anew at the latest."""
MEMORY = 16
"""Rounds that count as lately: after so many one weighs 1/e in the rate."""


class Known:
    """What was learned about drafting with one engine on one machine. It outlives answers."""

    def __init__(self, costs: Costs | None = None) -> None:
        """costs: what was measured before, if anything was."""
        self.costs = costs or Costs()
        self.promise = Promise()
        self.copied = Trust(TRUSTED, 2 * MEMORY)
        self.choose_s = 0.0
        self.host = Median()
        self._paid, self._free = Account(), Account()
        self._since_draft = self._since_plain = 0
        self._was_drafted = False
        self._tokens = self._seconds = 0.0  # of the last rounds with as many sequences
        self._n_sequences = self._n_unfiled = 0
        self._n_unaccepted = 0  # drafts in a row of which nothing was

    @property
    def n_kept(self) -> int:
        """Rounds that a decision is kept for, so that making it is a small part of them."""
        plain_s = self.costs.plain_s(0) if self.costs.knows_plain else 0.0
        return math.ceil(min(max(self.choose_s / max(SHARE * plain_s, 1e-9), 1.0), MOST_KEPT))

    def rate(self, n_sequences: int = 1) -> float:
        """Tokens a second of the last rounds, 0 before any and where they had other sequences."""
        is_known = self._seconds > 0.0 and n_sequences == self._n_sequences
        return self._tokens / self._seconds if is_known else 0.0

    def share(self, n_sequences: int = 1) -> float:
        """Of the time that drafts may lose that cost a pass.

        Less where nothing has been accepted for long, and for many, as a look tells more of them.
        """
        share = SHARE / math.sqrt(n_sequences)
        return share if self._n_unaccepted < MEMORY // 2 else share / 4.0

    def may_lose(self, seconds: float, plain_s: float) -> bool:
        """Whether drafts that cost a pass may lose so much more now; less than 0: promise.

        plain_s: of a plain round.
        """
        return self._paid.may_lose(seconds, plain_s)

    def may_verify(self, tokens: float, plain_s: float, n_sequences: int) -> bool:
        """Whether what cost no pass may be verified, which promises so many tokens beyond its cost.

        plain_s: of a plain round.
        """
        token_s = plain_s / n_sequences
        return self._free.may_lose(-min(tokens, OWED / AHEAD) * token_s, plain_s, kept=1.0)

    def rounds_to_wait(self, seconds: float, plain_s: float, n_sequences: int = 1) -> int:
        """Plain rounds until drafts may lose so much, or until it is worth to think again."""
        n = self._paid.missing_s(seconds, plain_s) / max(self.share(n_sequences) * plain_s, 1e-12)
        return int(min(max(n, self.n_kept), MOST_KEPT))

    def needs_plain(self, advantage: float, n_sequences: int = 1) -> bool:
        """Whether a plain round is due, so that the cost that drafting is compared with is recent.

        It takes two: one straight after a drafted round is slower than those of plain decoding.
        advantage: tokens that each gives up, of n_sequences together.
        """
        return self._since_plain * SHARE * n_sequences >= 2.0 * advantage

    def observe(self, done: Round, promised_s: float = 0.0) -> None:
        """Learns from a round. promised_s: seconds that a draft was to gain that cost a pass."""
        costs, is_plain = self.costs, done.n_drafted == 0 and done.n_positions == 0
        knows_plain, seconds = costs.knows_plain_of(done.n_sequences), done.seconds
        if done.n_sequences != self._n_sequences:  # many at once are faster by far than one
            n_before = MEMORY * knows_plain  # as if plain, so that one good round is not the rate
            self._n_sequences, self._tokens = done.n_sequences, float(n_before * done.n_sequences)
            self._seconds = n_before * costs.plain_s(done.position, done.n_sequences)
        keep = (1.0 - 1.0 / MEMORY) ** done.n_rounds
        self._tokens = keep * self._tokens + done.n_tokens
        self._seconds = keep * self._seconds + seconds
        if done.choose_s > 0.0:
            self.choose_s += (done.choose_s - self.choose_s) / min(4.0, 1.0 + costs.n_observed)
        if knows_plain:
            self._paid.earn(self.share(done.n_sequences) * seconds)
            self._free.earn(SHARE * seconds)
            plain_s = costs.plain_s(done.position, done.n_sequences)
            if not is_plain:
                self._account(done, promised_s, plain_s)
            self._paid.end_round(plain_s)
            self._free.end_round(plain_s)
        if done.n_drafted and done.n_positions:
            self._n_unaccepted = 0 if done.n_accepted else self._n_unaccepted + 1
        is_cold = is_plain and done.n_rounds == 1 and self._was_drafted and knows_plain
        # Filing a round takes a while too; of those that are well known some are enough.
        self._n_unfiled += done.n_rounds
        if not is_cold and (self._n_unfiled >= MEMORY or not costs.is_settled(done)):
            self._n_unfiled = 0
            # After a pause a draft also takes up all rows that were decoded meanwhile.
            is_usual = self._since_draft < MEMORY or not costs.most_positions(done.is_brief)
            costs.observe(done, with_draft=is_usual)
        self._since_plain = 0 if is_plain and not is_cold else self._since_plain + 1
        self._was_drafted = not is_plain
        self._since_draft = 0 if done.n_positions else self._since_draft + done.n_rounds

    def _account(self, done: Round, promised_s: float, plain_s: float) -> None:
        """Books what a round has lost, less than 0 if it has won. plain_s: of a plain round."""
        seconds, token_s = done.seconds, plain_s / done.n_sequences
        is_usual = self.costs.is_warm(done)
        if not is_usual and (self.promise.is_proven or not done.n_positions):
            seconds = min(seconds, self.costs.round_s(done))  # a graph is built only once
        elif seconds > SUSPENDED * plain_s:
            seconds = min(seconds, SUSPENDED * self.costs.round_s(done))
        if done.is_mixed:  # what others proposed as well would have come without the draft
            lost_s = min(done.draft_s, seconds) - (done.n_accepted - done.n_copied) * token_s
        else:
            lost_s = seconds - done.n_tokens * token_s
        (self._paid if done.n_positions else self._free).book(lost_s, promised_s)


class Account:
    """What drafting has lost beyond plain decoding, and what its promises were worth."""

    MEMORY = 32
    """Promises after which one weighs 1/e."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._promised_s = self._gained_s = 0.0

    def may_lose(self, seconds: float, plain_s: float, kept: float | None = None) -> bool:
        """Whether so much more may be lost now. Less than 0: what is promised.

        What was lost before is then made up for in AHEAD rounds, as far as such promises are kept;
        without a number for that, as far as they were.
        """
        return self.missing_s(seconds, plain_s, kept) <= 0.0

    def missing_s(self, seconds: float, plain_s: float, kept: float | None = None) -> float:
        """What must be earned before that."""
        if seconds < 0.0:
            if kept is None:
                promised_s = self._promised_s
                kept = min(max(self._gained_s / promised_s, 0.0), 1.0) if promised_s > 0.0 else 0.0
            seconds *= AHEAD * kept
        return self._lost_s + seconds - SHARE * AHEAD * plain_s

    def earn(self, seconds: float) -> None:
        """Time goes by, some of which may be lost."""
        self._lost_s -= seconds

    def book(self, lost_s: float, promised_s: float) -> None:
        """What a round has lost that promised to gain something, or nothing."""
        self._lost_s += lost_s
        if promised_s > 0.0:
            keep = 1.0 - 1.0 / self.MEMORY
            self._promised_s = keep * self._promised_s + promised_s
            self._gained_s = keep * self._gained_s - lost_s

    def end_round(self, plain_s: float) -> None:
        """No more can be saved than so much."""
        self._lost_s = max(self._lost_s, -SAVED * SHARE * AHEAD * plain_s)

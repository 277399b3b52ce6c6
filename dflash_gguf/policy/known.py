"""What was learned about drafting with one engine, and what it may still lose.

Times are counted in plain rounds: what one takes of as many sequences as the round at hand has.
"""

from __future__ import annotations

import math

from ..costs.rounds import Costs, Round
from ..costs.times import Median
from ..draft.promise import Promise, Trust

SHARE = 0.01
"""Share of the running time that drafting may lose, and that deciding may take."""
AHEAD = 64
"""Plain rounds whose share may be lost before it is earned, and of whose gains debts are paid."""
SAVED, OWED = 5.0, 16.0
"""Plain rounds that may be saved to be lost later, and that may be owed, however much is promised.
A long copy that fails costs up to ten. Copies that are always wrong beyond their first token lose
2 % of 2,000 rounds at most, and those that are right after 16 wrong ones are soon verified again.
"""
SUSPENDED = 4.0
"""Times what a round is expected to take, beyond which the process or the machine stood still. Such
a time is nobody's debt: it would take a hundred times as long to earn."""
TRUSTED = 8.0
"""Accepted candidates that trust in copies begins with: so many missing ones halve it. Two long
copies that fail at a process's beginning shall not keep all others from being verified."""
MEMORY = 16
"""Rounds that count as lately: after so many one weighs 1/e in the rate."""
MOST_KEPT = 256
"""Rounds after which a decision is made anew at the latest."""


class Account:
    """What some kind of drafting has lost beyond plain decoding, in plain rounds."""

    def __init__(self) -> None:
        self._lost = 0.0

    def may_lose(self, rounds: float) -> bool:
        """Whether a round may lose so much more now. Less than 0: it is to gain that.

        What was lost before is then made up for by AHEAD such rounds.
        """
        more = rounds if rounds >= 0.0 else max(AHEAD * rounds, -OWED)
        return self._lost + more <= SHARE * AHEAD

    def book(self, rounds: float) -> None:
        """A round has lost so much. Less than 0: gained, or earned as time went by."""
        self._lost = max(self._lost + rounds, -SAVED)


class Known:
    """What was learned about drafting with one engine on one machine. It outlives answers.

    costs: what rounds take. promise: what the drafter's candidates promise. copied: how far the
    chances of copies came true. host: seconds that asking for copies takes where there are none.
    paid, free: the accounts of drafts that cost a pass, and of those that cost none: what copies
    win is not for the drafter to lose.
    """

    def __init__(self, costs: Costs | None = None) -> None:
        """costs: what was measured before, if anything was."""
        self.costs = costs or Costs()
        self.promise = Promise()
        self.copied = Trust(TRUSTED, 2 * MEMORY)
        self.host = Median()
        self.paid, self.free = Account(), Account()
        self._choose_s = 0.0
        self._n_sequences, self._tokens, self._seconds = 0, 0.0, 0.0  # of the last rounds
        self._n_unaccepted = 0  # drafts in a row of which nothing was
        self._since_draft = self._since_plain = self._since_filed = 0
        self._was_plain = True

    @property
    def n_kept(self) -> int:
        """Rounds that a decision is kept for, so that making it is a small part of them."""
        plain_s = self.costs.plain_s(0) if self.costs.knows_plain else 0.0
        return math.ceil(min(max(self._choose_s / max(SHARE * plain_s, 1e-9), 1.0), MOST_KEPT))

    def rate(self, n_sequences: int = 1) -> float:
        """Tokens a second of the last rounds, 0 before any and where they had other sequences."""
        is_known = self._seconds > 0.0 and n_sequences == self._n_sequences
        return self._tokens / self._seconds if is_known else 0.0

    def needs_plain(self, gain: float) -> bool:
        """Whether a plain round is due, so that what drafting is compared with is recent.

        gain: plain rounds that are given up for it. It takes two, as one straight after a drafted
        round is slower than those of plain decoding.
        """
        return self._since_plain * SHARE >= 2.0 * gain

    def observe(self, done: Round) -> None:
        """Learns from a round, or from plain ones in a row."""
        costs, is_plain = self.costs, not (done.n_drafted or done.n_positions)
        knows_plain = costs.knows_plain_of(done.n_sequences)
        if done.is_shared and knows_plain:
            done = costs.expected(done)
        plain_s = 0.0
        if knows_plain:
            plain_s = max(costs.plain_s(done.position, done.n_sequences), 1e-9)
        if done.n_expected > 0.0 and not done.is_mixed:
            if not done.n_positions:
                self.copied.observe(done.n_expected, done.n_accepted)
            elif done.n_drafted:
                self.promise.observe(done.n_expected, done.n_accepted)
        if done.n_drafted and done.n_positions:
            self._n_unaccepted = 0 if done.n_accepted else self._n_unaccepted + 1
        if done.choose_s > 0.0:
            self._choose_s += (done.choose_s - self._choose_s) / min(4.0, 1.0 + costs.n_observed)
        if knows_plain or not done.is_shared:
            self._follow_rate(done, plain_s)
        if knows_plain:
            rounds = done.seconds / plain_s
            self.paid.book(-self._share(done.n_sequences) * rounds)
            self.free.book(-SHARE * rounds)
            if not is_plain:
                account = self.paid if done.n_positions else self.free
                account.book(self._lost_s(done, plain_s) / plain_s)
        is_cold = is_plain and done.n_rounds == 1 and not self._was_plain and knows_plain
        if not is_cold and not done.is_shared:
            self._file(done)
        self._since_plain = 0 if is_plain and not is_cold else self._since_plain + 1
        self._since_draft = 0 if done.n_positions else self._since_draft + done.n_rounds
        self._was_plain = is_plain

    def _share(self, n_sequences: int) -> float:
        """Of the time that drafts may lose that cost a pass.

        Less where nothing has been accepted for long, and for many, as a look tells more of them.
        """
        share = SHARE / math.sqrt(n_sequences)
        return share if self._n_unaccepted < MEMORY // 2 else share / 4.0

    def _follow_rate(self, done: Round, plain_s: float) -> None:
        """plain_s: 0 where it is not known."""
        if done.n_sequences != self._n_sequences:  # many at once are faster by far than one
            n_before = MEMORY * (plain_s > 0.0)  # as if plain: one good round is not the rate
            self._tokens, self._seconds = float(n_before * done.n_sequences), n_before * plain_s
            self._n_sequences = done.n_sequences
        keep = (1.0 - 1.0 / MEMORY) ** done.n_rounds
        self._tokens = keep * self._tokens + done.n_tokens
        self._seconds = keep * self._seconds + done.seconds

    def _lost_s(self, done: Round, plain_s: float) -> float:
        """What a drafted round has lost beyond plain decoding."""
        seconds, token_s = done.seconds, plain_s / done.n_sequences
        is_usual = self.costs.is_warm(done)
        if not is_usual and (self.promise.is_proven or not done.n_positions):
            seconds = min(seconds, self.costs.expected(done).seconds)  # a graph is built only once
        elif seconds > SUSPENDED * plain_s:
            seconds = min(seconds, SUSPENDED * self.costs.expected(done).seconds)
        if done.is_mixed:  # what others proposed as well would have come without the draft
            return min(done.draft_s, seconds) - (done.n_accepted - done.n_copied) * token_s
        return seconds - done.n_tokens * token_s

    def _file(self, done: Round) -> None:
        """Filing a round takes a while too; of those that are well known some are enough."""
        self._since_filed += done.n_rounds
        if self._since_filed >= MEMORY or not self.costs.is_settled(done):
            self._since_filed = 0
            # After a pause a draft also takes up all rows that were decoded meanwhile.
            is_usual = self._since_draft < MEMORY or not self.costs.most_draft_rows(done.is_brief)
            self.costs.observe(done, with_draft=is_usual)

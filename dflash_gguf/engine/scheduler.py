"""Who runs in the next pass, who waits, and whose cells are given up: for one answer or for many.

    round    trees for those that draft, then one pass of the target for all: trees, plain steps and
             pieces of prompts together; every answer draws its tokens; one commit

Whoever wants a step of its answer runs rounds for all. Answers join and leave between rounds. What
is drawn depends on an answer's own tokens alone, so how rounds are cut never shows in a text.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

from ..config import DecodeConfig
from ..kv_cache.prefix_cache import PrefixCache, PrefixMatch
from ..native import PAGE, BatchEntry, Engine, Error, Rows
from ..native import Sequence as KvSequence
from ..outputs import Step
from ..speculative.controller import Controller
from ..speculative.cost_model import Round
from ..speculative.proposers.proposer import Proposer
from ..speculative.speculator import Progress, Speculator
from ..speculative.tree import Tree
from .account import Phase
from .jobs import Group, Job
from .prefill_budget import PrefillBudget
from .writing import Writing


class _Work:
    """What a pass does for an answer, and what comes of it.

    item: what is run. tree: what is verified of it. decodes: whether it goes on from its last
    token; else it fills in what is before that. draws: whether the next token is drawn then.
    drawn: what the core drew of its rows, if it was to. tokens: what the answer took of these.
    path, n_taken: nodes of the tree that they took, and candidates.
    sampled_s: seconds of choosing them.
    """

    __slots__ = (
        "drawn",
        "draws",
        "is_decoding",
        "item",
        "job",
        "n_taken",
        "path",
        "sampled_s",
        "tokens",
        "tree",
    )

    def __init__(
        self,
        job: Job,
        item: BatchEntry,
        tree: Tree | None,
        *,
        is_decoding: bool,
        draws: bool = True,
    ) -> None:
        self.job, self.item, self.tree = job, item, tree
        self.is_decoding, self.draws = is_decoding, draws
        self.drawn: list[int] | None = None
        self.tokens: list[int] = []
        self.path: list[int] = []
        self.n_taken = 0
        self.sampled_s = 0.0

    @property
    def n_wanted(self) -> int:
        """Cells that it takes of those that are free."""
        return self.job.sequence.cells_needed(len(self.item.tokens))


class _Rest:
    """Rounds in a row in which the same answers decode and nobody is asked for candidates.

    jobs: those answers. drafted: a round of each group, which stands for all that were run.
    n_left: rounds until somebody is to be asked. n_rounds, seconds, sample_s: of those that were
    run.
    """

    __slots__ = ("drafted", "jobs", "n_left", "n_rounds", "sample_s", "seconds")

    def __init__(
        self, jobs: Sequence[Job] = (), drafted: Sequence[tuple[Group, Round]] = ()
    ) -> None:
        self.jobs, self.drafted = list(jobs), list(drafted)
        self.n_left = min([group.speculator.n_quiet for group, _ in drafted], default=0)
        self.n_rounds, self.seconds, self.sample_s = 0, 0.0, 0.0

    def adds(self, seconds: float, sample_s: float) -> None:
        """Another round."""
        self.n_left -= 1
        self.n_rounds += 1
        self.seconds += seconds
        self.sample_s += sample_s

    def end(self, engine: Engine) -> None:
        """Tells the groups, if any were run."""
        for at, (group, done) in enumerate(self.drafted if self.n_rounds else ()):
            done.is_timing_shared = at > 0  # one at most can say what its own part took
            done.n_experts = engine.n_experts
            done.n_rounds, done.n_tokens = self.n_rounds, self.n_rounds * done.n_sequences
            done.pass_s, done.sample_s = self.seconds - self.sample_s, self.sample_s
            group.speculator.pass_over(done)


class Scheduler:
    """Answers in one engine. Not for two threads at once."""

    def __init__(
        self,
        first: KvSequence,
        prefix_cache: PrefixCache,
        another: Callable[[Engine], KvSequence] = KvSequence,
    ) -> None:
        """first: a sequence of the engine; another: makes one more when it is needed.

        prefix_cache: what answers begin with, and where what they leave behind is kept.
        """
        self.engine: Engine = first.engine
        self._prefix_cache = prefix_cache
        self._another = another
        # An interruption may come between any two lines: who waits, who runs and which sequences
        # are free follows from each job's `assigned_sequence`.
        self._jobs: list[Job] = []  # in their order
        self._sequences: list[KvSequence] = [first]  # the longest unused first
        prefix_cache.parked = lambda: self._free
        self._groups: dict[object, Group] = {}
        self._open: list[KvSequence] = []  # in a round that has not ended
        self._n_jobs = 0
        self._took: dict[str, float] = {}  # seconds of the round by phase
        self._prefill_budget = PrefillBudget()
        self._rest = _Rest()
        # On a device, beside verifies, a plain step is one of a bare root: there is a graph less to
        # build and to run, as else states of recurrent layers would advance for some answers and
        # wait for the commit for others. CPUs build graphs quickly, and need 9 to 14 % longer so.
        self._few_graphs = self.engine.model.backend != "CPU"
        self._top = -1, 0  # best tokens of a row that were asked for, and that there are

    @property
    def running(self) -> list[Job]:
        """Answers that hold a sequence, the oldest first."""
        return [job for job in self._jobs if job.assigned_sequence is not None and not job.is_over]

    @property
    def waiting(self) -> list[Job]:
        """Answers that wait for one, the oldest first; not those whose readers are behind."""
        return [
            job
            for job in self._jobs
            if job.assigned_sequence is None and not job.is_over and not job.is_throttled
        ]

    @property
    def sequences(self) -> list[KvSequence]:
        """All sequences of answers, whoever holds them."""
        return list(self._sequences)

    @property
    def _free(self) -> list[KvSequence]:
        """Sequences that no answer holds, the longest unused first."""
        held = {job.assigned_sequence for job in self.running}
        return [sequence for sequence in self._sequences if sequence not in held]

    def add(
        self,
        writing: Writing,
        proposers: Sequence[Proposer] = (),
        controller: Controller | None = None,
        on_prefill: Progress | None = None,
    ) -> Job:
        """An answer joins.

        proposers, controller: sources of candidates, and the choice of those verified; without
            both, its rounds are plain. Answers of equal settings are drafted by those of the first.
        on_prefill: progress of the prefill, from 0 tokens on.
        """
        self._n_jobs += 1
        group = self._group_of(writing.config, proposers, controller)
        n_top = writing.n_top(self.engine.max_top_k)
        job = Job(self._n_jobs, writing, group, n_top, on_prefill)
        if group is not None:
            group.jobs.add(job)
        self._jobs.append(job)
        return job

    def forget(self) -> None:
        """Forgets what no answer needs now."""
        self._prefix_cache.forget()
        for sequence in self._free:
            sequence.reset()

    def reclaim(self, sequence: KvSequence) -> None:
        """Empties a sequence that is wanted for something else until the next round."""
        self.abort_batch()
        for job in self.running:
            if job.assigned_sequence is sequence:
                self._preempt(job)
        sequence.reset()

    def end(self, job: Job, error: BaseException | None = None) -> None:
        """An answer leaves, wherever it is. error: what whoever reads on is told."""
        if job.is_over:
            return
        if job.assigned_sequence is not None:
            if job.assigned_sequence in self._open:
                job.assigned_sequence.commit(0)
            if job.is_decoding:
                self._prefix_cache.park(job.assigned_sequence)
            else:
                self._prefix_cache.release(job.assigned_sequence)
            used = job.assigned_sequence
            self._sequences = [*(one for one in self._sequences if one is not used), used]
        if (step := job.writing.new_step()).tokens:  # drawn in a round that was interrupted
            job.add(step)
        job.error = error
        job.is_over = True
        self._end_rest()
        if job.group is not None:
            job.group.jobs.discard(job)
            if not job.group.jobs:
                job.group.speculator.end()
        self._jobs = [other for other in self._jobs if not other.is_over]

    def close(self, error: Exception) -> None:
        """Ends all answers and gives up the sequences. error: what their readers are told."""
        for job in self._jobs:
            self.end(job, error)
        self._prefix_cache.forget()
        for sequence in self._sequences:
            sequence.close()

    def step(self, job: Job, *, run: bool = True) -> Step | None:
        """The next step of an answer; if it is not there, after a round for all, if `run`.

        None where that round brought it none. Errors: StopIteration where it is over; what went
        wrong for it.
        """
        step = job.next_step()
        if step is None and run:
            self.round(job)
            if job.steps:
                return job.next_step()
        return step

    def round(self, wanted: Job) -> None:
        """One pass for all that can run. wanted: whose step is waited for."""
        if self._open:
            self.abort_batch()
        for job in list(self._jobs):
            if job.answer.stop_reason is not None or job.writing.cancelled():
                self.end(job)  # the former where that was interrupted
        if wanted.is_over:
            return
        active = [job for job in self._admit() if not job.is_throttled]
        if not active and self.running:  # for their readers; the wanted one has no place
            self._preempt(self.running[-1])
            active = [job for job in self._admit() if not job.is_throttled]
        if active:  # else the wanted one could not begin, which ended it
            self._run(active)

    def abort_batch(self) -> None:
        """After an interrupted round: what was verified goes, what was drawn is filled in."""
        for sequence in self._open:
            sequence.commit(0)
        for job in self.running if self._open else ():
            if job.answer.stop_reason is not None:
                self.end(job)
            elif job.sequence.position >= len(job.history):
                match = self._prefix_cache.match(job.history)
                job.prefix_hit = self._prefix_cache.start(job.sequence, match)
        self._open = []

    # ---- places and cells

    def _group_of(
        self, config: DecodeConfig, proposers: Sequence[Proposer], controller: Controller | None
    ) -> Group | None:
        if controller is None or not proposers:
            return None
        key = (
            config.draft,
            tuple(config.draft_type or ()),
            config.draft_max,
            config.draft_min,
            config.tree_budget,
            config.tree_main_chain,
        )
        self._groups = {key: group for key, group in self._groups.items() if group.jobs}
        if key not in self._groups:
            self._groups[key] = Group(Speculator(proposers, controller, self._phase))
        return self._groups[key]

    def _end_rest(self) -> None:
        if self._rest.jobs:
            rest, self._rest = self._rest, _Rest()
            rest.end(self.engine)

    def _phase(self, name: str) -> Phase:
        return Phase(self._took, name)

    def _admit(self) -> list[Job]:
        """The oldest that wait get places, as long as there are some and cells for them.

        All that hold a sequence then.
        """
        while (running := self.running) != self._jobs and len(running) < self.engine.n_parallel:
            if not (waiting := self.waiting) or not self._place(waiting[0], running):
                break
        return running

    def _place(self, job: Job, running: list[Job]) -> bool:
        """Gives it a sequence, unless it is to wait; whether others may be asked."""
        match = self._prefix_cache.match(job.history, job.ignore_prefix_cache)
        if not job.ignore_prefix_cache and self._is_being_filled(job, match.n):
            return False
        # Those that run want room to grow, or the newest would soon have to leave again.
        headroom = 2 * PAGE * len(running)
        sequence = self._free_sequence(match)
        if not self._prefix_cache.reserve(sequence, match, headroom) and running:
            return False
        if job.prefill_started is None:
            job.prefill_started = time.perf_counter()
        try:
            job.prefix_hit = self._prefix_cache.start(sequence, match, job.writing.turn_boundaries)
            n_left = len(job.history) - job.prefix_hit.n_cached
            self._prefix_cache.make_room(sequence.cells_needed(n_left), claimed=sequence)
        except Error as error:
            self._fail(job, error)
        else:
            self._begin(job, sequence)
        return True

    def _is_being_filled(self, job: Job, n_known: int) -> bool:
        """True if an answer that runs computes much of its prompt just now: it waits for that."""
        for other in self.running:
            position = other.sequence.position
            n = _n_common(job.history[:-1], other.history)
            if other.is_decoding or position >= n or n < n_known + PAGE or other.is_throttled:
                continue
            other.prefix_hit = other.prefix_hit.with_snapshot(n)
            return True
        return False

    def _begin(self, job: Job, sequence: KvSequence) -> None:
        job.request.sequence = sequence
        if not job.n_to_fill:
            n_there = job.writing.n_cached = job.prefix_hit.n_cached
            job.writing.n_draft_context = job.prefix_hit.n_draft_context
            job.n_to_fill = len(job.history) - n_there
            if job.on_prefill is not None:
                job.on_prefill(0, job.n_to_fill)
        if job.group is not None:
            job.group.speculator.start(job.request)
        job.assigned_sequence = sequence
        if job.group is not None and job.is_decoding:  # all that it had is there again
            job.group.speculator.start_decoding(job.request)

    def _free_sequence(self, match: PrefixMatch) -> KvSequence:
        """A sequence for an answer: the one that holds what it begins with, if there is one.

        Fewer answers run than the engine holds sequences.
        """
        free = self._free
        nearest = self._prefix_cache.nearest(free, match)
        if nearest is not None:
            return nearest
        if len(self._sequences) < self.engine.n_parallel:
            self._sequences.append(self._another(self.engine))
            return self._sequences[-1]
        return free[0]

    def _preempt(self, job: Job) -> None:
        """It waits again, and begins anew with what of it others leave room for."""
        sequence, job.assigned_sequence = job.sequence, None
        job.request.notes.clear()  # what proposers know of it goes by sequences
        self._prefix_cache.release(sequence)

    def _make_room(self, jobs: list[Job]) -> None:
        """Frees cells for a row of each. The newest leave first; the oldest always stays."""
        while wanted := sum([job.sequence.cells_needed(1) for job in jobs]):
            if self._prefix_cache.make_room(wanted) or len(running := self.running) == 1:
                return
            self._preempt(running[-1])
            if running[-1] in jobs:
                jobs.remove(running[-1])

    # ---- one pass

    def _run(self, active: list[Job]) -> None:
        """One pass, and what follows from its rows."""
        started = time.perf_counter()
        took = self._took = {}
        self._make_room(active)
        decoding = [job for job in active if job.is_decoding]
        self._set_top_k(active)
        rest = self._rest
        rests = rest.n_left > 0 and len(decoding) == len(active) and rest.jobs == decoding
        if not rests:
            self._end_rest()
        drafted = rest.drafted if rests else self._propose(decoding)
        going_on = [job for job in decoding if not job.is_over]
        verifies = any(job.request.tree is not None for job in going_on)
        work = [_work_of(job, verifies=verifies and self._few_graphs) for job in going_on]
        n_filled = 0
        if len(decoding) < len(active):
            pieces = self._pieces([job for job in active if job not in decoding], work)
            n_filled = sum([len(one.item.tokens) for one in pieces])
            work += pieces
        self._open = [one.job.sequence for one in work]
        ran = time.perf_counter()
        if not work or (rows := self._pass(work)) is None:
            return
        took["verify" if verifies else "decode"] = time.perf_counter() - ran
        done = self._draw(work, rows)
        if verifies:
            with self._phase("commit"):
                done = self._commit(done)
        self._open = []
        seconds = time.perf_counter() - started
        overhead_s = seconds - sum(took.values())
        for one in done:
            if one.is_decoding:
                self._count(one, seconds, overhead_s - one.sampled_s)
        is_whole = len(work) == len(done) == len(decoding)
        if rests:
            if is_whole:
                rest.adds(seconds, sum([one.sampled_s for one in work]))
        elif drafted:
            quiet = [group for group, _ in drafted if group.speculator.is_quiet]
            self._learn(drafted, done, seconds, is_whole=is_whole)
            if is_whole and len(quiet) == len(drafted):
                self._rest = _Rest(decoding, drafted)
        if decoding and self.engine.n_parallel > 1:
            self._prefill_budget.observe(seconds, n_filled)
        self._finish(done)

    def _set_top_k(self, jobs: list[Job]) -> None:
        """Lets a device pick the best tokens of rows, where all answers draw among these only."""
        k = min([job.n_top for job in jobs], default=0)
        if k != self._top[0] or self.engine.n_top != self._top[1]:
            self.engine.set_top_k(k)
            self._top = k, self.engine.n_top

    def _propose(self, decoding: list[Job]) -> list[tuple[Group, Round]]:
        """Trees for those that draft, group by group."""
        groups: dict[Group, list[Job]] = {}
        for job in decoding:
            if job.group is not None:
                job.request.tree = None
                groups.setdefault(job.group, []).append(job)
        if not groups:
            return []
        rounds = []
        n_most = max(1, self.engine.max_verify // len(decoding))
        # Who decodes has all but the last token in the caches.
        n_there = sum([len(job.history) for job in decoding]) - len(decoding)
        for group, jobs in groups.items():
            done = Round(n_there, len(decoding), n_undrafted=len(decoding) - len(jobs))
            if group.speculator.asks:
                self._propose_for(group, jobs, done, n_most)
            rounds.append((group, done))
        trees = [job.request for job in decoding if job.request.tree is not None]
        if trees:
            wanted = sum([job.sequence.cells_needed(job.n_rows) for job in decoding])
            if wanted and not self._prefix_cache.make_room(wanted):
                for request in trees:
                    request.tree = None  # what it was drafted for is short
                for _, done in rounds:
                    done.n_drafted, done.is_tree, done.n_expected = 0, False, 0.0
        return rounds

    def _propose_for(self, group: Group, jobs: list[Job], done: Round, n_most: int) -> None:
        """n_most: rows for each."""
        for job in jobs:
            left = job.writing.n_ctx - len(job.history) + 1
            job.request.n_room = min(n_most, left)
            job.request.n_left = job.answer.n_left
        try:
            group.speculator.propose(done, [job.request for job in jobs])
        except Error as error:
            for job in jobs:
                self._fail(job, error)

    def _pieces(self, filling: list[Job], decoding: list[_Work]) -> list[_Work]:
        """Of prompts as much as the pass takes and those who decode can wait for."""
        n_most = max(self.engine.config.n_ubatch, self.engine.n_parallel)
        left = min(n_most, self.engine.n_ctx) - sum([one.tree is None for one in decoding])
        if decoding:
            left = min(left, self._prefill_budget.chunk(len(decoding), len(filling)))
        n_taken = sum([one.n_wanted for one in decoding])
        work: list[_Work] = []
        for job in filling:  # the oldest first
            position, end = job.sequence.position, len(job.history)
            n = min(left, job.prefix_hit.next_snapshot(position, end) - position)
            self._prefix_cache.make_room(n_taken + job.sequence.cells_needed(n))
            n_free = self.engine.n_free_cells - n_taken
            # As many as there are cells for, be it in its last page: else two could wait for ever.
            n = bisect_right(range(1, n + 1), n_free, key=job.sequence.cells_needed) if n > 0 else 0
            if n == 0:
                continue
            stop = position + n
            # A snapshot has the drafter's rows, too.
            n_to_come = 0 if stop in job.prefix_hit.snapshot_positions else end - stop
            item = BatchEntry(job.sequence, job.history[position:stop], n_remaining=n_to_come)
            work.append(_Work(job, item, None, is_decoding=False, draws=stop == end))
            left -= n
            n_taken += work[-1].n_wanted
            if n_taken > self.engine.n_free_cells - 2 * PAGE * len(self.running):
                break  # rather one after the other
        return work

    def _pass(self, work: list[_Work]) -> list[Rows] | None:
        """Runs it; what the core refuses or fails at ends the answers in it."""
        try:
            return self.engine.run([one.item for one in work])
        except Error as error:
            self._fail_all(work, error)
            return None

    def _fail_all(self, work: list[_Work], error: Error) -> None:
        for one in work:
            self._fail(one.job, error)
        self._open = []

    def _fail(self, job: Job, error: Exception) -> None:
        self.end(job, error)

    def _draw(self, work: list[_Work], rows: list[Rows]) -> list[_Work]:
        """Each answer draws of its rows; those that could."""
        try:
            self._choose([one for one in work if one.draws])
        except Error as error:
            self._fail_all(work, error)
            return []
        done = []
        for one, found in zip(work, rows, strict=True):
            writing, account = one.job.writing, one.job.writing.account
            n_before, sampled_s = len(writing.answer.tokens), account.sample_s
            try:
                if one.drawn is not None:
                    choose = writing.choice_of(found, one.drawn)
                    if one.tree is not None:
                        one.path, one.n_taken = one.tree.follow(choose, writing.take)
                    else:
                        writing.take(choose(-1))
                elif one.draws:
                    writing.answer.stop_reason = "length"  # the answer was to have no token
                else:
                    found.check()
            except (Error, ValueError) as error:  # its rows are no numbers: no fault of others
                self._fail(one.job, error)
                continue
            one.tokens = writing.answer.tokens[n_before:]
            one.sampled_s += account.sample_s - sampled_s
            done.append(one)
        return done

    def _choose(self, reads: list[_Work]) -> None:
        """Has the core draw for those of these that are to have a token, in one call."""
        started = time.perf_counter()
        drawing = [one for one in reads if one.job.answer.n_left > 0]
        requests = [
            one.job.writing.sampler.sample_request(
                one.job.sequence, one.job.history, len(one.item.tokens)
            )
            for one in drawing
        ]
        for one, drawn in zip(drawing, self.engine.sample(requests), strict=True):
            one.drawn = drawn
        for one in drawing:
            one.sampled_s = (time.perf_counter() - started) / len(drawing)
            one.job.writing.account.sampled(one.sampled_s)

    def _commit(self, done: list[_Work]) -> list[_Work]:
        """The paths that the answers took, in one call."""
        paths: list[tuple[KvSequence, list[int] | int]] = []
        for one in done:
            if one.tree is not None:
                paths.append((one.job.sequence, len(one.path) if one.tree.is_chain else one.path))
        try:
            self.engine.commit(paths)
        except Error as error:
            self._fail_all(done, error)
            return []
        return done

    def _count(self, one: _Work, seconds: float, overhead_s: float) -> None:
        """Accounts for a round of an answer, and gives it the step."""
        job, tree, tokens = one.job, one.job.request.tree, one.tokens
        account = job.writing.account
        account.add_round(seconds, self._took, overhead_s, tree, len(tokens), one.n_taken)
        n_drafted = 0
        if tree is not None:
            n_drafted = tree.n_drafted
            for credit in job.request.credits(tokens):
                account.credit(*credit)
        job.add(job.writing.new_step(n_drafted, one.n_taken))

    def _learn(
        self,
        drafted: list[tuple[Group, Round]],
        work: list[_Work],
        seconds: float,
        *,
        is_whole: bool,
    ) -> None:
        """What those who are drafted together learn of a round that took so long.

        is_whole: whether all who were to decode did, and its pass did nothing else.
        """
        # One group at most can say what its own part took: whoever drafted, if nobody else did.
        rounds = [done for _, done in drafted]
        busy = [done for done in rounds if not done.is_plain]
        told = (busy or rounds)[0] if is_whole and len(busy) <= 1 else None
        took, n_experts = self._took, self.engine.n_experts
        sample_s = sum([one.sampled_s for one in work])
        draft_s = took.get("draft", 0.0) + took.get("select", 0.0)
        choose_s = took.get("choose", 0.0)
        for group, done in drafted:
            done.is_timing_shared, done.n_experts = done is not told, n_experts
            done.sample_s, done.draft_s = sample_s, draft_s
            done.pass_s = seconds - draft_s - sample_s - choose_s
            theirs = [one for one in work if one.is_decoding and one.job.group is group]
            if not theirs:
                continue
            done.n_tokens = done.n_undrafted + sum([len(one.tokens) for one in theirs])
            if group.speculator.is_quiet:
                group.speculator.pass_over(done)
                continue
            done.n_accepted = sum([one.n_taken for one in theirs])
            done.choose_s = choose_s
            requests, tokens = [one.job.request for one in theirs], [one.tokens for one in theirs]
            group.speculator.observe(done, requests, tokens)

    def _finish(self, done: list[_Work]) -> None:
        """Prompts have come further; answers that are over leave."""
        for one in done:
            job = one.job
            if not one.is_decoding:
                if one.tokens:
                    job.add(job.writing.new_step())
                if job.sequence.position in job.prefix_hit.snapshot_positions or (
                    one.tokens and self.engine.partial_prefix_ok
                ):
                    self._prefix_cache.insert(job.sequence)
                if job.is_decoding and job.group is not None:
                    job.group.speculator.start_decoding(job.request)
                is_first = len(job.answer.tokens) == len(one.tokens)
                job.filled(one.sampled_s, is_first=is_first)
            if job.answer.stop_reason is not None:
                self.end(job)


def _work_of(job: Job, *, verifies: bool) -> _Work:
    """The next round of an answer that decodes.

    verifies: whether even a plain step is to be a verify, of a bare root.
    """
    tree = job.request.tree
    if tree is None and not verifies:
        return _Work(job, BatchEntry(job.sequence, job.history[-1:]), None, is_decoding=True)
    tree = tree or Tree.of(job.history[-1:])
    parents = None if tree.is_chain else tree.parents
    return _Work(job, BatchEntry(job.sequence, tree.tokens, True, parents), tree, is_decoding=True)


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two lists begin with alike."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])

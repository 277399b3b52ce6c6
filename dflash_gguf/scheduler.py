"""Many answers at once: who runs in the next pass, who waits, and whose cells are given up.

    round    trees for those that draft, then one pass of the target for all: trees, plain steps and
             pieces of prompts together; every answer draws its tokens; one commit

Whoever wants a step of its answer runs rounds for all. Answers join and leave between rounds. What
is drawn depends on an answer's own tokens alone, so how rounds are cut never shows in a text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .account import ROUND_PHASES, Phase, set_seconds
from .config import DecodeConfig
from .core import Engine, Error, Item, Rows
from .core import Sequence as Timeline
from .decode import Writing
from .draft.proposer import Proposer, Request
from .draft.tree import Tree
from .policy.costs import Median, Round
from .policy.rule import Rule
from .prefixes import PAGE, Found, Prefixes
from .results import Result, Step
from .rounds import Progress, Speculation

MOST_UNREAD = 256
"""Tokens of an answer that nobody has read yet, after which it pauses."""
CHUNKS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of prompts that may join the others' rounds: few sizes, as each has a graph of its own."""
SLOWER = 1.85
"""Times as long as without prompts that rounds may take on average while some come in."""
MOST_MIXED = 16
"""Rounds with pieces of prompts before one without."""

DraftingOf = Callable[[DecodeConfig], tuple[Sequence[Proposer], Rule | None]]
"""Who drafts in an answer, and how much."""


class Job:
    """An answer that was asked for. It waits, holds a sequence, or is over."""

    def __init__(
        self, number: int, writing: Writing, group: Group | None, on_prefill: Progress | None
    ) -> None:
        """number: in the order in which they came."""
        self.number = number
        self.writing = writing
        self.group = group
        self.on_prefill = on_prefill
        self.request = Request(None, writing.history, writing.sampler)
        self.timeline: Timeline | None = None
        self.steps: deque[Step] = deque()
        self.n_unread = 0
        self.is_over = False
        self.error: BaseException | None = None
        self.prefill_started: float | None = None
        self.n_to_fill = 0
        self.found = Found()

    @property
    def held(self) -> Timeline:
        """Its sequence, which it has."""
        assert self.timeline is not None
        return self.timeline

    @property
    def history(self) -> list[int]:
        """Prompt and answer."""
        return self.writing.history

    @property
    def decodes(self) -> bool:
        """Whether only the last token is not in the caches yet; else some are to be filled in."""
        return bool(self.writing.answer.tokens) and self.held.position == len(self.history) - 1

    @property
    def is_fresh(self) -> bool:
        """Whether it begins with nothing of what earlier answers left behind."""
        return not self.writing.config.cache_prompt and self.prefill_started is None

    @property
    def pauses(self) -> bool:
        """Whether its reader is too far behind."""
        return self.n_unread >= MOST_UNREAD

    def add(self, step: Step) -> None:
        """A step for its reader."""
        self.steps.append(step)
        self.n_unread += len(step.tokens)


class Group:
    """Answers that are drafted alike, in one pass of the drafter."""

    def __init__(self, speculation: Speculation) -> None:
        self.speculation = speculation
        self.jobs: set[Job] = set()


class Part:
    """An answer's share in the rounds of all: iterate for its steps."""

    def __init__(self, scheduler: Scheduler, job: Job) -> None:
        self._scheduler, self._job = scheduler, job

    def advance(self, *, run: bool = True) -> Step | None:
        """Its next step if there is one, else None, after a round unless not `run`.

        Errors: StopIteration where it is over; what went wrong for it.
        """
        job = self._job
        if job.steps:
            step = job.steps.popleft()
            job.n_unread -= len(step.tokens)
            return step
        if job.error is not None:
            raise job.error
        if job.is_over:
            raise StopIteration
        if run:
            self._scheduler.round(job)
        return None

    def close(self) -> None:
        """Ends the answer where it is."""
        self._scheduler.end(self._job)

    def result(self) -> Result:
        """The account so far; final once the iteration has ended."""
        return self._job.writing.result()


class _Work(NamedTuple):
    """What the next pass does for an answer."""

    job: Job
    item: Item
    tree: Tree | None


class Scheduler:
    """Answers in one engine. Not for two threads at once."""

    def __init__(self, first: Timeline, drafting_of: DraftingOf, prefixes: Prefixes) -> None:
        """first: a sequence of the engine; others are made when they are needed.

        prefixes: what answers begin with, and where what they leave behind is kept.
        """
        self.engine: Engine = first.engine
        self._prefixes = prefixes
        self._drafting_of = drafting_of
        # An interruption may come between any two lines: who waits, who runs and which sequences
        # are free follows from each job's own `timeline`.
        self._jobs: list[Job] = []  # in their order
        self._timelines: list[Timeline] = [first]
        self._groups: dict[object, Group] = {}
        self._open: list[Timeline] = []  # in a round that has not ended
        self._n_jobs = 0
        self._seconds = dict.fromkeys(ROUND_PHASES, 0.0)
        self._alone = Median()  # of rounds without prompts
        self._row = Median()  # of a row of a prompt among others
        self._n_mixed = 0  # rounds with prompts since one without
        self._saved_s = 0.0  # that pieces of prompts may take longer, as others took less
        self._run_sizes: set[int] = set()  # whose graphs are there

    @property
    def running(self) -> list[Job]:
        """Answers that hold a sequence, the oldest first."""
        return [job for job in self._jobs if job.timeline is not None and not job.is_over]

    @property
    def waiting(self) -> list[Job]:
        """Answers that wait for one, the oldest first; not those whose readers are behind."""
        return [
            job for job in self._jobs if job.timeline is None and not job.is_over and not job.pauses
        ]

    @property
    def _free(self) -> list[Timeline]:
        """Sequences that nobody holds; empty but after an interruption."""
        held = {job.timeline for job in self.running}
        return [timeline for timeline in self._timelines if timeline not in held]

    def add(self, writing: Writing, on_prefill: Progress | None = None) -> Job:
        """An answer joins."""
        self._n_jobs += 1
        job = Job(self._n_jobs, writing, self._group_of(writing.config), on_prefill)
        if job.group is not None:
            job.group.jobs.add(job)
        self._jobs.append(job)
        return job

    def forget(self) -> None:
        """Forgets what no answer needs now."""
        for timeline in self._free:
            timeline.reset()
        self._prefixes.forget()

    def take_back(self, timeline: Timeline) -> None:
        """Empties a sequence that is wanted for something else until the next round."""
        for job in self.running:
            if job.timeline is timeline:
                self._preempt(job)
        timeline.reset()

    def end(self, job: Job) -> None:
        """An answer leaves, wherever it is."""
        if job.is_over:
            return
        if job.timeline is not None:
            if job.timeline in self._open:
                job.timeline.commit(0)
            self._prefixes.put(job.timeline)
        if (step := job.writing.new_step()).tokens:  # drawn in a round that was interrupted
            job.add(step)
        job.is_over = True
        if job.group is not None:
            job.group.jobs.discard(job)
        self._jobs = [other for other in self._jobs if not other.is_over]

    def close(self) -> None:
        """Ends all answers and gives up the sequences."""
        for job in self._jobs:
            self.end(job)
        for timeline in self._timelines:
            timeline.close()

    def round(self, wanted: Job) -> None:
        """One pass for all that can run. wanted: whose step is waited for."""
        self._recover()
        for job in list(self._jobs):
            if job.writing.cancelled() or job.writing.answer.stop_reason is not None:
                self.end(job)  # the latter where that was interrupted
        if wanted.is_over:
            return
        self._admit()
        if all(
            job.pauses for job in self.running
        ):  # for their readers; the wanted one has no place
            self._preempt(self.running[-1])
            self._admit()
        self._run([job for job in self.running if not job.pauses])

    # ---- places and cells

    def _group_of(self, config: DecodeConfig) -> Group | None:
        proposers, rule = self._drafting_of(config)
        if rule is None or not proposers:
            return None
        key = (
            config.draft,
            tuple(config.draft_type or ()),
            config.draft_max,
            config.draft_min,
            config.tree_budget,
            config.tree_spine,
        )
        self._groups = {key: group for key, group in self._groups.items() if group.jobs}
        if key not in self._groups:
            self._groups[key] = Group(Speculation(proposers, rule, self._phase))
        return self._groups[key]

    def _phase(self, name: str) -> Phase:
        return Phase(self._seconds, name)

    def _admit(self) -> None:
        """The oldest that wait get places, as long as there are some and cells for them."""
        while self.waiting and len(self.running) < self.engine.n_parallel:
            job = self.waiting[0]
            if not job.is_fresh and self._is_being_filled(job):
                return
            # Those that run want room to grow, or the newest would soon have to leave again.
            spare = 2 * PAGE * len(self.running)
            has_room = self._prefixes.reserve(job.history, spare, is_fresh=job.is_fresh)
            if not has_room and self.running:
                return
            timeline = self._free_timeline()
            with self._phase("decode"):
                job.found = self._prefixes.begin(
                    timeline, job.history, job.writing.turns, is_fresh=job.is_fresh
                )
                self._prefixes.make_room(
                    timeline.wanted_cells(len(job.history) - job.found.n_cached)
                )
            self._begin(job, timeline)

    def _is_being_filled(self, job: Job) -> bool:
        """Whether an answer that runs computes much of its prompt just now: it waits for that."""
        n_known = self._prefixes.n_known(job.history)
        for other in self.running:
            position = other.held.position
            n = _n_common(job.history[:-1], other.history)
            if other.decodes or position >= n or n < n_known + PAGE or other.pauses:
                continue
            other.found = other.found.with_stop(n)
            return True
        return False

    def _begin(self, job: Job, timeline: Timeline) -> None:
        job.request.sequence = timeline
        if job.prefill_started is None:
            job.prefill_started = time.perf_counter()
            n_there = job.writing.n_cached = job.found.n_cached
            job.writing.n_draft_context = job.found.n_draft_context
            job.n_to_fill = len(job.history) - n_there
            if job.on_prefill is not None:
                job.on_prefill(0, job.n_to_fill)
        if job.group is not None:
            job.group.speculation.begin(job.request)
        job.timeline = timeline

    def _free_timeline(self) -> Timeline:
        """A sequence for another answer; there are fewer than the engine holds."""
        if not self._free:
            self._timelines.append(Timeline(self.engine))
        return self._free[0]

    def _preempt(self, job: Job) -> None:
        """It waits again, and begins anew with what of it others leave room for."""
        timeline, job.timeline = job.held, None
        job.request.notes.clear()  # what proposers know of it goes by sequences
        self._prefixes.put(timeline)

    def _make_room(self, jobs: list[Job]) -> None:
        """Frees cells for a row of each. The newest leave first; the oldest always stays."""
        while True:
            wanted = sum(job.held.wanted_cells(1) for job in jobs)
            if self._prefixes.make_room(wanted) or len(self.running) == 1:
                return
            last = self.running[-1]
            self._preempt(last)
            if last in jobs:
                jobs.remove(last)

    # ---- one pass

    def _run(self, active: list[Job]) -> None:
        """One pass, and what follows from its rows."""
        started = time.perf_counter()
        self._seconds = dict.fromkeys(ROUND_PHASES, 0.0)
        self._make_room(active)
        decoding = [job for job in active if job.decodes]
        filling = [job for job in active if not job.decodes]
        self._keep_top(active)
        rounds = self._propose(decoding)
        work = [self._step_of(job) for job in decoding]
        n_trees = sum(one.tree is not None for one in work)
        n_plain = len(work) - n_trees
        work += self._pieces(filling, n_plain, is_alone=not decoding)
        self._open = [one.job.held for one in work]
        with self._phase("verify" if n_trees else "decode"):
            rows = self._pass(work)
        if rows is None:
            return
        drawn = self._draw(work, rows)
        self._open = []
        n_filled = sum(len(one.item.tokens) for one in work[len(decoding) :])
        self._settle(rounds, drawn, started, n_filled=n_filled)

    def _keep_top(self, jobs: list[Job]) -> None:
        n_most = self.engine.n_most_top
        few = all(job.writing.n_top(n_most) for job in jobs)
        has_top = self.engine.keep_top(n_most if few else 0)
        for job in jobs:
            job.writing.has_top = has_top

    def _propose(self, decoding: list[Job]) -> list[tuple[Group | None, list[Job], Round]]:
        """Trees for those that draft, group by group."""
        groups: dict[int, list[Job]] = {}
        for job in decoding:
            job.request.tree = None
            groups.setdefault(id(job.group), []).append(job)
        n_each = max(1, self.engine.max_verify // max(1, len(decoding)))
        rounds = []
        for jobs in groups.values():
            group = jobs[0].group
            done = Round(sum(job.held.position for job in jobs), n_sequences=len(jobs))
            if group is not None and not group.speculation.n_rest:
                for job in jobs:
                    left = job.writing.n_ctx - job.held.position
                    job.request.n_room = min(n_each, left)
                    job.request.n_left = job.writing.answer.n_left
                group.speculation.propose(done, [job.request for job in jobs])
            rounds.append((group, jobs, done))
        trees = [job for job in decoding if job.request.tree is not None]
        wanted = sum(job.held.wanted_cells(_n_rows(job)) for job in decoding)
        if not self._prefixes.make_room(wanted):
            for job in trees:
                job.request.tree = None  # what it was drafted for is short
            for _, _, done in rounds:
                done.n_drafted, done.is_tree, done.n_expected = 0, False, 0.0
        return rounds

    def _step_of(self, job: Job) -> _Work:
        tree = job.request.tree
        if tree is None:
            return _Work(job, Item(job.held, [job.history[-1]]), None)
        parents = None if tree.is_chain else tree.parents
        return _Work(job, Item(job.held, tree.tokens, verifies=True, parents=parents), tree)

    def _pieces(self, filling: list[Job], n_plain: int, *, is_alone: bool) -> list[_Work]:
        """Of prompts as much as the pass takes and the others can wait for, the oldest first."""
        most = max(self.engine.model.config.n_ubatch, self.engine.n_parallel)
        left = min(most, self.engine.n_ctx) - n_plain
        if not is_alone:
            left = min(left, self._chunk())
        work = []
        for job in filling:
            position = job.held.position
            end = len(job.history)
            n = min(left, job.found.next_stop(position, end) - position)
            if job.held.wanted_cells(n) > self.engine.n_free_cells:
                self._prefixes.make_room(job.held.wanted_cells(n))
            while n > 0 and job.held.wanted_cells(n) > self.engine.n_free_cells:
                n -= min(n, PAGE)
            if n <= 0:
                continue
            n_to_come = end - position - n
            item = Item(job.held, job.history[position : position + n], n_to_come=n_to_come)
            work.append(_Work(job, item, None))
            left -= n
            if sum(one.job.held.wanted_cells(len(one.item.tokens)) for one in work) > (
                self.engine.n_free_cells - 2 * PAGE * len(self.running)
            ):
                break  # rather one after the other
        return work

    def _pass(self, work: list[_Work]) -> list[Rows] | None:
        """Runs it; what the core refuses or fails at ends the answers in it."""
        try:
            return self.engine.run([one.item for one in work])
        except Error as error:
            for one in work:
                self._fail(one.job, error)
            self._open = []
            return None

    def _fail(self, job: Job, error: Error) -> None:
        job.error = error
        self._prefixes.forget_unproven()
        self.end(job)

    def _draw(self, work: list[_Work], rows: list[Rows]) -> dict[Job, tuple[list[int], int]]:
        """What each answer draws of its rows, and how many candidates it took; one commit."""
        drawn: dict[Job, tuple[list[int], int]] = {}
        paths: list[tuple[Timeline, list[int]]] = []
        with self._phase("sample"):
            for one, found in zip(work, rows, strict=True):
                job, writing = one.job, one.job.writing
                n_before, n_taken = len(writing.answer.tokens), 0
                try:
                    if one.tree is not None:
                        path, n_taken = one.tree.follow(
                            lambda i, found=found, writing=writing: writing.choose(found, i),  # type: ignore[misc]
                            writing.take,
                        )
                        paths.append((job.held, path))
                    elif len(found):
                        self._take_row(job, found)
                except Error as error:  # its own rows are no numbers: the others are not to blame
                    self._fail(job, error)
                    continue
                drawn[job] = writing.answer.tokens[n_before:], n_taken
        if paths:
            with self._phase("commit"):
                self.engine.commit(paths)
        return drawn

    def _take_row(self, job: Job, rows: Rows) -> None:
        writing = job.writing
        if not writing.answer.tokens and writing.config.max_tokens == 0:
            writing.answer.stop_reason = "length"
        else:
            writing.take(writing.choose(rows, -1))

    def _settle(
        self,
        rounds: Iterable[tuple[Group | None, list[Job], Round]],
        drawn: dict[Job, tuple[list[int], int]],
        started: float,
        *,
        n_filled: int,
    ) -> None:
        """Accounts, steps and what is learned."""
        seconds = time.perf_counter() - started
        rounds, decoded = list(rounds), set()
        for group, all_jobs, done in rounds:
            jobs = [job for job in all_jobs if job in drawn]
            decoded |= set(jobs)
            for job in jobs:
                self._count(job, *drawn[job], done, seconds)
            done.n_tokens = sum(len(drawn[job][0]) for job in jobs)
            done.n_accepted = sum(drawn[job][1] for job in jobs)
            if group is not None and jobs:
                set_seconds(done, seconds, self._seconds)
                is_alone = len(rounds) == 1 and len(jobs) == len(all_jobs) and not n_filled
                if group.speculation.n_rest:
                    group.speculation.pass_over(done, is_alone=is_alone)
                    continue
                group.speculation.observe(
                    done,
                    [job.request for job in jobs],
                    [drawn[job][0] for job in jobs],
                    is_alone=is_alone,
                )
        self._learn_chunk(seconds, decoded, n_filled=n_filled)
        for job, (tokens, _) in drawn.items():
            if job not in decoded:
                self._filled(job, tokens)
                if job.held.position in job.found.stops or (
                    tokens and self.engine.divides_prefixes
                ):
                    self._prefixes.keep(job.held)
            if job.writing.answer.stop_reason is not None:
                self.end(job)

    def _count(
        self, job: Job, tokens: list[int], n_taken: int, done: Round, seconds: float
    ) -> None:
        """One round of an answer."""
        own = Round(done.position, n_positions=done.n_positions, is_brief=done.is_brief)
        if (tree := job.request.tree) is not None:
            own.verifies(tree)
        own.n_tokens, own.n_accepted = len(tokens), n_taken
        took = {name: s for name, s in self._seconds.items() if name != "sample"}
        if tree is None:
            took["decode"] += took.pop("verify")
            took["verify"] = 0.0
        job.writing.account.add_round(own, seconds, took)
        for credit in job.request.credits(tokens):
            job.writing.account.credit(*credit)
        job.add(job.writing.new_step(own.n_drafted, n_taken))

    def _filled(self, job: Job, tokens: list[int]) -> None:
        """A piece of a prompt, or of what is computed anew, has come in."""
        writing = job.writing
        if job.on_prefill is not None and len(writing.answer.tokens) <= len(tokens):
            position = job.timeline.position if job.timeline is not None else 0
            n_there = len(writing.prompt) - writing.n_cached - (len(writing.prompt) - position)
            job.on_prefill(min(n_there, job.n_to_fill), job.n_to_fill)
        if job.prefill_started is not None and len(writing.answer.tokens) <= len(tokens):
            writing.account.prefill_s = time.perf_counter() - job.prefill_started
        if tokens:
            job.add(writing.new_step())

    def _chunk(self) -> int:
        """How much of a prompt joins the others in this round: none while they wait too long.

        Nor where it is long ago that they ran alone, which is what they are compared with.
        """
        if self._saved_s < 0.0 or self._n_mixed >= MOST_MIXED:
            return 0
        most_s = (SLOWER - 1.0) * self._alone.value
        fitting = [n for n in CHUNKS if n * self._row.value <= most_s]
        return fitting[-1] if fitting and self._row.value else CHUNKS[0]

    def _learn_chunk(self, seconds: float, decoded: set[Job], *, n_filled: int) -> None:
        """What rounds take with so many tokens of prompts, and without any."""
        if not decoded:
            return
        self._n_mixed = self._n_mixed + 1 if n_filled else 0
        if not n_filled:
            self._alone.add(seconds)
        alone_s = self._alone.value
        more_s = max(seconds - alone_s, 0.0) if n_filled else 0.0
        self._saved_s = min(self._saved_s + (SLOWER - 1.0) * alone_s - more_s, alone_s)
        if n_filled in self._run_sizes and more_s:
            self._row.add(more_s / n_filled)
        self._run_sizes.add(n_filled)  # the first of a size builds its graph

    def _recover(self) -> None:
        """After an interrupted round: what was verified goes, what was drawn is filled in."""
        for timeline in self._open:
            timeline.commit(0)
        for job in self.running if self._open else ():
            if job.writing.answer.stop_reason is not None:
                self.end(job)
            elif job.held.position >= len(job.history):
                job.found = self._prefixes.begin(job.held, job.history)
        self._open = []


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two lists begin with alike."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])


def _n_rows(job: Job) -> int:
    """Rows that an answer's next step takes."""
    tree = job.request.tree
    return 1 if tree is None else len(tree.tokens)

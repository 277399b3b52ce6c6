"""Scheduler: runs the requests of an engine in batches.

    schedule      admits requests, drafts trees, selects the rows of a pass (trees, plain, prompts)
    execute       runs the pass, samples along the trees and commits the accepted paths
    postprocess   gives readers their steps, updates the controllers, ends finished requests

A batch is atomic: after any exception before its steps are given out, `abort_batch` restores the
state before the batch, except for requests that ended in it. Sampled tokens depend only on their
request's own tokens, so scheduling never changes a text.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ..config import DecodeConfig
from ..constraints.errors import ConstraintError
from ..kv_cache.prefix_cache import PrefixCache, PrefixMatch
from ..native import PAGE, BatchEntry, Engine, Error, Progress, Rows
from ..native import Sequence as KvSequence
from ..speculative.controller import Controller
from ..speculative.cost_model import Round
from ..speculative.proposers.proposer import Proposer
from ..speculative.speculator import Speculator
from ..speculative.tree import Tree
from .batch import Batch, ScheduledEntry, decode_entry
from .output_processor import VocabularyLike
from .prefill_budget import PrefillBudget
from .request import Request, RequestState
from .stats import Phase
from .turns import Turns

SCORED_ROWS = 32
"""Most rows of a prompt chunk whose logits all come to the host, 20 MB for a large vocabulary."""


class Scheduler:
    """Runs all requests of one engine. Not thread-safe."""

    def __init__(
        self,
        first: KvSequence,
        prefix_cache: PrefixCache,
        vocabulary: VocabularyLike,
        another: Callable[[Engine], KvSequence] = KvSequence,
    ) -> None:
        """Creates a scheduler. first: a sequence of the engine. another: creates more sequences."""
        self.engine: Engine = first.engine
        self._prefix_cache = prefix_cache
        self._vocabulary = vocabulary
        self._another = another
        # Unfinished requests, oldest first, and all sequences, least recently used first.
        self._states: list[RequestState] = []
        self._sequences: list[KvSequence] = [first]
        prefix_cache.parked = lambda: self._free
        self._batch: Batch | None = None
        self._turns = Turns()
        self._prefill_budget = PrefillBudget()
        # Seconds of learning from the last round that called proposers.
        self._learn_s = 0.0
        # If any request verifies on a GPU, plain steps run as one-row verifies: the pass needs one
        # graph, and recurrent states commit together. On CPUs one-row verifies are slower.
        self._few_graphs = self.engine.model.backend != "CPU"
        self._top = -1, 0  # k of the device's top-k selection: last requested k, k in use

    def add_request(
        self,
        request: Request,
        proposers: Sequence[Proposer] = (),
        controller: Controller | None = None,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
    ) -> RequestState:
        """Adds a request, which then waits for a sequence, and returns its state.

        proposers, controller: sources of candidates and their control; decoding is plain without
        them. Requests of equal draft settings share a speculator. cancelled, on_prefill: see
        `RequestState`.
        """
        speculator = None
        if controller is not None and proposers:
            key = _draft_settings(request.config)
            alike = (x.speculator for x in self._states if _draft_settings(x.request.config) == key)
            speculator = next((x for x in alike if x is not None), None)
            speculator = speculator or Speculator(proposers, controller, self._phase)
        state = RequestState(
            request, self._vocabulary, self.engine.n_ctx, speculator, cancelled, on_prefill
        )
        n_best, n_most = state.sampler.n_best, self.engine.max_top_k
        state.n_top = n_most if 0 < n_best <= n_most else 0
        if all(x.request.client != request.client for x in self._states):
            self._turns.add(request.client)
        self._states.append(state)
        return state

    def step(self) -> None:
        """Runs one batch for all runnable requests; an error raised here leaves them unchanged."""
        try:
            self.abort_batch()  # undoes a batch that was interrupted
            batch = self.schedule()
            if batch.entries:
                self.execute(batch)
                self.postprocess(batch)
            self._batch = None
        except BaseException:
            self.abort_batch()
            raise

    def abort(self, state: RequestState, error: BaseException | None = None) -> None:
        """Ends a request at any time. error: raised to the reader after the last step."""
        if state.is_finished:
            return
        if state not in self._states:
            raise ValueError("the request is another decoder's; end it with that decoder")
        # Call the core last: the request must be finished even if a call fails.
        sequence, state.sequence = state.sequence, None
        is_kept = state.request.config.cache_prompt
        if state.output.n_new:
            state.add_step()
        state.error, state.is_finished = state.error or error, True
        self._states.remove(state)
        if sequence is not None:
            self._sequences.sort(key=lambda one: one is sequence)
            if self._batch is not None:
                sequence.commit(0)
            if not is_kept:
                if state.speculator is not None:
                    state.speculator.forget(sequence)
                sequence.reset()
            elif state.output.tokens and sequence.position == len(state.history) - 1:
                self._prefix_cache.park(sequence)
            else:
                self._prefix_cache.release(sequence)
        if not is_kept:
            self._prefix_cache.forget_scope(state.scope)

    def abort_all(self, states: Iterable[RequestState], error: BaseException | None = None) -> None:
        """Ends several requests; if ending one of them fails, the rest are still ended."""
        with ExitStack() as stack:
            for state in states:
                stack.callback(self.abort, state, error)

    def abort_batch(self) -> None:
        """Undoes an unfinished batch, if any: restores the engine and the requests."""
        if (batch := self._batch) is None:
            return
        for entry in batch.entries:
            state = entry.state
            entry.sequence.commit(0)
            if state.sequence is None:
                continue  # an ended or preempted request has no sequence to rewind
            state.rewind(entry.n_tokens)
            if state.sequence.position != entry.position:
                self._preempt(state)
        for state in batch.admitted:
            if state.sequence is not None:
                self._preempt(state)
        self._batch = None

    def close(self, error: Exception) -> None:
        """Ends all requests and closes the sequences. error: raised to the readers."""
        self.abort_all(list(self._states), error)
        self._prefix_cache.forget()
        for sequence in self._sequences:
            sequence.close()

    @property
    def running(self) -> list[RequestState]:
        """Requests that have a sequence, in the order in which they got it."""
        held = [state for state in self._states if state.sequence is not None]
        return sorted(held, key=lambda state: state.turn)

    @property
    def waiting(self) -> list[RequestState]:
        """Requests that wait for a sequence, oldest first; throttled requests are left out."""
        return [x for x in self._states if x.sequence is None and not x.is_throttled]

    @property
    def sequences(self) -> list[KvSequence]:
        """All sequences of the scheduler, in use or not."""
        return list(self._sequences)

    @property
    def _free(self) -> list[KvSequence]:
        used = {state.sequence for state in self._states}
        return [sequence for sequence in self._sequences if sequence not in used]

    def forget(self) -> None:
        """Empties the prefix cache, and the sequences that no request uses."""
        self._prefix_cache.forget()
        for sequence in self._free:
            sequence.reset()

    def reclaim(self, sequence: KvSequence) -> None:
        """Preempts the request of a sequence; empties the sequence for use until the next batch."""
        self.abort_batch()
        for state in self.running:
            if state.sequence is sequence:
                self._preempt(state)
        sequence.reset()

    def make_room(self, n_cells: int, sequence: KvSequence) -> None:
        """Frees cells for a reclaimed sequence; preempts the newest requests if necessary."""
        while not self._prefix_cache.make_room(n_cells, claimed=sequence) and self.running:
            self._preempt(self.running[-1])

    def _admit(self, batch: Batch) -> list[RequestState]:
        """Assigns sequences to waiting requests in turn; returns the requests that can run."""
        turns, held = self._turns, list[RequestState]()
        while waiting := [x for x in self.waiting if x not in held]:
            running = self.running
            following = turns.next(waiting, running)
            if len(running) < self.engine.n_parallel:
                match = self._match(following)
                if self._is_being_prefilled(following, match, running):
                    held.append(following)
                    continue
                if self._place(following, match, running, batch):
                    continue
            if (state := turns.over(following, waiting, running)) is None:
                break
            self._preempt(state)
            turns.served(state, self._states)
        return [state for state in self.running if not state.is_throttled]

    def _match(self, state: RequestState) -> PrefixMatch:
        # Cached rows have no logits to score.
        limit = None if state.is_scored else len(state.prompt_logprobs)
        return self._prefix_cache.match(state.history, state.scope, limit)

    def _place(
        self,
        state: RequestState,
        match: PrefixMatch,
        running: list[RequestState],
        batch: Batch,
    ) -> bool:
        """Admits a request or fails it; returns False if cells are short."""
        # Keep room for the rest of the running requests' prompts and for some growth, or the
        # request that is admitted now would soon be preempted.
        left = [x.sequence.cells_needed(x.n_uncomputed) for x in running]
        headroom = 2 * PAGE * len(running) + sum(left)
        try:
            sequence = self._sequence_for(match)
            if not self._prefix_cache.reserve(sequence, match, headroom) and running:
                return False
            if state.prefill_started is None:
                state.prefill_started = time.perf_counter()
            hit = self._prefix_cache.start(sequence, match, state.request.turn_boundaries)
            n_left = len(state.history) - hit.n_cached
            self._prefix_cache.make_room(sequence.cells_needed(n_left), claimed=sequence)
            batch.admitted.append(state)
            state.begin(sequence, hit)
            self._turns.served(state, self._states)
            if state.speculator is not None:
                state.speculator.start(state)
        except Error as error:
            self.abort(state, error)
        return True

    def _is_being_prefilled(
        self, state: RequestState, match: PrefixMatch, running: list[RequestState]
    ) -> bool:
        """True if a running request is prefilling more of this prompt's prefix than is cached."""
        for other in running:
            if other.scope != state.scope:
                continue
            n = _n_common(state.history[:-1], other.history)
            if other.is_decoding or other.is_throttled or n < match.n + PAGE:
                continue
            if other.sequence.position < n:
                other.prefix_hit = other.prefix_hit.with_snapshot(n)
                return True
        return False

    def _sequence_for(self, match: PrefixMatch) -> KvSequence:
        free = self._free
        nearest = self._prefix_cache.nearest(free, match)
        if nearest is not None:
            return nearest
        if len(self._sequences) < self.engine.n_parallel:
            self._sequences.append(self._another(self.engine))
            return self._sequences[-1]
        return free[0]

    def _preempt(self, state: RequestState) -> None:
        """Takes the sequence from a request, which will start again from its cached prefix."""
        sequence, state.sequence = state.sequence, None
        state.n_reached = max(state.n_reached, sequence.position)
        state.notes.clear()  # drops data of proposers about the lost sequence
        self._prefix_cache.release(sequence)

    def _make_room(self, states: list[RequestState]) -> None:
        """Frees a K/V cell for each request's next row; may preempt all but the oldest request."""
        while wanted := sum([state.sequence.cells_needed(1) for state in states]):
            if self._prefix_cache.make_room(wanted) or len(running := self.running) == 1:
                return
            self._preempt(running[-1])
            if running[-1] in states:
                states.remove(running[-1])

    def schedule(self) -> Batch:
        """Selects the rows of the next pass; the batch has no entries if no request can run."""
        batch = self._batch = Batch()
        for state in list(self._states):
            if state.output.stop_reason is not None or state.is_cancelled():
                self.abort(state)
        active = self._admit(batch)
        self._make_room(active)
        self._advance_constraints(active)
        decoding = [state for state in active if state.is_decoding]
        prefilling = [state for state in active if state not in decoding]
        batch.n_decoding = len(decoding)
        self._set_top_k(active)
        batch.drafts = self._propose(decoding)
        decoding = [state for state in decoding if not state.is_finished]
        masks = [self._masks(state) for state in decoding]  # may drop nodes of state.tree
        all_verify = self._few_graphs and any(state.tree is not None for state in decoding)
        batch.entries = [decode_entry(state, verifies=all_verify) for state in decoding]
        for entry, words in zip(batch.entries, masks, strict=True):
            entry.masks = words
        if prefilling:
            chunks = self._prefill_chunks(prefilling, batch.entries)
            for entry in chunks:
                if entry.samples:
                    entry.state.tree = None
                    entry.masks = self._masks(entry.state)
            batch.n_prefilled = sum([len(entry.rows.tokens) for entry in chunks])
            batch.entries += chunks
        return batch

    def execute(self, batch: Batch) -> None:
        """Runs the pass, samples and commits; an error of the core ends the batch's requests."""
        verifies = batch.verifies
        try:
            with batch.phase("verify" if verifies else "decode"):
                rows = self.engine.run([entry.rows for entry in batch.entries])
            with batch.phase("sample"):
                self._sample(batch, rows)
            if verifies:
                with batch.phase("commit"):
                    self.engine.commit(
                        [
                            (x.state.sequence, len(x.path) if x.tree.is_chain else x.path)
                            for x in batch.entries
                            if x.tree is not None and x.state.sequence is not None
                        ]
                    )
        except Error as error:
            self.abort_all([entry.state for entry in batch.entries], error)

    def postprocess(self, batch: Batch) -> None:
        """Gives readers their steps, updates the controllers, ends finished requests."""
        entries = [entry for entry in batch.entries if not entry.state.is_finished]
        seconds = time.perf_counter() - batch.started
        batch.seconds["overhead"] = seconds - sum(batch.seconds.values())
        self._batch = None  # from here on `abort_batch` does not undo the batch
        for entry in entries:
            if entry.is_decoding:
                self._end_round(entry, batch)
            else:
                self._end_chunk(entry, batch)
        if entries:
            self._learn(batch, entries, seconds)
            if batch.n_decoding and self.engine.n_parallel > 1:
                self._prefill_budget.observe(seconds, batch.n_prefilled)
        for entry in entries:
            state = entry.state
            is_snapshot = entry.end in state.prefix_hit.snapshot_positions
            error = None
            if not entry.is_decoding and (
                is_snapshot or (entry.tokens and self.engine.partial_prefix_ok)
            ):
                try:
                    self._prefix_cache.insert(state.sequence)
                except Error as failure:
                    error = failure
            if error is not None or state.output.stop_reason is not None:
                self.abort(state, error)

    def _advance_constraints(self, states: list[RequestState]) -> None:
        """Tells constraints of the answers' new tokens; removes requests that cannot go on."""
        for state in list(states):
            if state.constraint is not None:
                try:
                    with self._phase("mask"):
                        state.constraint.advance(state.output.tokens)
                except ConstraintError as error:
                    self.abort(state, error)
                    states.remove(state)

    def _masks(self, state: RequestState) -> NDArray[np.uint32] | None:
        """Returns the masks of a request's rows; None if its answer is free.

        Drops the candidates of the request's tree for which the constraint computes no mask.
        """
        if state.constraint is None:
            return None
        with self._phase("mask"):
            tree, masks = state.constraint.masks(state.tree or Tree.of([-1]))
        state.tree = tree if tree.n_drafted else None
        return masks

    def _phase(self, name: str) -> Phase:
        assert self._batch is not None
        return self._batch.phase(name)

    def _set_top_k(self, states: list[RequestState]) -> None:
        """Lets a device select the best tokens of rows, if they suffice for any request."""
        k = max([state.n_top for state in states], default=0)
        if k != self._top[0] or self.engine.n_top != self._top[1]:
            self.engine.set_top_k(k)
            self._top = k, self.engine.n_top

    def _propose(self, decoding: list[RequestState]) -> list[tuple[Speculator, Round]]:
        groups: dict[Speculator, list[RequestState]] = {}
        for state in decoding:
            if state.speculator is not None:
                state.tree = None
                groups.setdefault(state.speculator, []).append(state)
        drafts: list[tuple[Speculator, Round]] = []
        if not groups:
            return drafts
        n_most = max(1, self.engine.max_verify // len(decoding))
        n_cached = sum([len(state.history) - 1 for state in decoding])
        for speculator, states in groups.items():
            done = Round(n_cached, len(decoding), n_undrafted=len(decoding) - len(states))
            drafts.append((speculator, done))
            if not speculator.asks:
                continue
            for state in states:
                state.n_room = min(n_most, self.engine.n_ctx - len(state.history) + 1)
                state.n_left = state.output.n_left
            try:
                speculator.propose(done, states)
            except Error as error:
                self.abort_all(states, error)
        if any(state.tree is not None for state in decoding):
            wanted = sum([x.sequence.cells_needed(x.n_rows) for x in decoding if x.sequence])
            if wanted and not self._prefix_cache.make_room(wanted):
                for state in decoding:
                    state.tree = None
                for _, done in drafts:
                    done.n_drafted, done.is_tree = 0, False
        return drafts

    def _prefill_chunks(
        self, prefilling: list[RequestState], decoding: list[ScheduledEntry]
    ) -> list[ScheduledEntry]:
        """Builds entries of prompt chunks that fit the pass, free cells and prefill budget."""
        n_most = max(self.engine.config.n_ubatch, self.engine.n_parallel)
        left = min(n_most, self.engine.n_ctx) - sum([entry.tree is None for entry in decoding])
        if decoding:
            left = min(left, self._prefill_budget.chunk(len(decoding), len(prefilling)))
        n_taken = sum([entry.cells_needed for entry in decoding])
        entries: list[ScheduledEntry] = []
        by_client: dict[str, list[RequestState]] = {}
        for state in prefilling:
            by_client.setdefault(state.request.client, []).append(state)
        # Clients get equal shares of the pass's rows; what one cannot use goes to the others.
        groups = sorted(by_client.values(), key=lambda x: sum([one.n_uncomputed for one in x]))
        for n_after, states in zip(range(len(groups), 0, -1), groups, strict=True):
            share = -(-left // n_after)
            for state in states:
                if (entry := self._chunk(state, share, n_taken)) is None:
                    continue
                entries.append(entry)
                share -= len(entry.rows.tokens)
                left -= len(entry.rows.tokens)
                n_taken += entry.cells_needed
        return entries

    def _chunk(self, state: RequestState, n_most: int, n_taken: int) -> ScheduledEntry | None:
        """Builds an entry of at most n_most tokens of a prompt; None if no cell is free.

        n_taken: free cells that other entries of the pass will take.
        """
        position, end = state.sequence.position, len(state.history)
        n = min(n_most, state.prefix_hit.next_snapshot(position, end) - position)
        self._prefix_cache.make_room(n_taken + state.sequence.cells_needed(n))
        n_free = self.engine.n_free_cells - n_taken
        # Use every free cell, even in a partly filled page: else two prompts could deadlock.
        needed = state.sequence.cells_needed
        n = bisect_right(range(1, n + 1), n_free, key=needed) if n > 0 else 0
        if n == 0:
            return None
        all_logits = None
        if not state.is_scored:
            n = min(n, SCORED_ROWS)
            all_logits = np.empty((n, self.engine.model.n_vocab), dtype=np.float32)
        stop = position + n
        # n_remaining 0, the prompt's end, makes the pass keep features, which a snapshot needs.
        n_remaining = 0 if stop in state.prefix_hit.snapshot_positions else end - stop
        rows = BatchEntry(
            state.sequence,
            state.history[position:stop],
            n_remaining=n_remaining,
            all_logits=all_logits,
        )
        return ScheduledEntry(state, rows, is_decoding=False, samples=stop == end)

    def _sample(self, batch: Batch, rows: list[Rows]) -> None:
        sampling: list[tuple[ScheduledEntry, Rows]] = []
        for entry, found in zip(batch.entries, rows, strict=True):
            try:  # non-finite logits of a prompt end its request alone
                if (scored := entry.rows.all_logits) is not None:
                    entry.state.score(entry.position, scored)
                if entry.samples and entry.state.output.n_left > 0:
                    sampling.append((entry, found))
                    continue
                found.check()
            except (Error, ValueError) as error:
                self.abort(entry.state, error)
            if entry.samples:
                entry.state.output.stop_reason = "length"  # max_tokens is 0, so no token is sampled
        sampled = self.engine.sample(
            [
                entry.state.sampler.sample_request(
                    entry.state.sequence,
                    entry.state.history,
                    1 if entry.tree is None else len(entry.tree),
                    entry.masks,
                )
                for entry, _ in sampling
            ]
        )
        for (entry, found), tokens in zip(sampling, sampled, strict=True):
            try:
                self._accept(entry, found, tokens)
            except (Error, ValueError) as error:  # non-finite logits end this request alone
                self.abort(entry.state, error)

    def _accept(self, entry: ScheduledEntry, rows: Rows, sampled: Sequence[int]) -> None:
        state, tokens = entry.state, iter(sampled)
        scored: Iterator[NDArray[np.float32]] | None = None
        if sampled and state.request.config.n_probs is not None:
            path = entry.tree.accepted(sampled) if entry.tree is not None else [-1]
            scored = iter(rows.gather(path[: len(sampled)]))

        def choose(index: int) -> int:
            token = next(tokens, None)
            if token is None:
                token = self._sample_again(entry, rows, index)
            if scored is not None:
                for row in islice(scored, 1):
                    if state.request.config.post_sampling_probs:
                        row = entry.allowed(row, index)
                    state.logprobs.append(state.sampler.logprobs(row, state.history, token))
            return token

        if entry.tree is None:
            state.take(choose(-1))
        else:
            entry.path, entry.n_accepted = entry.tree.follow(choose, state.take)

    def _sample_again(self, entry: ScheduledEntry, rows: Rows, index: int) -> int:
        """Samples a row whose sampling failed, to raise the reason."""
        state, row = entry.state, entry.allowed(rows.logits(index), index)
        if state.constraint is not None and state.constraint.error is not None:
            raise ConstraintError(state.constraint.error)
        return state.sampler.sample(row, state.history, len(state.history)).token

    def _end_round(self, entry: ScheduledEntry, batch: Batch) -> None:
        state, tree, tokens = entry.state, entry.state.tree, entry.tokens
        state.stats.add_round(batch.seconds, batch.n_decoding, tree, len(tokens), entry.n_accepted)
        n_drafted = 0
        if tree is not None:
            n_drafted = tree.n_drafted
            for credit in state.credits(tokens, entry.n_accepted):
                state.stats.credit(*credit)
        state.add_step(n_drafted, entry.n_accepted)

    def _end_chunk(self, entry: ScheduledEntry, batch: Batch) -> None:
        state = entry.state
        if entry.tokens:
            state.add_step()
        if entry.n_tokens == 0:
            sample_s = batch.seconds["sample"] if entry.samples else 0.0
            state.end_prefill_chunk(entry.end, sample_s)

    def _learn(self, batch: Batch, entries: list[ScheduledEntry], seconds: float) -> None:
        # True if the pass only decoded, and no request failed in it.
        is_whole = len(batch.entries) == len(entries) == batch.n_decoding
        if not batch.drafts:
            return
        took, started, asks = batch.seconds, time.perf_counter(), False
        # Draft times are attributable only if at most one speculator drafted in this round.
        rounds = [done for _, done in batch.drafts]
        busy = [done for done in rounds if not done.is_plain]
        told = (busy or rounds)[0] if is_whole and len(busy) <= 1 else None
        draft_s = took.get("draft", 0.0) + took.get("select", 0.0)
        choose_s, sample_s = took.get("choose", 0.0), took["sample"]
        for speculator, done in batch.drafts:
            done.is_timing_shared |= done is not told
            done.sample_s, done.draft_s = sample_s, draft_s
            done.pass_s = seconds - draft_s - sample_s - choose_s - took.get("mask", 0.0)
            theirs = [x for x in entries if x.is_decoding and x.state.speculator is speculator]
            if not theirs:
                continue
            tokens = [entry.tokens for entry in theirs]
            done.n_tokens = done.n_undrafted + sum(map(len, tokens))
            done.n_accepted = sum([entry.n_accepted for entry in theirs])
            done.choose_s = choose_s + self._learn_s
            asks |= speculator.asks
            speculator.observe(done, [entry.state for entry in theirs], tokens)
        if asks:
            self._learn_s = time.perf_counter() - started


def _draft_settings(config: DecodeConfig) -> tuple[object, ...]:
    """Returns the settings that requests must share to be drafted together."""
    return (
        config.draft,
        tuple(config.draft_type or ()),
        config.draft_max,
        config.draft_min,
        config.tree_budget,
        config.tree_main_chain,
    )


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])

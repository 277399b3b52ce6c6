"""Runtime of speculative decoding: an engine's proposers, controllers and measured costs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .. import _cache_dir
from ..config import AUTO_TREE_BUDGET, TREE_BUDGET, DecodeConfig
from ..native import MAX_VERIFY, Error, Sequence, files_of
from ..sampling.noise import DraftScorer
from .controller import AutoController, Controller, ControllerState, FixedController
from .cost_model import N_FIRST, CostModel, Round
from .proposers.proposer import CHAIN, MAIN_CHAIN, TOP1, TREE, Proposer, SpeculativeState
from .proposers.registry import create_proposers, select_proposers

ROOM = 32
"""Rows of a verify for which memory is reserved in advance, if it is available."""
MEASURE_S, N_PROMPT = 0.5, 8
"""Time limit of measuring rounds at load, in seconds, and cached tokens before these rounds."""
SHAPES = ((7, True), (7, False), (3, True), (3, False), (15, True))
"""Verifies to measure, most useful first: number of nodes, True for a top-1 chain (else tree)."""
N_ROUNDS_KEPT = 256
"""Rounds between two writes of the cost file; one write takes about 2 ms."""
N_HEADER = 1 << 16
"""Bytes at the start of a model file that are hashed to identify it, besides its size and time."""


class CostFile:
    """File of measured costs; its name is a hash of the model files and the settings."""

    def __init__(self, paths: Iterable[str], *settings: str | int) -> None:
        """Identifies the file by model files and settings; OSError for unreadable models."""
        files = [_file_identity(part) for path in paths for part in files_of(path)]
        self._identity = [*files, *map(str, settings), _cache_dir.cpu_name()]
        name = hashlib.sha256(os.fsencode("\n".join(self._identity))).hexdigest()[:16]
        self._name = f"costs-{name}.json"

    def load(self) -> tuple[CostModel, dict[str, Any]]:
        """Returns the stored costs and learned values; empty if the file is missing or damaged."""
        stored = _cache_dir.read(self._name, self._identity)
        if stored is not None:
            with contextlib.suppress(*_cache_dir.SENSELESS):
                return CostModel.from_dict(stored["costs"]), dict(stored["learned"])
        return CostModel(), {}

    def store(self, costs: CostModel, learned: Mapping[str, Any]) -> None:
        """Writes the cost model and the learned values of proposers."""
        value = {"costs": costs.to_dict(), "learned": dict(learned)}
        _cache_dir.write(self._name, self._identity, value)


class SpeculativeRuntime:
    """Proposers, controllers and learned state of an engine; a cost file keeps the state."""

    def __init__(
        self,
        sequence: Sequence,
        cost_file: CostFile | None = None,
        max_verify_rows: int = MAX_VERIFY,
    ) -> None:
        """Creates an engine's proposers with the state in the cost file (None: no file is kept)."""
        self.proposers = create_proposers(sequence)
        costs, learned = cost_file.load() if cost_file else (CostModel(), {})
        self.state = ControllerState(costs)
        for proposer in self.proposers:
            with contextlib.suppress(*_cache_dir.SENSELESS):
                proposer.learn(learned[proposer.name])
        self._sequence, self._engine = sequence, sequence.engine
        self._cost_file, self._max_verify_rows = cost_file, max_verify_rows
        self._n_stored = costs.n_observed
        self._auto, self._auto_key = AutoController(self.state, 1, 1, 0), (1, 1, 0, list[str]())

    def controller(self, config: DecodeConfig) -> tuple[list[Proposer], Controller | None]:
        """Returns the proposers and the controller for a config; no controller for plain decoding.

        Errors: ValueError for draft settings that the engine's proposers cannot fulfil.
        """
        proposers = select_proposers(self.proposers, config.draft_type)
        if config.draft == "none":
            return [], None
        drafters = [proposer for proposer in proposers if proposer.needs_forward]
        if config.draft != "auto" and config.draft_type is None:
            proposers = drafters[:1] or proposers
        if not proposers:
            if config.draft == "auto":
                return [], None
            raise ValueError(
                f"draft is {config.draft!r}, which needs a drafter; load one, or use 'auto'"
            )
        longest = max(proposer.max_draft for proposer in drafters or proposers)
        longest = min(config.draft_max or longest, longest)
        least = min(config.draft_min, longest)
        if config.draft == "chain":
            return proposers, FixedController(CHAIN, longest, longest, least)
        if config.draft == "tree":
            most = config.tree_budget or TREE_BUDGET
            shape = MAIN_CHAIN if config.tree_main_chain else TREE
            return proposers, FixedController(shape, most, longest, least)
        most = config.tree_budget or AUTO_TREE_BUDGET
        self.make_room(min(most + 1, ROOM), is_needed=False)
        key = config.draft_max or most, most, least, [proposer.name for proposer in proposers]
        if key != self._auto_key:
            self._auto_key, self._auto = key, AutoController(self.state, *key[:3])
        return proposers, self._auto

    def measure(self) -> None:
        """Measures rounds for up to MEASURE_S seconds if none are known; empties the sequence."""
        sequence, costs = self._sequence, self.state.costs
        n_rows = min(ROOM, self._max_verify_rows, sequence.n_ctx - 2 * N_PROMPT)
        if costs.knows_plain() or n_rows < 2:
            return
        self.make_room(n_rows, is_needed=False)
        n_vocab = self._engine.model.n_vocab
        # Measure with different tokens: equal ones would be routed to the same few experts.
        tokens = [97 * row % n_vocab for row in range(ROOM)]
        drafters = [proposer for proposer in self.proposers if proposer.needs_forward]
        request = SpeculativeState(sequence, tokens[:N_PROMPT], DraftScorer(DecodeConfig()))

        def run(done: Round) -> None:
            started = time.perf_counter()
            if done.n_positions:
                request.n_positions = request.n_nodes = done.n_positions
                request.shape = TOP1 if done.is_top1 else TREE
                next(x for x in drafters if x.name == done.proposer).propose([request])
                request.notes.clear()
            drafted = time.perf_counter()
            if done.is_tree:
                parents = [(node + 1) // 2 - 1 for node in range(done.n_rows)]
                sequence.verify_tree(tokens[: done.n_rows], parents).argmax()
            elif done.n_drafted:
                sequence.verify(tokens[: done.n_rows]).argmax()
            else:
                sequence.decode(tokens[0]).argmax()
            if done.n_drafted:
                sequence.commit(0)
            done.draft_s, done.pass_s = drafted - started, time.perf_counter() - drafted

        try:
            sequence.prefill(tokens[:N_PROMPT]).argmax()
            n_rows = min(n_rows, self._engine.max_verify)
            for drafter in (*drafters, *(() if drafters else (None,))):
                measure(costs, n_rows, drafter, run, MEASURE_S / max(len(drafters), 1))
        except Error:  # measuring is optional; the first request raises this error
            self.state.costs = CostModel()
        finally:
            sequence.reset()

    def make_room(self, n_rows: int, *, is_needed: bool) -> None:
        """Reserves memory for verifies of n_rows rows. Error if memory is short and is_needed."""
        if not is_needed:
            n_rows = min(n_rows, self._max_verify_rows)
        if n_rows > self._engine.max_verify:
            try:
                self._engine.reserve_verify(n_rows)
            except Error:
                if is_needed:
                    raise
                self._max_verify_rows = self._engine.max_verify

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Makes all proposers forget the remembered text of sequences."""
        for sequence in sequences:
            for proposer in self.proposers:
                proposer.forget(sequence)

    def save(self, n_rounds: int = N_ROUNDS_KEPT) -> None:
        """Writes the cost file if at least n_rounds rounds were filed since the last write."""
        n_observed = self.state.costs.n_observed
        if self._cost_file is not None and n_observed >= self._n_stored + n_rounds:
            learned = {proposer.name: proposer.to_dict() for proposer in self.proposers}
            self._cost_file.store(self.state.costs, learned)
            self._n_stored = n_observed


def measure(
    costs: CostModel,
    n_rows: int,
    drafter: Proposer | None,
    run: Callable[[Round], None],
    max_s: float,
) -> None:
    """Runs rounds that accept nothing, so that the first request has a measured cost model.

    n_rows: maximum rows of a pass. drafter: None to measure no drafts. run: runs a round and sets
    its seconds. A round that would probably end later than max_s seconds is left out.
    """
    name, longest = (drafter.name, drafter.max_draft) if drafter else ("", 0)
    plain = 0, True
    shapes = [shape for shape in SHAPES if shape[0] < n_rows and (shape[1] or shape[0] <= longest)]
    warm_up = [shape for shape in (plain, *shapes, plain) for _ in range(N_FIRST + 1)]
    spent_s = 0.0
    for n, is_top1 in (*warm_up, *shapes):
        if spent_s + costs.pass_s(0, n + 1) > max_s:
            continue
        done = Round(0, proposer=name, n_positions=min(n, longest), is_top1=is_top1, n_drafted=n)
        done.is_tree, done.n_tokens, done.n_draft_rows = not is_top1, 1, n + 1
        run(done)
        costs.observe(done)
        spent_s += done.seconds


def _file_identity(path: str) -> str:
    stat = os.stat(path)
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(N_HEADER)).hexdigest()
    return f"{os.path.abspath(path)} {stat.st_size} {stat.st_mtime_ns} {digest}"

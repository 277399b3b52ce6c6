"""The constraint of one answer: which tokens may follow, at every node of a candidate tree.

Reasoning is free. The answer, which the constraint binds, begins behind the mark that ends the
reasoning, or with the first token if the model's template marks no reasoning. A matcher of
llguidance knows the tokens of the answer so far; for a node of a tree it consumes the tokens of the
path to the node, and then takes them back.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..speculative.tree import Tree
from ..text.reasoning import Format, ReasoningSplitter
from .errors import ConstraintError, sentence

if TYPE_CHECKING:  # llguidance is loaded with the first constraint, which takes 100 ms
    from .compiler import CompiledConstraint
    from .vocabulary import Words

MAX_DRAFT_S = 0.02
"""Seconds of the processor after which no more candidates of an answer are checked in a round. A
usual mask takes 20 us, one of an ambiguous grammar up to 0.1 s."""
MAX_SPACES = 2
"""Tokens of white space, which are no part of the answer, that may follow reasoning."""

Region = ReasoningSplitter | int | None
"""Region of the text that follows: None: the answer; a number: the answer, or at most so many
tokens of white space before it; a splitter: the reasoning, or what it calls "before"."""


class AnswerConstraint:
    """The constraint of one answer, and its state behind the tokens that it was told of."""

    def __init__(self, compiled: CompiledConstraint, reasoning: Format | None = None) -> None:
        """Creates the constraint of an answer. reasoning: format of the template's marks."""
        self._compiled, self._vocabulary = compiled, compiled.vocabulary
        self._level = 0
        """Index of the limits in force, which depends on the answer's tokens alone."""
        self._matcher = compiled.matcher(self._level)
        self._renewed_at = -1
        """Length of the answer at which the lexer was last built anew."""
        self._drafts = True
        """False once a candidate has exceeded the limits: the answer is about to do so, too."""
        self._format = reasoning
        self._region: Region = None if reasoning is None else reasoning.splitter()
        self._n_known = 0
        self._consumed: list[int] = []
        """Tokens of the answer, and of the path to a node, that the matcher has consumed."""
        self._path: list[tuple[Region, bool]] = []
        """Region before each token of the path, and True if the matcher has consumed the token."""
        self._n_masked = 0
        """Number of tokens that the matcher had consumed when it computed its last mask."""
        self._row = np.zeros(self._vocabulary.end // 32 + 1, dtype=np.uint32)
        self.error: str | None = None
        """Reason why the mask behind the answer could not be computed."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes the tokens of the answer so far; ConstraintError if the matcher has failed."""
        n, self._n_known = self._n_known, len(tokens)
        for token in tokens[n:]:
            self._push(token)
            self._path.clear()
            while self._matcher.is_error():
                self._widen()

    def forced(self, tree: Tree, depth: int) -> Tree:
        """Returns a tree with the tokens that have no alternative behind any of its nodes.

        depth: most tokens on a path. The tokens are as probable as the node before them.
        """
        tokens, parents = list(tree.tokens), list(tree.parents)
        depths, log_probs = list(tree.depths), list(tree.log_probs)

        def visit(node: int, children: Sequence[int]) -> Sequence[int]:
            forced = self._forced() if self._region is None and depths[node] < depth else []
            # A child of the node is the first forced token, or the constraint forbids it.
            for token in [] if children else forced[: depth - depths[node]]:
                if token == self._vocabulary.end:
                    break
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
                log_probs.append(log_probs[node])
                node = len(tokens) - 1
            return [x for x in children if tree.tokens[x] not in self._vocabulary.stop_tokens]

        self._walk(tree, visit, with_leaves=True)
        return Tree(tokens, parents, depths, log_probs)

    def allowed(self, tree: Tree) -> Tree:
        """Returns a tree without the nodes that the constraint forbids, else in the same order."""
        kept = [0]

        def visit(_: int, children: Sequence[int]) -> Sequence[int]:
            forced = self._forced() if self._region is None else []
            found = [x for x in children if self._allows(tree.tokens[x], forced)]
            kept.extend(found)
            return [x for x in found if tree.tokens[x] not in self._vocabulary.stop_tokens]

        self._walk(tree, visit)
        return tree.only(sorted(kept))

    def masks(self, tree: Tree) -> tuple[Tree, Words]:
        """Returns the tree, and the mask of the tokens after each node, uint32 [n_nodes, n_words].

        The tree lacks the candidates whose masks exceed the limits or would take long: the model
        may still choose their tokens. A mask is all ones behind a token that ends the answer or
        that is forbidden, where nothing is sampled. The mask of the root is all zeros if the answer
        exceeds the limits, which `error` explains.
        """
        rows = np.full((len(tree), self._vocabulary.n_words), 0xFFFFFFFF, dtype=np.uint32)
        stops, self.error = self._vocabulary.stop_tokens, None

        def visit(node: int, children: Sequence[int]) -> Sequence[int]:
            row = self._mask()
            while node == 0 and self._matcher.is_error() and self.error is None:
                try:
                    self._widen()
                    row = self._mask()
                except ConstraintError as error:
                    self.error = str(error)
            rows[node] = row
            found = [x for x in children if _has(row, tree.tokens[x])]
            return [x for x in found if tree.tokens[x] not in stops]

        dropped = set(self._walk(tree, visit, with_leaves=True))
        if not dropped:
            return tree, rows
        for node, parent in enumerate(tree.parents):
            if parent in dropped:
                dropped.add(node)
        kept = [node for node in range(len(tree)) if node not in dropped]
        return tree.only(kept), rows[kept]

    def _walk(
        self,
        tree: Tree,
        visit: Callable[[int, Sequence[int]], Sequence[int]],
        *,
        with_leaves: bool = False,
    ) -> list[int]:
        """Calls visit(node, children), depth first, with the state behind the node's token.

        visit returns the children that are visited next, of which leaves are left out unless
        with_leaves. Returns the nodes that it returned and that exceed a limit or were not visited.
        """
        children: list[list[int]] = [[] for _ in tree.tokens]
        for node, parent in enumerate(tree.parents[1:], 1):
            children[parent].append(node)
        waiting, path = [0], list[int]()
        end = time.thread_time() + MAX_DRAFT_S
        try:
            while waiting:
                node = waiting[-1]
                if node and (not self._drafts or time.thread_time() > end):
                    break
                while path and path[-1] != tree.parents[node]:
                    path.pop()
                    self._pop()
                if node:
                    self._push(tree.tokens[node])
                    path.append(node)
                else:
                    path.append(0)
                    self._path.append((self._region, False))
                found = visit(node, children[node])
                if node and self._matcher.is_error():
                    self._drafts = False
                    break
                waiting.pop()
                waiting += [x for x in reversed(found) if with_leaves or children[x]]
        finally:
            while self._path:
                self._pop()
        return waiting

    def _push(self, token: int) -> None:
        region, consumes = self._region, True
        if isinstance(region, int):
            consumes = self._validates(token)
            self._region = None if consumes else region - 1
        elif region is not None:
            consumes = self._begins(region, token)
            self._region = None if consumes else self._after(region, token)
        self._path.append((region, consumes))
        if consumes:
            if self._n_masked > len(self._consumed):
                # llguidance 1.5.1 to 1.9.1 keep the mask of a text that was taken back, and may
                # return it for other tokens: replace it by that of the text before them.
                self._answer_mask()
            self._consumed.append(token)
            self._consume(token)

    def _pop(self) -> None:
        self._region, consumed = self._path.pop()
        if consumed:
            self._consumed.pop()
            if not self._matcher.rollback(1):
                self._restart()

    def _after(self, splitter: ReasoningSplitter, token: int) -> Region:
        """Returns the region behind a token that does not belong to the answer."""
        after = copy.copy(splitter)
        after.push(self._vocabulary.text(token))
        if after.region != "answer":
            return after
        return MAX_SPACES if self._closing else 0

    def _begins(self, splitter: ReasoningSplitter, token: int) -> bool:
        """True if the token begins the answer where reasoning might begin instead."""
        if splitter.region != "before" or splitter.held:
            return False
        is_mark = self._vocabulary.text(token).startswith(self._opening)
        return not is_mark and self._validates(token)

    @property
    def _opening(self) -> str:
        return self._format.opening if self._format else ""

    @property
    def _closing(self) -> str:
        return self._format.closing if self._format else ""

    def _forced(self) -> list[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            self._restart()
            return []
        return tokens

    def _validates(self, token: int) -> bool:
        return bool(self._matcher.validate_tokens([token]))

    def _allows(self, token: int, forced: Sequence[int]) -> bool:
        """True if the token may follow. forced: the forced tokens of the answer."""
        region = self._region
        if region is None or isinstance(region, int):
            if region and _has(self._vocabulary.spaces, token):
                return True
            if token in self._vocabulary.stop_tokens:
                return bool(self._matcher.is_accepting())
            return token == forced[0] if forced else self._validates(token)
        return _has(self._free(region), token) or self._begins(region, token)

    def _free(self, splitter: ReasoningSplitter) -> Words:
        """Returns the mask of the tokens that may follow and do not belong to the answer."""
        if splitter.region == "before":
            return self._vocabulary.opening(splitter.held, self._opening)
        if not self._closing:  # harmony
            return self._vocabulary.free
        return self._vocabulary.closing(splitter.held, self._closing)

    def _mask(self) -> Words:
        region = self._region
        if region is None:
            return self._answer_mask()
        if isinstance(region, int):
            mask = self._answer_mask()
            return mask | self._vocabulary.spaces if region else mask
        free = self._free(region)
        if region.region == "before" and not region.held:
            return free | self._answer_mask()
        return free

    def _answer_mask(self) -> Words:
        """Returns the mask of the matcher; all zeros if it has failed."""
        row, vocabulary = self._row, self._vocabulary
        self._n_masked = len(self._consumed)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            row[:] = 0  # a failed matcher allows the end of the answer
        mask = row[: vocabulary.n_words] & vocabulary.all
        return mask | vocabulary.stops if _has(row, vocabulary.end) else mask

    def _consume(self, token: int) -> None:
        # A limit may be exceeded within forced text: advance to its end before each token, as masks
        # do, so that the limits are checked at the same places with and without drafts.
        self._matcher.compute_ff_bytes()
        self._matcher.consume_token(token)

    def _widen(self) -> None:
        """Replaces a matcher that has failed on the answer by one with the next limits.

        Answers share a constraint's lexer: if it has failed, it is first built anew.
        Errors: ConstraintError if the answer has exceeded all limits.
        """
        error = self._matcher.get_error()
        is_lexer = error.startswith("lexer error")
        if is_lexer and self._renewed_at != self._n_known:
            self._renewed_at = self._n_known
            self._compiled.renew()
        elif not is_lexer and self._level + 1 < self._compiled.n_levels:
            self._level += 1
        else:
            raise ConstraintError(sentence(error))
        self._restart()

    def _restart(self) -> None:
        """Replaces a failed matcher by one that has consumed the same tokens."""
        self._matcher, self._n_masked = self._compiled.matcher(self._level), 0
        for token in self._consumed:
            self._consume(token)


def _has(mask: Words, token: int) -> bool:
    return bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))

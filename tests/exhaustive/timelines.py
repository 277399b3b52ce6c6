"""Compares sequences on a device that run at once, grow by verifies, or fill the context.

`timelines.py --part many --device CUDA0 --backend-module FILE --only tiny-qwen35` prints a JSON
line for each small random model, as agreement.py does:

    many      five sequences; each pass has prompt tokens, single tokens, a chain and a tree. Then a
              batch of drafted and plain answers, beside the plain answer of each prompt alone
    promoted  a sequence of 500 tokens that were verified in chains and trees, beside a prefill of
              the same tokens
    context   a chain, a tree and drafted answers that take the last cell of the context

The sequences grow along known texts by verifies that contain the next tokens, and wrong ones.
Differences of logits are shares of the range of the CPU's logits. `margins` are the leads in logits
of the tokens that a run alone found best, where another token was best.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from dflash_gguf import native
from dflash_gguf.config import DecodeConfig, LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.speculative.proposers.proposer import SpeculativeState
from dflash_gguf.speculative.tree import Tree

sys.path += [
    str(Path(__file__).resolve().parents[2] / x)
    for x in ("tests/support", "scripts", "scripts/bench")
]
from agreement import N_THREADS, Rows, knowing, sizes_of
from gate import margins_at_differences, margins_of_batch
from gpu.child import report
from gpu.files import write_pair
from gpu.setting import Figures, Setting, add_arguments
from half_right import HalfRight
from proposers import MadeUpProposer
from synthetic_shapes import TINY_NAMES

KINDS = ("prompt", "append", "root", "chain", "tree")
"""Work of a sequence in a pass; single tokens are appended, or verified and committed."""
DRAFTS = ("tree", "none", "chain", "tree", "chain")
N_NODES = 16
N_PROMPT = 24
"""Tokens of a prompt that a pass computes: two sequences' fit into a micro-batch."""
N_RESERVED = 64
"""Rows of verifies that an engine has memory for."""
N_FOLLOWING = 16
"""Tokens whose logits show a state."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Amounts of work, in tokens, passes and answers.

    lengths: of the texts of `many`. n_answers, n_answer: answers of its batch, and their tokens.
    n_promoted: tokens of `promoted`. n_ctx: context of `context`, no multiple of a page of 64
    cells. n_left: tokens of it that a prompt leaves.
    """

    lengths: tuple[int, ...]
    n_passes: int
    n_answers: int
    n_answer: int
    n_promoted: int
    n_ctx: int
    n_left: int


FULL = Sizes((120, 24, 90, 61, 150, 40), 25, 5, 12, 500, 150, 20)
SHORT = Sizes((20, 12, 26, 17), 6, 2, 5, 50, 70, 6)


@dataclass
class Compared:
    """Differences of rows from a run alone on the device, and from the CPU."""

    off: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def add(self, rows: Rows, alone: Rows, cpu: Rows) -> None:
        """Compares logits of the same tokens, all float32 [n, n_vocab]."""
        self.off += (np.abs(rows - cpu).max(axis=1) / float(np.ptp(cpu))).tolist()
        for row, other in zip(rows, alone, strict=True):
            lead = float(other.max() - other[row.argmax()])
            self.margins += [lead] if lead > 0 else []

    def figures(self) -> Figures:
        return {
            "rows": len(self.off),
            "largest": max(self.off),
            "median": float(np.median(self.off)),
            "margins": [round(margin, 6) for margin in self.margins],
        }


@dataclass
class Growing:
    """A sequence that grows along a text. alone, cpu: the logits after each token of the text."""

    sequence: native.Sequence
    text: list[int]
    alone: Rows
    cpu: Rows

    def entry(
        self, kind: str, n_nodes: int, random: np.random.Generator
    ) -> tuple[native.BatchEntry, list[int]]:
        """Returns an entry with the text's next tokens, and the places of right tokens in it."""
        start, n_vocab = self.sequence.position, self.sequence.engine.model.n_vocab
        following = self.text[start:]
        if start == 0 or kind in ("prompt", "append"):
            new = following[: 1 if start and kind == "append" else N_PROMPT]
            out = np.empty((len(new), n_vocab), dtype=np.float32)
            return native.BatchEntry(self.sequence, new, all_logits=out), list(range(len(new)))
        n = min(1 if kind == "root" else n_nodes, len(following))
        n_right = 1 + int(random.integers(n))
        tokens, parents, right = _around(following[:n_right], n, random, n_vocab, kind == "tree")
        entry = native.BatchEntry(self.sequence, tokens, is_verify=True, parents=parents)
        return entry, right

    def compare(self, rows: Rows, start: int, compared: Compared) -> None:
        """Compares the rows of the text's tokens from `start`, float32 [n, n_vocab]."""
        at = slice(start, start + len(rows))
        compared.add(rows, self.alone[at], self.cpu[at])


def _around(
    path: list[int], n: int, random: np.random.Generator, n_vocab: int, is_tree: bool
) -> tuple[list[int], list[int], list[int]]:
    """Returns tokens and parents of n nodes that contain a path, and the nodes of the path."""
    tokens, parents, right = [path[0]], [-1], [0]
    for node in range(1, n):
        n_left = len(path) - len(right)
        if n_left and (not is_tree or random.random() < 2 * n_left / (n - node)):
            parents.append(right[-1])
            tokens.append(path[len(right)])
            right.append(node)
        else:
            parents.append(int(random.integers(node)) if is_tree else node - 1)
            tokens.append(int(random.integers(n_vocab)))
    return tokens, parents, right


def advance(
    growing: Sequence[Growing],
    work: Sequence[tuple[str, int]],
    random: np.random.Generator,
    compared: Compared,
) -> None:
    """Runs a pass with a kind of work and a number of nodes for each sequence.

    Compares the rows of right tokens, and commits some of the right nodes of each verify.
    """
    engine = growing[0].sequence.engine
    starts = [one.sequence.position for one in growing]
    entries = [one.entry(*kind, random) for one, kind in zip(growing, work, strict=True)]
    found = engine.run([entry for entry, _ in entries])
    paths = []
    for one, start, (entry, right), rows in zip(growing, starts, entries, found, strict=True):
        if entry.all_logits is not None:
            one.compare(entry.all_logits, start, compared)
        else:
            one.compare(rows.gather(right), start, compared)
            paths.append((one.sequence, right[: 1 + int(random.integers(len(right)))]))
    engine.commit(paths)


class EachHalfRight(MadeUpProposer):
    """Proposes known answers. known: proposers by the first token of their prompt."""

    name = "each half right"
    max_draft = 15

    def __init__(self, known: dict[int, HalfRight]) -> None:
        self._known = known

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        return [self._known[one.history[0]].propose([one])[0] for one in requests]

    def observe(
        self, requests: Sequence[SpeculativeState], tokens: Sequence[Sequence[int]]
    ) -> None:
        pass


@dataclass
class Models:
    """A random model on the CPU and on the device. n_vocab: its tokens."""

    on_cpu: native.Model
    on_device: native.Model

    def text(self, n: int, random: np.random.Generator) -> list[int]:
        tokens: list[int] = random.integers(0, self.on_cpu.n_vocab, n).tolist()
        return tokens

    def sequences(self, n: int, n_ctx: int) -> list[native.Sequence]:
        """Returns n sequences of one engine on the device."""
        config = replace(self.on_device.config, n_parallel=n)
        engine = native.Engine(self.on_device, n_ctx, config=config)
        engine.reserve_verify(N_RESERVED)
        return [native.Sequence(engine) for _ in range(n)]

    def growing(self, sequence: native.Sequence, text: list[int]) -> Growing:
        """Computes the expected logits of a text, alone and on the CPU."""
        alone, cpu = (
            native.Sequence(native.Engine(model, len(text)))
            for model in (self.on_device, self.on_cpu)
        )
        return Growing(sequence, text, alone.logits(text), cpu.logits(text))


def many(models: Models, sizes: Sizes) -> Figures:
    """Runs passes with all kinds of work at once, then a batch of answers."""
    random = np.random.default_rng(1)
    sequences = models.sequences(len(KINDS), sum(sizes.lengths) + N_RESERVED * len(KINDS))
    texts = [models.text(n, random) for n in sizes.lengths]
    expected = [models.growing(sequences[0], text) for text in texts]
    live: list[Growing | None] = [None] * len(sequences)
    compared, begun = Compared(), 0
    for number in range(sizes.n_passes):
        has_begun = False
        active, work = [], []
        for i, sequence in enumerate(sequences):
            one = live[i]
            if one is None or sequence.position == len(one.text):
                if has_begun:  # the prompts of two would not fit into a micro-batch
                    continue
                has_begun = True
                sequence.reset()
                one = live[i] = replace(expected[begun % len(expected)], sequence=sequence)
                begun += 1
            active.append(one)
            work.append((KINDS[(number + i) % len(KINDS)], N_NODES - i))
        advance(active, work, random, compared)
    for sequence in sequences[1:]:
        sequence.close()
    sequences[0].reset()
    return compared.figures() | {
        "begun": begun,
        "answers": _answers(models, sequences[0], texts, sizes),
    }


def _answers(
    models: Models, sequence: native.Sequence, texts: list[list[int]], sizes: Sizes
) -> Figures:
    """Compares a batch of answers, each with drafts of its kind, with plain answers alone."""
    decoder = Decoder(sequence, None)
    config = DecodeConfig(max_tokens=sizes.n_answer, draft="none")
    prompts, drafts = texts[: sizes.n_answers], list(DRAFTS[: sizes.n_answers])
    plain, known = [], {}
    for prompt, draft in zip(prompts, drafts, strict=True):
        plain.append(decoder.generate(prompt, config).tokens)
        known[prompt[0]] = knowing(plain[-1], len(prompt), models.on_cpu.n_vocab, draft)
    decoder._speculative.proposers = [EachHalfRight(known)]
    margins, results = margins_of_batch(decoder, prompts, config, plain, draft=drafts)
    drafted = [result for result in results if result.draft != "none"]
    return {
        "n": len(results),
        "margins": [round(margin, 6) for margin in margins],
        "tokens_a_round": round(
            sum(x.n_tokens - 1 for x in drafted) / sum(x.rounds for x in drafted), 2
        ),
    }


def promoted(models: Models, sizes: Sizes) -> Figures:
    """Compares states after many verifies with those after a prefill of the same tokens.

    `one_token`: the difference if the last verified token had been another.
    """
    random = np.random.default_rng(2)
    n = sizes.n_promoted
    (sequence,) = models.sequences(1, n + 2 * N_NODES)
    growing = models.growing(sequence, models.text(n + N_FOLLOWING, random))
    text, following = growing.text[:n], growing.text[n:]
    compared, n_passes = Compared(), 0
    growing.text = text
    while sequence.position < n:
        kind, n_nodes = ("chain", "tree")[n_passes % 2], N_NODES + 7 * (n_passes % 3 == 0)
        advance([growing], [(kind, n_nodes)], random, compared)
        n_passes += 1
    found = sequence.logits(following)
    other = list(text)
    other[-1] = (other[-1] + 1) % models.on_cpu.n_vocab
    expected, wrong = (_after(sequence, x, following) for x in (text, other))
    after = Compared()
    after.add(found, expected, expected)
    one_token = Compared()
    one_token.add(wrong, expected, expected)
    along = compared.figures()
    return {
        "passes": n_passes,
        "along": along,
        "late_median": float(np.median(compared.off[-100:])),
        "after": after.figures(),
        "one_token": one_token.figures(),
    }


def _after(sequence: native.Sequence, text: list[int], following: list[int]) -> Rows:
    sequence.reset()
    sequence.prefill(text)
    return sequence.logits(following)


def context(models: Models, sizes: Sizes) -> Figures:
    """Fills a context to its last cell by a chain and by a tree, then by drafted answers."""
    random = np.random.default_rng(3)
    (sequence,) = models.sequences(1, sizes.n_ctx)
    growing = models.growing(sequence, models.text(sizes.n_ctx, random))
    prompt = growing.text[: -sizes.n_left]
    compared = Compared()
    for kind in ("chain", "tree"):
        sequence.reset()
        sequence.prefill(prompt)
        while sequence.position < sequence.n_ctx:
            advance([growing], [(kind, N_NODES)], random, compared)
    decoder = Decoder(sequence, None)
    config = DecodeConfig(draft="none")
    plain = decoder.generate(prompt, config)
    margins, n_tokens = [], []
    for draft in ("chain", "tree"):
        known = knowing(plain.tokens, len(prompt), models.on_cpu.n_vocab, draft)
        decoder._speculative.proposers = [known]
        found, result = margins_at_differences(decoder, prompt, config, plain.tokens, draft=draft)
        margins += [round(margin, 6) for margin in found]
        n_tokens.append(result.n_tokens)
    return compared.figures() | {
        "left": sequence.n_ctx - len(prompt),
        "ended_by": plain.stop_reason,
        "tokens": [plain.n_tokens, *n_tokens],
        "answer_margins": margins,
    }


PARTS: dict[str, Callable[[Models, Sizes], Figures]] = {
    "many": many,
    "promoted": promoted,
    "context": context,
}


def compare(
    setting: Setting, part: str, names: Sequence[str], weights: str, cache_type: str, sizes: Sizes
) -> Iterator[Figures]:
    """Yields a line for each model. part: a key of PARTS."""
    setting.found_device()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            target, _ = write_pair(Path(folder), name, weights, seed=2 * TINY_NAMES.index(name) + 1)
            shared = sizes_of(cache_type)
            models = Models(
                native.Model(
                    str(target), LoadConfig(n_gpu_layers=0, n_threads=N_THREADS, **shared)
                ),
                native.Model(str(target), setting.load_config(**shared)),
            )
            yield {"architecture": name.removeprefix("tiny-"), **PARTS[part](models, sizes)}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--only", choices=TINY_NAMES, action="append", help="may be given again")
    parser.add_argument("--weights", default="q8_0", help="type of the weights; default: q8_0")
    parser.add_argument("--cache-type", default="f16", help="of K and V; default: f16")
    parser.add_argument("--short", action="store_true", help="fewer passes, tokens and answers")
    args = parser.parse_args()
    names = args.only or TINY_NAMES
    lines = compare(
        Setting.of(args),
        args.part,
        names,
        args.weights,
        args.cache_type,
        SHORT if args.short else FULL,
    )
    report(args.part, lines)


if __name__ == "__main__":
    main()

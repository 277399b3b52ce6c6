"""Lets a target answer collected prompts, in pieces that survive an interruption.

    scripts/train/make_answers.py TARGET.gguf PROMPTS.jsonl FOLDER [--part 0/2] [--piece 50000]

Answers lie in FOLDER/PART-NUMBER.xz (pieces.py). A repeated call leaves out the prompts that any
.xz file in FOLDER has answers to.
--part 0/2 answers every second prompt: a process with one thread for each core is faster than one
process with two threads, and waits for nobody if other work takes a core. Three of five answers are
greedy, the others are sampled at temperature 0.5 or 0.8. Answers end where they begin to loop.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dflash_gguf
from dflash_gguf._files import check_file
from dflash_gguf.cli.command import guarded
from dflash_gguf.engine.request import RequestState
from dflash_gguf.train import pieces
from dflash_gguf.train.prompts import has_template, user_turn
from train.overlap import HeldOutRuns

TEMPERATURES = (0.0, 0.0, 0.0, 0.5, 0.8)
SAMPLED = {"top_k": 0, "top_p": 0.95, "min_p": 0.0}
MAX_PROMPT = 640
"""Longest prompt in tokens; longer ones are left out."""


@dataclass(slots=True)
class Item:
    """A prompt of the list, its answers so far, and their texts."""

    index: int
    kind: str
    turns: list[str]
    temperature: float
    texts: list[str] = field(default_factory=list)
    answers: list[pieces.StoredAnswer] = field(default_factory=list)
    is_user_turn: bool = False


class Maker:
    """Answers items with a decoder, `n_parallel` at once."""

    def __init__(self, decoder: dflash_gguf.Decoder, held_out: HeldOutRuns, n_new: int) -> None:
        self._decoder, self._held_out, self._n_new = decoder, held_out, n_new
        self._live: list[tuple[Item, RequestState]] = []
        self._user_turn = user_turn(decoder)

    def run(self, items: Iterator[Item]) -> Iterator[pieces.StoredAnswer]:
        """Yields the answers to a prompt, and to its answer, once all of them have ended."""
        while True:
            while len(self._live) < self._decoder.engine.n_parallel:
                item = next(items, None)
                if item is None:
                    break
                self._begin(item)
            if not self._live:
                return
            self._decoder.step()
            ended = [x for x in self._live if x[1].is_finished]
            self._live = [x for x in self._live if not x[1].is_finished]
            for item, state in ended:
                yield from self._end(item, state)
            for _, state in self._live:
                state.steps.clear()

    def _prompt(self, text: str) -> list[int]:
        return list(self._decoder.chat_prompt([{"role": "user", "content": text}]))

    def _begin(self, item: Item) -> bool:
        """Adds a request for the next turn of an item, unless the turn is too long or held out."""
        item.is_user_turn = not item.turns
        if item.is_user_turn:
            tokens, n_new, temperature = self._user_turn, 200, 1.0
        else:
            text = item.turns[len(item.texts)]
            if item.texts:
                text = text.replace("{answer}", item.texts[-1])
            if self._held_out.are_in(text):
                return False
            tokens, n_new, temperature = self._prompt(text), self._n_new, item.temperature
        if len(tokens) > MAX_PROMPT:
            return False
        seed = item.index * 4 + len(item.texts) + 2 * item.is_user_turn
        config = dflash_gguf.DecodeConfig(
            max_tokens=n_new, temperature=temperature, seed=seed, draft="none",
            **SAMPLED,
        )  # fmt: skip
        request = self._decoder.request(tokens, config)

        def loops() -> bool:
            n_tokens = len(state.history)
            return n_tokens % 16 == 0 and pieces.loop_end(state.history, len(tokens)) < n_tokens

        state = self._decoder.add_request(request, cancelled=loops)
        self._live.append((item, state))
        return True

    def _end(self, item: Item, state: RequestState) -> Iterator[pieces.StoredAnswer]:
        if state.error is not None:
            raise state.error
        result = self._decoder.result(state)
        if item.is_user_turn:
            if result.stop_reason == "token" and 10 < len(result.text.strip()) < 1500:
                item.turns = [result.text.strip()]
                self._begin(item)
            return
        prompt = list(state.request.prompt)
        tokens = (*prompt, *result.tokens)
        tokens = tokens[: pieces.loop_end(tokens, len(prompt))]
        turn = len(item.texts)
        item.answers.append(
            pieces.StoredAnswer(item.index, turn, item.kind, item.temperature, len(prompt), tokens)
        )
        item.texts.append(result.text.strip())
        is_whole = len(tokens) == len(prompt) + len(result.tokens)
        if not (is_whole and len(item.texts) < len(item.turns) and self._begin(item)):
            yield from item.answers


def items_of(path: Path) -> list[Item]:
    """Returns the prompts of a list; ValueError for a line that is none."""
    items = []
    for index, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        temperature = random.Random(index).choice(TEMPERATURES)
        try:
            x = json.loads(line)
            kind, turns = x["kind"], x["turns"]
        except (ValueError, KeyError, TypeError):
            kind, turns = None, None
        if kind in pieces.KINDS and isinstance(turns, list) and {*map(type, turns)} <= {str}:
            items.append(Item(index, kind, turns, temperature))
        else:
            raise ValueError(
                f'{path}: line {index + 1} is no object with "turns", a list of texts, and "kind", '
                f"one of {', '.join(pieces.KINDS)}"
            )
    return items


def save(folder: Path, part: str, answers: Iterable[pieces.StoredAnswer]) -> None:
    """Writes a piece under the next number that is free in the folder."""
    number = 0
    while (path := folder / f"{part}-{number:05d}.xz").exists():
        number += 1
    pieces.save(path, answers)


def make(
    args: argparse.Namespace,
    items: list[Item],
    decoder: dflash_gguf.Decoder,
    held_out: HeldOutRuns,
) -> None:
    """Answers a part's prompts and writes a piece whenever it has enough tokens."""
    part, _, n_parts = args.part.partition("/")
    done, n_before = set(), 0
    for path in args.out.glob("*.xz"):
        for answer in pieces.load(path):
            done.add(answer.index)
            n_before += answer.n_answer
    mine = [x for x in items if x.index % int(n_parts) == int(part)]
    left = [x for x in mine if x.index not in done]
    print(f"part {part}: {len(left)} of {len(mine)} prompts are left to answer", flush=True)
    answers: list[pieces.StoredAnswer] = []
    n_new = n_piece = 0
    started = time.monotonic()
    try:
        for answer in Maker(decoder, held_out, args.tokens).run(iter(left)):
            answers.append(answer)
            n_piece += answer.n_answer
            if n_piece >= args.piece:
                save(args.out, part, answers)
                n_new, n_piece, answers = n_new + n_piece, 0, []
                speed = n_new / (time.monotonic() - started)
                print(
                    f"{time.strftime('%H:%M:%S')} part {part}: {n_new} new tokens of answers "
                    f"(begun with {n_before}), {speed:.0f} tokens/s",
                    flush=True,
                )
    finally:
        if answers:
            save(args.out, part, answers)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, metavar="TARGET.gguf")
    parser.add_argument("prompts", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("out", type=Path, metavar="FOLDER")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="answer every N-th prompt")
    parser.add_argument("--piece", type=int, default=50_000, help="answer tokens of a file")
    parser.add_argument("--parallel", type=int, default=32, help="answers at once")
    parser.add_argument("--tokens", type=int, default=256, help="maximum tokens of an answer")
    parser.add_argument("-t", "--threads", type=int, default=1)
    args = parser.parse_args()
    for name in ("piece", "parallel", "tokens", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, must be at least 1")
    if args.tokens + MAX_PROMPT >= pieces.MAX_VOCAB:
        parser.error(f"--tokens is {args.tokens}, must be below {pieces.MAX_VOCAB - MAX_PROMPT}")
    part, _, n_parts = args.part.partition("/")
    if not (part.isdecimal() and n_parts.isdecimal() and int(part) < int(n_parts)):
        parser.error(f"--part is {args.part}, must be I/N with I from 0 to N - 1")
    return args


def run(args: argparse.Namespace) -> None:
    """Answers the prompts of the arguments."""
    check_file(args.prompts)
    items = items_of(args.prompts)
    try:
        from train.collect_prompts import held_out_texts
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the package {error.name} is not installed: pip install 'dflash-gguf[test]'"
        ) from None
    held_out = HeldOutRuns(held_out_texts())
    args.out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # n_ctx is shared by all answers, so no answer exceeds the trained context.
        warnings.filterwarnings("ignore", message="n_ctx is .*, the model was trained for")
        decoder = dflash_gguf.load(
            args.target,
            n_ctx=args.parallel * (MAX_PROMPT + args.tokens) * 2 // 3,
            n_threads=args.threads,
            n_parallel=args.parallel,
        )
    with decoder:
        if decoder.model.n_vocab > pieces.MAX_VOCAB:
            raise ValueError(
                f"{args.target} has {decoder.model.n_vocab} tokens; the limit is {pieces.MAX_VOCAB}"
            )
        if not has_template(decoder):
            raise ValueError(f"{args.target}: has no chat template")
        make(args, items, decoder, held_out)


def main() -> int:
    args = parse()
    return guarded(lambda: run(args) or 0)


if __name__ == "__main__":
    sys.exit(main())

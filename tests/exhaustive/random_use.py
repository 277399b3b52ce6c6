"""Compares drafted answers with plain ones, over random models, settings and ways of use.

    random_use.py [--answers 3000] [--seed 1]
    random_use.py --seed 1 --only 17      # repeat one decoder with its answers
    random_use.py --many                  # concurrent answers from several threads

A decoder has a random model of any architecture and weight type (or the bundled model in another
type), K/V types, threads, repacked weights or not, and a drafter. Its prompts are new, continue
the last answer, or repeat or shorten an earlier prompt. Answers are free or constrained, greedy or
sampled with any cuts and penalties; drafted as chains, trees, by `auto` or not at all; and end by
length, context, stop text or cancellation. A second decoder computes the plain answer on one
thread.

With --many a decoder answers up to 16 requests at once in a short context. Threads read streams,
cancel some, and ask for several answers per call. Timing matters there, so --only may not
reproduce a difference.

Prints every difference with the command that repeats it, then one JSON object. The exit status is 1
if any answer differs. `auto` depends on measured times, so its rounds vary, but its text must not.
Without --many the JSON object has the SHA-256 of all tokens, to compare two versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_gguf import bundled
from dflash_gguf.config import DecodeConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import CACHE_TYPES, Drafter, Engine, LoadConfig, Model, Sequence
from dflash_gguf.outputs import Result
from dflash_gguf.text.tokenizer import Tokenizer
from dflash_gguf.text.tools.grammars import call_grammar
from dflash_gguf.text.tools.parser import ToolFormat

sys.path += [
    str(Path(__file__).resolve().parents[2] / x) for x in ("tests/support", "scripts/bench")
]
from half_right import HalfRight
from small_models import (
    NEED_IMPORTANCES,
    SHAPES,
    SLOW,
    WEIGHT_TYPES,
    retyped,
    write_small,
    write_small_drafter,
)

TRAINED = "python-tiny"
TRAINED_TYPES = tuple(x for x in WEIGHT_TYPES if x not in (*SLOW, *NEED_IMPORTANCES))
ANSWERS_A_DECODER = 12
LEAVES = ("cancelled", "closed", "progress")
"""Ways to cancel: the `cancelled` callback, closing the stream, an exception in a callback."""


RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "return": {}},
    "required": ["name", "return"],
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"json_schema": RECORD},
    {"json_schema": {"type": "array", "items": {"enum": ["return", "word7", "é", 17, None]}}},
    {"grammar": 'root ::= "return " v+\nv ::= [a-z]+ " " | "word" [0-9]+ " " | "(" v ")"'},
    {"grammar": 'start: ("return" | "word7" | /[ -~]/ | /\\n/)+'},
    {"regex": r"(return|word[0-9]|[a-z_]{1,9}|[()., :=])*\n"},
    {"grammar": call_grammar(ToolFormat("hermes", {"word7": RECORD}))},
)


class Left(Exception):
    """Raised by a callback to cancel an answer."""


@dataclass(frozen=True, slots=True)
class Setting:
    kind: str
    weights: str
    drafter: str
    config: LoadConfig

    def __str__(self) -> str:
        c = self.config
        where = f"{c.cache_type_k}/{c.cache_type_v}, {c.n_threads} threads, repack {c.repack}"
        return f"{self.kind} {self.weights}, drafter {self.drafter}, {where}, n_ctx {c.n_ctx}"


def drawn_setting(random: np.random.Generator, number: int) -> Setting:
    """Returns random settings; architectures and weight types take turns."""
    place, is_trained = number // 3, number % 3 == 0
    if not is_trained:
        place = number - place - 1  # index among decoders with random weights
    kind = TRAINED if is_trained else list(SHAPES)[place % len(SHAPES)]
    types = TRAINED_TYPES if is_trained else WEIGHT_TYPES
    caches = CACHE_TYPES[:3] if kind == "llama, heads of 40" else CACHE_TYPES
    k = str(random.choice(caches))
    config = LoadConfig(
        n_ctx=int(random.choice((96, 256, 700))),
        cache_type_k=k,
        cache_type_v=k if random.random() < 0.7 else str(random.choice(caches)),
        n_threads=int(random.integers(1, 4)),
        n_gpu_layers=0,
        n_ubatch=int(random.choice((16, 64, 512))),
        draft_window=int(random.choice((30, 4096))),
        repack=bool(random.random() < 0.7),
    )
    return Setting(kind, types[place % len(types)], str(random.choice(("q8_0", "f16"))), config)


class Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def target(self, setting: Setting) -> Path:
        path = self._folder / f"{setting.kind}-{setting.weights}.gguf"
        if not path.exists():
            if setting.kind == TRAINED:
                retyped(bundled.TARGET, path, setting.weights)
            else:
                write_small(path, setting.kind, setting.weights)
        return path

    def drafter(self, setting: Setting) -> Path:
        """Returns the bundled drafter for the bundled model, or one with random weights."""
        if setting.kind == TRAINED:
            return bundled.DRAFTER
        kind, weights, own = setting.kind, setting.weights, setting.drafter
        path = self._folder / f"{kind}-{weights}-{own}-drafter.gguf"
        if not path.exists():
            write_small_drafter(path, kind, own, self.target(setting), weights)
        return path


def drawn_config(random: np.random.Generator, longest: int) -> DecodeConfig:
    greedy = random.random() < 0.4
    drawn: dict[str, Any] = {
        "temperature": 0.0 if greedy else float(random.choice((0.2, 0.7, 1.0, 1.8))),
        "seed": int(random.integers(1 << 32)),
        "top_k": int(random.choice((0, 1, 5, 40, 100))),
        "top_p": float(random.choice((0.5, 0.95, 1.0))),
        "min_p": float(random.choice((0.0, 0.05, 0.3))),
        "ignore_eos": bool(random.random() < 0.5),
        "max_tokens": None if random.random() < 0.1 else int(random.integers(1, 70)),
    }
    if random.random() < 0.3:
        drawn["repeat_penalty"] = float(random.choice((0.8, 1.1, 1.4)))
        drawn["presence_penalty"] = float(random.choice((0.0, 0.5)))
        drawn["frequency_penalty"] = float(random.choice((0.0, -0.3, 0.4)))
        drawn["repeat_last_n"] = int(random.choice((4, 64)))
    if random.random() < 0.3:
        drawn |= CONSTRAINTS[random.integers(len(CONSTRAINTS))]
        drawn["ignore_eos"] = False
    if random.random() < 0.15:
        drawn["stop"] = str(random.choice(("e", "\n", "return", "word7")))
    drawn["draft"] = str(random.choice(("none", "chain", "tree", "auto"), p=(0.1, 0.3, 0.3, 0.3)))
    if random.random() < 0.5:
        drawn["draft_max"] = int(random.integers(1, longest + 1))
        drawn["draft_min"] = int(random.integers(drawn["draft_max"] + 1)) // 3
    if drawn["draft"] in ("tree", "auto") and random.random() < 0.7:
        drawn["tree_budget"] = int(random.choice((1, 2, 7, 15, 23, 40, 63)))
        drawn["tree_main_chain"] = bool(random.random() < 0.3)
    return DecodeConfig(**drawn)


def leaving(left: int) -> tuple[Callable[[], bool], Callable[[int, int], None]]:
    """Returns two callbacks that cancel after `left` calls: by returning True, by raising Left."""

    def enough() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    def progress(_done: int, _total: int) -> None:
        if enough():
            raise Left

    return enough, progress


class Use:
    """A decoder with drafts, and a plain decoder for the expected answers."""

    def __init__(self, setting: Setting, files: Files, random: np.random.Generator) -> None:
        self.random = random
        path = files.target(setting)
        tokenizer = Tokenizer.from_file(path)
        model = Model(str(path), setting.config)
        drafter = Drafter(str(files.drafter(setting)), model)
        self.drafted = Decoder(Sequence(Engine(model, drafter=drafter)), tokenizer)
        alone = Model(str(path), replace(setting.config, n_threads=1))
        self.plain = Decoder(Sequence(Engine(alone)), tokenizer)
        self.proposers = self.drafted._speculative.proposers
        self.prompts: list[list[int]] = []
        is_trained = setting.kind == TRAINED
        self.text = tokenizer.tokenize(Path(argparse.__file__).read_text()) if is_trained else None
        self.counts: Counter[str] = Counter()
        self.digest = hashlib.sha256()
        """Hash of the tokens of all complete answers, in order."""

    def close(self) -> None:
        self.plain.close()
        self.drafted.close()

    def answers(self, n: int) -> Iterator[str]:
        """Runs n answers and yields a sentence for each difference."""
        for number in range(n):
            prompt = self._prompt()
            config = drawn_config(self.random, self.drafted.sequence.max_draft)
            self.plain.reset()
            expected = self.plain.generate(prompt, replace(config, draft="none"))
            self._choose_proposer(expected, len(prompt))
            config = self._with_types(config)
            if self.random.random() < 0.25:
                left = self._leave(prompt, config)
                if left.tokens != expected.tokens[: len(left.tokens)]:
                    yield f"answer {number}, left early: {_parted(left, expected)}; {config}"
                if self.random.random() < 0.3:
                    continue  # the next prompt follows a cancelled answer
            found = self.drafted.generate(prompt, config)
            self._count(found, config)
            self.digest.update(np.asarray(found.tokens, np.int32).tobytes() + b"|")
            if _facts(found) != _facts(expected):
                yield f"answer {number}: {_parted(found, expected)}; {config}"
            self.prompts = [*self.prompts, [*prompt, *found.tokens]][-5:]

    def _with_types(self, config: DecodeConfig) -> DecodeConfig:
        """Returns config with a draft_type in 60 % of cases: all proposers, or suffix."""
        names = [proposer.name for proposer in self.drafted._speculative.proposers]
        chance = self.random.random()
        if chance < 0.4:
            return replace(config, draft_type=names)
        return replace(config, draft_type="suffix") if chance < 0.6 else config

    def _count(self, found: Result, config: DecodeConfig) -> None:
        self.counts["answers"] += 1
        self.counts[config.draft] += 1
        self.counts[found.stop_reason] += 1
        self.counts["constrained"] += config.constraint is not None
        self.counts["greedy" if config.temperature == 0.0 else "sampled"] += 1
        self.counts["tokens"] += len(found.tokens)
        self.counts["drafted tokens"] += found.n_drafted
        self.counts["accepted tokens"] += sum(
            i * n for i, n in enumerate(found.accept_histogram or ())
        )
        for name, (_, taken) in found.candidates_by_proposer.items():
            self.counts[f"accepted of {name}"] += taken
        self.counts["tokens found in the caches"] += found.n_cached

    def _tokens(self, n: int) -> list[int]:
        if self.text is None:
            return self.random.integers(0, self.drafted.model.n_vocab - 2, n).tolist()
        start = int(self.random.integers(len(self.text) - n))
        return self.text[start : start + n]

    def _prompt(self) -> list[int]:
        """Returns a new prompt, or one that shares text with an earlier prompt and its answer."""
        n_ctx = self.drafted.n_ctx
        prompt: list[int] = []
        if self.prompts and self.random.random() < 0.7:
            prompt = self.prompts[int(self.random.integers(len(self.prompts)))]
            if self.random.random() < 0.4:
                prompt = prompt[: int(self.random.integers(1, len(prompt) + 1))]
        if not prompt or self.random.random() < 0.6:
            prompt = [*prompt, *self._tokens(int(self.random.choice((1, 3, 20, 60))))]
        n_room = n_ctx - int(self.random.choice((0, 1, 8, 40)))
        return prompt[:n_room]

    def _choose_proposer(self, expected: Result, n_prompt: int) -> None:
        """Proposes with the drafter, or with a proposer that knows half of the answer."""
        drafting = self.drafted._speculative
        drafting.proposers = self.proposers
        if self.random.random() < (0.3 if self.text else 0.7):
            width = int(self.random.integers(1, 5))
            every, shift = int(self.random.integers(2, 12)), int(self.random.integers(width))
            known = HalfRight(
                expected.tokens,
                n_prompt,
                lambda r: every + r % 5,
                self.drafted.sequence.max_draft,
                width=width,
                rank=lambda i: (i // 3 + shift) % width,
                n_vocab=self.drafted.model.n_vocab,
            )
            drafting.proposers = [*(x for x in self.proposers if not x.needs_forward), known]

    def _leave(self, prompt: list[int], config: DecodeConfig) -> Result:
        way = str(self.random.choice(LEAVES))
        self.counts[f"left: {way}"] += 1
        enough, progress = leaving(int(self.random.integers(0, 12)))
        cancelled = enough if way == "cancelled" else None
        on_prefill = progress if way == "progress" else None
        stream = self.drafted.stream(prompt, config, cancelled=cancelled, on_prefill=on_prefill)
        try:
            for _ in stream:
                if way == "closed" and enough():
                    stream.close()
                    break
        except Left:
            pass
        return stream.result()


class UseOfMany(Use):
    """A decoder that several threads use at once, and a plain decoder."""

    N_THREADS = 4

    def __init__(self, setting: Setting, files: Files, random: np.random.Generator) -> None:
        n_parallel = int(random.choice((2, 5, 16)))
        n_ctx = int(random.choice((256, 512, 1024)))
        many = replace(setting.config, n_parallel=n_parallel, n_ctx=n_ctx)
        super().__init__(replace(setting, config=many), files, random)
        self._lock = threading.Lock()
        self._faults: list[str] = []

    def answers(self, n: int) -> Iterator[str]:
        """Runs n answers per thread and yields a sentence for each difference."""
        threads = [
            threading.Thread(target=self._ask, args=(random, n))
            for random in self.random.spawn(self.N_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield from self._faults

    def _ask(self, random: np.random.Generator, n: int) -> None:
        try:
            for _ in range(n):
                self._answer(random)
        except Exception as error:
            self._faults.append(f"{type(error).__name__}: {error}")
            raise

    def _answer(self, random: np.random.Generator) -> None:
        with self._lock:  # self.random and self.plain are not thread-safe
            prompts = [self._prompt() for _ in range(int(random.choice((1, 1, 3))))]
            drawn = [drawn_config(random, self.drafted.sequence.max_draft) for _ in prompts]
            expected = []
            for prompt, config in zip(prompts, drawn, strict=True):
                self.plain.reset()
                expected.append(self.plain.generate(prompt, replace(config, draft="none")))
        if len(prompts) > 1:
            config = replace(drawn[0], cache_prompt=bool(random.random() < 0.8))
            with self._lock:
                expected = []
                for prompt in prompts:
                    self.plain.reset()
                    expected.append(self.plain.generate(prompt, replace(config, draft="none")))
            found = self.drafted.generate_batch(prompts, config)
        else:
            config = drawn[0]
            found = [self._stream(random, prompts[0], config)]
        with self._lock:
            for prompt, one, right in zip(prompts, found, expected, strict=True):
                n = len(one.tokens)
                left = len(prompts) == 1 and one.stop_reason == "cancelled"
                if one.tokens != right.tokens[:n] if left else _facts(one) != _facts(right):
                    self._faults.append(f"{_parted(one, right)}; {config}")
                self._count(one, config)
                self.prompts = [*self.prompts, [*prompt, *one.tokens]][-8:]

    def _stream(
        self, random: np.random.Generator, prompt: list[int], config: DecodeConfig
    ) -> Result:
        """Reads a stream to its end, or cancels it at a random moment."""
        way = str(random.choice(("read", "read", *LEAVES)))
        self.counts[f"left: {way}"] += way != "read"
        enough, progress = leaving(int(random.integers(0, 40)))
        stream = self.drafted.stream(
            prompt,
            config,
            cancelled=enough if way == "cancelled" else None,
            on_prefill=progress if way == "progress" else None,
        )
        try:
            for _ in stream:
                if way == "closed" and enough():
                    stream.close()
                    break
        except Left:
            stream.close()
        return stream.result()


def _facts(result: Result) -> tuple[Any, ...]:
    return result.tokens, result.text, result.stop_reason


def _parted(found: Result, expected: Result) -> str:
    pairs = enumerate(zip(found.tokens, expected.tokens, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    where = f"tokens differ from {at} of {len(expected.tokens)} on" if at is not None else ""
    return where or f"{len(found.tokens)} tokens, {found.stop_reason}, for {_facts(expected)[2]}"


def use(
    seed: int,
    numbers: range,
    files: Files,
    counts: Counter[str],
    digest: hashlib._Hash | None = None,
    *,
    many: bool = False,
) -> Iterator[str]:
    """Runs the decoders of these numbers and yields a sentence for each difference."""
    for number in numbers:
        random = np.random.default_rng((seed, number))
        setting = drawn_setting(random, number)
        used = (UseOfMany if many else Use)(setting, files, random)
        for sentence in used.answers(ANSWERS_A_DECODER):
            how = f"--seed {seed} --only {number}{' --many' if many else ''}"
            yield f"tests/exhaustive/random_use.py {how}: {setting}: {sentence}"
        used.close()
        counts.update(used.counts)
        if digest is not None:
            digest.update(used.digest.digest())
        if number % 25 == 24:
            print(f"{counts['answers']} answers", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare drafted answers with plain ones")
    parser.add_argument("--answers", type=int, default=3000, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="DECODER", help="one decoder of the run")
    parser.add_argument("--many", action="store_true", help="many answers at once")
    args = parser.parse_args()
    numbers = range(-(-args.answers // ANSWERS_A_DECODER))
    if args.only is not None:
        numbers = range(args.only, args.only + 1)
    counts: Counter[str] = Counter()
    digest = hashlib.sha256()
    n_different = 0
    with tempfile.TemporaryDirectory() as folder:
        for sentence in use(
            args.seed, numbers, Files(Path(folder)), counts, digest, many=args.many
        ):
            n_different += 1
            print(sentence, flush=True)
    facts = {"seed": args.seed, "differing": n_different, **counts}
    if not args.many:
        facts["tokens_sha256"] = digest.hexdigest()
    print(json.dumps(facts))
    sys.exit(n_different > 0)


if __name__ == "__main__":
    main()

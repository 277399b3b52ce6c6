"""Writes docs/gallery.md: answers of a bundled model, plain and drafted, side by side.

    scripts/bench/gallery.py [docs/gallery.md] [-m smollm2] [--tokens 160] [--runs 5]

Decodes the first prompt of each kind of own_answers.py, greedily, by plain decoding and with
`--draft auto`, in turns of 30 ms. Shows the run of median ratio: the drafted answer, and beside it
what plain decoding had written by the same time. A picture beside the page has the tokens of both
over time. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from matplotlib.figure import Figure
from own_answers import texts_of
from turns import facts

import dflash_gguf
from dflash_gguf import bundled

KINDS = {"code": "Code", "chat": "Chat", "prose": "Prose", "edit": "Edit"}
TURN_S = 0.03
"""Seconds that one side decodes before the other continues."""
COLUMN = 58
"""Characters of a column of text."""


@dataclass(frozen=True)
class Side:
    """An answer with its times: seconds from the start of decoding to each token."""

    result: dflash_gguf.Result
    times: list[float]

    @property
    def speed(self) -> float:
        """Returns the tokens per second after the first token, which the prefill gives."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


def decode(decoders: dict[str, dflash_gguf.Decoder], prompt: list[int], n: int) -> dict[str, Side]:
    """Answers a prompt on all sides in turns; returns the sides by name."""
    streams = {}
    for name, decoder in decoders.items():
        decoder.forget_texts()  # an earlier run of the prompt would be a perfect draft
        draft = "none" if name == "plain" else "auto"
        streams[name] = decoder.stream(prompt, max_tokens=n, temperature=0.0, draft=draft)
    times: dict[str, list[float]] = {name: [] for name in streams}
    spent = dict.fromkeys(streams, 0.0)
    is_open = set(streams)
    while is_open:
        for name in sorted(is_open):
            begun = last = time.perf_counter()
            for step in streams[name]:
                now = time.perf_counter()
                spent[name] += now - last
                last = now
                times[name] += [spent[name]] * len(step.tokens)
                if now - begun > TURN_S:
                    break
            else:
                is_open.remove(name)
    return {name: Side(stream.result(), times[name]) for name, stream in streams.items()}


def columns(left: str, right: str) -> Iterator[str]:
    """Yields the lines of two texts side by side."""

    def lines(text: str) -> list[str]:
        return [x for line in text.splitlines() for x in textwrap.wrap(line, COLUMN) or [""]]

    for a, b in zip_longest(lines(left), lines(right), fillvalue=""):
        yield f"{a:{COLUMN}} | {b}".rstrip()


def section(title: str, prompt: str, sides: dict[str, Side], decoder: dflash_gguf.Decoder) -> str:
    """Returns a kind's part of the page. decoder: turns tokens into text."""
    plain, auto = sides["plain"], sides["auto"]
    seconds, result = auto.times[-1], auto.result
    n_plain = sum(x <= seconds for x in plain.times)
    left = f"drafted, {len(auto.times)} tokens after {seconds:.2f} s"
    text = decoder.detokenize(plain.result.tokens[:n_plain])
    lines = [
        f"{left:{COLUMN}} | plain, {n_plain} tokens by then",
        "-" * COLUMN + "-+-" + "-" * COLUMN,
        *columns(result.text, text),
    ]
    return "\n".join(
        [
            f"## {title}\n\n````text\n{prompt.strip()}\n````\n",
            f"**{auto.speed / plain.speed:.2f} times** as fast: {auto.speed:.0f} tokens/s,"
            f" plainly {plain.speed:.0f}. {result.tau:.2f} tokens a round,"
            f" {result.n_accepted} of {result.n_drafted} drafted tokens accepted.\n",
            "````text",
            *lines,
            "````\n",
        ]
    )


def draw(found: dict[str, dict[str, Side]], path: Path) -> None:
    """Writes a PNG with each kind's tokens over seconds."""
    figure = Figure(figsize=(12, 3), layout="constrained")
    for axes, (kind, sides) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        for name, side in sides.items():
            axes.step(side.times, range(1, len(side.times) + 1), where="post", label=name)
        axes.set(title=KINDS[kind], xlabel="seconds", ylabel="tokens", xlim=0, ylim=0)
    axes.legend()
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", nargs="?", type=Path, default=Path("docs/gallery.md"))
    parser.add_argument("-m", "--model", default="smollm2", help="name of a bundled model")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    args = parser.parse_args()
    files = bundled.find(args.model)
    decoders = {
        name: dflash_gguf.load(files.target, drafter=drafter, n_ctx=2048, n_threads=args.threads)
        for name, drafter in (("plain", None), ("auto", files.drafter))
    }
    found: dict[str, dict[str, Side]] = {}
    sections = []
    for kind in args.kinds.split(","):
        text = texts_of(kind, 1)[0]
        prompt = decoders["plain"].chat_prompt([{"role": "user", "content": text}])
        runs = [decode(decoders, prompt, args.tokens) for _ in range(args.runs)]
        if any(x["plain"].result.tokens != x["auto"].result.tokens for x in runs):
            raise SystemExit(f"{kind}: the drafted answer differs from the plain one")
        runs.sort(key=lambda x: x["auto"].speed / x["plain"].speed)
        found[kind] = runs[len(runs) // 2]
        sections.append(section(KINDS[kind], text, found[kind], decoders["plain"]))
    picture = args.page.with_suffix(".png")
    draw(found, picture)
    machine = facts()
    head = f"""\
# Answers, plain and drafted

`dflash-run -m {args.model}` answers the first prompt of each kind that the benchmarks use. The
left column has the greedy answer with `--draft auto`, the right one what plain decoding had written
by the same time; its whole answer is the same text. Each prompt was decoded {args.runs} times, in
turns of {TURN_S * 1000:.0f} ms, and the run of median ratio is shown. `scripts/bench/gallery.py`
wrote this page ({machine["commit"]}; {decoders["plain"].engine.n_threads} threads, \
{machine["cpu"]}, kernels of {machine["kernels"]}).

![Tokens over seconds, plain and drafted]({picture.name})

"""
    args.page.write_text(head + "\n".join(sections), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Scores a server on GSM8K's word problems with drafting and without, and compares the texts.

    scripts/gsm8k.py FILE.jsonl http://127.0.0.1:8080 [--beside URL] [--limit N] [--at-once N]

FILE.jsonl has a "question" and an "answer" ending in "#### NUMBER" a line, as GSM8K's test.jsonl
(github.com/openai/grade-school-math). Each question is asked twice, greedily: as the server drafts
by default, and with "draft": "none", or of the second server (--beside), which does not draft. The
last line is JSON; the exit code is 1 if a request fails or texts differ. Needs only Python's
standard library.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from smoke import CHAT, Site, chat, words

INSTRUCTION = "Solve the problem step by step. End with a line: #### NUMBER\n\n"


def number_of(text: str) -> float | None:
    """Returns the number behind the last "####" of a text, else its last number, else None."""
    after = text.rpartition("####")[2]
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", after) or re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    if not found:
        return None
    return float(found[0 if "####" in text else -1].replace(",", ""))


class Run:
    """The answers of one server to all problems, in their order."""

    def __init__(
        self, site: Site, problems: list[dict[str, str]], args: argparse.Namespace
    ) -> None:
        more: dict[str, Any] = {} if site is args.site else {"draft": "none"}

        def ask(problem: dict[str, str]) -> Any:
            body = chat(INSTRUCTION + problem["question"], args.n_predict, **more)
            return site.answer(CHAT, body)

        began = time.perf_counter()
        with ThreadPoolExecutor(args.at_once) as pool:
            found = list(pool.map(ask, problems))
        self.seconds = time.perf_counter() - began
        self.texts = [words(one) for one in found]
        self.n_tokens = sum(one["usage"]["completion_tokens"] for one in found)
        self.n_right = sum(
            number_of(text) == number_of(problem["answer"])
            for text, problem in zip(self.texts, problems, strict=True)
        )

    def figures(self, name: str) -> dict[str, float]:
        """Returns JSON fields of score and speed; their names begin with `name`."""
        return {
            f"{name}_right": self.n_right,
            f"{name}_tokens": self.n_tokens,
            f"{name}_tokens_per_s": round(self.n_tokens / self.seconds, 2),
        }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("file", type=Path, metavar="FILE", help='JSON lines with "question", "answer"')
    p.add_argument("url", help="address of the server, e.g. http://127.0.0.1:8080")
    p.add_argument("--beside", metavar="URL", help="server that answers without drafting")
    p.add_argument("--api-key", metavar="KEY")
    p.add_argument("--limit", type=int, metavar="N", help="problems to ask (default: all)")
    p.add_argument("--at-once", type=int, default=1, metavar="N", help="parallel requests")
    p.add_argument("-n", "--n-predict", type=int, default=256, metavar="N", help="tokens an answer")
    args = p.parse_args()
    lines = args.file.read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines if line.strip()][: args.limit]
    args.site = Site(args.url, args.api_key)
    beside = Site(args.beside or args.url, args.api_key)
    try:
        drafted, plain = Run(args.site, problems, args), Run(beside, problems, args)
    except (AssertionError, OSError, http.client.HTTPException) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    different = [
        n for n, (a, b) in enumerate(zip(drafted.texts, plain.texts, strict=True)) if a != b
    ]
    for n in different[:3]:
        print(f"problem {n}: drafted {drafted.texts[n]!r}, plain {plain.texts[n]!r}")
    report = {"problems": len(problems), "different_texts": len(different)}
    print(json.dumps(report | drafted.figures("drafted") | plain.figures("plain")))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())

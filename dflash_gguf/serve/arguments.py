"""The arguments of dflash-serve, and the environment variables that stand for them."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli.arguments import add_drafting, add_sampling, decode_config
from ..cli.model_arguments import add_fit, add_options, new_parser
from ..config import REASONING_FORMATS
from .settings import Settings

DESCRIPTION = "Answers the HTTP requests of OpenAI's and of llama-server's clients."
EPILOG = """\
Flags that llama-server has keep its names and meaning, and its environment variables
(LLAMA_ARG_...) stand for flags that are not given. docs/serve.md has every route and field.
"""
TEMPERATURE = 0.8
"""Where neither a request nor --temp says, as in llama-server."""
QUEUE = 128

ENVIRONMENT = {
    f"LLAMA_ARG_{name.upper().replace('-', '_')}": f"--{name}"
    for name in (
        *("alias", "api-key-file", "cache-prompt", "cache-ram", "cache-reuse"),
        *("cache-type-k", "cache-type-v", "chat-template", "chat-template-file"),
        *("ctx-size", "device", "draft-max", "draft-min", "flash-attn", "host", "jinja"),
        *("model", "model-draft", "models-max", "n-cpu-moe", "n-gpu-layers", "n-predict"),
        *("port", "reasoning", "ssl-cert-file", "ssl-key-file", "threads", "threads-http"),
        "timeout",
    )
} | {
    "LLAMA_API_KEY": "--api-key",
    "LLAMA_ARG_BATCH": "--batch-size",
    "LLAMA_CHAT_TEMPLATE_KWARGS": "--chat-template-kwargs",
    "LLAMA_ARG_ENDPOINT_METRICS": "--metrics",
    "LLAMA_ARG_ENDPOINT_PROPS": "--props",
    "LLAMA_ARG_ENDPOINT_SLOTS": "--slots",
    "LLAMA_ARG_MODELS_DIR": "--models",
    "LLAMA_ARG_N_PARALLEL": "--parallel",
    "LLAMA_ARG_THINK": "--reasoning-format",
    "LLAMA_ARG_THINK_BUDGET": "--reasoning-budget",
    "LLAMA_ARG_UBATCH": "--ubatch-size",
}
IGNORED: tuple[tuple[tuple[str, ...], bool, str], ...] = (
    (("--cache-reuse",), True, "shifted keys and values would change the text"),
    (("--threads-http",), True, "HTTP is answered by one thread"),
    (("--jinja",), False, "chat templates are Jinja always"),
    (("--no-jinja",), False, "chat templates are Jinja always"),
    (("--props",), False, "nothing can be changed by POST /props"),
    (("--flash-attn", "-fa"), True, "attention is chosen by the device"),
    (("--kv-unified", "-kvu"), False, "the context is one pool always"),
    (("--cont-batching", "-cb"), False, "requests join and leave at any time"),
    (("--spec-type",), True, "the drafter's file says what it is"),
    (("--no-webui", "--no-ui"), False, "there is no page"),
    (("--offline",), False, "nothing is downloaded"),
    (("--swa-full",), False, "what layers with a window forget is kept with prefixes"),
    (("--log-disable",), False, "the log is one line a request"),
    (("--mlock",), False, "weights stay where the system puts them"),
    (("--no-mmap",), False, "weights are read as suits the device"),
    (("--no-context-shift",), False, "there is no shift"),
)
"""Flags of llama-server that do nothing here: names, whether a value follows, and why."""


def parser() -> argparse.ArgumentParser:
    """The parser."""
    p = new_parser("dflash-serve", DESCRIPTION, EPILOG)
    _add_models(p)
    _add_http(p)
    _add_answers(p)
    add_options(p)
    add_fit(p)
    add_drafting(p)
    add_sampling(p)
    p.set_defaults(temp=TEMPERATURE, escape=True)
    for action in p._actions:
        if action.dest == "temp":
            action.help = f"0: always the best token (default: {TEMPERATURE})"
    group = p.add_argument_group("flags of llama-server that do nothing here")
    for flags, has_value, why in IGNORED:
        settings: dict[str, Any] = {"dest": "ignored", "help": f"ignored: {why}"}
        if has_value:
            settings |= {"nargs": "?" if "-fa" in flags else None, "metavar": "X"}
        else:
            settings["nargs"] = 0
        group.add_argument(*flags, action=_Ignored, default=[], **settings)
    return p


class _Ignored(argparse.Action):
    """Keeps the name of a flag that does nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: object,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        flags = [*getattr(namespace, self.dest), option_string or self.option_strings[0]]
        setattr(namespace, self.dest, flags)


def _add_models(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("models")
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        "-m",
        "--model",
        metavar="FILE|NAME",
        help="GGUF file of the model, or a name as dflash-run -m takes (default: smollm2 if its "
        "package is installed, else python-tiny)",
    )
    one.add_argument(
        "--models",
        "--models-dir",
        metavar="FOLDER",
        help="requests choose among the models of a folder by name",
    )
    group.add_argument(
        "--models-max",
        type=int,
        default=1,
        metavar="N",
        help="models loaded at once (default: 1)",
    )
    group.add_argument(
        "-a", "--alias", metavar="A,B", help="names of the model in answers and in /v1/models"
    )
    group.add_argument(
        "--list-devices", action="store_true", help="name what models can run on, and end"
    )
    group.add_argument("--tags", metavar="A,B", help="tags of the model in /v1/models")


def _add_http(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("HTTP")
    group.add_argument(
        "--host",
        action="append",
        metavar="HOST",
        help="address to listen on, several by comma or by several flags (default: 127.0.0.1)",
    )
    group.add_argument(
        "--port", type=int, default=8080, metavar="N", help="0: any free one (default: 8080)"
    )
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="keys, several by comma"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="file with a key a line")
    group.add_argument(
        "--no-api-key",
        action="store_true",
        help="listen beyond this machine although no key is needed",
    )
    group.add_argument(
        "--cors-origins",
        default="localhost",
        metavar="A,B",
        help="pages of which origins a browser lets ask; localhost, or * for all "
        "(default: localhost)",
    )
    group.add_argument(
        "-to",
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds a client may take to send or to read (default: 600)",
    )
    group.add_argument(
        "--queue",
        type=int,
        default=QUEUE,
        metavar="N",
        help=f"requests that may wait, beyond them: 429 (default: {QUEUE})",
    )
    group.add_argument(
        "--sse-ping-interval",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds of silence after which a stream shows that it lives, -1: never (default: 10)",
    )
    group.add_argument("--ssl-key-file", metavar="FILE", help="for HTTPS")
    group.add_argument("--ssl-cert-file", metavar="FILE", help="for HTTPS")
    group.add_argument("--metrics", action=argparse.BooleanOptionalAction, help="route /metrics")
    group.add_argument(
        "--slot-save-path",
        metavar="FOLDER",
        help="let POST /slots/N write what a slot's text left behind to files here, and read them",
    )
    group.add_argument(
        "--slots",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="route /slots (default)",
    )


def _add_answers(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("conversations")
    template = group.add_mutually_exclusive_group()
    template.add_argument(
        "--chat-template", metavar="NAME|FILE", help="a built-in template, a file, or its text"
    )
    template.add_argument("--chat-template-file", metavar="FILE", help="a template's file")
    group.add_argument(
        "--chat-template-kwargs", metavar="JSON", help="values for the template, as an object"
    )
    group.add_argument(
        "-rea",
        "--reasoning",
        choices=("on", "off", "auto"),
        default="auto",
        help="let models think first that offer the choice (default: auto, as the template has it)",
    )
    group.add_argument(
        "--reasoning-format",
        choices=(*REASONING_FORMATS, "deepseek", "deepseek-legacy"),
        default="auto",
        help="auto, deepseek: thoughts are in reasoning_content; none: they stay in content",
    )
    group.add_argument(
        "--reasoning-budget",
        type=int,
        choices=(-1, 0),
        default=-1,
        help="0: no thoughts; -1: no limit (default)",
    )
    group.add_argument(
        "--cache-prompt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse what the context holds of a prompt (default)",
    )
    group.add_argument(
        "-b",
        "--batch-size",
        type=int,
        default=2048,
        metavar="N",
        help="prompt tokens between two reports of return_progress (default: 2048)",
    )
    group.add_argument(
        "-v", "--verbose", action="store_true", help="every answer has the prompt as evaluated"
    )


def with_environment(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command line after what environment variables say, which it thereby overrides.

    A flag without a value is meant by 1, true, on, yes, and not by 0, false, off, no.
    """
    actions = {flag: action for action in parser()._actions for flag in action.option_strings}
    words: list[str] = []
    given = {word.partition("=")[0] for word in argv if word.startswith("-")}
    for variable, flag in ENVIRONMENT.items():
        value = environ.get(variable)
        action = actions.get(flag)
        if value is None or action is None or given & set(action.option_strings):
            continue
        if action.nargs != 0:
            words += [f"{flag}={value}"]
        elif value.lower() in ("1", "true", "on", "yes", "enabled"):
            words.append(flag)
        elif value.lower() in ("0", "false", "off", "no", "disabled"):
            off = f"--no-{flag[2:]}"
            words += [off] if off in actions else []
        else:
            raise ValueError(f"{variable} is {value!r}, must be 1 or 0")
    return [*words, *argv]


def settings_of(args: argparse.Namespace) -> Settings:
    """What the server's parts are told. ValueError, OSError for bad values."""
    if args.timeout <= 0:
        raise ValueError(f"--timeout is {args.timeout:g}, must be greater than 0")
    if args.sse_ping_interval != -1 and args.sse_ping_interval <= 0:
        raise ValueError(
            f"--sse-ping-interval is {args.sse_ping_interval:g}, must be greater than 0, or -1"
        )
    if args.queue < 0:
        raise ValueError(f"--queue is {args.queue}, must be at least 0")
    if args.batch_size < 1:
        raise ValueError(f"--batch-size is {args.batch_size}, must be at least 1")
    args.reasoning_format = "none" if args.reasoning_format == "none" else "auto"
    return Settings(
        decode=decode_config(args),
        keys=tuple(_keys(args)),
        cors_origins=tuple(listed(args.cors_origins)),
        tags=tuple(listed(args.tags)),
        has_metrics=bool(args.metrics),
        has_slots=args.slots,
        slot_save_path=_folder(args.slot_save_path),
        verbose=args.verbose,
        n_batch=args.batch_size,
        timeout_s=args.timeout,
        keep_alive_s=math.inf if args.sse_ping_interval == -1 else args.sse_ping_interval,
    )


def template_of(args: argparse.Namespace) -> str | None:
    """The template in place of the model's own, read from its file if it is one.

    Errors: OSError, ValueError.
    """
    path = args.chat_template_file
    if path is None:
        return None if args.chat_template is None else str(args.chat_template)
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not valid UTF-8") from None


def template_variables(args: argparse.Namespace) -> dict[str, Any]:
    """Values for the template. ValueError for what is no JSON object."""
    if args.chat_template_kwargs is None:
        return {}
    try:
        variables = json.loads(args.chat_template_kwargs)
    except (json.JSONDecodeError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise ValueError("--chat-template-kwargs must be a JSON object")
    return variables


def thinks(args: argparse.Namespace, variables: dict[str, Any]) -> bool | None:
    """Whether models think where a request does not say; None: as their templates have it."""
    wanted = variables.pop("enable_thinking", None)
    if args.reasoning_budget == 0 or args.reasoning == "off":
        return False
    return True if args.reasoning == "on" else wanted


def notes(args: argparse.Namespace) -> list[str]:
    """What is to be said about flags that do nothing."""
    why = {flag: reason for flags, _, reason in IGNORED for flag in flags}
    return [f"{flag} is ignored: {why[flag]}" for flag in dict.fromkeys(args.ignored)]


def listed(text: str | None) -> list[str]:
    """The parts of "A,B"."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _folder(path: str | None) -> Path | None:
    if path is not None and not Path(path).is_dir():
        raise ValueError(f"--slot-save-path {path}: is no folder")
    return None if path is None else Path(path)


def _keys(args: argparse.Namespace) -> list[str]:
    keys = [key for text in args.api_key for key in listed(text)]
    if args.api_key_file is not None:
        lines = Path(args.api_key_file).read_text(encoding="utf-8").splitlines()
        of_file = [line.strip() for line in lines if line.strip()]
        keys += of_file
        if not of_file:
            raise ValueError(f"--api-key-file {args.api_key_file}: holds no key")
    for key in keys:
        if not re.fullmatch(r"[!-~]+", key):
            raise ValueError("a key may hold only printable ASCII without spaces")
    return keys

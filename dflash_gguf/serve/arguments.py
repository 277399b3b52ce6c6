"""Command-line flags of dflash-serve, and the environment variables that can set them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli.arguments import (
    add_drafting,
    add_sampling,
    add_template,
    attribute_of,
    decode_config,
    given_fields,
)
from ..cli.llama_flags import CONSTRAINTS, add_llama_flags
from ..cli.model_arguments import add_fit, add_options, load_config, new_parser
from ..config import REASONING_FORMATS
from ..native import MAX_PARALLEL
from .clients import networks
from .settings import Settings

DESCRIPTION = "Answers the HTTP requests of OpenAI's and of llama-server's clients."
EPILOG = """\
Flags that llama-server has keep its names and meaning, and its environment variables
(LLAMA_ARG_...) stand for flags that are not given. docs/serve.md has every route and field.
"""
TEMPERATURE = 0.8
"""Default sampling temperature, that of llama-server."""
QUEUE = 128
MAX_S = 1e6
"""Largest number of seconds that a flag accepts, which timers can still count."""

ENVIRONMENT = {
    f"LLAMA_ARG_{name.upper().replace('-', '_')}": f"--{name}"
    for name in (
        *("alias", "api-key-file", "cache-prompt", "cache-ram", "cache-reuse"),
        *("cache-type-k", "cache-type-v", "chat-template", "chat-template-file"),
        *("ctx-size", "device", "draft-max", "draft-min", "flash-attn", "host", "jinja"),
        *(
            "model",
            "model-draft",
            "models-max",
            "models-preset",
            "n-cpu-moe",
            "n-gpu-layers",
            "n-predict",
        ),
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
    "LLAMA_ARG_REMAP_DEVELOPER_ROLE": "--remap-developer-role",
    "LLAMA_SPEC_NO_THINK": "--no-think",
    "LLAMA_ARG_THINK": "--reasoning-format",
    "LLAMA_ARG_THINK_BUDGET": "--reasoning-budget",
    "LLAMA_ARG_UBATCH": "--ubatch-size",
}
IGNORED: tuple[tuple[tuple[str, ...], bool, str], ...] = (
    (("--cache-reuse",), True, "shifted keys and values would change the text"),
    (("--threads-http",), True, "HTTP is answered by one thread"),
    (("--props",), False, "nothing can be changed by POST /props"),
    (("--no-webui", "--no-ui"), False, "there is no web page"),
    (("--remap-developer-role",), False, "the role developer becomes system always"),
)
"""Flags of llama-server alone without effect here: names, whether a value follows, reason."""
REFUSED = ((CONSTRAINTS, "each request has its own: response_format, json_schema or grammar"),)


def parser(*, raises: bool = False) -> argparse.ArgumentParser:
    """Returns dflash-serve's command-line parser. raises: ValueError in place of exit code 2."""
    p = new_parser("dflash-serve", DESCRIPTION, EPILOG, raises=raises)
    _add_models(p)
    _add_http(p)
    _add_answers(p)
    add_options(p)
    add_fit(p)
    add_drafting(p)
    add_sampling(p)
    p.set_defaults(escape=True)
    for action in p._actions:
        if action.dest == "temperature":
            action.help = (
                "0: always the best token (default: the model file's general.sampling, else "
                f"{TEMPERATURE})"
            )
    add_llama_flags(p, IGNORED, REFUSED)
    return p


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
        help="folder of models, one of which each request names",
    )
    group.add_argument(
        "--models-preset",
        metavar="FILE",
        help="INI file with flags of each model, in llama-server's form",
    )
    group.add_argument(
        "--sleep-idle-seconds",
        type=float,
        default=-1,
        metavar="S",
        help="unload a model that had no request for so long, until the next one, -1: never "
        "(default: -1)",
    )
    group.add_argument(
        "--models-max",
        type=int,
        default=1,
        metavar="N",
        help="models loaded at once, 0: no limit (default: 1)",
    )
    group.add_argument(
        "-a", "--alias", metavar="A,B", help="names of the model in answers and in /v1/models"
    )
    group.add_argument(
        "--list-devices", action="store_true", help="list the devices that can run models, and exit"
    )
    group.add_argument("--tags", metavar="A,B", help="tags of the model in /v1/models")


def _add_http(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("HTTP")
    group.add_argument(
        "--host",
        action="append",
        metavar="HOST",
        help="address to listen on, several by comma or by several flags, or the path of a Unix "
        "socket that ends in .sock (default: 127.0.0.1)",
    )
    group.add_argument(
        "--port", type=int, default=8080, metavar="N", help="0: any free port (default: 8080)"
    )
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="API keys, several by comma"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="file with one API key per line")
    group.add_argument(
        "--share-prefixes",
        action="store_true",
        help="let requests with different API keys reuse each other's texts: for one person with "
        "several keys",
    )
    group.add_argument(
        "--no-api-key",
        action="store_true",
        help="let other machines send requests without a key",
    )
    group.add_argument(
        "--cors-origins",
        default="localhost",
        metavar="A,B",
        help="origins whose web pages may send requests: localhost (pages of this machine and of "
        "installed programs), * for all, null, or a list (default: localhost)",
    )
    group.add_argument(
        "--allowed-hosts",
        default="",
        metavar="A,B",
        help="names by which clients call this server, besides --host, IP addresses and local "
        "names; * for all. With a key every name is allowed",
    )
    group.add_argument(
        "--trusted-proxies",
        default="",
        metavar="A,B",
        help="addresses or networks of proxies whose X-Forwarded-For names the client; clients "
        "with the same key, else the same address, share turns",
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
        help=f"answers that may wait; while so many do, requests get status 429 (default: {QUEUE})",
    )
    group.add_argument(
        "--max-answers",
        type=int,
        default=Settings.max_answers,
        metavar="N",
        help="answers that one request may ask for, n for each prompt "
        f"(default: {Settings.max_answers})",
    )
    group.add_argument(
        "--sse-ping-interval",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds of silence before a stream sends a comment, -1: never (default: 10)",
    )
    group.add_argument("--ssl-key-file", metavar="FILE", help="private key for HTTPS")
    group.add_argument("--ssl-cert-file", metavar="FILE", help="certificate for HTTPS")
    group.add_argument("--metrics", action=argparse.BooleanOptionalAction, help="serve /metrics")
    group.add_argument(
        "--slot-save-path",
        metavar="FOLDER",
        help="folder where POST /slots/N saves and restores the cached prefix of a slot",
    )
    group.add_argument(
        "--slot-save-mib",
        type=int,
        default=Settings.max_slot_bytes >> 20,
        metavar="N",
        help="MiB of each API key's files there beyond which nothing more is saved "
        f"(default: {Settings.max_slot_bytes >> 20})",
    )
    group.add_argument(
        "--slots",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve /slots (default)",
    )


def _add_answers(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("conversations")
    add_template(group)
    group.add_argument(
        "-rea",
        "--reasoning",
        choices=("on", "off", "auto"),
        default="auto",
        help="switch thinking on or off if the chat template can (default: auto, on)",
    )
    group.add_argument(
        "--no-think",
        dest="reasoning",
        action="store_const",
        const="off",
        default=argparse.SUPPRESS,
        help="the same as --reasoning off, as in dflash-run",
    )
    group.add_argument(
        "--reasoning-format",
        choices=(*REASONING_FORMATS, "deepseek", "deepseek-legacy"),
        default="auto",
        help="auto, deepseek: thoughts go to reasoning_content; none: thoughts stay in content",
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
        help="reuse the cached prefix of a prompt (default)",
    )
    group.add_argument(
        "-b",
        "--batch-size",
        type=int,
        default=2048,
        metavar="N",
        help="most prompt tokens of a pass and of a report of return_progress (default: 2048)",
    )
    group.add_argument(
        "-v", "--verbose", action="store_true", help="add the prompt as evaluated to every answer"
    )


def with_environment(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns the command line with flags from environment variables before it.

    A flag on the command line overrides its variable. A flag without a value is set by 1, true, on
    or yes, and switched off by 0, false, off or no. Raises ValueError for any other value.
    """
    actions = {flag: action for action in parser()._actions for flag in action.option_strings}
    words: list[str] = []
    given = {word.partition("=")[0] for word in argv if word.startswith("-")}
    for variable, flag in ENVIRONMENT.items():
        value = environ.get(variable)
        action = actions.get(flag)
        if value is None or action is None or given & set(action.option_strings):
            continue
        words += flag_words(action, flag, value, variable)
    return [*words, *argv]


def flag_words(action: argparse.Action, flag: str, value: str, name: str) -> list[str]:
    """Returns the flag that an environment variable or preset key stands for. name: for errors."""
    if action.nargs != 0:
        return [f"{flag}={value}"]
    if is_on(value, name):
        return [flag]
    return [off] if (off := f"--no-{flag[2:]}") in action.option_strings else []


def is_on(value: str, name: str) -> bool:
    """Returns True for 1, true, on or yes, False for 0, false, off or no; else ValueError."""
    if value.lower() in ("1", "true", "on", "yes", "enabled"):
        return True
    if value.lower() in ("0", "false", "off", "no", "disabled"):
        return False
    raise ValueError(f"{name} is {value!r}, must be 1 or 0")


def settings_of(args: argparse.Namespace) -> Settings:
    """Returns the settings on the command line. Raises ValueError or OSError for bad values."""
    for flag, low, high in (
        ("--port", 0, 65535),
        ("--parallel", 1, MAX_PARALLEL),
        ("--models-max", 0, None),
        ("--queue", 0, None),
        ("--max-answers", 1, None),
        ("--slot-save-mib", 1, None),
        ("--batch-size", 1, None),
    ):
        value = getattr(args, "n_parallel" if flag == "--parallel" else attribute_of(flag))
        if value is not None and (value < low or (high is not None and value > high)):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            raise ValueError(f"{flag} is {value}, must be {limits}")
    for flag, has_off in (
        ("--timeout", False),
        ("--sse-ping-interval", True),
        ("--sleep-idle-seconds", True),
    ):
        value = getattr(args, attribute_of(flag))
        if not 0 < value <= MAX_S and not (has_off and value == -1):
            off = ", or -1 (off)" if has_off else ""
            raise ValueError(f"{flag} is {value:g}, must be above 0 and at most {MAX_S}{off}")
    if (args.ssl_key_file is None) != (args.ssl_cert_file is None):
        raise ValueError("--ssl-key-file and --ssl-cert-file go together: give both")
    load_config(args, None)
    args.reasoning_format = "none" if args.reasoning_format == "none" else "auto"
    origins = listed(args.cors_origins)
    for origin in origins:
        if not re.fullmatch(r"localhost|\*|null|[\w+.-]+://[^/]+", origin):
            raise ValueError(
                f"--cors-origins holds {origin!r}, must be localhost, *, null or origins such as "
                "https://example.org, without a path"
            )
    return Settings(
        decode=decode_config(args, {"temperature": TEMPERATURE}),
        given=frozenset(given_fields(args)),
        keys=tuple(_keys(args)),
        shares_prefixes=args.share_prefixes,
        cors_origins=tuple(origins),
        allowed_hosts=tuple(listed(",".join([args.allowed_hosts, *(args.host or [])]))),
        trusted_proxies=tuple(networks(listed(args.trusted_proxies))),
        tags=tuple(listed(args.tags)),
        has_metrics=bool(args.metrics),
        has_slots=args.slots,
        slot_save_path=_folder(args.slot_save_path),
        max_slot_bytes=args.slot_save_mib << 20,
        verbose=args.verbose,
        n_batch=args.batch_size,
        timeout_s=args.timeout,
        max_answers=args.max_answers,
        keep_alive_s=math.inf if args.sse_ping_interval == -1 else args.sse_ping_interval,
    )


def thinks(args: argparse.Namespace, variables: dict[str, Any]) -> bool:
    """Returns the default thinking mode, which a template that cannot think ignores."""
    wanted = variables.pop("enable_thinking", None)
    if args.reasoning_budget == 0 or args.reasoning == "off":
        return False
    return args.reasoning == "on" or wanted is not False


def listed(text: str | None) -> list[str]:
    """Returns the non-empty parts of a comma-separated list."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _folder(path: str | None) -> Path | None:
    if path is not None and not Path(path).is_dir():
        raise ValueError(f"--slot-save-path {path}: must be an existing folder")
    return None if path is None else Path(path)


def _keys(args: argparse.Namespace) -> list[str]:
    keys = [key for text in args.api_key for key in listed(text)]
    if args.api_key and not keys:
        raise ValueError("--api-key is empty, must hold a key")
    if args.api_key_file is not None:
        lines = Path(args.api_key_file).read_text("utf-8", errors="replace").splitlines()
        of_file = [line.strip() for line in lines if line.strip()]
        keys += of_file
        if not of_file:
            raise ValueError(
                f"--api-key-file {args.api_key_file}: holds no key, must hold one per line"
            )
    for key in keys:
        if not re.fullmatch(r"[!-~]+", key):
            raise ValueError("--api-key: a key may hold only printable ASCII without spaces")
    return keys

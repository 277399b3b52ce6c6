"""Entry point of dflash-serve: opens the models, starts the HTTP server, runs until a signal."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from .. import bundled
from ..cli.arguments import template_of, template_variables
from ..cli.command import guarded, list_devices
from ..cli.llama_flags import ignored_flags
from ..native import OPTIONS
from ..text.gguf_metadata import GgufMetadata
from ..text.tokenizer import Tokenizer
from ..text.vocabulary import read_templates
from .app import App
from .arguments import (
    listed,
    parser,
    settings_of,
    thinks,
    with_environment,
)
from .engine_client import EngineClient, NotReadyError
from .guard import ENDING, Guard
from .listen import (
    GRACE_S,
    Shutdown,
    address_of,
    bind,
    checked_hosts,
    is_local,
    remove_files,
    server,
)
from .messages import Load
from .metrics import Metrics
from .models import ModelRegistry, ServedModel, models_in_folder
from .prompts import PromptBuilder
from .settings import Settings

LOAD_OPTIONS = (*OPTIONS, "fit", "vram", "draft")
"""Names of the command-line options that are sent to the engine process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until a signal; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)

    return guarded(lambda: _run(words))


def log(line: str) -> None:
    """Writes a line with the time of day to stderr."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _run(words: Sequence[str]) -> int:
    p = parser()
    try:
        args = p.parse_args(with_environment(words, os.environ))
        if args.list_devices:
            return list_devices(args.backend_module)
        settings, hosts = settings_of(args), _hosts(args)
        variables = template_variables(args)
        _check_models(args)
    except ValueError as error:
        p.error(str(error))
    models = _models(args)
    own_templates = {k: v for one in models for k, v in read_templates(one.path).items()}
    try:
        template = template_of(args, own_templates)
    except ValueError as error:
        p.error(str(error))
    think = thinks(args, variables)

    def builder_of(tokenizer: Tokenizer | None) -> PromptBuilder:
        return PromptBuilder(tokenizer, template, think, variables)

    for note in ignored_flags(args):
        log(note)
    for path in (args.ssl_key_file, args.ssl_cert_file):
        if path is not None:
            open(path, "rb").close()
    n_parallel = 1 if args.n_parallel is None else args.n_parallel
    return asyncio.run(_serve(args, settings, models, builder_of, hosts, n_parallel))


def _hosts(args: argparse.Namespace) -> list[str]:
    """Returns the hosts to listen on. ValueError for one that needs a key and has none."""
    texts = [host for text in args.host or ["127.0.0.1"] for host in listed(text) or [""]]
    hosts = checked_hosts(texts)
    open_hosts = [host for host in hosts if not is_local(host)]
    if open_hosts and not (args.api_key or args.api_key_file or args.no_api_key):
        raise ValueError(
            f"--host {open_hosts[0]} lets other machines send requests: give --api-key KEY, or "
            "--no-api-key to serve without keys"
        )
    return hosts


def _check_models(args: argparse.Namespace) -> None:
    """Raises ValueError for flags of models that contradict each other."""
    if args.models is not None and (args.model_draft is not None or args.alias is not None):
        raise ValueError("-md and --alias go with one model, not with --models: use -m")
    if args.models is None and args.model is None and args.model_draft is not None:
        raise ValueError(f"-md {args.model_draft} is a drafter: give its target model with -m")


def _models(args: argparse.Namespace) -> list[ServedModel]:
    if args.models is not None:
        return models_in_folder(args.models)
    name = args.model or default_model()
    drafter = None if args.model_draft is None else Path(args.model_draft)
    path, called = Path(name), Path(name).stem
    if bundled.is_name(name):
        bundle = bundled.find(name)
        path, drafter, called = bundle.target, drafter or bundle.drafter, name
        log(f"{path.name} with {drafter.name}: {bundle.about}")
    for file in (path, drafter):
        if file is not None:
            GgufMetadata(file).close()  # raises here already if the file is not GGUF
    names = sorted(listed(args.alias)) or [called]
    return [ServedModel(names, path, drafter)]


def default_model() -> str:
    """Returns the name of the model served without -m: smollm2 if installed, else python-tiny."""
    return "smollm2" if find_spec(bundled.PACKAGES["smollm2"][0]) else bundled.DEFAULT


async def _serve(
    args: argparse.Namespace,
    settings: Settings,
    models: Sequence[ServedModel],
    builder_of: Callable[[Tokenizer | None], PromptBuilder],
    hosts: Sequence[str],
    n_parallel: int,
) -> int:
    options = {name: getattr(args, name) for name in LOAD_OPTIONS}
    metrics = Metrics()

    def new_engine(model: ServedModel) -> EngineClient:
        drafter = None if model.drafter is None else str(model.drafter)
        load = Load(str(model.path), drafter, n_parallel, options, asdict(settings.decode))
        return EngineClient(load, args.queue, log, metrics.add)

    registry = ModelRegistry(models, new_engine, builder_of, args.models_max)
    app = Guard(App(registry, settings, metrics).asgi(), settings, log)

    def begin() -> None:
        log(f"ending: {app.n_running} requests in flight have {GRACE_S} s")

    def end_requests() -> None:
        app.end_requests()
        registry.end_requests(ENDING)

    runner = server(
        app,
        args.ssl_key_file,
        args.ssl_cert_file,
        settings.timeout_s,
        Shutdown(begin, end_requests, registry.kill),
    )
    sockets = bind(hosts, args.port)
    scheme = "http" if args.ssl_key_file is None else "https"
    for one in sockets:
        log(f"listening on {address_of(one, scheme)}")
    failures: list[str] = []
    opening = asyncio.create_task(_open(registry, failures, runner.handle_exit))
    try:
        await runner.serve(sockets)
    finally:
        opening.cancel()
        await registry.close()
        remove_files(hosts)
    for sentence in failures:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if failures else 0


async def _open(
    models: ModelRegistry, failures: list[str], end: Callable[[int, None], None]
) -> None:
    """Loads the model if there is only one; ends the server if loading fails."""
    if not models.is_one:
        log(f"models: {', '.join(model.name for model in models.all)}")
        return
    (model,) = models.all
    try:
        await models.open(model)
        assert model.engine is not None
        await model.engine.wait()
    except (NotReadyError, OSError, ValueError) as error:
        failures.append(str(error))
        end(0, None)
        return
    ready = model.engine.require_ready()
    for note in ready.notes:
        log(f"warning: {note}")
    drafter = f" with {ready.drafter}" if ready.drafter else ""
    log(
        f"loaded {ready.model}{drafter} on {ready.backend}, {ready.n_threads} threads, "
        f"context {ready.n_ctx} tokens, {ready.n_parallel} at once"
    )

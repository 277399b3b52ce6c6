"""Entry point of dflash-serve: opens the models, starts the HTTP server, runs until a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from .. import bundled
from ..cli.arguments import template_of, template_variables
from ..cli.command import guarded, list_devices
from ..cli.llama_flags import ignored_flags
from ..native import DEFAULTS, OPTIONS
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
from .folder import FoundModel, check, models_in_folder
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
from .models import ModelRegistry, ServedModel
from .presets import ALL, Preset, arguments_of, read_presets
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
        words = with_environment(words, os.environ)
        args = p.parse_args(words)
        if args.list_devices:
            return list_devices(args.backend_module)
        settings, hosts = settings_of(args), _hosts(args)
        template_variables(args)
        _check_models(args)
        presets = {ALL: Preset()}
        if args.models_preset is not None:
            presets = read_presets(args.models_preset)
    except ValueError as error:
        p.error(str(error))
    found = _found(args, presets)
    try:
        models = [_served(model, args, words, presets) for model in found]
    except ValueError as error:
        p.error(str(error))
    for note in ignored_flags(args):
        log(note)
    for path in (args.ssl_key_file, args.ssl_cert_file):
        if path is not None:
            open(path, "rb").close()
    return asyncio.run(_serve(args, settings, models, hosts))


def _hosts(args: argparse.Namespace) -> list[str]:
    """Returns the hosts to listen on. ValueError for a public one if no flag is about API keys."""
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
    if (args.models or args.models_preset) and (
        args.model_draft is not None or args.alias is not None
    ):
        raise ValueError("-md and --alias go with one model, not with --models: use -m")
    if args.models_preset is not None and args.model is not None:
        raise ValueError("--models-preset goes with --models, not with -m: leave one out")
    if args.models is None and args.model is None and args.model_draft is not None:
        raise ValueError(f"-md {args.model_draft[0]} is a drafter: give its target model with -m")


def _found(args: argparse.Namespace, presets: Mapping[str, Preset]) -> list[FoundModel]:
    """Returns the models to serve; a preset replaces the folder's model of the same name.

    Errors: OSError or ValueError if there is no model.
    """
    if args.models is None and args.models_preset is None:
        return [_one_model(args)]
    folder = [] if args.models is None else models_in_folder(args.models, _leave_out)
    found = {model.name: model for model in folder}
    for name, preset in presets.items():
        if preset.model is not None and name != ALL:
            found[name] = FoundModel(name, preset.model)
        elif name not in (ALL, *found):
            log(f"left out: [{name}] of {args.models_preset}: no such model, give model = FILE")
    sound = []
    for model in found.values():
        drafters = presets.get(model.name, presets[ALL]).drafters or model.drafters
        file = model.path
        try:
            for file in (model.path, *drafters):
                check(file)
        except ValueError as error:
            which = "" if file == model.path else f"its drafter {file} "
            _leave_out(model.path, f"{which}{error}")
            continue
        sound.append(replace(model, drafters=drafters))
    if not sound:
        source = f" {args.models}" if args.models else f"-preset {args.models_preset}"
        raise ValueError(f"--models{source}: holds no GGUF file of a model")
    return sound


def _served(
    model: FoundModel, args: argparse.Namespace, words: Sequence[str], presets: Mapping[str, Preset]
) -> ServedModel:
    """Returns a model with its flags. words: the command line. ValueError for bad values."""
    preset = presets.get(model.name, presets[ALL])
    try:
        own = arguments_of(preset, words)
        templates = read_templates(model.path) if own.chat_template else {}
        template, variables = template_of(own, templates), template_variables(own)
        settings, think = settings_of(own), thinks(own, variables)
    except ValueError as error:
        if args.models_preset is None:
            raise
        raise ValueError(f"{args.models_preset}: [{model.name}]: {error}") from None

    def prompts_of(tokenizer: Tokenizer | None) -> PromptBuilder:
        return PromptBuilder(tokenizer, template, think, variables)

    return ServedModel(
        names=sorted(listed(args.alias)) or [model.name],
        path=model.path,
        drafters=model.drafters,
        args=own,
        settings=settings,
        prompts_of=prompts_of,
        preset=preset.words,
        loads_on_startup=preset.loads_on_startup,
    )


def _leave_out(path: Path, why: str) -> None:
    log(f"left out: {path}: {why}")


def _one_model(args: argparse.Namespace) -> FoundModel:
    name = args.model or bundled.default_for_chat()
    drafters = tuple(map(Path, args.model_draft or ()))
    path, called = Path(name), Path(name).stem
    if bundled.is_name(name):
        bundle = bundled.find(name)
        path, drafters, called = bundle.target, drafters or (bundle.drafter,), name
        log(f"{path.name} with {' and '.join(x.name for x in drafters)}: {bundle.about}")
    for file in (path, *drafters):
        try:
            check(file)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    return FoundModel(called, path, drafters)


async def _serve(
    args: argparse.Namespace,
    settings: Settings,
    models: Sequence[ServedModel],
    hosts: Sequence[str],
) -> int:
    metrics = Metrics()

    def new_engine(model: ServedModel) -> EngineClient:
        options = {name: getattr(model.args, name) for name in LOAD_OPTIONS}
        if model.args.batch_size < (options["n_ubatch"] or DEFAULTS["n_ubatch"]):
            options["n_ubatch"] = model.args.batch_size
        n_parallel = 1 if model.args.n_parallel is None else model.args.n_parallel
        config = asdict(model.settings.decode)
        drafters = [str(file) for file in model.drafters]
        load = Load(str(model.path), drafters, n_parallel, options, config)
        return EngineClient(load, model.settings, args.queue, log, metrics.add)

    registry = ModelRegistry(models, new_engine, args.models_max, args.queue)
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
    tasks = [asyncio.create_task(_open(registry, failures, runner.handle_exit))]
    if args.sleep_idle_seconds != -1:
        tasks.append(asyncio.create_task(registry.sleep_idle(args.sleep_idle_seconds, log)))
    try:
        await runner.serve(sockets)
    finally:
        for task in tasks:
            task.cancel()
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
        for model in models.all:
            if model.loads_on_startup:
                with contextlib.suppress(NotReadyError):  # the log has the reason of a failed load
                    await models.take(model.name)
        return
    try:
        await models.open(models.all[0]).wait()
    except NotReadyError as error:
        failures.append(str(error))
        end(0, None)

"""Routes of slots: what each does, and its cached prefix in a file."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..config import DecodeConfig
from .bodies import Bodies
from .engine_client import Slot
from .errors import error_answer, json_answer
from .generation import left
from .messages import Failed
from .models import ModelRegistry
from .schemas import BadRequestError, SlotBody
from .serializers import settings_of
from .settings import Settings


class Slots:
    """Routes /slots and /slots/N."""

    def __init__(self, models: ModelRegistry, settings: Settings, bodies: Bodies) -> None:
        self._models = models
        self._settings = settings
        self._bodies = bodies

    async def show(self, request: Request) -> Response:
        """Answers GET /slots with every slot and its current or last request.

        Requests of other API keys are left out, unless keys share prefixes.
        """
        if not self._settings.has_slots:
            return error_answer(501, "/slots is switched off: start the server with --slots")
        model, ready, _ = self._models.look(request.query_params.get("model"))
        slots = model.engine.slots if model.engine else [Slot()] * ready.n_parallel
        if request.query_params.get("fail_on_no_slot") and all(slot.run for slot in slots):
            return error_answer(
                503, "all slots are in use: ask again later, or without fail_on_no_slot"
            )
        entries = []
        for number, slot in enumerate(slots):
            entry: dict[str, Any] = {
                "id": number,
                "n_ctx": ready.n_ctx,
                "speculative": ready.drafter is not None,
                "is_processing": slot.run is not None,
            }
            run, ask = slot.run or slot.last, slot.ask
            if run is not None and ask is not None and ask.scope == request.scope["tenant"]:
                limit = ask.config["max_tokens"]
                n_left = -1 if limit is None or slot.run is None else limit - slot.n_decoded
                entry |= {
                    "id_task": run.id,
                    "params": settings_of(DecodeConfig(**ask.config), run.seed, []),
                    "next_token": [
                        {
                            "has_next_token": slot.run is not None,
                            "n_remain": n_left,
                            "n_decoded": slot.n_decoded,
                        }
                    ],
                }
            entries.append(entry)
        return json_answer(entries)

    async def act(self, request: Request) -> Response:
        """Answers POST /slots/N: saves, restores or erases the cached prefix of a slot."""
        action = request.query_params.get("action", "")
        if action not in ("save", "restore", "erase"):
            raise BadRequestError(f"action is {action!r}, must be save, restore or erase")
        folder, slot = self._settings.slot_save_path, request.path_params["slot"]
        if folder is None:
            return error_answer(
                501, "/slots/N is switched off: start the server with --slot-save-path FOLDER"
            )
        async with self._bodies.read(request, SlotBody) as (body, _):
            _, engine, prompt_builder = await self._models.take(
                body.model, client=request.scope["asker"], gone=partial(left, request)
            )
        if slot >= engine.require_ready().n_parallel:
            raise BadRequestError(f"slot is {slot}, must be 0 to {len(engine.slots) - 1}")
        name = body.filename or ""
        if action != "erase" and (not re.fullmatch(r"[\w.-]{1,200}", name) or name.startswith(".")):
            raise BadRequestError(
                f"filename is {name[:200]!r}, must be 1 to 200 letters, digits, '_', '-' or '.', "
                "the first not a '.'"
            )
        scope = request.scope["tenant"]
        prefix = f"{folder}/{scope and scope + '-'}"
        if action == "save":
            _check_quota(prefix, self._settings.max_slot_bytes)
        done = await engine.act(slot, action, "" if action == "erase" else prefix + name, scope)
        if isinstance(done, Failed):
            return error_answer(done.status, done.sentence.replace(prefix, ""))
        ms = 1e3 * done.seconds
        report: dict[str, Any] = {"id_slot": slot}
        if action == "erase":
            prompt_builder.answers.forget(scope)
            return json_answer(report | {"n_erased": done.n_tokens})
        if action == "save":
            report |= {"filename": name, "n_saved": done.n_tokens, "n_written": done.n_bytes}
            return json_answer(report | {"timings": {"save_ms": ms}})
        report |= {"filename": name, "n_restored": done.n_tokens, "n_read": done.n_bytes}
        return json_answer(report | {"timings": {"restore_ms": ms}})


def _check_quota(prefix: str, limit: int) -> None:
    """Raises BadRequestError if the files of a client hold as many bytes as it may save.

    prefix: how their paths begin.
    """
    folder, start = os.path.split(prefix)
    files = (entry for entry in os.scandir(folder) if entry.name.startswith(start))
    used = sum(entry.stat(follow_symlinks=False).st_size for entry in files)
    if used >= limit:
        raise BadRequestError(
            f"the saved slots hold {used >> 20} MiB, the limit of --slot-save-mib is "
            f"{limit >> 20}: delete files in the folder of --slot-save-path",
            status=507,
        )

"""llama.cpp's draft-dflash as a process that answers prompts of token ids: peer/rounds.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_peer import OURS, build, can_repack

GREEDY = ("--samplers", "top_k", "--top-k", "1")
"""The cheapest of llama.cpp's ways to take the best token."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """An answer. rounds: (tokens before it, drafted, accepted). us: microseconds by phase."""

    tokens: list[int]
    rounds: list[tuple[int, int, int]]
    us: Mapping[str, list[int]]


class Peer:
    """A pair loaded in llama.cpp."""

    def __init__(
        self,
        target: Path,
        drafter: Path,
        *,
        n_draft: int,
        n_ctx: int,
        options: Sequence[str] = (),
        tools: Path | None = None,
        device: str | None = None,
        module: str | None = None,
    ) -> None:
        """n_draft: tokens drafted each round. options: more arguments of llama.cpp.

        tools: folder of the program, None to build it. device: ggml's name of where all layers go;
        None is the CPU. module: the backend that brings the device.
        """
        place = ["-ngl", "0", "-ngld", "0"]
        if device is not None:
            # the program looks for modules only where a device is named
            place = ["--device", device, "-devd", device, "-ngl", "99", "-ngld", "99"]
            place += ["--fit", "off"]
        program = (tools or build([OURS])) / OURS
        command = [str(program), "-m", str(target), "-md", str(drafter)]
        command += ["--spec-type", "draft-dflash", "--spec-draft-n-max", str(n_draft)]
        command += ["-c", str(n_ctx), "-b", "512", "-fa", "on", *place]
        command += [*GREEDY, "--log-disable", *([] if can_repack() else ["--no-repack"]), *options]
        environment = os.environ | ({"GGML_BACKEND_PATH": module} if module else {})
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._stderr.close()

    def answer(
        self,
        prompt: Sequence[int],
        n_predict: int,
        *,
        text: Sequence[int] | None = None,
        accept: int | None = None,
    ) -> PeerAnswer:
        """Answers a prompt; text and accept force its choices, as rounds.cpp explains."""
        job: dict[str, Any] = {"prompt": list(prompt), "n_predict": n_predict}
        if text is not None:
            job["text"] = list(text)
        if accept is not None:
            job["accept"] = accept
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the peer has no pipes")
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            raise SystemExit(f"{OURS} ended: {self._stderr.read()[-2000:]}")
        found = json.loads(line)
        rounds = [(before, drafted, accepted) for before, drafted, accepted in found["rounds"]]
        return PeerAnswer(found["tokens"], rounds, found["us"])

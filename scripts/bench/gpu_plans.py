"""Plans for a GPU that is not there, beside what ggml's CUDA backend takes for true sizes.

    scripts/bench/gpu_plans.py --backend-module $(dflash-backend build cuda --arch 90-real)
        [SHAPE:CONTEXT:KV...] [--null-gpu 90] [--limit 0.01]

Writes files of published shapes with their drafters, with holes in place of their tensors, and
loads each on a CUDA driver that computes nothing (gpu/null_gpu.py; it needs CUDA's headers): the
context is filled and a verify of 64 rows run, so that whatever is taken is counted. Beside it are
the plan that `dflash-run --plan --vram` makes without any GPU, and the one that the backend itself
is asked for; both less the half GiB for a real driver. Fails where a plan is off by more than the
limit. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import dflash_gguf
from dflash_gguf import LoadConfig
from dflash_gguf.memory.plan import CONTEXT_BYTES, Planner

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gpu import null_gpu

SCRIPTS = Path(__file__).resolve().parent
N_ROWS = 64
VRAM = 80 << 30
OUTTYPES = {"gpt-oss-20b": "q8_0"}
"""Of targets other than q4_0; experts of gpt-oss stay in MXFP4."""
CASES = (
    *(f"gpt-oss-20b:{n}:q8_0" for n in (32768, 131072)),
    *("gemma-4-31b:32768:q8_0", "gemma-4-31b:32768:f16", "gemma-4-31b:131072:q4_0"),
    *(f"gemma-4-{x}:{n}:q8_0" for x in ("26b-a4b", "e2b", "e4b") for n in (32768, 131072)),
)


def write(shape: str, folder: Path) -> tuple[Path, Path]:
    """Headers of a target and its drafter, written once."""
    target, drafter = folder / f"{shape}.gguf", folder / f"{shape}-dflash.gguf"
    outtype = OUTTYPES.get(shape, "q4_0")
    for path, more in ((target, ["--outtype", outtype]), (drafter, ["--target", str(target)])):
        if not path.exists():
            more = [*more, "--header-only"] + (["--outtype", "q8_0"] if path == drafter else [])
            run(["synthetic_gguf.py", path.stem, str(path), *more])
    return target, drafter


def run(command: list[str], **environment: str) -> str:
    """Output of a script; SystemExit with its last words if it fails."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / command[0]), *command[1:]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"error: {command[0]}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def check(case: str, module: str, libraries: Path, folder: Path) -> dict[str, Any]:
    """Bytes that were planned and taken."""
    try:
        shape, context, kv = case.split(":")
        n_ctx = int(context)
    except ValueError:
        raise SystemExit(f"error: {case!r} is not SHAPE:CONTEXT:KV") from None
    target, drafter = write(shape, folder)
    config = LoadConfig(n_ctx=n_ctx, cache_type_k=kv, cache_type_v=kv)
    plan = Planner(target, str(drafter), config, VRAM).plan(verify_rows=N_ROWS)
    command = ["plan.py", str(target), "-md", str(drafter), "-c", context]
    command += ["-ctk", kv, "-ctv", kv, "--rows", str(N_ROWS), "--backend-module", module]
    found = json.loads(run(command, LD_LIBRARY_PATH=str(libraries)).splitlines()[-1])
    held = found["held_bytes"]
    without_gpu = plan.needed_bytes - CONTEXT_BYTES
    return {
        "case": case,
        "held_gib": round(held / (1 << 30), 3),
        "held_over_planned": round(held / without_gpu, 4),
        "held_over_backends_plan": round(found["held_over_planned"], 4),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="SHAPE:CONTEXT:KV", default=list(CASES))
    parser.add_argument("--backend-module", metavar="FILE", required=True)
    parser.add_argument("--null-gpu", metavar="CAPABILITY", default="90", help="of the module")
    parser.add_argument("--limit", type=float, default=0.01, help="that a plan may be off by")
    args = parser.parse_args()
    if not Path(args.backend_module).is_file():
        raise SystemExit(f"error: {args.backend_module}: no such file")
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            libraries = null_gpu.build(folder, args.null_gpu)
            for case in args.cases:
                figures = check(case, args.backend_module, libraries, folder)
                found.append(figures)
                print(
                    f"{case:28} {figures['held_gib']:7.3f} GiB, of the plan "
                    f"{figures['held_over_planned']:.4f}, of the backend's own "
                    f"{figures['held_over_backends_plan']:.4f}",
                    flush=True,
                )
        except (dflash_gguf.Error, OSError, ValueError) as error:
            raise SystemExit(f"error: {error}") from None
    off = [x["case"] for x in found if abs(x["held_over_planned"] - 1.0) > args.limit]
    print(json.dumps(found))
    if off:
        raise SystemExit(f"error: plans are off by more than {args.limit:.1%}: {', '.join(off)}")


if __name__ == "__main__":
    main()

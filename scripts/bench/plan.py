"""Compares memory plans with the memory that real loads take.

    scripts/bench/plan.py MODEL.gguf [-md DRAFTER.gguf] [-c 8192] [-ctk q8_0 -ctv q8_0]
    scripts/bench/plan.py MODEL.gguf --backend-module libggml-cuda.so [-ngl 40] [--n-cpu-moe 8]
    scripts/bench/plan.py --null-gpu 90 --backend-module $(dflash-backend build cuda --arch 90-real)
        [--cases SHAPE:CONTEXT:KV...] [--limit 0.01]

Loads a model, fills its context and verifies as many rows as possible, so that all allocated memory
is written. Prints planned and allocated bytes by item, and the growth of the process's anonymous
memory (Linux, interpreter included) or the drop of a GPU's free memory.

--null-gpu: loads targets and drafters of published shapes, without weights, on a CUDA driver that
computes nothing (gpu/null_gpu.py; needs CUDA's headers). Compares the allocated bytes with the plan
of `dflash-run --plan --vram`, made without a GPU, and with the plan of the GPU's backend, both
without the 0.5 GiB of a real driver. Fails if the former is off by more than --limit. The last line
is JSON.
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

from dflash_gguf import LoadConfig, native
from dflash_gguf.memory.plan import CONTEXT_BYTES, Planner, plan_of

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gpu import null_gpu

SCRIPTS = Path(__file__).resolve().parent
N_ROWS = 64
VRAM = 80 << 30
OUTTYPES = {"gpt-oss-20b": "q8_0"}
"""Types of quantised weights by shape, q4_0 if not listed; gpt-oss also has experts in MXFP4."""
CASES = (
    *(f"gpt-oss-20b:{n}:q8_0" for n in (32768, 131072)),
    *("gemma-4-31b:32768:q8_0", "gemma-4-31b:32768:f16", "gemma-4-31b:131072:q4_0"),
    *(f"gemma-4-{x}:{n}:q8_0" for x in ("26b-a4b", "e2b", "e4b") for n in (32768, 131072)),
)


def anonymous_bytes() -> int:
    """Returns the anonymous memory that this process uses, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


def held_bytes() -> int:
    """Returns the bytes in use on all GPUs."""
    return sum(x.total_bytes - x.free_bytes for x in native.devices() if x.type != "cpu")


def fill(sequence: native.Sequence, drafts: bool) -> None:
    """Fills the context, then runs the largest draft and verify."""
    tokens = [i % 100 for i in range(sequence.n_ctx)]
    n_last = sequence.engine.max_verify if drafts else 1
    sequence.prefill(tokens[:-n_last])
    if drafts:
        sequence.draft(tokens[-n_last], sequence.max_draft, 8)
        sequence.verify_tree(tokens[-n_last:], [-1, *[0] * (n_last - 1)])
        sequence.commit(1)


def write(shape: str, folder: Path) -> tuple[Path, Path]:
    """Writes a target and a drafter without weights, unless they exist; returns their paths."""
    target, drafter = folder / f"{shape}.gguf", folder / f"{shape}-dflash.gguf"
    outtype = OUTTYPES.get(shape, "q4_0")
    for path, more in ((target, ["--outtype", outtype]), (drafter, ["--target", str(target)])):
        if not path.exists():
            more = [*more, "--header-only"] + (["--outtype", "q8_0"] if path == drafter else [])
            run(["synthetic_gguf.py", path.stem, str(path), *more])
    return target, drafter


def run(command: list[str], **environment: str) -> str:
    """Runs a script of this folder; returns its output, or raises SystemExit with its error."""
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
    """Plans and loads one of --cases; returns the allocated GiB, and the ratios to both plans."""
    try:
        shape, context, kv = case.split(":")
        n_ctx = int(context)
    except ValueError:
        raise SystemExit(f"error: --cases {case!r}: give SHAPE:CONTEXT:KV") from None
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


def compare(args: argparse.Namespace) -> None:
    """Plans and loads one model; prints planned and allocated bytes."""
    on_gpu = args.backend_module is not None
    config = LoadConfig(
        n_ctx=args.ctx_size,
        cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_v,
        backend_module=args.backend_module,
        n_gpu_layers=args.n_gpu_layers if on_gpu else 0,
        n_cpu_moe=args.n_cpu_moe,
    )
    try:
        if on_gpu:
            native.load_backend(args.backend_module)
        plan = Planner(args.model, args.model_draft, config).plan(verify_rows=args.rows)
        before, held_before = anonymous_bytes(), held_bytes()
        model = native.Model(args.model, config)
        drafter = native.Drafter(args.model_draft, model) if args.model_draft else None
        engine = native.Engine(model, None, drafter)
        if drafter:
            engine.reserve_verify(args.rows)
        if not args.load_only:
            fill(native.Sequence(engine), drafter is not None)
        grown, held = anonymous_bytes() - before, held_bytes() - held_before
        real = plan_of(engine, config, plan.free_bytes)
    except (native.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    allocated = {(x.name, x.where): x.bytes for x in real.items}
    for item in plan.items:
        found = allocated.pop((item.name, item.where), 0)
        print(f"{item.name:40} {item.where:6} {item.bytes:14,} {found:14,}")
    needed = plan.needed_bytes
    if not on_gpu:  # excludes the planned prefix cache, which no answer fills
        needed -= sum(x.bytes for x in plan.items if x.name.startswith("prompts to"))
    if on_gpu:
        print(f"{'planned in all, and drop of free GPU memory':47} {needed:14,} {held:14,}")
    else:
        print(f"{'planned in all, and growth of the process':47} {needed:14,} {grown:14,}")
    figures = {
        "model": Path(args.model).name,
        "planned_bytes": plan.needed_bytes,
        "allocated_bytes": real.needed_bytes,
        "not_planned": len(allocated),
        "grown_bytes": grown,
        "grown_over_planned": grown / needed,
    }
    if on_gpu:
        figures |= {"held_bytes": held, "held_over_planned": held / needed}
    print(json.dumps(figures))


def compare_without_gpu(args: argparse.Namespace) -> None:
    """Plans and loads all --cases on the null GPU; SystemExit if a plan is off by --limit."""
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
        except (native.Error, OSError, ValueError) as error:
            raise SystemExit(f"error: {error}") from None
    off = [x["case"] for x in found if abs(x["held_over_planned"] - 1.0) > args.limit]
    print(json.dumps(found))
    if off:
        raise SystemExit(f"error: plans are off by more than {args.limit:.1%}: {', '.join(off)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare memory plans with allocations")
    parser.add_argument("model", nargs="?", metavar="MODEL.gguf")
    parser.add_argument("-md", "--model-draft", metavar="DRAFTER.gguf")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("-ctk", "--cache-type-k", default="f16")
    parser.add_argument("-ctv", "--cache-type-v", default="f16")
    parser.add_argument("--rows", type=int, default=24, help="rows of a verify")
    parser.add_argument("--backend-module", metavar="FILE", help="backend of the GPU")
    parser.add_argument("-ngl", "--n-gpu-layers", type=int, help="layers on the GPU; default: all")
    parser.add_argument("--n-cpu-moe", type=int, default=0)
    parser.add_argument("--load-only", action="store_true", help="load without computing anything")
    parser.add_argument(
        "--null-gpu",
        metavar="CAPABILITY",
        help="compute capability of the module; runs without a GPU",
    )
    parser.add_argument("--cases", nargs="+", metavar="SHAPE:CONTEXT:KV", default=list(CASES))
    parser.add_argument(
        "--limit", type=float, default=0.01, help="allowed deviation of a plan, as a share"
    )
    args = parser.parse_args()
    if args.null_gpu is not None and args.backend_module is not None:
        compare_without_gpu(args)
    elif args.model is not None:
        compare(args)
    else:
        parser.error("give MODEL.gguf, or --null-gpu with --backend-module")


if __name__ == "__main__":
    main()

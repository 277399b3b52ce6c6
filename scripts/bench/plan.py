"""The memory plan compared with what a real load takes: by its buffers, and by the process.

    scripts/bench/plan.py MODEL.gguf [-md DRAFTER.gguf] [-c 8192] [-ctk q8_0 -ctv q8_0]
    scripts/bench/plan.py MODEL.gguf --backend-module libggml-cuda.so [-ngl 40] [--n-cpu-moe 8]

Plans, loads, fills the context and verifies as many rows as there is room for, so that every page
of every buffer is touched; then prints each item of the plan, what was allocated for it, and by how
much the process's anonymous memory grew (Linux; the interpreter's own growth is in it), on a GPU
by how much less of it is free. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dflash_gguf import LoadConfig, native
from dflash_gguf.memory.plan import Planner, plan_of


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


def held_bytes() -> int:
    """Memory of all GPUs that is in use."""
    return sum(x.total_bytes - x.free_bytes for x in native.devices() if x.type != "cpu")


def fill(sequence: native.Sequence, drafts: bool) -> None:
    """Runs the largest passes there are."""
    tokens = [i % 100 for i in range(sequence.n_ctx)]
    n_last = sequence.engine.max_verify if drafts else 1
    sequence.prefill(tokens[:-n_last])
    if drafts:
        sequence.draft(tokens[-n_last], sequence.max_draft, 8)
        sequence.verify_tree(tokens[-n_last:], [-1, *[0] * (n_last - 1)])
        sequence.commit(1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Plan beside allocation")
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("-md", "--model-draft", metavar="DRAFTER.gguf")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("-ctk", "--cache-type-k", default="f16")
    parser.add_argument("-ctv", "--cache-type-v", default="f16")
    parser.add_argument("--rows", type=int, default=24, help="of a verify")
    parser.add_argument("--backend-module", metavar="FILE", help="of the GPU")
    parser.add_argument("-ngl", "--n-gpu-layers", type=int, help="default: all on the GPU")
    parser.add_argument("--n-cpu-moe", type=int, default=0)
    parser.add_argument("--load-only", action="store_true", help="allocates, and computes nothing")
    args = parser.parse_args()
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
    if not on_gpu:  # kept only once an answer has begun
        needed -= sum(x.bytes for x in plan.items if x.name.startswith("prompts to"))
    if on_gpu:
        print(f"{'needed, and how much less of the GPU is free':47} {needed:14,} {held:14,}")
    else:
        print(f"{'needed, and how much the process grew':47} {needed:14,} {grown:14,}")
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


if __name__ == "__main__":
    main()

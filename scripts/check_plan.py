"""The memory plan beside what a real load takes: by its buffers, and by the process.

    scripts/check_plan.py MODEL.gguf [-md DRAFTER.gguf] [-c 8192] [-ctk q8_0 -ctv q8_0]

Plans, loads, fills the context and verifies as many rows as there is room for, so that every page
of every buffer is touched; then prints each item of the plan, what was allocated for it, and by how
much the process's anonymous memory grew (Linux; the interpreter's own growth is in it). The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dflash_gguf import LoadConfig, core
from dflash_gguf.plan import Planner, plan_of


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


def fill(session: core.Session, drafts: bool) -> None:
    """Runs the largest passes there are."""
    tokens = [i % 100 for i in range(session.n_ctx)]
    n_last = session.max_verify if drafts else 1
    session.prefill(tokens[:-n_last])
    if drafts:
        session.draft(tokens[-n_last], session.max_draft, 8)
        session.verify_tree(tokens[-n_last:], [-1, *[0] * (n_last - 1)])
        session.commit(1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Plan beside allocation")
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("-md", "--model-draft", metavar="DRAFTER.gguf")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("-ctk", "--cache-type-k", default="f16")
    parser.add_argument("-ctv", "--cache-type-v", default="f16")
    parser.add_argument("--rows", type=int, default=24, help="of a verify")
    args = parser.parse_args()
    config = LoadConfig(
        n_ctx=args.ctx_size, cache_type_k=args.cache_type_k, cache_type_v=args.cache_type_v
    )
    try:
        plan = Planner(args.model, args.model_draft, config).plan(verify_rows=args.rows)
        before = anonymous_bytes()
        model = core.Model(args.model, config)
        drafter = core.Drafter(args.model_draft, model) if args.model_draft else None
        session = core.Session(model, None, drafter)
        if drafter:
            session.reserve_verify(args.rows)
        fill(session, drafter is not None)
        grown = anonymous_bytes() - before
        real = plan_of(model, drafter, session, config, plan.free_bytes)
    except (core.Error, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    allocated = {(x.name, x.where): x.bytes for x in real.items}
    for item in plan.items:
        found = allocated.pop((item.name, item.where), 0)
        print(f"{item.name:40} {item.where:6} {item.bytes:14,} {found:14,}")
    needed = plan.needed_bytes - sum(x.bytes for x in plan.items if x.name.startswith("prompts to"))
    print(f"{'needed, and how much the process grew':47} {needed:14,} {grown:14,}")
    figures = {
        "model": Path(args.model).name,
        "planned_bytes": plan.needed_bytes,
        "allocated_bytes": real.needed_bytes,
        "not_planned": len(allocated),
        "grown_bytes": grown,
        "grown_over_planned": grown / needed,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

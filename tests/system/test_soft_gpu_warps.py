"""Warps and blocks of the software GPU against models, and kernels whose mutants must fail."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ptx_kernels import LOADED, STORED, run, words
from soft_gpu import GpuError, PtxModule, set_order


@pytest.fixture(autouse=True)
def _order() -> Iterator[None]:
    set_order()
    yield
    set_order()


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str, width: int) -> None:
    a, distance = words(32), words(32, 1) % 40
    segment = 32 - width
    bounds = segment << 8 | (0 if mode == "up" else 31)
    body = f"{LOADED} shfl.sync.{mode}.b32 %r7|%p1, %r5, %r6, {bounds}, -1;"
    found = run(f"{body} {STORED}", a, distance)
    inside = run(f"{body} selp.u32 %r7, 1, 0, %p1; {STORED}", a, distance)
    for lane in range(32):
        first, last = lane & segment, (lane & segment) + width - 1
        n = int(distance[lane]) & 31
        source = {
            "up": lane - n,
            "down": lane + n,
            "bfly": lane ^ n,
            "idx": first | (n & ~segment),
        }[mode]
        is_inside = source >= first if mode == "up" else source <= last
        assert inside[lane] == is_inside
        assert found[lane] == a[source if is_inside else lane]


def test_a_shuffle_from_a_lane_that_does_not_take_part_gives_nan() -> None:
    body = """setp.lt.u32 %p1, %r1, 16; @!%p1 bra END;
    shfl.sync.idx.b32 %r7, %r5, 20, 31, 0xffff; END:"""
    found = run(f"{LOADED} mov.u32 %r7, 0; {body} {STORED}", words(32))
    assert (found[:16] == 0xFFFFFFFF).all()
    assert not found[16:].any()


def test_votes_and_reductions_are_those_of_their_members() -> None:
    a = words(32) % 100
    members = np.array([0x0000FFFF] * 16 + [0xFFFF0000] * 16, np.uint32)
    halves = [a[:16], a[16:]]

    def both(*results: int) -> np.ndarray:
        return np.repeat(np.array(results, np.uint32), 16)

    def ballot(half: int, test: np.ndarray) -> int:
        return sum(int(bit) << (16 * half + lane) for lane, bit in enumerate(test))

    vote = "setp.lt.u32 %p1, %r5, 50;"
    found = run(f"{LOADED} {vote} vote.sync.ballot.b32 %r7, %p1, %r6; {STORED}", a, members)
    assert np.array_equal(found, both(*(ballot(i, x < 50) for i, x in enumerate(halves))))
    for name, model in (("all", all), ("any", any)):
        for limit in (0, 50, 100):
            vote = f"setp.lt.u32 %p1, %r5, {limit}; vote.sync.{name}.pred %p2, !%p1, %r6;"
            found = run(f"{LOADED} {vote} selp.u32 %r7, 1, 0, %p2; {STORED}", a, members)
            assert np.array_equal(found, both(*(model(x >= limit) for x in halves)))
    for name, model in (("add", np.sum), ("min", np.min), ("max", np.max)):
        found = run(f"{LOADED} redux.sync.{name}.u32 %r7, %r5, %r6; {STORED}", a, members)
        assert np.array_equal(found, both(*(model(x) for x in halves)))
    for name, reduce in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        found = run(f"{LOADED} redux.sync.{name}.b32 %r7, %r5, %r6; {STORED}", a, members)
        assert np.array_equal(found, both(*(reduce.reduce(x) for x in halves)))
    few = a % 4
    found = run(f"{LOADED} match.any.sync.b32 %r7, %r5, %r6; {STORED}", few, members)
    for lane in range(32):
        half = lane // 16
        assert found[lane] == ballot(half, few[16 * half :][:16] == few[lane])


LOOP = """
mov.u32 %r7, 0; mov.u32 %r8, %r5;
AGAIN: setp.eq.u32 %p1, %r8, 1; @%p1 bra DONE;
and.b32 %r9, %r8, 1; setp.eq.u32 %p2, %r9, 0; @%p2 bra EVEN;
mad.lo.u32 %r8, %r8, 3, 1; bra NEXT;
EVEN: shr.u32 %r8, %r8, 1;
NEXT: add.u32 %r7, %r7, 1; bra AGAIN;
DONE:
"""


def test_lanes_diverge_and_meet_again() -> None:
    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    a = np.arange(1, 65, dtype=np.uint32)
    meet = "activemask.b32 %r10; setp.ne.u32 %p3, %r10, -1; @%p3 trap;"
    found = run(f"{LOADED} {LOOP} {meet} {STORED}", a)
    assert found.tolist() == [steps(int(n)) for n in a]


def test_lanes_wait_for_members_on_the_other_side_of_a_branch() -> None:
    body = """setp.lt.u32 %p1, %r1, 16; @%p1 bra LEFT;
    shfl.sync.bfly.b32 %r7, %r5, 16, 31, -1; bra END;
    LEFT: add.u32 %r5, %r5, 1;
    END: """
    with pytest.raises(GpuError, match="never arrive"):
        run(f"{LOADED} {body} bar.warp.sync -1; shfl.sync.idx.b32 %r7, %r5, 0, 31, -1;", words(32))


SUM = """
.shared .align 4 .b8 parts[512];
ld.global.f32 %f1, [%rd6]; mov.u32 %r10, parts; shl.b32 %r11, %r1, 2; add.u32 %r12, %r10, %r11;
st.shared.f32 [%r12], %f1; bar.sync 0; mov.u32 %r13, 64;
AGAIN: setp.ge.u32 %p1, %r1, %r13; @%p1 bra SKIP;
shl.b32 %r14, %r13, 2; add.u32 %r15, %r12, %r14;
ld.shared.f32 %f2, [%r12]; ld.shared.f32 %f3, [%r15]; add.f32 %f4, %f2, %f3;
st.shared.f32 [%r12], %f4;
SKIP: barrier.sync 0; shr.u32 %r13, %r13, 1; setp.ne.u32 %p2, %r13, 0; @%p2 bra AGAIN;
ld.shared.f32 %f5, [parts]; st.global.f32 [%rd5], %f5;
"""


def test_a_missing_barrier_is_seen_in_one_order_of_warps() -> None:
    a = np.random.default_rng(0).integers(0, 100, 256).astype(np.float32)
    expected = np.repeat(a.reshape(2, 128).sum(1), 128)

    def is_right(body: str) -> bool:
        results = []
        for is_reversed in (False, True):
            set_order(is_reversed=is_reversed, n_threads=2)
            results.append(np.array_equal(run(body, a, grid=2), expected))
        return all(results)

    assert is_right(SUM)
    assert not is_right(SUM.replace("bar.sync 0;", ""))
    assert not is_right(SUM.replace("barrier.sync 0;", ""))


def test_a_barrier_that_not_all_warps_reach_ends_the_run() -> None:
    few = "setp.lt.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 0; END: bar.sync 1;"
    with pytest.raises(GpuError, match="at a barrier"):
        run(few, words(64))
    # Barriers of some of the threads, and those that warps at their end leave.
    run("setp.lt.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 1, 32; END:", words(64))
    run("setp.lt.u32 %p1, %r1, 32; @%p1 exit; bar.sync 0;", words(64))


@pytest.mark.parametrize("limit", [0, 30, 100])
def test_barriers_reduce_predicates(limit: int) -> None:
    a = words(96) % 100
    test = f"setp.lt.u32 %p1, %r5, {limit};"
    found = run(f"{LOADED} {test} bar.red.popc.u32 %r7, 0, %p1; {STORED}", a)
    assert (found == np.count_nonzero(a < limit)).all()
    for name, model in (("and", all), ("or", any)):
        reduced = f"{test} barrier.cta.red.{name}.pred %p2, 0, !%p1; selp.u32 %r7, 1, 0, %p2;"
        assert (run(f"{LOADED} {reduced} {STORED}", a) == model(a >= limit)).all()


@pytest.mark.parametrize(
    ("operation", "model"),
    [
        ("add.u32", np.add),
        ("min.u32", np.minimum),
        ("max.u32", np.maximum),
        ("and.b32", np.bitwise_and),
        ("or.b32", np.bitwise_or),
        ("xor.b32", np.bitwise_xor),
    ],
)
def test_atomics_of_blocks_on_several_threads(operation: str, model: np.ufunc) -> None:
    set_order(n_threads=4)
    a, total = words(64 * 64), words(1, 1)
    expected = model.reduce([*a, *total], dtype=np.uint32)
    load = "ld.global.u32 %r5, [%rd6];"
    run(f"{load} red.global.{operation} [%rd3], %r5;", a, total, grid=64)
    assert total[0] == expected


def test_an_atomic_counter_gives_each_thread_its_number() -> None:
    set_order(n_threads=4)
    counted = f"atom.global.inc.u32 %r7, [%rd3], 0xffffffff; {STORED}"
    found = run(counted, words(64 * 64), np.zeros(1, np.uint32), grid=64)
    assert sorted(found) == list(range(64 * 64))


def test_atomics_return_the_old_value() -> None:
    body = """.shared .align 4 .b8 cell[4]; mov.u32 %r10, cell; mov.u32 %r11, 7;
    setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT; st.shared.u32 [%r10], %r11;
    WAIT: bar.sync 0;"""
    a = np.zeros(32, np.uint32)
    swapped = "atom.shared.cas.b32 %r7, [%r10], 7, 9;"
    assert run(f"{body} {swapped} {STORED}", a).tolist() == [7] + [9] * 31
    exchanged = "atom.shared.exch.b32 %r7, [%r10], %r1;"
    assert run(f"{body} {exchanged} {STORED}", a).tolist() == [7, *range(31)]
    added = "atom.shared.add.f32 %f1, [%r10], 0f3F800000; ld.shared.f32 %f2, [%r10];"
    cleared = "mov.u32 %r11, 0; @%p1 bra ON; st.shared.u32 [%r10], %r11; ON: bar.sync 0;"
    found = run(f"{body} {cleared} {added} st.global.f32 [%rd5], %f2;", a.view(np.float32))
    assert (found == 32).all()


@pytest.mark.parametrize(
    ("kind", "dtype", "one"),
    [
        ("f64", np.float64, "0d3FF0000000000000"),
        ("noftz.f16x2", np.float16, "0x3C003C00"),
        ("u64", np.uint64, "1"),
    ],
)
def test_atomic_sums_of_other_types(kind: str, dtype: type, one: str) -> None:
    set_order(n_threads=4)
    bits = "b32" if dtype is np.float16 else "b64"
    total = np.zeros(8 // np.dtype(dtype).itemsize, dtype)
    body = f".reg .{bits} %one; mov.{bits} %one, {one}; red.global.add.{kind} [%rd3], %one;"
    run(body, words(32 * 4), total, grid=4)
    assert total[0] == 128


def test_a_counter_down_wraps() -> None:
    count = np.array([2], np.uint32)
    body = f"atom.global.dec.u32 %r7, [%rd3], 5; {STORED}"
    assert run(body, words(32), count).tolist() == [2, 1, 0, *[5, 4, 3, 2, 1, 0] * 5][:32]


def test_spaces_of_generic_addresses() -> None:
    body = """.shared .align 4 .b8 tile[64]; .local .align 4 .b8 own[8];
    .reg .b64 %x; .reg .pred %q;
    mov.u64 %x, SPACE; cvta.SPACE_NAME.u64 %x, %x; isspacep.ASKED %q, %x;
    selp.u32 %r7, 1, 0, %q;"""
    for name, symbol in (("shared", "tile"), ("local", "own")):
        for asked in ("shared", "local", "global"):
            text = body.replace("SPACE_NAME", name).replace("SPACE", symbol)
            found = run(f"{text.replace('ASKED', asked)} {STORED}", words(32))
            assert (found == (asked == name)).all()


GRID_BARRIER = """
mov.u32 %r10, %nctaid.x; st.global.u32 [%rd6], %r4; bar.sync 0;
setp.ne.u32 %p1, %r1, 0; @%p1 bra MEET; atom.global.add.u32 %r11, [%rd3], 1;
AGAIN: ld.volatile.global.u32 %r12, [%rd3]; setp.lt.u32 %p2, %r12, %r10; @%p2 bra AGAIN;
MEET: bar.sync 0; mul.lo.u32 %r13, %r10, %r3; sub.u32 %r13, %r13, %r4; sub.u32 %r13, %r13, 1;
mul.wide.u32 %rd8, %r13, 4; add.s64 %rd9, %rd2, %rd8; ld.global.u32 %r7, [%rd9];
"""


def test_blocks_of_a_cooperative_launch_wait_for_each_other() -> None:
    a, count = np.zeros(256, np.uint32), np.zeros(1, np.uint32)
    found = run(f"{GRID_BARRIER} {STORED}", a, count, grid=4, cooperative=True)
    assert found.tolist() == list(range(255, -1, -1))
    set_order(max_jumps=10**5)
    with pytest.raises(GpuError, match="a loop without end"):
        run(f"{GRID_BARRIER} {STORED}", a, np.zeros(1, np.uint32), grid=4)


def test_limits_of_a_launch() -> None:
    a = words(64)
    with pytest.raises(GpuError, match="2048 threads"):
        run(STORED, words(2048))
    bounded = "\n.visible .entry k(.param .u64 out) .maxntid 32, 1, 1\n{ ret; }\n"
    PtxModule(bounded).launch("k", a, block=(32,))
    with pytest.raises(GpuError, match="launch bounds"):
        PtxModule(bounded).launch("k", a, block=(64,))
    with pytest.raises(GpuError, match="wrong number of arguments"):
        PtxModule(bounded).launch("k", a, a)
    with pytest.raises(GpuError, match="no kernel other"):
        PtxModule(bounded).launch("other", a)
    with pytest.raises(GpuError, match="a trap"):
        run("trap;", a)

"""What a profile says about communication: intervals, and which events are which."""

from __future__ import annotations

import random

import pytest

from minifloat.tools.bench.exposed import Interval, covered, exposures, intervals


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ([], 0.0),
        ([(3.0, 3.0)], 0.0),
        ([(0.0, 2.0), (5.0, 6.0)], 3.0),
        ([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)], 4.0),  # in any order, overlapping
        ([(0.0, 9.0), (1.0, 2.0), (8.0, 9.0)], 9.0),  # one within the other
        ([(0.0, 1.0), (1.0, 2.0), (0.0, 1.0)], 2.0),  # touching, and twice
    ],
)
def test_covered(given: list[Interval], length: float) -> None:
    assert covered(given) == length


def test_exposures_are_what_a_clock_would_count() -> None:
    """Random whole numbers, beside a count of every unit of time."""
    draw = random.Random(0)
    for _ in range(200):
        kinds = []
        for _ in range(2):
            begins = [draw.randrange(40) for _ in range(draw.randrange(6))]
            kinds.append([(float(begin), float(begin + draw.randrange(8))) for begin in begins])
        ticks = [{t for begin, end in kind for t in range(int(begin), int(end))} for kind in kinds]
        ends = [time for kind in kinds for interval in kind for time in interval]
        step = max(ends) - min(ends) if ends else 0.0
        busy = ticks[0] | ticks[1]
        assert exposures(*kinds) == (step, len(ticks[0]), len(ticks[0] - ticks[1]), step - len(busy))


def test_which_events_communicate() -> None:
    def event(name: str, begin: float, cat: str = "kernel") -> dict[str, object]:
        return {"name": name, "cat": cat, "ts": begin, "dur": 0.5, "ph": "X"}

    communication, computation = intervals(
        [
            event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0.0),
            event("nvjet_qqtst_256x128_64x4_2x1_v_bz_coopA_TNT", 1.0),
            event("void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)", 2.0),
            event("Memcpy PtoP (Device -> Device)", 3.0, "gpu_memcpy"),
            event("Memcpy DtoD (Device -> Device)", 4.0, "gpu_memcpy"),
            event("Memcpy HtoD (Pageable -> Device)", 5.0, "gpu_memcpy"),
            event("Memset (Device)", 6.0, "gpu_memset"),
            event("nccl:all_gather", 7.0, "user_annotation"),
            event("fused_all_gather_matmul", 8.0, "gpu_user_annotation"),
            event("aten::mm", 9.0, "cpu_op"),
            {"name": "process_name", "ph": "M"},
            event("at::cuda::(anonymous namespace)::spin_kernel(long)", 10.0),
        ]
    )
    assert communication == [(begin, begin + 0.5) for begin in (0.0, 2.0, 3.0, 4.0, 10.0)]
    assert computation == [(begin, begin + 0.5) for begin in (1.0, 5.0, 6.0)]

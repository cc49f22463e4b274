"""Percentiles, and what is read out of a trace."""

import pytest

from bench.timing import percentile
from bench.trace import Event, events_of, has_nccl_kernel, kernel_names, overlapping, sm_time_us

TRACE = {
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::copy_", "ts": 0, "dur": 900},
        {"ph": "X", "cat": "kernel", "name": "accumulate_kernel", "ts": 30, "dur": 100, "args": {"grid": [16, 1, 1]}},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "void at::native::chunk_cat<float>(int)",
            "ts": 5,
            "dur": 10,
            "args": {"grid": [1000, 5, 1], "stream": 7},
        },
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP", "ts": 20, "dur": 50, "args": {"bytes": 4096}},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_AllReduce_Sum_f32",
            "ts": 1,
            "dur": 99,
            "args": {"grid": [2]},
        },
        {"ph": "X", "cat": "kernel", "name": "at::cuda::spin_kernel(long)", "ts": 0, "dur": 99, "args": {"grid": [1]}},
    ]
}


def test_percentiles_interpolate_between_neighbours() -> None:
    values = [4.0, 1.0, 3.0, 2.0, 5.0]
    assert [percentile(values, p) for p in (0, 20, 50, 80, 100)] == pytest.approx([1.0, 1.8, 3.0, 4.2, 5.0])
    assert percentile([7.0], 80) == 7.0
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def test_sm_time_is_duration_times_resident_ctas_and_leaves_out_copies_and_scaffolding() -> None:
    events = events_of(TRACE)
    assert [event.name.split("_")[0] for event in events] == ["void at::native::chunk", "Memcpy PtoP", "accumulate"]
    # 10 us on all 132 SMs, and 100 us on 16 of them.
    assert sm_time_us(events, 132) == 10 * 132 + 100 * 16
    assert [event.ctas for event in events] == [5000, 0, 16]
    assert events[1].nbytes == 4096


def test_kernels_are_counted_by_short_names_per_repetition() -> None:
    assert kernel_names(events_of(TRACE), 2) == {"accumulate_kernel": 0.5, "chunk_cat": 0.5}


def test_only_kernels_count_as_nccls_work_on_sms() -> None:
    copies = [Event("gpu_memcpy", "nccl copy", 0, 1)]
    assert not has_nccl_kernel(copies)
    assert has_nccl_kernel([*copies, Event("kernel", "ncclDevKernel_AllGather_RING_LL", 0, 1)])


def test_overlap_is_by_time() -> None:
    gemms = [Event("kernel", "gemm", start, 10.0) for start in (0.0, 10.0, 20.0)]
    assert overlapping(gemms, [Event("kernel", "sum", 12.0, 5.0)]) == [gemms[1]]

"""Tables from a time line that is written by hand."""

import json

import pytest

from gigamask.profiling import timeline


def line(name, start, took, cat="user_annotation", tid=1, **args):
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "tid": tid,
        "pid": 9,
        "ts": start,
        "dur": took,
        "args": args,
    }


def operator(name, start, took, number, tid=1):
    return line(name, start, took, "cpu_op", tid, **{"External id": number, "Sequence number": 3})


def kernel(name, start, took, number=None, launch=None, cat="kernel"):
    return line(
        name,
        start,
        took,
        cat,
        7,
        **({} if number is None else {"External id": number}),
        correlation=launch,
    )


STEPS = [
    {"ph": "M", "name": "process_name", "pid": 9, "tid": "Trace", "args": {"name": "python"}},
    {"ph": "s", "id": 3, "pid": 9, "tid": 1, "ts": 5, "cat": "fwdbwd", "name": "fwdbwd"},
    line("gigamask: step 4", 0, 100_000),
    line("gigamask: load wait", 1000, 9000),
    line("gigamask: mining", 10_000, 20_000),
    line("gigamask: encode", 12_000, 5000),
    line("gigamask: encode", 30_000, 15_000),
    line("Optimizer.step#AdamW.step", 60_000, 10_000),
    line("Optimizer.zero_grad#AdamW.zero_grad", 80_000, 1000),
    line("gigamask: step 5", 100_000, 100_000),
    line("gigamask: encode", 130_000, 25_000),
    line("gigamask: backward", 160_000, 30_000),
    operator("aten::linear", 31_000, 6000, 1),
    operator("aten::addmm", 32_000, 4000, 2),
    operator("aten::addmm", 131_000, 2000, 3),
    operator("AddmmBackward0", 161_000, 9000, 4, tid=2),
    operator("aten::mm", 162_000, 3000, 5, tid=2),
    line("cudaLaunchKernel", 190_500, 10, "cuda_runtime", correlation=77),
]
KERNELS = [
    kernel("gemm", 300_000, 40_000, 2, 70),
    kernel("gemm", 350_000, 10_000, 5, 71),
    kernel("Memcpy HtoD", 400_000, 6000, None, 77, "gpu_memcpy"),
    kernel("gpu copy of a range", 300_000, 90_000, 2, cat="gpu_user_annotation"),
]


def read(*lines):
    return tuple(
        {each.name: each for each in rows}
        for rows in timeline.read(json.dumps({"traceEvents": lines}).encode(), 2)
    )


def test_parts_are_means_of_the_steps_without_the_parts_in_them():
    parts, _ = read(*STEPS)
    assert {name: (each.ms, each.times) for name, each in parts.items()} == {
        "load wait": (4.5, 0.5),
        "mining": (7.5, 0.5),
        "mining / encode": (2.5, 0.5),
        "encode": (20.0, 1.0),
        "optimizer": (5.0, 0.5),
        "backward": (15.0, 0.5),
        "everything else": (45.5, 1.0),
    }
    assert list(parts)[-1] == "everything else"
    assert sum(each.ms for each in parts.values()) == pytest.approx(100)


def test_operator_times_exclude_nested_operators_per_thread():
    _, operators = read(*STEPS)
    assert {name: (each.ms, each.times, each.gpu_ms) for name, each in operators.items()} == {
        "aten::linear": (1.0, 0.5, 0.0),
        "aten::addmm": (3.0, 1.0, 0.0),
        "AddmmBackward0": (3.0, 0.5, 0.0),
        "aten::mm": (1.5, 0.5, 0.0),
    }


def test_kernels_are_of_the_part_that_launched_them_from_whatever_thread():
    """They run later, when the process is in another part; one that no operator launched stands for
    itself."""
    parts, operators = read(*STEPS, *KERNELS)
    assert {name: each.gpu_ms for name, each in parts.items() if each.gpu_ms} == {
        "encode": 20.0,
        "backward": 5.0,
        "everything else": 3.0,
    }
    assert {name: each.gpu_ms for name, each in operators.items() if each.gpu_ms} == {
        "aten::addmm": 20.0,
        "aten::mm": 5.0,
        "Memcpy HtoD": 3.0,
    }


def test_nothing_is_nothing():
    parts, operators = read()
    assert {name: (each.ms, each.times) for name, each in parts.items()} == {
        "everything else": (0.0, 0.0)
    }
    assert operators == {}

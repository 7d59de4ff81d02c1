"""Time per part of a step and per operator, from a trace of `torch.profiler`.

torch's own tables take several times as long and twice the memory. The parts of a step are
marked by `distributed.profile_ranges`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from gigamask.distributed.profile_ranges import PREFIX

STEP = f"{PREFIX}step "
REST, OPTIMIZER = "everything else", "optimizer"
OPTIMIZER_PREFIX = "Optimizer.step#"
"""Prefix of the range that torch itself records for every optimizer step."""
OPERATOR, RANGE = "cpu_op", "user_annotation"
LAUNCHES, KERNELS = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")


class TraceIds(msgspec.Struct):
    """Ids that an operator shares with its kernels, and a launch with its kernel."""

    operator: int | str | None = msgspec.field(default=None, name="External id")
    launch: int | str | None = msgspec.field(default=None, name="correlation")


class Event(msgspec.Struct):
    """An event of a trace; times in microseconds."""

    name: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: TraceIds = msgspec.field(default_factory=TraceIds)


class Trace(msgspec.Struct):
    """The events of a trace; its other fields are ignored."""

    events: list[Event] = msgspec.field(name="traceEvents")


class Launch(Event):
    """A kernel at the time of its launch, named after the operator, with the kernel's duration."""

    kernel_dur: float = 0.0


@dataclass(frozen=True)
class TimeSpent:
    """Time of a part or operator per step, without nested rows, and its number of calls."""

    name: str
    ms: float
    gpu_ms: float
    times: float


def read(trace: bytes, steps: int) -> tuple[list[TimeSpent], list[TimeSpent]]:
    """Read a trace.

    Args:
        trace: The JSON that `torch.profiler` writes.
        steps: Number of steps in it.

    Returns:
        The parts of a step in their order, with everything else last, and the operators; both as
        means per step.
    """
    events = msgspec.json.decode(trace, type=Trace).events
    by_operator = {event.args.operator: event for event in events if event.cat in (OPERATOR, RANGE)}
    by_launch = {event.args.launch: event for event in events if event.cat in LAUNCHES}
    launched = []
    for kernel in events:
        if kernel.cat in KERNELS:
            operator = (
                by_operator.get(kernel.args.operator) if kernel.args.operator is not None else None
            )
            at = operator or by_launch.get(kernel.args.launch) or kernel
            launched.append(
                Launch(
                    name=operator.name if operator else kernel.name,
                    ts=at.ts,
                    kernel_dur=kernel.dur,
                )
            )
    return parts(events, launched, steps), operators(events, launched, steps)


def parts(events: Iterable[Event], launched: Iterable[Launch], steps: int) -> list[TimeSpent]:
    """Return the time spent in each part of a step.

    A kernel belongs to the part during which it was launched, by any thread: backward passes have
    their own threads, for which the main thread waits.

    Args:
        events: The events of the trace.
        launched: Its kernels.
        steps: Number of steps.
    """
    ranges = [
        event
        for event in events
        if event.cat == RANGE and event.name.startswith((PREFIX, OPTIMIZER_PREFIX))
    ]
    sums: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for event, around in nested([*ranges, *launched]):
        outer = path(around)
        if isinstance(event, Launch):
            sums[outer] += 0.0, event.kernel_dur, 0.0
            continue
        sums[path([*around, event])] += event.dur, 0.0, 1.0
        if around:
            sums[outer] -= event.dur, 0.0, 0.0
    rest = sums.pop("", np.zeros(3))
    return means({**sums, REST: rest}, steps)


def operators(events: Iterable[Event], launched: Iterable[Launch], steps: int) -> list[TimeSpent]:
    """Return the time spent in each operator; kernels without an operator have their own row.

    Args:
        events: The events of the trace.
        launched: Its kernels.
        steps: Number of steps.
    """
    threads: defaultdict[int | str, list[Event]] = defaultdict(list)
    for event in events:
        if event.cat in (OPERATOR, RANGE):
            threads[event.tid].append(event)
    sums: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for thread in threads.values():
        for event, around in nested(thread):
            if event.cat == OPERATOR:
                sums[event.name] += event.dur, 0.0, 1.0
            if around and around[-1].cat == OPERATOR:
                sums[around[-1].name] -= event.dur, 0.0, 0.0
    for launch in launched:
        sums[launch.name] += 0.0, launch.kernel_dur, 0.0
    return means(sums, steps)


def nested(events: Iterable[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Yield events by time, each with the events around it, outermost first."""
    around: list[Event] = []
    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        while around and around[-1].ts + around[-1].dur <= event.ts:
            around.pop()
        yield event, around
        around.append(event)


def path(ranges: Iterable[Event]) -> str:
    """Return the name of nested ranges, such as `a / b`; the step itself has no name."""
    names = [
        event.name.removeprefix(PREFIX) if event.name.startswith(PREFIX) else OPTIMIZER
        for event in ranges
        if not event.name.startswith(STEP)
    ]
    return " / ".join(names)


def means(sums: dict[str, np.ndarray], steps: int) -> list[TimeSpent]:
    """Divide sums by the number of steps.

    Args:
        sums: Microseconds, GPU microseconds and number of calls by name.
        steps: Number of steps.

    Returns:
        Milliseconds and numbers of calls per step.
    """
    return [
        TimeSpent(name, float(own) / 1e3 / steps, float(gpu) / 1e3 / steps, float(times) / steps)
        for name, (own, gpu, times) in sums.items()
    ]

"""From a time line to tables: the trace of some steps as `torch.profiler` writes it enters, what parts of a step and operators took leaves.

torch has tables of its own, but takes several times as long for them, and twice the memory (docs/measurements.md).

Not here: how a trace is made (`memory.profiler`), where the parts of a step are marked (`parallel.ranges`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from gigamask.distributed.profile_ranges import PREFIX

STEP = f"{PREFIX}step "
REST, OPTIMIZER = "everything else", "optimizer"
OPTIMIZERS_OWN = "Optimizer.step#"
"""How the range begins that torch itself makes of every optimizer's step."""
OPERATOR, RANGE = "cpu_op", "user_annotation"
LAUNCHES, KERNELS = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")


class Origin(msgspec.Struct):
    """An operator and the kernels it launches have one number in common; a launch and its kernel another."""

    operator: int | str | None = msgspec.field(default=None, name="External id")
    launch: int | str | None = msgspec.field(default=None, name="correlation")


class Event(msgspec.Struct):
    """A line of a trace; microseconds."""

    name: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: Origin = msgspec.field(default_factory=Origin)


class Trace(msgspec.Struct):
    """A trace, of which the rest is left aside."""

    events: list[Event] = msgspec.field(name="traceEvents")


class Launch(Event):
    """The moment at which an operator, by name, launched a kernel, and how long that took."""

    took: float = 0.0


@dataclass(frozen=True)
class Spent:
    """What a part or an operator took of one step, without what lies in it, and how often it came."""

    name: str
    ms: float
    gpu_ms: float
    times: float


def read(trace: bytes, steps: int) -> tuple[list[Spent], list[Spent]]:
    """Returns the parts of a step in their order, what is in none of them last, and the operators; both as means of so many steps."""
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
                Launch(name=operator.name if operator else kernel.name, ts=at.ts, took=kernel.dur)
            )
    return parts(events, launched, steps), operators(events, launched, steps)


def parts(events: Iterable[Event], launched: Iterable[Launch], steps: int) -> list[Spent]:
    """Returns what is spent in each part of a step.

    A kernel is of the part in which it was launched, by whatever thread: backward passes have threads of their own, for which ours waits.
    """
    ours = [
        event
        for event in events
        if event.cat == RANGE and event.name.startswith((PREFIX, OPTIMIZERS_OWN))
    ]
    sums: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for event, around in nested([*ours, *launched]):
        outer = path(around)
        if isinstance(event, Launch):
            sums[outer] += 0.0, event.took, 0.0
            continue
        sums[path([*around, event])] += event.dur, 0.0, 1.0
        if around:
            sums[outer] -= event.dur, 0.0, 0.0
    rest = sums.pop("", np.zeros(3))
    return means({**sums, REST: rest}, steps)


def operators(events: Iterable[Event], launched: Iterable[Launch], steps: int) -> list[Spent]:
    """Returns what is spent in each operator; a kernel that none of them launched stands for itself."""
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
        sums[launch.name] += 0.0, launch.took, 0.0
    return means(sums, steps)


def nested(events: Iterable[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Yields events in their order, each with those that it lies in, the outermost first."""
    around: list[Event] = []
    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        while around and around[-1].ts + around[-1].dur <= event.ts:
            around.pop()
        yield event, around
        around.append(event)


def path(ranges: Iterable[Event]) -> str:
    """Returns the part of a step that ranges mean, one in the other; the step itself is an empty one."""
    names = [
        each.name.removeprefix(PREFIX) if each.name.startswith(PREFIX) else OPTIMIZER
        for each in ranges
        if not each.name.startswith(STEP)
    ]
    return " / ".join(names)


def means(sums: dict[str, np.ndarray], steps: int) -> list[Spent]:
    """Returns microseconds, the GPU's and numbers of times as milliseconds and numbers a step."""
    return [
        Spent(name, float(own) / 1e3 / steps, float(gpu) / 1e3 / steps, float(times) / steps)
        for name, (own, gpu, times) in sums.items()
    ]

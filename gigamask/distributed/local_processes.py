"""Processes on this machine that train together on a CPU without torchrun."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch.distributed import TCPStore

from gigamask.distributed.world import HOST, STARTED, World, destroy_world, init_world
from gigamask.errors import GigamaskError

EXIT_TIMEOUT_S = 60.0
"""Seconds that the other processes have to exit once this one has finished."""


@contextmanager
def start_world(
    arguments: Sequence[str],
    count: int,
    environment: MutableMapping[str, str],
    timeout_s: float,
) -> Iterator[World]:
    """Run a command in further processes, which form a world with this one.

    Only this process gets a Ctrl-C of the terminal. If it fails, the others are killed.

    Args:
        arguments: Arguments of `gigamask` for the other processes.
        count: Number of processes including this one, whose rank is 0.
        environment: Environment variables of this process; inside the context they are those that
            torchrun would set.
        timeout_s: Seconds to wait for another process in a collective operation.

    Yields:
        The world, once all processes have joined.

    Raises:
        GigamaskError: One of them has ended before.
    """
    before = dict(environment)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    environment.update(_variables(0, count, store.port))
    # The others must find the same modules, also when this process is a script or a notebook.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    shared = {**environment, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    others: list[subprocess.Popen] = []
    world = World()
    try:
        for rank in range(1, count):
            others.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "gigamask", *arguments],
                    env={**shared, **_variables(rank, count, store.port), STARTED: "1"},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        _wait(store, others)
        world = init_world(environment, torch.device("cpu"), timeout_s)
        yield world
    except SystemExit:  # another process has failed and prints why
        raise
    except BaseException:
        for process in others:  # before they notice, and print, that this one has left
            process.kill()
        raise
    finally:
        destroy_world(world)
        environment.clear()
        environment.update(before)
        for process in others:
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_TIMEOUT_S)
            process.kill()
            process.wait()


def _wait(store: TCPStore, others: Sequence[subprocess.Popen]) -> None:
    """Wait until all processes are about to join, which torch would do for ten minutes."""
    for rank, process in enumerate(others, 1):
        while not store.check([str(rank)]):
            if process.poll() is not None:
                raise GigamaskError(
                    f"process {rank} of {len(others) + 1} ended with exit code "
                    f"{process.returncode} before training; its output is above; --processes 1 "
                    "trains without it"
                )
            time.sleep(0.02)


def _variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment variables of a process, as torchrun sets them."""
    names = {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is not the one of rank 0
        "TORCHELASTIC_RESTART_COUNT": 0,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": 0,
        "RANK": rank,
        "LOCAL_RANK": rank,
    }
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:  # does not change with the network
        names["GLOO_SOCKET_IFNAME"] = loopback[0]
    return {name: str(value) for name, value in names.items()}

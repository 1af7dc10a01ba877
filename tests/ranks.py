"""Run a function on real ranks: one process each, gloo between them, a seed of its own, and a time limit.

    def body(shape): ...            # importable by name; torch.distributed is initialized, results are
    picklable first, second = ranks.run(2, body, (3, 4))

Processes are kept from call to call and, without a GPU, forked from one that has imported everything, since that
takes seconds; each call has a group of its own.
A rank that fails, or a deadlock that runs into the limit, fails the call with every failed rank's traceback,
and the next call starts fresh processes.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_pool: list[tuple[BaseProcess, Connection]] = []


def run(world_size: int, body: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """body(*args, **kwargs) on every rank of a new group; its results in rank order. `timeout` is in seconds."""
    while len(_pool) < world_size:
        _pool.append(_start())
    connections = [connection for _, connection in _pool[:world_size]]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rendezvous")
        for rank, connection in enumerate(connections):
            connection.send((partial(body, *args, **kwargs), rank, world_size, path, timeout))
        results = _collect(connections, timeout)
    failed = [f"rank {r}: {text}" for r, (ok, text) in enumerate(results) if not ok]
    if failed:
        stop()
        raise AssertionError(f"{len(failed)} of {world_size} ranks failed\n" + "\n".join(failed))
    return [result for _, result in results]


def stop() -> None:
    """End every kept process."""
    for _, connection in _pool:
        connection.close()
    while _pool:
        process, _ = _pool.pop()
        process.join(2)  # an idle process ends by itself
        process.kill()


def _collect(connections: list[Connection], timeout: float) -> list[tuple[bool, Any]]:
    results: dict[Connection, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(connections):
        left = deadline - time.monotonic()
        ready = wait([c for c in connections if c not in results], max(left, 0))
        if not ready:
            break
        for connection in ready:
            try:
                results[connection] = connection.recv()
            except EOFError:
                results[connection] = (False, "the process died")
            # The others may now wait for this rank in vain: give them just long enough to report.
            if not results[connection][0]:
                deadline = min(deadline, time.monotonic() + 3)
    return [results.get(c, (False, f"no answer (limit {timeout} s): a deadlock?")) for c in connections]


def _start() -> tuple[BaseProcess, Connection]:
    import torch

    # A process that has asked for GPUs cannot be forked into one that uses them.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(["tests.preload"])
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, dict(os.environ)), daemon=True)
    process.start()
    there.close()
    return process, here


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the server that forks has that of its own start
    import torch
    import torch.distributed as dist

    from titan_mega_moe import device

    torch.set_num_threads(1)
    # Before the first body is read, because that imports its module and with it torchtitan.
    device.prepare("cuda" if torch.cuda.is_available() else "cpu")
    # As torchtitan does when it makes the group itself: recomputation in backward reads thread-local meshes.
    torch.autograd.set_multithreading_enabled(False)
    while True:
        try:
            body, rank, world_size, path, timeout = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # at once: taking gigabytes of Python objects apart takes seconds
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{path}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            torch.manual_seed(1000 + rank)
            answer = (True, body())
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)

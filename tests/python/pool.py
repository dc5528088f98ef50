"""A pool of rank processes with a process group among them, kept over many tests: gloo, or with device "cuda" one GPU a
rank while there are so many, NCCL for its tensors and gloo for those of the CPU.

    results = pool.run(function, *args)    # function(*args) on every rank, in rank order

`function` is a module-level function of a module that the ranks can import. What a rank raises is raised here, with its
traceback. A rank that dies or passes the time limit ends the pool; the next run starts a new one.
"""

import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection, forkserver


class RankError(AssertionError):
    pass


def _context(device):
    """Importing torch takes seconds of a core: it is done once, in a process that every rank is then forked from. A
    CUDA context must not come near a fork."""
    if device == "cuda":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["training", "torch._dynamo"])  # the latter comes with the first fully_shard
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # where Python < 3.12 looks for them
    forkserver.ensure_running()
    os.environ["PYTHONPATH"] = before
    return context


class Pool:
    def __init__(self, size, limit_s=240, device="cpu"):
        self.size, self.limit_s, self.device, self.ranks = size, limit_s, device, []
        self.grace_s = 3  # for the others, once one has failed

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        context = _context(self.device)
        self.store = tempfile.TemporaryDirectory(prefix="tide-store-")
        self.ranks = []
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, self.size, f"{self.store.name}/store", self.device)
            )
            process.start()
            there.close()
            self.ranks.append((process, here))

    def stop(self, kill=False):
        ranks, self.ranks = self.ranks, []
        for process, pipe in ranks:
            if kill:
                process.kill()
            else:
                try:
                    pipe.send(None)
                except OSError:
                    pass
        for process, pipe in ranks:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        if ranks:
            self.store.cleanup()

    def run(self, function, *args, **kwargs):
        if not self.ranks:
            self.start()
        for _, pipe in self.ranks:
            pipe.send((function, args, kwargs))
        results, errors, until = [None] * self.size, [], time.monotonic() + self.limit_s
        waiting = {pipe: (rank, process) for rank, (process, pipe) in enumerate(self.ranks)}
        while waiting and (ready := connection.wait(list(waiting), max(0.0, until - time.monotonic()))):
            for pipe in ready:
                rank, process = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    process.join(5)
                    ok, value = False, f"died with exit code {process.exitcode}"
                if ok:
                    results[rank] = value
                else:  # the others may wait for it: they get a moment to say where they are
                    errors.append((rank, value))
                    until = min(until, time.monotonic() + self.grace_s)
        errors += [(rank, "no answer") for rank, _ in waiting.values()]
        if errors:
            self.stop(kill=True)  # its groups may be anywhere
            raise RankError("\n".join(f"--- rank {rank} of {self.size}: {text}" for rank, text in errors))
        return results


def _serve(pipe, rank, size, store, device):
    os.environ["TIDE_TEST_DEVICE"] = device  # read by training.py, which the first job imports
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    while (job := _next(pipe)) is not None:
        function, args, kwargs = job
        try:
            answer = True, function(*args, **kwargs)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
    dist.destroy_process_group()
    pipe.close()
    os._exit(0)  # torch's threads need no farewell


def _next(pipe):
    try:
        return pipe.recv()
    except EOFError:  # whoever ran the tests is gone
        return None

"""Runs a function of somebody else in a process of its own, with a time limit.

The process is a fork: torch is loaded once, for all of them. So it needs Linux or macOS.
"""

import json
import multiprocessing
import os
import warnings

import torch

FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None


class Stopped(Exception):
    """The process gave no answer. The sentence says why."""


class Apart:
    """A process that runs function(send, *args). `receive` returns what it sends: numbers, strings
    and lists of these."""

    def __init__(self, function, *args):
        if FORK is None:
            raise SystemExit("conformance forks processes: it needs Linux or macOS (or WSL)")
        self.pipe, there = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=quietly, args=(there, function, *args))
        self.process.start()
        there.close()

    def receive(self, limit):
        try:
            if self.pipe.poll(limit):
                return json.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise Stopped(f"it ended its process with {how}") from None
        raise Stopped(f"it did not end within {limit} seconds")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.join()
        self.pipe.close()


def quietly(pipe, function, *args):
    """What their functions print would appear in the middle of the table; and a fork has no threads
    but this one: torch would wait for the others for ever."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warnings.simplefilter("ignore")
    function(lambda answer: pipe.send_bytes(json.dumps(answer).encode()), *args)

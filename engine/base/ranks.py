"""Collectives between the ranks, the processes of one run. With one process, values come back
unchanged."""

import atexit
import os
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.base.errors import UserError


class AgreedError(UserError):
    """A UserError that every rank raises at the same place. So they can still save together."""


def start():
    """Join the other ranks, if there are any, and return this rank's device. GPUs talk by nccl,
    CPUs by gloo."""
    local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if gpus and local >= gpus:
        raise UserError(f"this machine has {gpus} GPU(s), and torchrun started more processes: "
                        f"--nproc-per-node {gpus}.")
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # nccl gets its GPU here: otherwise each rank would guess one at its first message
        dist.init_process_group(
            "nccl" if gpus else "gloo", timeout=timedelta(hours=1),
            device_id=device if gpus else None)
        # a thread of gloo needs Python's lock to free the last tensors: if Python has ended before,
        # the process aborts
        atexit.register(time.sleep, 0.2)
    return device


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


def is_alone(error):
    """Whether a RuntimeError means that another rank has ended."""
    return world_size() > 1 and (isinstance(error, dist.DistBackendError) or "gloo" in str(error))


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce(device, sums=(), maxima=()):
    """`sums` added up over the ranks, and the largest of `maxima`, in one dict of floats. Every
    rank must pass the same keys.

    Both are dicts of numbers, or of 0-dimensional tensors, with different keys. They are read off
    the device all at once.
    """
    values = dict(sums) | dict(maxima)
    packed = torch.zeros(len(values), dtype=torch.float64, device=device)
    for i, value in enumerate(values.values()):
        packed[i].fill_(value)  # the host waits for no number that is on the device
    if world_size() > 1:
        dist.all_reduce(packed[: len(sums)])
        if maxima:
            dist.all_reduce(packed[len(sums) :], op=dist.ReduceOp.MAX)
    return dict(zip(values, packed.tolist()))


def gather(rows):
    """The lists of all ranks, one after the other, on every rank."""
    if world_size() == 1:
        return rows
    lists = [None] * world_size()
    dist.all_gather_object(lists, rows)
    return [row for rows_of_rank in lists for row in rows_of_rank]


def over_all_groups(advantages, rollout):
    """`advantages(rollout)`, but over the groups of all ranks. Returns those of this rank, (Q, G).
    `advantages` may read only the rewards: all else in the rollout is that of this rank."""
    parts = gather([rollout.rewards])
    rewards = torch.cat(parts, dim=1)
    questions = [part.shape[1] for part in parts]
    return advantages(replace(rollout, rewards=rewards)).split(questions)[rank()]


def split_over_ranks(things):
    """This rank's share of a list: things r, r + world size …"""
    return things[rank() :: world_size()]


def from_first(value):
    """Rank 0's value, on every rank."""
    return gather([value])[0]

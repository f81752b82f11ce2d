"""The few things that ranks say to each other. Without torchrun, or with one process, each is the identity."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def start():
    """Join the other ranks, if there are any, and return this rank's device. gloo on CPU, nccl on GPU."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=1))
    return device


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def all_sum(values, device, op="sum"):
    """A dict of floats, summed over the ranks (op "max": the largest). Every rank must bring the same keys."""
    if world_size() == 1:
        return dict(values)
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    return dict(zip(values, packed.tolist()))


def sum_gradients(model):
    """Add up the gradients of all ranks. A sum, not a mean: the loss weights already count the whole batch."""
    for p in model.parameters():
        if p.requires_grad and p.grad is None:  # a rank without a completion brings zeros
            p.grad = torch.zeros_like(p)
    if world_size() > 1:
        work = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters() if p.requires_grad]
        for w in work:
            w.wait()


def gather(rows):
    """The lists of all ranks, one after the other, on every rank."""
    if world_size() == 1:
        return rows
    lists = [None] * world_size()
    dist.all_gather_object(lists, rows)
    return [row for part in lists for row in part]


def over_all_groups(advantages, rewards):
    """This rank's part of `advantages` over the groups of all ranks, for a normalisation over the whole batch. rewards: (R, Q, G)."""
    if world_size() == 1:
        return advantages(rewards)
    groups = gather([(rank(), group) for group in rewards.unbind(1)])
    mine = [i for i, (owner, _) in enumerate(groups) if owner == rank()]
    return advantages(torch.stack([group for _, group in groups], dim=1))[mine]


def from_first(value):
    """Rank 0's value, on every rank."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier():
    if world_size() > 1:
        dist.barrier()

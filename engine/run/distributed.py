"""The few things that ranks say to each other. Without torchrun, or with one process, each is the identity."""

import atexit
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.run.options import UserError


def start():
    """Join the other ranks, if there are any, and return this rank's device. gloo on CPU, nccl on GPU."""
    local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if gpus and local >= gpus:
        raise UserError(f"this machine has {gpus} GPU{'s' * (gpus > 1)}, and torchrun started more processes: --nproc-per-node {gpus}.")
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        store, rank, size = next(dist.rendezvous("env://"))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun keeps one store for all restarts of a job, and it still holds the addresses of processes that are gone
            store = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        # nccl is told its GPU at once: else each rank would guess one at its first word to the others
        backend, bound = ("nccl", device) if gpus else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(hours=1), device_id=bound)
        # a thread of gloo takes Python's lock to let go of the last tensors: if Python has ended by then, the process aborts
        atexit.register(time.sleep, 0.2)
    return device


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


def is_alone(error):
    """Whether a RuntimeError says that another rank has left the talk."""
    return world_size() > 1 and (isinstance(error, dist.DistBackendError) or "gloo" in str(error))


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def all_sum(values, device, op="sum"):
    """A dict of floats, summed over the ranks (op "max": the largest). Every rank must bring the same keys.

    values: numbers, or 0-dimensional tensors on `device`, which are read off it all at once.
    """
    packed = list(values.values())
    if isinstance(packed[0], torch.Tensor):
        packed = torch.stack(packed).double()
    elif world_size() == 1:
        return dict(values)
    else:
        packed = torch.tensor(packed, dtype=torch.float64, device=device)
    if world_size() > 1:
        dist.all_reduce(packed, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    return dict(zip(values, packed.tolist()))


def shard(module, *methods, exact=(), **options):
    """FSDP2: share the weights of `module` out to the ranks, and with them its gradients and the optimizer's moments.

    A layer's weights are gathered when it is computed, in bf16 on a GPU, and given up again; gradients are added up in float32.
    methods: names of functions of `module` that do what its `forward` usually does, before which its weights are gathered.
    exact: names of parts that are computed in float32. options: of `fully_shard`, for what stands outside the layers.
    """
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if torch.cuda.is_available() else MixedPrecisionPolicy()
    layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    parts = [*((layer, bf16, {}) for layer in layers), *((module.get_submodule(name), MixedPrecisionPolicy(), {}) for name in exact)]
    for part, policy, given in [*parts, (module, bf16, options)]:
        fully_shard(part, mp_policy=policy, **given)
        # a sum over the ranks, not a mean: the loss weights already count the whole batch
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    for name in methods:
        register_fsdp_forward_method(module, name)


def hand_out(network, empty, device, *methods, **options):
    """Shards, on `device`, of a network that the first rank has in the host's memory; for the other ranks it is None.

    empty: the same network on every rank, whose parameters are on the meta device and take no memory. A device holds its part, and
    one whole tensor at a time. methods, options: those of `shard`.
    """
    shard(empty, *methods, **options)  # which moves the buffers to the device
    buffers = {name: buffer.clone() for name, buffer in empty.named_buffers()}
    empty.to_empty(device=device)
    for name, buffer in empty.named_buffers():
        buffer.copy_(buffers[name])
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, network.state_dict() if network else {}, options=whole)
    return empty


def is_sharded(module):
    return isinstance(module, FSDPModule)


def whole_weights(model, dtype=None):
    """(name, tensor) of every weight, gathered from all ranks one by one where they are shared out."""
    for name, p in model.named_parameters():
        p = p.detach().to(dtype)
        yield name, p.full_tensor() if isinstance(p, DTensor) else p


def sum_gradients(model):
    """Add up the gradients of all ranks. A sum, not a mean: the loss weights already count the whole batch."""
    if is_sharded(model):
        return  # done by FSDP
    for p in model.parameters():
        if p.requires_grad and p.grad is None:  # a rank without a completion brings zeros
            p.grad = torch.zeros_like(p)
    if world_size() > 1:
        work = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters() if p.requires_grad]
        for w in work:
            w.wait()


def clip_gradients(network, longest):
    """Scale gradients that are longer than `longest` down to it, over all ranks. Returns their length before."""
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), longest)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def even_out(parts, filler, device):
    """`parts` with what `filler()` makes behind them, so that every rank has as many as the others."""
    most = all_sum({"parts": len(parts)}, device, op="max")["parts"]
    return parts + [filler() for _ in range(int(most) - len(parts))]


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

"""FSDP2 shards (`--shard full`), and the sum of the gradients over the devices."""

import warnings

import torch
import torch.distributed as dist

from engine.base import ranks
from engine.model.precision import with_parameters

# of log-probabilities that are a part of a larger tensor: nothing writes into them
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def shard(module, dtype, exact=()):
    """FSDP2: split the weights of `module`, their gradients and the optimizer's moments over the
    ranks.

    A layer's weights are gathered just before the layer is computed, in `dtype`, and freed
    afterwards. Gradients are added up in float32. exact: names of submodules that are computed in
    float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    exact = [module.get_submodule(name) for name in exact]
    for part in [*layers, *exact, module]:
        computed = torch.float32 if part in exact else dtype
        fully_shard(part, mp_policy=MixedPrecisionPolicy(computed, torch.float32))
        # a sum over the ranks, not a mean: the loss weights are already those of the whole batch
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def with_gathered_weights(module, function):
    """`function`, which computes with the split `module`, as a function that may be called.

    FSDP gathers the weights outside the layers only for `forward` and for methods that it knows. So
    the module gets the function as a method. FSDP moves tensors among the arguments to the device,
    but it leaves a Batch as it is.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    module.function = function
    register_fsdp_forward_method(module, "function")
    return module.function


def without_weights(network, dtype):
    """The network of the first rank on every rank, with its parameters on the meta device, where
    they take no memory."""
    return ranks.from_first(network and with_parameters(network, lambda p: p.to("meta", dtype)))


def shard_from_rank_0(network, device, stored, computed, exact=()):
    """Sharded network from the whole network in the memory of rank 0's host.

    network: that whole network; None on the other ranks. A device holds its part, and at most one
    whole tensor at a time. stored, computed: the dtypes of the weights and of the arithmetic.
    exact: as for `shard`.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    empty = without_weights(network, stored)
    shard(empty, computed, exact)  # this moves the buffers to the device
    buffers = [buffer.clone() for buffer in empty.buffers()]
    empty.to_empty(device=device)
    for buffer, loaded in zip(empty.buffers(), buffers):
        buffer.copy_(loaded)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, network.state_dict() if network else {}, options=whole)
    return empty


def full_state_dict(model, dtype=None):
    """Full state dict, (name, whole tensor) of every weight. Split weights are gathered from all
    ranks, one at a time."""
    from torch.distributed.tensor import DTensor

    for name, p in model.named_parameters():
        p = p.detach().to(dtype)
        yield name, p.full_tensor() if isinstance(p, DTensor) else p


def sum_gradients(networks):
    """Add up the gradients of all ranks. A sum, not a mean: the loss weights are already those of
    the whole batch."""
    if networks.policy.sharded:
        return  # FSDP has done it
    learning = []
    for network in networks.optimized_networks:
        learning += [p for p in network.parameters() if p.requires_grad]
    for p in learning:
        if p.grad is None:  # a rank without a completion adds zeros
            p.grad = torch.zeros_like(p)
    if ranks.world_size() > 1:
        for work in [dist.all_reduce(p.grad, async_op=True) for p in learning]:
            work.wait()


def clip_gradients(network, longest):
    """Scale the gradient down to the norm `longest` if its norm is larger, over all ranks. Returns
    the norm before."""
    from torch.distributed.tensor import DTensor

    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), longest)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm

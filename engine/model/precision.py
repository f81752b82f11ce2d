"""bfloat16 networks with float32 master weights.

The option `--dtype` names the dtype of a network: it samples, scores and learns in this dtype.

An update at lr 1e-6 is too small for the weights of a network in bfloat16 (bf16). So the optimizer
changes a second set of weights in float32, the masters. After each of its steps the network's
weights are the rounded masters.
"""

from copy import deepcopy
from functools import partial

import torch

# a CPU computes a model with fewer parameters faster in float32, and faster with one thread
TINY = 10_000_000


def choose_dtype(choice, device, parameters):
    """The dtype of a network's weights and of its arithmetic.

    choice: the option --dtype. auto: bf16 if the device multiplies bf16 matrices in hardware: a
    GPU from Ampere on, a CPU with Intel's AMX if the model is not tiny. Without such units bf16 is
    slower than float32. parameters: how many the model has.
    """
    if choice != "auto":
        return getattr(torch, choice)
    fast = (
        torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda"
        else torch.cpu.get_capabilities().get("amx_bf16") and parameters >= TINY
    )
    return torch.bfloat16 if fast else torch.float32


def nearly_equal(one, other):
    """Whether two tensors differ by no more than the rounding of their dtype."""
    tolerance = 1e-3 if one.dtype == torch.float32 else 0.1
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def with_parameters(network, make):
    """A copy of a network with make(p) for each parameter p.

    Its buffers stay as they were loaded: rotary frequencies rounded to bf16 would turn the keys of
    the thousandth token by a radian too much or too little.
    """
    memo = {
        id(p): torch.nn.Parameter(make(p.detach()), requires_grad=p.requires_grad)
        for p in network.parameters()
    }
    return deepcopy(network, memo)


def rounded(masters, dtype):
    """Compute copy of float32 master weights: a network in `dtype` with their rounded values. Its
    gradients are added up in those of the masters. Weights that do not learn are shared, if their
    dtype is the same."""
    network = with_parameters(masters, lambda p: p.to(dtype))
    for p, master in zip(network.parameters(), masters.parameters()):
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(partial(add_gradient, master))
    return network


def add_gradient(master, p):
    """Add the new gradient of a weight to that of its master, in float32, and free it."""
    if master.grad is None:
        master.grad = p.grad.float()
    else:
        master.grad += p.grad
    p.grad = None


@torch.no_grad()
def copy_masters_to_model(masters, network):
    """Copy the float32 master weights into the network that `rounded(masters)` has made."""
    for p, master in zip(network.parameters(), masters.parameters()):
        if p.requires_grad:
            p.copy_(master)


def frozen_copy(network, dtype):
    """A copy of a network that does not learn. Its weights have `dtype`."""
    return with_parameters(network, lambda p: p.to(dtype, copy=True)).requires_grad_(False)

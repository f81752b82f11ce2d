"""Precision: weights that learn are float32, because an update at lr 1e-6 is too small for bfloat16
(bf16). Arithmetic is float32, or bf16 by autocast, as `--dtype` says."""

from copy import deepcopy

import torch

# a CPU computes a model with fewer parameters faster in float32, and faster with one thread
TINY = 10_000_000


def choose_dtype(choice, device, parameters):
    """The dtype of arithmetic, and of weights that are not trained.

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


def frozen_copy(network, dtype):
    """A copy of a network that does not learn. Its weights have `dtype`."""
    return with_parameters(network, lambda p: p.to(dtype, copy=True)).requires_grad_(False)

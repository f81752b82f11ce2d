"""In which precision what is computed: weights that learn in float32, arithmetic on a GPU in bfloat16."""

import contextlib
from copy import deepcopy

import torch


def compute_dtype(device):
    """bf16 on a GPU, float32 on a CPU: of arithmetic, and of weights that are not trained."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def autocast(device):
    """Arithmetic in `compute_dtype`; the weights themselves stay float32 (at lr 1e-6 bf16 swallows updates)."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def with_parameters(network, make):
    """A copy of a network whose parameters are `make` of the network's. Its buffers stay as they were loaded: rotary frequencies
    rounded to bfloat16 would turn the keys of a thousandth token by a radian."""
    memo = {id(p): torch.nn.Parameter(make(p.detach()), requires_grad=p.requires_grad) for p in network.parameters()}
    return deepcopy(network, memo)


def frozen_copy(network, dtype):
    """A copy of a network that does not learn, with its weights in `dtype`."""
    return with_parameters(network, lambda p: p.to(dtype, copy=True)).requires_grad_(False)

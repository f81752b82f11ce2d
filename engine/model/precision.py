"""Precision: weights that learn are float32; arithmetic on a GPU is bf16 (bfloat16)."""

import contextlib
from copy import deepcopy

import torch


def compute_dtype(device):
    """The dtype of arithmetic, and of weights that are not trained: bf16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def autocast(device):
    """Arithmetic in `compute_dtype`. The weights stay float32: an update at lr 1e-6 is too small for bf16."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def with_parameters(network, make):
    """A copy of a network with make(p) for each parameter p.

    Its buffers stay as they were loaded: rotary frequencies rounded to bf16 would turn the keys of the thousandth token
    by a radian too much or too little.
    """
    memo = {id(p): torch.nn.Parameter(make(p.detach()), requires_grad=p.requires_grad) for p in network.parameters()}
    return deepcopy(network, memo)


def frozen_copy(network, dtype):
    """A copy of a network that does not learn. Its weights have `dtype`."""
    return with_parameters(network, lambda p: p.to(dtype, copy=True)).requires_grad_(False)

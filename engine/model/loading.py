"""Loading a causal language model of transformers, with the checks that training needs."""

import ctypes
import functools
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm

from engine.base.errors import UserError, one_line
from engine.model.folders import adapters_in, resolve_model, why_unread
from engine.model.precision import TINY, choose_dtype, nearly_equal
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Sampling


def load_model(name, device, dtype="auto", *, frozen=False, place=None):
    """(model, tokenizer) of a hub name or a folder.

    Dropout stays off, in training too: with dropout the scored policy would differ from the policy
    that sampled, and the first ratio would not be 1. dtype: what the model computes in, as
    `choose_dtype` takes it. Its weights are float32, for the optimizer; those of a frozen model,
    which are never trained, have the dtype that it computes in. place: None, or the device that
    holds the weights at first.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading and saving weights; the run has a bar of its own
    repeat_keys_in_float32()

    name = resolve_model(name)
    weights = choose_dtype(dtype, device, TINY) if frozen else torch.float32
    model, tokenizer = read_model(name, weights)
    if frozen and choose_dtype(dtype, device, model.num_parameters()) != weights:
        # a tiny model: its weights would be rounded for nothing
        return load_model(name, device, "float32", frozen=True)
    if adapters_in(name):
        adapters_in_float32(model, name)
    model.to(place or device).eval()
    fewer_kernels(model, device)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    check_model(model, tokenizer, name)
    if device.type == "cpu":
        keep_freed_memory()
        if model.num_parameters() < TINY:
            torch.set_num_threads(1)  # a tiny model is several times slower with several threads
    return model, tokenizer


def keep_freed_memory():
    """Let the C library keep the memory of tensors that are gone, for the tensors to come.

    Otherwise glibc gives the memory of large tensors back to the system. The system hands out
    memory page by page and empties each page. This took 1 to 8 % of a step of SmolLM2-135M on a
    quiet CPU, and 17 % on a busy one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt:
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: 32 MB is the largest value that it takes
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def read_model(name, dtype):
    """(model, tokenizer) as transformers reads them. Code that a model brings is never run."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:  # without trust_remote_code transformers asks on the terminal
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        if tokenizer.vocab_size < 10:
            raise ValueError("it holds no tokenizer")  # transformers has made it from nothing
        model, loading = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, output_loading_info=True, trust_remote_code=False)
    # what a damaged or a hostile folder raises is up to transformers and torch
    except Exception as error:
        raise UserError(f"the model {name} cannot be loaded ({why_unread(name, error)}): name a "
                        "causal language model of text with its tokenizer, whose weights are "
                        "whole, not quantized.") from None
    if getattr(model, "is_quantized", False):
        raise UserError(f"the weights of {name} are quantized: only whole weights can be trained.")
    for missing in sorted(loading["missing_keys"]):  # filled with random numbers
        raise UserError(
            f"the weights of {name} lack {missing}: name a complete causal language model.")
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {name} has no end-of-sequence token, so no completion "
                        "would end: set its eos_token.")
    return model, tokenizer


@functools.cache  # once in a process
def repeat_keys_in_float32():
    """Keep attention in float32 on a GPU from writing all scores, T × T for each head.

    If queries share keys and there is no mask, transformers leaves it to PyTorch to repeat the keys
    (enable_gqa). In float32 PyTorch has no fused kernel on a GPU that can do this. So here
    transformers repeats the keys.
    """
    from transformers.integrations import sdpa_attention

    usual = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda mask, key, *value: (  # transformers 5.0: no value
        not (key.is_cuda and key.dtype == torch.float32) and usual(mask, key, *value))


def fewer_kernels(model, device):
    """If the device is a GPU, let the host start fewer kernels, and make fewer plans."""
    if device.type == "cuda":
        # in attention cuDNN makes a plan for each new shape, which takes 3 ms
        torch.backends.cuda.enable_cudnn_sdp(False)
        fuse_norms(model)


@torch.no_grad()
def fuse_norms(model):
    """Let PyTorch compute each RMSNorm of a model in one kernel. transformers' own takes six, and
    keeps a tensor more for the backward pass."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            x = torch.linspace(-2, 3, module.weight.numel()).to(module.weight)
            if nearly_equal(fused_norm(module, x), module(x)):
                module.forward = partial(fused_norm, module)


def fused_norm(norm, x):
    """x · weight / √(mean x² + ε)"""
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def adapters_in_float32(model, folder=None):
    """Make the adapters of a model float32, then read those of a checkpoint into them: bf16 would
    round them."""
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data.float()
    if folder:
        from peft import set_peft_model_state_dict  # takes a second to import, and few runs need it

        saved = load_file(Path(folder, "adapter_model.safetensors"), device=str(model.device))
        saved = {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}
        set_peft_model_state_dict(model, saved)


@torch.no_grad()
def check_model(model, tokenizer, name):
    """Refuse a model that cannot be scored or sampled from here.

    `Policy.logprobs` multiplies by the output head's weight itself, so the logits must be this
    product. Sampling needs a cache of keys and values in which it can repeat the prompts.
    """
    ids = torch.arange(4, device=model.device).unsqueeze(0)
    sampler = Sampler(model, tokenizer)
    sampler.stop_ids = [-1]  # no completion ends before the cache is used
    try:
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model(input_ids=ids).logits
        head = model.get_output_embeddings()
        product = linear(states, head.weight, head.bias)
        sampler.sample([[0, 1, 2], [1]], 2, Sampling(2), 0)
    except Exception as error:
        raise UserError(f"the model {name} cannot be scored and sampled from here "
                        f"({one_line(error)}): use another model, or an earlier checkpoint of "
                        "it.") from None
    # a cap hardly changes small logits
    capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if capped or not nearly_equal(product, logits):
        raise UserError(
            f"the model {name} rescales its logits after the output head, or changes its states "
            "before it, which is not supported: use another causal language model.")

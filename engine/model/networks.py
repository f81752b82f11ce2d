"""Building the networks of a run: the policy that learns, the sampler, the reference, PPO's
critic."""

import warnings
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.base import ranks
from engine.model import shards
from engine.model.critic import Critic
from engine.model.loading import adapters_in_float32, load_model
from engine.model.logprobs import completion_logprobs
from engine.model.precision import compute_dtype, frozen_copy, with_parameters
from engine.model.prompts import prompts_once
from engine.model.sampling import Sampler, stop_tokens
from engine.model.vllm import VLLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# only this name of activation checkpointing is known to every version of transformers 5, and to
# peft
warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated")


@dataclass
class Networks:
    model: "PreTrainedModel"  # the policy
    tokenizer: "PreTrainedTokenizerBase"
    sampler: Sampler | VLLM | None = None
    optimizer: torch.optim.Optimizer | None = None
    reference: object = None  # a frozen model, or WithoutAdapter; None if β is 0
    critic: Critic | None = None

    @property
    def learners(self):
        return [network for network in (self.model, self.critic) if network]

    @property
    def notes(self):
        """A list with a sentence, if the model is slower than others."""
        if prompts_once(self.model.base_model):
            return []
        return [
            "this model keeps more than keys and values, so a prompt is computed again for each of "
            "its completions."
        ]


class WithoutAdapter:
    """The reference of a policy with a low-rank adapter: the same model with the adapter switched
    off."""

    def __init__(self, model):
        self.model, self.compute_dtype = model, compute_dtype(model)

    def completion_logprobs(self, *batch, **options):
        self.model.disable_adapters()
        try:
            return completion_logprobs(self.model, *batch, **options)
        finally:
            self.model.enable_adapters()


def build(source, config, device, *, critic=False, folder=None):
    """The Networks of a run that starts from the model `source`. folder: the checkpoint to resume
    from, or None.

    Reads these options: dtype, lr, beta, lora, seed, shard, rollout, sample_batch_size,
    gradient_checkpointing, and for vLLM those of `VLLM`.

    Weights that are trained are float32; all others have the `compute_dtype` of the policy. Each
    copy is made in its final precision, so that a device never holds more than in training. """
    if config.shard == "full":
        networks = sharded_networks(source, config, device, critic=critic, folder=folder)
    else:
        reference = None
        if config.lora:
            model, tokenizer = load_model(source, device, config.dtype, frozen=True)
            add_adapter(model, config.lora, config.seed, folder)
        else:
            # the reference of a resumed run is the model that the run started from
            if folder and config.beta:
                reference = load_model(source, device, config.dtype, frozen=True)[0].requires_grad_(
                    False
                )
            model, tokenizer = load_model(folder or source, device, config.dtype)
        networks = whole_networks(model, tokenizer, config, reference=reference, critic=critic)
    if config.rollout == "vllm":
        stop_ids = stop_tokens(networks.model, networks.tokenizer)
        dtype = compute_dtype(networks.model)
        networks.sampler = VLLM(folder or source, config, networks.tokenizer, stop_ids, dtype)
    return networks


def whole_networks(model, tokenizer, config, *, reference=None, critic=False):
    """The Networks of a run in which each device holds the whole policy `model`.

    reference: None: it is made from `model`, if beta is not 0. Reads the options lr, beta, lora,
    rollout, sample_batch_size, gradient_checkpointing. """
    if config.beta and reference is None:
        reference = (
            WithoutAdapter(model) if config.lora else frozen_copy(model, compute_dtype(model))
        )
    # for arithmetic in bf16 the sampler gets a bf16 copy: each of its small steps would cast
    # float32 weights again
    sampled = model
    if compute_dtype(model) != torch.float32 and config.rollout == "own" and not config.lora:
        sampled = frozen_copy(model, compute_dtype(model))
    critic = Critic(deepcopy(model.base_model)) if critic else None
    sampler = Sampler(
        sampled, tokenizer, copy=sampled is not model, batch_size=config.sample_batch_size
    )
    networks = Networks(model, tokenizer, sampler, None, reference, critic)
    return complete(networks, lr=config.lr, gradient_checkpointing=config.gradient_checkpointing)


def sharded_networks(source, config, device, *, critic=False, folder=None):
    """The Networks of `--shard full`: each device holds a part of each network, and a whole copy to
    sample from.

    The first rank reads a model into the host's memory and sends each device its part, one tensor
    at a time. Reads the options dtype, lr, beta, rollout, sample_batch_size,
    gradient_checkpointing. """
    def read(name):
        return (
            load_model(name, device, config.dtype, place="cpu")
            if ranks.rank() == 0
            else (None, None)
        )

    # the same network on every rank, with parameters on the meta device
    def without_weights(network, dtype):
        return ranks.from_first(network and with_parameters(network, lambda p: p.to("meta", dtype)))

    def hand_out(network, dtype, *methods, **options):
        empty = without_weights(network, dtype)
        if "completion_logprobs" in methods:
            empty.completion_logprobs = partial(completion_logprobs, empty)
        return shards.hand_out(network, empty, device, *methods, **options)

    whole, tokenizer = read(folder or source)
    tokenizer = ranks.from_first(tokenizer)
    networks = Networks(hand_out(whole, torch.float32, "completion_logprobs"), tokenizer)
    if critic:
        networks.critic = hand_out(
            whole and Critic(whole.base_model), torch.float32, "values", exact=["head"]
        )
    sampled, dtype = networks.model, compute_dtype(networks.model)
    if config.rollout == "own":
        empty = without_weights(whole, dtype)
        sampled = with_parameters(empty, lambda p: torch.empty_like(p, device=device)).to(device)
    networks.sampler = Sampler(
        sampled, tokenizer, copy=sampled is not networks.model, batch_size=config.sample_batch_size)
    networks.sampler.refresh(shards.whole_weights(networks.model, dtype))
    if config.beta:
        if folder:
            del whole  # before the next model is read, so that the host never holds two
            whole, _ = read(source)
        networks.reference = hand_out(
            whole, dtype, "completion_logprobs", reshard_after_forward=True
        )
        networks.reference.requires_grad_(False)
    return complete(networks, lr=config.lr, gradient_checkpointing=config.gradient_checkpointing)


def complete(networks, *, lr, gradient_checkpointing):
    """Add the optimizer to the networks, and switch gradient checkpointing on if it is asked
    for."""
    if gradient_checkpointing:
        for backbone in filter(
            None, [networks.model, networks.critic and networks.critic.backbone]
        ):
            backbone.gradient_checkpointing_enable({"use_reentrant": False})
    groups = [
        {"params": [p for p in network.parameters() if p.requires_grad]}
        for network in networks.learners
    ]
    networks.optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=0.0, fused=True)
    return networks


def add_adapter(model, rank, seed, folder=None):
    """Add a low-rank adapter (LoRA, 2106.09685) to every linear layer. Only the adapters' weights
    learn.

    W x becomes W x + (α / rank) B A x with α = 2 rank. B starts at 0. A starts at random numbers
    that follow from `seed`, so that all devices start with the same adapters. folder: a checkpoint;
    its adapters are loaded in place of new ones. """
    from peft import LoraConfig  # takes a second to import, and few runs need it

    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        model.add_adapter(
            LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")
        )
    adapters_in_float32(model, folder)
    model.eval()


def save_merged(folder, source, out):
    """Save a policy with adapters as one ordinary float32 model in the folder `out`: W becomes W +
    (α / rank) B A.

    folder: the checkpoint with the adapters. source: the model that they were trained on.
    """
    from peft import PeftModel

    base, tokenizer = load_model(source, torch.device("cpu"))
    PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(out)
    tokenizer.save_pretrained(out)

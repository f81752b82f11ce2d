"""The networks of a run: the policy that learns, the sampler, the reference, PPO's critic; and what makes them fit."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from engine.model import shards
from engine.model.critic import Critic
from engine.model.loading import load_model
from engine.model.logprobs import completion_logprobs
from engine.model.precision import compute_dtype, frozen_copy, with_parameters
from engine.model.sampling import Sampler, stop_tokens
from engine.model.vllm import VLLM
from engine.run import ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Networks:
    model: "PreTrainedModel"  # the policy
    tokenizer: "PreTrainedTokenizerBase"
    sampler: Sampler | VLLM | None = None
    optimizer: torch.optim.Optimizer | None = None
    reference: object = None  # a frozen model, or WithoutAdapter; None where β is 0
    critic: Critic | None = None

    @property
    def learners(self):
        return [network for network in (self.model, self.critic) if network]


class WithoutAdapter:
    """The reference of a policy that is the base model with a low-rank adapter: the same, with the adapter off."""

    def __init__(self, model):
        self.model = model

    def completion_logprobs(self, *batch, **options):
        self.model.disable_adapters()
        try:
            return completion_logprobs(self.model, *batch, **options)
        finally:
            self.model.enable_adapters()


def build(source, config, device, *, critic=False, folder=None):
    """The Networks of a run that starts from the model `source`. folder: a checkpoint whose policy it takes up again.

    Weights that are trained are float32, others are in `compute_dtype`. Every copy is made in the precision in which it stays,
    so that no device ever holds more than it does in training.
    """
    if config.shard == "full":
        networks = sharded_networks(source, config, device, critic=critic, folder=folder)
    else:
        reference, frozen = None, compute_dtype(device)
        if config.lora:
            model, tokenizer = load_model(source, device, frozen)
            add_adapter(model, config.lora, config.seed, folder)
        else:
            if folder and config.beta:  # the reference of a resumed run is the model that it started from, and not its policy
                reference = load_model(source, device, frozen)[0].requires_grad_(False)
            model, tokenizer = load_model(folder or source, device)
        networks = whole_networks(model, tokenizer, config, reference=reference, critic=critic)
    if config.rollout == "vllm":
        networks.sampler = VLLM(folder or source, config, networks.tokenizer, stop_tokens(networks.model, networks.tokenizer))
    return networks


def whole_networks(model, tokenizer, config, *, reference=None, critic=False):
    """The Networks around a policy that this device holds as a whole. reference: None for a frozen copy of the policy."""
    if config.beta and reference is None:
        reference = WithoutAdapter(model) if config.lora else frozen_copy(model, compute_dtype(model.device))
    sampled = model  # on a GPU a copy in bf16: the small steps of sampling would cast the weights again and again
    if model.device.type == "cuda" and config.rollout == "own" and not config.lora:
        sampled = frozen_copy(model, compute_dtype(model.device))
    critic = Critic(deepcopy(model.base_model)) if critic else None
    return complete(Networks(model, tokenizer, Sampler(sampled, tokenizer, copy=sampled is not model), None, reference, critic), config)


def sharded_networks(source, config, device, *, critic=False, folder=None):
    """The Networks of `--shard full`: every device holds its part of the weights, and the whole of the copy that samples.

    The first rank reads a model into the host's memory, from which the devices get their parts, one tensor after the other.
    """
    def read(name):
        return load_model(name, torch.device("cpu")) if ranks.rank() == 0 else (None, None)

    def without_weights(network, dtype):  # on every rank
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
        networks.critic = hand_out(whole and Critic(whole.base_model), torch.float32, "values", exact=["head"])
    sampled = networks.model
    if config.rollout == "own":
        sampled = with_parameters(without_weights(whole, compute_dtype(device)), lambda p: torch.empty_like(p, device=device)).to(device)
    networks.sampler = Sampler(sampled, tokenizer, copy=sampled is not networks.model)
    networks.sampler.refresh(shards.whole_weights(networks.model, compute_dtype(device)))
    if config.beta:
        if folder:
            del whole  # before another one is read
            whole, _ = read(source)
        networks.reference = hand_out(whole, compute_dtype(device), "completion_logprobs", reshard_after_forward=True)
        networks.reference.requires_grad_(False)
    return complete(networks, config)


def complete(networks, config):
    """The networks with the optimizer of those that learn, and their layers recomputed if the options say so."""
    if config.gradient_checkpointing:
        for backbone in filter(None, [networks.model, networks.critic and networks.critic.backbone]):
            backbone.gradient_checkpointing_enable({"use_reentrant": False})
    groups = [{"params": [p for p in network.parameters() if p.requires_grad]} for network in networks.learners]
    networks.optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=0.0)
    return networks


def add_adapter(model, rank, seed, folder=None):
    """Low-rank adapters (LoRA, 2106.09685) beside every linear layer, the only weights that learn; from `folder`, else new ones.

    W x becomes W x + (α / rank) B A x with α = 2 rank. B starts at 0, and A at random numbers that follow from `seed`, so that
    every rank starts from the same adapter.
    """
    from peft import LoraConfig, set_peft_model_state_dict  # takes a second to import, and few runs need it

    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear"))
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    if folder:  # only now: a bfloat16 model would have rounded what it loads
        saved = load_file(Path(folder, "adapter_model.safetensors"), device=str(model.device))
        set_peft_model_state_dict(model, {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()})
    model.eval()


def save_merged(folder, source, out):
    """The model of an adapter's checkpoint `folder` as one ordinary model in `out`, float32. source: the model that it was trained on.

    W becomes W + (α / rank) B A.
    """
    from peft import PeftModel

    base, tokenizer = load_model(source, torch.device("cpu"))
    PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(out)
    tokenizer.save_pretrained(out)

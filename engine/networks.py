"""The networks of a run: the policy that learns, the sampler, the reference, PPO's critic; and what makes them fit."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine import distributed, policy
from engine.critic import Critic
from engine.policy import completion_logprobs, compute_dtype
from engine.rollout import Own, stop_tokens
from engine.vllm import VLLM


@dataclass
class Networks:
    model: PreTrainedModel  # the policy
    tokenizer: PreTrainedTokenizerBase
    sampler: Own | VLLM | None = None
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

    Weights that are trained are float32, others are in `compute_dtype`.
    """
    base, tokenizer = policy.load(source, device, compute_dtype(device) if config.lora else torch.float32)
    if config.lora:
        add_adapter(base, config.lora, folder)
        return around(base, tokenizer, config)
    networks = around(policy.load(folder, device)[0] if folder else base, tokenizer, config, base=base, critic=critic)
    if config.rollout == "vllm":
        networks.sampler = VLLM(folder or source, config, tokenizer, stop_tokens(base, tokenizer))
    return networks


def around(model, tokenizer, config, *, base=None, critic=False):
    """The Networks around a policy. base: what the reference is a copy of; None: the policy."""
    networks = Networks(model, tokenizer)
    if config.beta:
        frozen = WithoutAdapter if config.lora else lambda model: deepcopy(model).requires_grad_(False).to(compute_dtype(model.device))
        networks.reference = frozen(base or model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    networks.critic = Critic(model) if critic else None
    copy = config.rollout == "own" and not config.lora and (model.device.type == "cuda" or config.shard == "full")
    networks.sampler = Own(model, tokenizer, copy)
    if config.shard == "full":
        for network in filter(None, [model, networks.reference]):
            network.completion_logprobs = partial(completion_logprobs, network)
            distributed.shard(network, "completion_logprobs")
        if critic:
            distributed.shard(networks.critic, "values")
    groups = [{"params": [p for p in network.parameters() if p.requires_grad]} for network in networks.learners]
    networks.optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=0.0)
    return networks


def add_adapter(model, rank, folder=None):
    """Low-rank adapters (LoRA, 2106.09685) beside every linear layer, the only weights that learn; from `folder`, else new ones.

    W x becomes W x + (α / rank) B A x with α = 2 rank; B starts at 0.
    """
    from peft import LoraConfig  # takes a second to import, and few runs need it

    if folder:
        model.load_adapter(folder, is_trainable=True)
    else:
        model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear"))
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    model.eval()


def save_merged(folder, source, out):
    """The model of an adapter's checkpoint `folder` as one ordinary model in `out`, float32. source: the model that it was trained on.

    W becomes W + (α / rank) B A.
    """
    from peft import PeftModel

    base, tokenizer = policy.load(source, torch.device("cpu"))
    PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(out)
    tokenizer.save_pretrained(out)

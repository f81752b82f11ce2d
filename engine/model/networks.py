"""Building the networks of a run: the policy that learns, the sampler, the reference, PPO's
critic."""

import warnings
from copy import deepcopy
from dataclasses import dataclass, replace

import torch

from engine.base import ranks
from engine.model import shards
from engine.model.critic import Critic
from engine.model.loading import adapters_in_float32, load_model
from engine.model.logprobs import Policy
from engine.model.precision import choose_dtype, frozen_copy, with_parameters
from engine.model.prompts import shares_prompts
from engine.model.sampling import Sampler, stop_tokens
from engine.model.vllm import VLLM

# only this name of activation checkpointing is known to every version of transformers 5, and to
# peft
warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated")

# --rollout NAME; sampling.py has their contract
SAMPLERS = {"own": Sampler, "vllm": VLLM}


@dataclass
class Networks:
    policy: Policy  # it learns
    tokenizer: object  # of transformers
    sampler: Sampler | VLLM | None = None
    optimizer: torch.optim.Optimizer | None = None
    reference: Policy | None = None  # None if β is 0
    critic: Critic | None = None
    peaks: list[float] = ()  # the highest learning rate of each parameter group of the optimizer

    @property
    def model(self):
        return self.policy.model

    @property
    def learners(self):
        return [network for network in (self.model, self.critic) if network]


def build(
    source, device, devices, sampling, *,
    lr, critic_lr=None, beta=0.0, seed=0, longest=None, critic=False, folder=None,
):  # fmt: skip
    """The Networks of a run that starts from the model `source`. folder: the checkpoint to resume
    from, or None.

    devices: dtype, shard, lora and gradient_checkpointing are read. sampling: temperature, rollout,
    and what another sampler than our own reads; longest, seed: as in the contract of sampling.py.

    Weights that are trained are float32; all others have the dtype of the policy's arithmetic. Each
    copy is made in its final precision, so that a device never holds more than in training.
    """
    options = {
        "lr": lr, "critic_lr": critic_lr, "beta": beta, "critic": critic,
        "gradient_checkpointing": devices.gradient_checkpointing,
        "own_sampler": sampling.rollout == "own",
    }
    if devices.shard == "full":
        networks = sharded_networks(source, device, devices.dtype, folder=folder, **options)
    else:
        reference = None
        if folder and beta and not devices.lora:
            # the reference of a resumed run is the model that the run started from
            reference, _ = load_policy(source, device, devices.dtype, frozen=True)
        start = source if devices.lora else folder or source
        policy, tokenizer = load_policy(start, device, devices.dtype, frozen=bool(devices.lora))
        if devices.lora:
            add_adapter(policy.model, devices.lora, seed, folder)
        networks = whole_networks(
            policy, tokenizer, reference=reference, adapter=bool(devices.lora), **options
        )
    for network in filter(None, [networks.policy, networks.reference]):
        network.temperature = sampling.temperature
    if sampling.rollout != "own":
        networks.sampler = SAMPLERS[sampling.rollout](
            folder or source, networks.tokenizer, networks.policy.dtype, sampling,
            stop_ids=stop_tokens(networks.model, networks.tokenizer), longest=longest, seed=seed,
        )
    return networks


def load_policy(name, device, dtype, **options):
    """(Policy, tokenizer). The arguments are those of `load_model`."""
    model, tokenizer = load_model(name, device, dtype, **options)
    computed = choose_dtype(dtype, device, model.num_parameters())
    return Policy(model, computed, shares_prompts(model.base_model)), tokenizer


def whole_networks(
    policy, tokenizer, *, lr, critic_lr=None, beta=0.0, reference=None, critic=False,
    adapter=False, gradient_checkpointing=False, own_sampler=True,
):  # fmt: skip
    """The Networks of a run in which each device holds the whole policy.

    reference: a Policy; None: it is made from the policy, if beta is not 0. adapter: whether the
    policy has a low-rank adapter.
    """
    model, dtype = policy.model, policy.dtype
    if beta and reference is None:
        frozen = model if adapter else frozen_copy(model, dtype)
        reference = replace(policy, model=frozen, without_adapter=adapter)
    networks = Networks(policy, tokenizer, reference=reference)
    if own_sampler:
        # for arithmetic in bf16 the sampler gets a bf16 copy: each of its small steps would cast
        # float32 weights again
        copy = dtype != torch.float32 and not adapter
        sampled = frozen_copy(model, dtype) if copy else model
        networks.sampler = Sampler(sampled, tokenizer, copy=copy)
    if critic:
        networks.critic = Critic(deepcopy(model.base_model), dtype, policy.shares_prompts)
    return complete(networks, lr, critic_lr, gradient_checkpointing)


def sharded_networks(
    source, device, dtype, *, lr, critic_lr=None, beta=0.0, critic=False, folder=None,
    gradient_checkpointing=False, own_sampler=True,
):  # fmt: skip
    """The Networks of `--shard full`: each device holds a part of each network, and a whole copy to
    sample from.

    The first rank reads a model into the host's memory and sends each device its part, one tensor
    at a time.
    """
    def read(name):
        """(model, about it) on the first rank; (None, None) on the others."""
        if ranks.rank() > 0:
            return None, None
        policy, tokenizer = load_policy(name, device, dtype, place="cpu")
        return policy.model, (policy.dtype, policy.shares_prompts, tokenizer)

    whole, about = read(folder or source)
    computed, share, tokenizer = ranks.from_first(about)
    policy = Policy(shards.hand_out(whole, device, torch.float32, computed), computed, share)
    networks = Networks(policy, tokenizer)
    if critic:
        first = whole and Critic(whole.base_model, computed, share)
        networks.critic = shards.hand_out(first, device, torch.float32, computed, exact=["head"])
    if own_sampler:
        empty = shards.without_weights(whole, computed)
        copy = with_parameters(empty, lambda p: torch.empty_like(p, device=device)).to(device)
        networks.sampler = Sampler(copy, tokenizer, copy=True)
        networks.sampler.refresh(shards.whole_weights(policy.model, computed))
    if beta:
        if folder:
            del whole  # before the next model is read, so that the host never holds two
            whole, _ = read(source)
        frozen = shards.hand_out(whole, device, computed, computed, reshard_after_forward=True)
        networks.reference = replace(policy, model=frozen.requires_grad_(False))
    return complete(networks, lr, critic_lr, gradient_checkpointing)


def complete(networks, lr, critic_lr, gradient_checkpointing):
    """Add the optimizer to the networks, and switch gradient checkpointing on if it is asked for.

    critic_lr: None: lr, as for the policy.
    """
    groups = [
        {"params": [p for p in network.parameters() if p.requires_grad], "lr": peak}
        for network, peak in zip(networks.learners, [lr, critic_lr or lr])
    ]
    networks.peaks = [group["lr"] for group in groups]
    networks.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    for network in networks.learners if gradient_checkpointing else ():
        backbone = getattr(network, "backbone", network)
        backbone.gradient_checkpointing_enable({"use_reentrant": False})
    return networks


def add_adapter(model, rank, seed, folder=None):
    """Add a low-rank adapter (LoRA, 2106.09685) to every linear layer. Only the adapters' weights
    learn.

    W x becomes W x + (α / rank) B A x with α = 2 rank. B starts at 0. A starts at random numbers
    that follow from `seed`, so that all devices start with the same adapters. folder: a checkpoint;
    its adapters are loaded in place of new ones.
    """
    from peft import LoraConfig  # takes a second to import, and few runs need it

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

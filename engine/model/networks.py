"""The networks of a run: policy, reference, PPO's critic, sampler, optimizer."""

import warnings
from copy import deepcopy
from dataclasses import dataclass, replace

import torch

from engine.base import ranks
from engine.base.errors import UserError
from engine.base.files import builtin_or_custom
from engine.model import shards
from engine.model.critic import Critic
from engine.model.loading import adapters_in_float32, load_model
from engine.model.logprobs import START, Policy, recompute_layers
from engine.model.precision import (
    choose_dtype,
    copy_masters_to_model,
    frozen_copy,
    rounded,
    with_parameters,
)
from engine.model.prefix_sharing import can_share_prefix
from engine.model.sampler import Sampler
from engine.model.sampler_interface import check_sampler, stop_tokens
from tasks.table import task_of

# peft warns of a second set of adapters, which START is
warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")


def sampler_class(word):
    """The class that `--sampler` names: "builtin" or FILE.py:CLASS. sampler_interface.py says what
    it has."""
    kind = builtin_or_custom(word, {"builtin": Sampler}, "sampler", "--sampler")
    if not (hasattr(kind, "check") and hasattr(kind, "sample")):
        raise UserError(f"--sampler {word} lacks check or sample: "
                        "engine/model/sampler_interface.py says what a sampler has.")
    return kind


def make_sampler(word, model, *arguments, **named):
    """A sampler of the user's own. What it returns is checked. model: the policy's, which reads the
    sampled tokens."""
    sampler = sampler_class(word)(*arguments, **named)
    check_sampler(
        sampler, f"--sampler {word}", vocabulary=model.get_input_embeddings().num_embeddings)
    return sampler


def uses_builtin(word):
    """Whether `--sampler` names the project's sampler, or a class that is built on it."""
    return word == "builtin" or getattr(sampler_class(word), "wraps_builtin", False)


@dataclass
class Networks:
    policy: Policy  # it learns
    tokenizer: object  # of transformers
    sampler: object = None  # as sampler_interface.py says
    optimizer: torch.optim.Optimizer | None = None
    reference: Policy | None = None  # None if β is 0 and nothing else needs the KL
    critic: Critic | None = None
    # of the policy's model and of the critic, if they compute in bfloat16 (precision.py)
    master_weights: list[torch.nn.Module] | None = None
    updates: int = 0  # steps of the optimizer that this process has begun

    @property
    def model(self):
        return self.policy.model

    @property
    def trained_networks(self):
        """The networks that learn, as they compute."""
        return [network for network in (self.model, self.critic) if network]

    @property
    def optimized_networks(self):
        """The networks that learn, with the weights that the optimizer changes."""
        return self.master_weights or self.trained_networks

    def step(self):
        """A step of the optimizer."""
        self.updates += 1
        self.optimizer.step()
        self.copy_master_weights()

    def copy_master_weights(self):
        """Copy the float32 master weights into the bfloat16 networks."""
        for network, masters in zip(self.trained_networks, self.master_weights or []):
            copy_masters_to_model(masters, network)

    def zero_grad(self):
        """Free all gradients."""
        self.optimizer.zero_grad()
        # in bfloat16 one is left here if memory has run out before it was added to the master's
        self.model.zero_grad()
        if self.critic:
            self.critic.zero_grad()

    def sync_sampler(self):
        """Copy the policy's weights to the sampler."""
        self.sampler.refresh(shards.full_state_dict(self.model, self.sampler.dtype))

    def set_learning_rate(self, schedule):
        """Set the learning rates to schedule(peak). Returns the policy's."""
        groups = self.optimizer.param_groups
        for group in groups:
            group["lr"] = schedule(group["peak"])
        return groups[0]["lr"]


def build(config, algorithm, source, device, folder=None):
    """The Networks of a run.

    config: the run's, of which data, sampling, update, devices and run are read. source: the model
    that the run starts from. folder: the checkpoint to resume from, or None.

    All networks have the dtype of the policy's arithmetic. The optimizer changes float32 weights.
    Each copy is made in its final precision, so that a device never holds more than in training.
    """
    devices, sampling, seed = config.devices, config.sampling, config.run.seed
    compares = config.run.stop_kl or algorithm.beta  # with a reference
    builtin = uses_builtin(sampling.sampler)
    how = {"device": device, "dtype": devices.dtype, "temperature": sampling.temperature}
    if devices.shard == "full":
        networks = sharded_networks(source, folder, how, algorithm, compares, builtin)
    else:
        networks = whole_networks(
            source, folder, how, algorithm, compares, devices.lora, seed)
    if not builtin:
        networks.sampler = make_sampler(
            sampling.sampler, networks.model, folder or source, networks.tokenizer,
            networks.policy.dtype, sampling,
            stop_ids=stop_tokens(networks.model, networks.tokenizer),
            longest=config.data.max_prompt_tokens + sampling.max_new_tokens, seed=seed)
    elif sampling.sampler != "builtin":
        networks.sampler = make_sampler(
            sampling.sampler, networks.model, networks.sampler, networks.tokenizer, sampling)
    add_optimizer(networks, config.update, task_of(config.data.dataset).critic_lr)
    for network in networks.trained_networks if devices.gradient_checkpointing else ():
        recompute_layers(network)
    return networks


def whole_networks(source, folder, how, algorithm, compares, lora, seed):
    """Networks without an optimizer. Each device holds them whole.

    how: arguments of `load_policy`. compares: with a reference.
    """
    first = None
    if compares and folder and not lora:
        # the reference of a resumed run is the model that the run started from. It is read before
        # the policy is in memory, because reading takes more memory than keeping
        first, _ = load_policy(source, frozen=True, **how)
    start = source if lora else folder or source
    policy, tokenizer = load_policy(start, frozen=lora, **how)
    if lora:
        add_adapter(policy.model, lora, seed, folder)
    networks = networks_around(policy, tokenizer, algorithm.critic)
    if compares and lora:
        networks.reference = replace(policy, at_start=True)
    elif compares:
        networks.reference = first or frozen(policy)
    return networks


def networks_around(policy, tokenizer, critic=False, reference=False):
    """The Networks of a policy that is in memory, without an optimizer. critic, reference: whether
    there is one, made of the policy."""
    networks = Networks(policy, tokenizer)
    if critic:
        networks.critic = Critic(deepcopy(policy.model.base_model), policy.can_share_prefix)
    if policy.dtype != torch.float32:
        # the weights of now are the masters, and rounded copies of them compute
        networks.master_weights = networks.trained_networks
        policy.model = rounded(policy.model, policy.dtype)
        if critic:
            head = networks.critic.head  # it is float32, its own master
            backbone = rounded(networks.critic.backbone, policy.dtype)
            networks.critic = Critic(backbone, policy.can_share_prefix)
            networks.critic.head = head
    if reference:
        networks.reference = frozen(policy)
    networks.sampler = Sampler(policy.model, tokenizer)
    return networks


def load_policy(name, device, dtype, temperature=1.0, **options):
    """(Policy, tokenizer). The other arguments are those of `load_model`."""
    model, tokenizer = load_model(name, device, dtype, **options)
    computed = choose_dtype(dtype, device, model.num_parameters())
    policy = Policy(model, computed, can_share_prefix(model.base_model), temperature)
    return policy, tokenizer


def frozen(policy):
    """A copy of a policy that does not learn: the reference."""
    return replace(policy, model=frozen_copy(policy.model, policy.dtype))


def sharded_networks(source, folder, how, algorithm, compares, builtin):
    """Networks of `--shard full`, without an optimizer: each device holds a part of each network,
    and a whole copy to sample from. The arguments are those of `whole_networks`.

    The first rank reads a model into the host's memory and sends each device its part, one tensor
    at a time.
    """
    whole, policy, tokenizer = read_on_first_rank(folder or source, how)
    device, computed = how["device"], policy.dtype
    policy.model = shards.shard_from_rank_0(whole, device, torch.float32, computed)
    policy.logprobs = shards.with_gathered_weights(policy.model, policy.logprobs)
    networks = Networks(policy, tokenizer)
    if algorithm.critic:
        critic = whole and Critic(whole.base_model, policy.can_share_prefix)
        networks.critic = shards.shard_from_rank_0(
            critic, device, torch.float32, computed, exact=["head"])
    if builtin:
        empty = shards.without_weights(whole, computed)
        copy = with_parameters(empty, lambda p: torch.empty_like(p, device=device)).to(device)
        networks.sampler = Sampler(copy, tokenizer, copy=True)
        networks.sync_sampler()
    if compares:
        if folder:
            del whole  # before the next model is read, so that the host never holds two
            whole, *_ = read_on_first_rank(source, how)
        model = shards.shard_from_rank_0(whole, device, computed, computed).requires_grad_(False)
        # no backward pass would free the weights outside the layers
        model.set_reshard_after_forward(True)
        reference = replace(policy, model=model)
        reference.logprobs = shards.with_gathered_weights(model, reference.logprobs)
        networks.reference = reference
    return networks


def read_on_first_rank(name, how):
    """(whole model, Policy without its model, tokenizer). The model is in the memory of the first
    rank's host; the other ranks get None in its place. how: arguments of `load_policy`."""
    model = policy = tokenizer = None
    if ranks.rank() == 0:
        policy, tokenizer = load_policy(name, place="cpu", **how)
        model, policy.model = policy.model, None
    policy, tokenizer = ranks.from_first((policy, tokenizer))
    policy.sharded = True
    return model, policy, tokenizer


def add_optimizer(networks, update, critic_lr=None):
    """Make the optimizer. Another one needs `step`, `zero_grad` and `param_groups`, and for
    checkpoints what torch.distributed.checkpoint reads of a torch optimizer (`state`).

    update: a record of the options. critic_lr: the highest learning rate of the critic. The policy
    and the critic have one parameter group each, with its highest learning rate as "peak".
    """
    groups = []
    for network, lr in zip(networks.optimized_networks, [update.lr, critic_lr]):
        learning = [p for p in network.parameters() if p.requires_grad]
        groups.append({"params": learning, "lr": lr, "peak": lr})
    networks.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)


def add_adapter(model, rank, seed, folder=None):
    """Add a low-rank adapter (LoRA, 2106.09685) to every linear layer. Only the adapters' weights
    learn.

    W x becomes W x + (α / rank) B A x with α = 2 rank. B starts at 0. A starts at random numbers
    that follow from `seed`, so that all devices start with the same adapters. If the model has
    adapters already, they learn on, and a copy of them stays as they are, for the reference.
    folder: a checkpoint; its adapters are loaded in place of these.
    """
    # takes a second to import, and few runs need it
    from peft import LoraConfig, set_peft_model_state_dict

    check_rank(model, rank)
    torch.manual_seed(seed)
    if getattr(model, "peft_config", None):
        model.add_adapter(model.peft_config["default"], START)
        set_peft_model_state_dict(model, model.get_adapter_state_dict("default"), START)
        model.set_adapter("default")
    else:
        model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    adapters_in_float32(model, folder)


def check_rank(model, rank):
    """Refuse a rank of adapters above that of a layer, which could be trained whole for less."""
    width = model.config.get_text_config().hidden_size
    if rank > width:
        raise UserError(f"--lora {rank} is above the width of the model's layers, {width}: name a "
                        "lower rank (8 to 64 are usual).")

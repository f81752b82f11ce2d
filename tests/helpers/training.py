"""What the tests of training share: six fixed completions and an update of them; one step on
questions of the toy; and the loss on demonstrations."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

import train
from algorithms import resolve
from engine.model.device_defaults import DEVICE_DEFAULTS
from engine.model.logprobs import Policy, completion_mask
from engine.model.networks import Networks, add_optimizer
from engine.model.networks import networks_around as without_optimizer
from engine.model.sampler_interface import Sampling
from grpo import token_logprobs
from loop.batches import split_into_mini_batches
from loop.records import FIRST_STEP, Batch, Parts, Rollout
from loop.update import Limits, update
from tests.helpers.examples import named

CPU = torch.device("cpu")
LONGEST = 48  # tokens of a completion of the toy


def at_pace(monkeypatch, **habits):
    """Give the CPU other habits (engine/model/device_defaults.py), for example those of a GPU."""
    monkeypatch.setitem(DEVICE_DEFAULTS, "cpu", replace(DEVICE_DEFAULTS["cpu"], **habits))


def completions(tokenizer, n=6, seed=0):
    """Fixed completions of different lengths with advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [tokenizer.encode(text) for text in ["1+2=?", "7+8-3=?", "9-8=?"] * (n // 3)]
    lengths = torch.randint(1, 9, (n,), generator=generator)
    tokens = torch.randint(2, 22, (n, 8), generator=generator)
    advantages = torch.randn(n, generator=generator)  # and PPO's scores
    mask = completion_mask(tokens, lengths)
    return Batch(prompts, tokens, mask, advantages, scores=advantages)


def logprobs(model, batch):
    """log π of this model."""
    with torch.no_grad():
        return Policy(model).logprobs(batch)


def completion_logprobs(
    model, prompts, tokens, mask, *,
    dtype=torch.float32, temperature=1.0, with_entropy=False, can_share_prefix=True,
    shares_prefix=False,
):  # fmt: skip
    """`Policy.logprobs` of completions that are no Batch yet."""
    batch = Batch(prompts, tokens, mask, None, shares_prefix=shares_prefix)
    policy = Policy(model, dtype, can_share_prefix, temperature)
    return policy.logprobs(batch, with_entropy)


def with_reference(batch, model):
    """The batch with a reference that differs from the policy."""
    batch.ref_logp = logprobs(model, batch) - 0.1 * batch.mask
    return batch


@torch.no_grad()
def loss_on(demonstrations, model, tokenizer):
    """Cross-entropy per completion token, and that of EOS alone.

    demonstrations: [(question, completion)].
    """
    losses = []
    for question, completion in demonstrations:
        start = len(tokenizer(question).input_ids)
        ids = tokenizer(question + completion + "<eos>", return_tensors="pt").input_ids
        losses.append(-token_logprobs(model(ids).logits[0, start - 1 : -1], ids[0, start:]))
    return torch.cat(losses).mean(), torch.stack([each[-1] for each in losses]).mean()


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def a_rollout(rewards, lengths=None, reward_weights=None, **more):
    """A Rollout of rewards (Q, G), or of several (R, Q, G). lengths: (Q, G), or 1 token each."""
    rewards = torch.as_tensor(rewards)
    rewards = rewards if rewards.dim() == 3 else rewards[None]
    R, Q, G = rewards.shape
    lengths = torch.ones(Q, G).long() if lengths is None else torch.as_tensor(lengths)
    longest = int(lengths.max()) if Q else 1
    return Rollout(**{
        "questions": [{"prompt": [1]}] * Q, "question_numbers": torch.arange(Q),
        "tokens": torch.ones(Q * G, longest, dtype=torch.long), "logp": torch.zeros(Q * G, longest),
        "mask": torch.arange(longest) < lengths.view(-1, 1), "texts": ["?"] * Q * G,
        "lengths": lengths, "truncated": torch.zeros(Q, G, dtype=torch.bool),
        "trainable": torch.ones(Q, G, dtype=torch.bool), "rewards": rewards,
        "reward_names": [f"reward_{i}" for i in range(R)],
        "reward_weights": reward_weights or [1.0] * R, **more,
    })


def minibatches_of(batch, algorithm, numbers=None, **more):
    """What `split_into_mini_batches` makes of a batch in which each completion has its own
    question. numbers: of these questions among those of all devices. more: of the Rollout."""
    n = len(batch.prompts)
    rollout = a_rollout(
        batch.advantages.cpu().view(n, 1), batch.mask.sum(1, keepdim=True), tokens=batch.tokens,
        questions=[{"prompt": prompt} for prompt in batch.prompts], mask=batch.mask,
        logp=torch.zeros(batch.tokens.shape, device=batch.tokens.device),
        question_numbers=torch.tensor(range(n) if numbers is None else numbers), **more)
    found = split_into_mini_batches(rollout, rollout.total, torch.arange(n), algorithm, LONGEST)
    for minibatch in found:
        minibatch.sampled_logp = None  # nobody has sampled these
    return found


def updated(model, optimizer, minibatches, algorithm, *, critic=None, limits=None):
    """`update` of these networks on mini-batches of one device. Returns the metrics."""
    networks = Networks(Policy(model), tokenizer=None, optimizer=optimizer, critic=critic)
    for batch in minibatches:
        if batch.weights is None:
            n, tokens = len(batch.mask), batch.mask.sum()
            batch.weights = algorithm.token_weights(batch.mask, n, tokens, LONGEST)
    stats, skipped = update(networks, minibatches, algorithm, limits or Limits())
    return stats | {"skipped": skipped}


def networks_around(policy, tokenizer, *, lr, beta=0.0, critic=False, reference=None):
    """The Networks of a policy that is in memory, with an optimizer."""
    copies = beta != 0 and reference is None
    networks = without_optimizer(policy, tokenizer, critic, copies)
    if beta and reference:
        networks.reference = reference
    add_optimizer(networks, SimpleNamespace(lr=lr), critic_lr=lr)
    return networks


def stepper(
    model, tokenizer, questions, rewards, algorithm="cppo", *,
    lr=3e-4, reference=None, max_new_tokens=LONGEST, temperature=1.0, micro_batch_tokens=2048,
    dtype=torch.float32, **options,
):  # fmt: skip
    """step(number) → Step: `train_step` on the same questions each time. rewards: functions."""
    algorithm = resolve(algorithm, **options)
    policy = Policy(model, dtype, temperature=temperature)
    networks = networks_around(
        policy, tokenizer, lr=lr, beta=algorithm.beta, critic=algorithm.critic,
        reference=reference and replace(policy, model=reference),
    )

    parts = Parts(networks, algorithm, named(*rewards), Sampling(max_new_tokens, temperature),
                  Limits(micro_batch_tokens))

    def step(number=1, asked=questions, so_far=FIRST_STEP, more=lambda count: questions):
        return train.train_step(parts, asked, random.Random(f"42 {number} 0"), so_far, more)

    return step


def one_step(model, folder, *words, program=None):
    """The metrics of a run of one step with these options. program: a file to call in place of
    train.py."""
    words = ["--model", model, "--output_dir", str(folder), "--steps", "1",
             "--questions_per_step", "1", *words]
    if program:
        subprocess.run([sys.executable, program, *words], cwd=Path(__file__).parents[2], check=True)
    else:
        assert train.main(words) == 0
    [metrics] = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return metrics

"""What the tests of training share: six fixed completions and an update of them; and one step on
questions of the toy."""

import json
import random
import subprocess
import sys
from pathlib import Path

import torch

import train
from algorithms import resolve
from engine.model.logprobs import Policy
from engine.model.networks import Networks, whole_networks
from engine.model.sampling import Sampling
from records import Batch, MiniBatch
from tests.examples import named
from update import Limits, update

CPU = torch.device("cpu")
LONGEST = 48  # tokens of a completion of the toy


def completions(tokenizer, n=6, seed=0):
    """Fixed completions of different lengths with advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [tokenizer.encode(text) for text in ["1+2=?", "7+8-3=?", "9-8=?"] * (n // 3)]
    lengths = torch.randint(1, 9, (n,), generator=generator)
    tokens = torch.randint(2, 22, (n, 8), generator=generator)
    advantages = torch.randn(n, generator=generator)  # and PPO's scores
    return Batch(prompts, tokens, lengths, advantages, scores=advantages)


def with_reference(micro_batches, model):
    for batch in micro_batches:
        with torch.no_grad():
            # a reference that differs from the policy
            batch.ref_logp = batch.logprobs(Policy(model), 1.0) - 0.1 * batch.mask
    return micro_batches


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def counted(micro_batches):
    """A mini-batch of one device."""
    n = sum(len(batch.prompts) for batch in micro_batches)
    tokens = sum(batch.lengths.sum().item() for batch in micro_batches)
    return MiniBatch(micro_batches, n, tokens, Limits().micro_batch_tokens)


def updated(model, optimizer, minibatches, algorithm, *, critic=None, limits=None):
    """`update` of these networks. minibatches: of each, a MiniBatch or its list of micro-batches.
    Returns the metrics."""
    networks = Networks(Policy(model), tokenizer=None, optimizer=optimizer, critic=critic)
    minibatches = [counted(own) if isinstance(own, list) else own for own in minibatches]
    stats, skipped = update(networks, minibatches, algorithm, Sampling(LONGEST), limits or Limits())
    return stats | {"skipped": skipped}


def stepper(
    model, tokenizer, questions, rewards, algorithm="cppo", *,
    lr=3e-4, reference=None, max_new_tokens=LONGEST, temperature=1.0, micro_batch_tokens=2048,
    dtype=torch.float32, **options,
):  # fmt: skip
    """step(number) → Step: `train_step` on the same questions each time. rewards: functions."""
    algorithm = resolve(algorithm, **options)
    networks = whole_networks(
        Policy(model, dtype), tokenizer, lr=lr, beta=algorithm.beta,
        reference=reference and Policy(reference), critic=algorithm.critic,
    )

    def step(number=1, next_questions=lambda count: questions, history=()):
        return train.train_step(
            networks, algorithm, named(*rewards), Sampling(max_new_tokens, temperature),
            Limits(micro_batch_tokens), next_questions, random.Random(f"42 {number} 0"), history,
        )

    return step


def one_step(model, folder, *words, program=None):
    """The metrics of a run of one step with these options. program: a file to call in place of
    train.py."""
    words = ["--model", model, "--output_dir", str(folder), "--steps", "1",
             "--questions_per_step", "1", *words]
    if program:
        subprocess.run([sys.executable, program, *words], cwd=Path(__file__).parents[1], check=True)
    else:
        assert train.main(words) == 0
    [metrics] = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return metrics

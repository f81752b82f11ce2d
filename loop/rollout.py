"""Steps 1 and 2 of the algorithm box: sample completions, and score them."""

from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

from engine.base import ranks
from engine.scoring.score import reward_columns, score
from family.dapo import has_signal, overlong_penalty
from family.nat import prefix_factors
from judges.mathematics import COUNTS
from loop.records import FIRST_STEP, Rollout, join


def sample_and_score(parts, questions, rng, clock, so_far=FIRST_STEP, more=None):
    """Steps 1 and 2 for this device's questions. Returns a Rollout. The arguments are those of
    `train_step`."""
    algorithm = parts.algorithm
    sample_batch = partial(roll_out, parts, rng=rng, clock=clock, so_far=so_far)
    if algorithm.max_rollouts > 1:
        rollout = dynamic_sampling(sample_batch, questions, more, algorithm.max_rollouts)
    else:
        rollout = sample_batch(questions)
    if algorithm.mask_truncated:
        rollout = replace(rollout, trainable=rollout.trainable & ~rollout.truncated)
    if algorithm.overlong_buffer:
        rollout = with_overlong_penalty(
            rollout, parts.sampling.max_new_tokens, algorithm.overlong_buffer)
    if algorithm.min_prefix is not None:
        # a seed of its own: a rule draws from rollout.seed
        seed = rng.getrandbits(62) + ranks.rank()
        rollout = with_prefixes(rollout, algorithm.min_prefix, seed)
    return rollout


def roll_out(parts, questions, rng, clock, so_far):
    """Sample G completions of each question, and score them."""
    networks = parts.networks
    reward_functions = parts.reward_functions
    G = parts.algorithm.group_size
    shape = (len(questions), G)
    # All ranks draw the same two seeds. The first one and the number of a question fix what its
    # completions draw. So any number of ranks samples the same completions. The second one and the
    # rank fix what a rule draws (--keep random).
    seed = rng.getrandbits(62)
    rule_seed = rng.getrandbits(62)
    world = ranks.world_size()
    numbers = range(ranks.rank(), len(questions) * world, world)
    with clock.phase("generate"):  # 1 sample
        prompts = [question["prompt"] for question in questions]
        sampled = networks.sampler.sample(prompts, G, parts.sampling, seed, numbers)
        mask = sampled.mask.cpu()
    with clock.phase("score"):  # 2 score
        texts = sampled.texts(networks.tokenizer, questions)
        columns = reward_columns(questions, G)
        before = COUNTS["timeouts"]
        values, failures = score(reward_functions, texts, columns)
        timeouts = COUNTS["timeouts"] - before
    logp = sampled.logp.masked_fill(~sampled.mask, 0.0)  # a tool's tokens have none
    logp = logp.masked_fill(~logp.isfinite(), torch.nan)
    lengths = mask.sum(1)
    truncated = sampled.truncated.cpu()
    rewards = torch.stack(list(values.values()))
    return Rollout(
        questions=questions,
        question_numbers=torch.tensor(list(numbers), dtype=torch.long),
        tokens=sampled.tokens,
        logp=logp,
        mask=mask,
        texts=texts,
        lengths=lengths.view(shape),
        truncated=truncated.view(shape),
        trainable=torch.ones(shape, dtype=torch.bool),
        rewards=rewards.view(len(values), *shape),
        reward_names=list(values),
        reward_weights=[reward.weight for reward in reward_functions],
        **so_far._asdict(),
        seed=rule_seed + ranks.rank(),
        failures=failures,
        timeouts=timeouts,
    )


# --- DAPO's changes of a rollout (family/dapo.py) ---


def dynamic_sampling(sample_batch, questions, more, max_rollouts):
    """Sample again, for further questions, until the step is full of groups with unequal rewards.

    sample_batch: questions → Rollout. more: as for `train_step`. At most `max_rollouts` times.
    Returns all as one Rollout.
    """
    rollouts = []
    while questions is not None:
        rollout = sample_batch(questions)
        signal = has_signal(rollout.total)
        # its questions come after those of the earlier rollouts
        numbers = rollout.question_numbers + 2**32 * len(rollouts)
        trainable = rollout.trainable & signal.unsqueeze(1)
        rollouts.append(replace(rollout, trainable=trainable, question_numbers=numbers))
        equal = (~signal).sum().item()
        counts = ranks.all_reduce(rollout.tokens.device, {"without": equal})
        without = int(counts["without"])
        again = without and len(rollouts) < max_rollouts
        questions = more(without) if again else None  # None, too, if no question is left
    if without and ranks.rank() == 0:
        tqdm.write(f"Groups whose rewards are all equal after sampling {len(rollouts)} times: "
                   f"{without}. The step trains on the others.")
    return join(rollouts)


def with_overlong_penalty(rollout, max_length, cache):
    """The rollout with a penalty for long completions as one more reward. max_length, cache: as for
    `overlong_penalty`.

    It comes after `has_signal`. Otherwise a group of right answers would look informative. A
    tool's tokens take room, too, so they count here.
    """
    ends = rollout.mask.cumsum(1).argmax(1) + 1  # where the policy's last token is
    lengths = ends.view_as(rollout.lengths).masked_fill(rollout.truncated, max_length)
    penalty = overlong_penalty(lengths, max_length=max_length, cache=cache)
    rewards = torch.cat([rollout.rewards, penalty[None]])
    names = [*rollout.reward_names, "overlong"]
    weights = [*rollout.reward_weights, 1.0]
    return replace(rollout, rewards=rewards, reward_names=names, reward_weights=weights)


# --- NAT's (family/nat.py) ---


def with_prefixes(rollout, share, seed):
    """The rollout with `prefix_weights`: 1/p in the random prefix of each completion, else 0.

    seed: it must not follow from `rollout.seed`. torch's CPU generator reads only the lowest 32
    bits of a seed, so a sum with 2**62 would give the numbers that the rule has drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand((len(rollout.mask), 1), generator=generator)
    factors = prefix_factors(rollout.mask, u, share=share)
    return replace(rollout, prefix_weights=factors.to(rollout.tokens.device))

"""Which of the sampled completions are trained on, and with which advantages: steps 3 and 4 of the algorithm box."""

import torch

from cppo import prune, prune_pooled
from engine.scoring.score import merge
from family.gfpo import retain, retained_advantages, token_efficiency
from family.pods import max_variance_subset

SELECT_FIRST = ("shortest", "efficiency", "max_variance")  # rules that look at rewards and lengths: advantages come after


def select(rewards, weights, lengths, k, algorithm, config, generator=None):
    """Advantages (Q, G), and the flat indices q·G + i of the completions that are kept, ascending.

    rewards: (R, Q, G), R rewards. weights: R numbers. lengths: (Q, G). k: a number, or GFPO's adaptive one of each question (Q,).
    algorithm: a row of the table in train.py. config: `keep` and `prune_pooled` count. generator: of the rule random.
    """
    n_questions, group_size = lengths.shape
    first = group_size * torch.arange(n_questions).unsqueeze(1)  # flat index of each question's first completion
    if config.keep in SELECT_FIRST:  # GFPO and PODS: mean and std over those that are kept
        total = merge(rewards, weights)
        metric = lengths if config.keep == "shortest" else -token_efficiency(total, lengths)
        if algorithm.ks:
            kept = [retain(row.unsqueeze(0), n)[0] for row, n in zip(metric, k.tolist())]
            return retained_advantages(total, kept), torch.cat([i + q for i, q in zip(kept, first)] or [first.flatten()])
        kept = max_variance_subset(total, k) if config.keep == "max_variance" else retain(metric, k)
        own = algorithm.advantages(rewards.gather(2, kept.expand(len(rewards), -1, -1)), weights)
        advantages = torch.zeros(n_questions, group_size).scatter(1, kept, own)
    else:
        advantages = algorithm.advantages(rewards, weights)
        if config.prune_pooled:
            return advantages, prune_pooled(advantages, n_questions * k)
        if config.keep is None:
            return advantages, torch.arange(n_questions * group_size)
        kept = prune(advantages, k, rule=config.keep, generator=generator)
    return advantages, (kept + first).flatten()

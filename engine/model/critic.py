"""PPO's critic: a second network that says, before every token, what score the completion will end with."""

import torch

from engine.model.policy import autocast, completion_states, spread
from engine.run import distributed
from family.ppo import gae, token_rewards, whiten


class Critic(torch.nn.Module):
    """V(s_t): a backbone under a linear head that starts at 0, and so does V. At first the backbone is a copy of the policy's."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = torch.nn.Linear(backbone.config.get_text_config().hidden_size, 1, device=backbone.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def values(self, batch):
        """V(s_t) of the completions of a Batch: (N, T) float32, before token t, 0 on padding."""
        with autocast(batch.tokens.device):
            states, _, places = completion_states(self.backbone, batch.prompts, batch.tokens, batch.lengths)
        values = self.head(states.float()).squeeze(-1)  # the one number that all else depends on is computed in float32
        return spread(values, places, batch.tokens.shape)


@torch.no_grad()
def estimate(critic, parts, device, *, beta, lam):
    """PPO's step 5: `advantages` of the parts, so far the scores (N,), become (N, T), and `old_values` and `returns` are set.

    parts: this device's micro-batches, with old_logp and, where beta is not 0, ref_logp. Whitened over all devices.
    """
    for part in parts:
        ref_logp = part.old_logp if part.ref_logp is None else part.ref_logp
        rewards = token_rewards(part.advantages, part.old_logp, ref_logp, part.mask, beta=beta)
        part.old_values = critic.values(part)
        part.advantages, part.returns = gae(rewards, part.old_values, part.mask, lam=lam)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = {"tokens": sum((part.mask.sum() for part in parts), zero), "total": sum((part.advantages.sum() for part in parts), zero)}
    sums = distributed.all_sum(sums, device)  # gae is 0 on padding
    n = max(sums["tokens"], 1)
    mean = sums["total"] / n
    squares = {"squares": sum(((part.advantages - mean).masked_fill(~part.mask, 0.0).pow(2).sum() for part in parts), zero)}
    variance = distributed.all_sum(squares, device)["squares"] / n
    for part in parts:
        part.advantages = whiten(part.advantages, part.mask, mean=mean, variance=variance)

"""PPO's critic: a second network that says, before every token, what score the completion will end with."""

import torch

from engine import distributed
from engine.policy import autocast, completion_states
from ppo import gae, token_rewards, whiten


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
            states, _ = completion_states(self.backbone, batch.prompts, batch.tokens, batch.lengths)
        values = self.head(states.float()).squeeze(-1)  # the one number that all else depends on is computed in float32
        return torch.zeros(batch.mask.shape, device=values.device).masked_scatter(batch.mask, values)


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
    # gae is 0 on padding
    sums = {"tokens": sum(part.mask.sum().item() for part in parts), "total": sum(part.advantages.sum().item() for part in parts)}
    sums = distributed.all_sum(sums, device)
    n = max(sums["tokens"], 1)
    mean = sums["total"] / n
    squares = {"squares": sum((part.advantages[part.mask] - mean).pow(2).sum().item() for part in parts)}
    variance = distributed.all_sum(squares, device)["squares"] / n
    for part in parts:
        part.advantages = whiten(part.advantages, part.mask, mean=mean, variance=variance)

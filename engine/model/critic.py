"""PPO's critic: a second network that says, before every token, what score the completion will end with."""

import torch

from engine.model.logprobs import completion_states, spread
from engine.model.precision import autocast
from engine.run import ranks
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
def estimate(critic, micro_batches, device, *, beta, lam):
    """PPO's step 5: `advantages` of the micro-batches, so far the scores (N,), become (N, T), and `old_values` and `returns` are set.

    micro_batches: this device's micro-batches, with old_logp and, where beta is not 0, ref_logp. Whitened over all devices.
    """
    for batch in micro_batches:
        ref_logp = batch.old_logp if batch.ref_logp is None else batch.ref_logp
        rewards = token_rewards(batch.advantages, batch.old_logp, ref_logp, batch.mask, beta=beta)
        batch.old_values = critic.values(batch)
        batch.advantages, batch.returns = gae(rewards, batch.old_values, batch.mask, lam=lam)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    tokens = sum((batch.mask.sum() for batch in micro_batches), zero)
    sums = {"tokens": tokens, "total": sum((batch.advantages.sum() for batch in micro_batches), zero)}
    sums = ranks.all_sum(sums, device)  # gae is 0 on padding
    n = max(sums["tokens"], 1)
    mean = sums["total"] / n
    squares = {"squares": sum(((batch.advantages - mean).masked_fill(~batch.mask, 0.0).pow(2).sum() for batch in micro_batches), zero)}
    variance = ranks.all_sum(squares, device)["squares"] / n
    for batch in micro_batches:
        batch.advantages = whiten(batch.advantages, batch.mask, mean=mean, variance=variance)

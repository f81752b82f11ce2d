"""PPO's critic: a second network that predicts, before every token, the score that the completion
will get."""

import torch

from engine.base import ranks
from engine.model.logprobs import completion_states, scatter_to_tokens
from family.ppo import gae, token_rewards, whiten


class Critic(torch.nn.Module):
    """V(s_t), the predicted score: a backbone and a linear head.

    The backbone starts as a copy of the policy's. The head starts at 0, so V is 0 at first.
    can_share_prefix: as for the Policy.
    """

    def __init__(self, backbone, can_share_prefix=True):
        super().__init__()
        self.backbone, self.can_share_prefix = backbone, can_share_prefix
        width = backbone.config.get_text_config().hidden_size
        self.head = torch.nn.Linear(width, 1, device=backbone.device)
        for p in self.head.parameters():
            torch.nn.init.zeros_(p)

    def forward(self, batch):
        """(N, T) float32: V(s_t), predicted before token t, for the completions of a Batch. It is 0
        on padding."""
        states, _, positions = completion_states(self.backbone, batch, self.can_share_prefix)
        # float32, because the advantages depend on this one number
        values = self.head(states.float()).squeeze(-1)
        return scatter_to_tokens(values, positions, batch.tokens.shape)


@torch.no_grad()
def compute_advantages(minibatches, device, *, beta, lam):
    """PPO's step 5: turn the `scores` of this device's mini-batches into advantages.

    Sets `advantages`, whitened over all devices, and `returns`, both (N, T). The mini-batches need
    old_logp and old_values, and ref_logp if beta is not 0.
    """
    tokens = total = squares = torch.zeros((), dtype=torch.float64, device=device)
    masked = [(batch, batch.mask.to(device)) for batch in minibatches]
    for batch, mask in masked:
        ref_logp = batch.old_logp if batch.ref_logp is None else batch.ref_logp
        rewards = token_rewards(batch.scores, batch.old_logp, ref_logp, mask, beta=beta)
        batch.advantages, batch.returns = gae(rewards, batch.old_values, mask, lam=lam)
        tokens = tokens + mask.sum()
        total = total + batch.advantages.sum()  # no mask is needed: gae returns 0 on padding
    sums = ranks.all_reduce(device, {"tokens": tokens, "total": total})
    n = max(sums["tokens"], 1)
    mean = sums["total"] / n
    for batch, mask in masked:
        distance = (batch.advantages - mean) * mask
        squares = squares + distance.pow(2).sum()
    variance = ranks.all_reduce(device, {"squares": squares})["squares"] / n
    for batch, mask in masked:
        batch.advantages = whiten(batch.advantages, mask, mean=mean, variance=variance)

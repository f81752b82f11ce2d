"""Truncated and masked importance sampling: for a sampler that computes unlike the trainer.

(TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
IcePop: Ring-1T, arXiv 2510.18855, where the ends are 0.5 and 5. At the level of the sequence: Liu
and Li 2025, "When speed kills stability", as TRL cites it. It is TRL's default, with C = 3.)

The sampler may use other kernels or a lower precision than the trainer. Then it draws from a policy
π_sampler that differs a little from π_old. A factor on the weight of each token corrects for this:

    w_t = min(π_old(o_t) / π_sampler(o_t), C)

IcePop does not trust a token on which the two differ much, in either direction:

    w_t = π_old(o_t) / π_sampler(o_t)     if a ≤ this ratio ≤ C
    w_t = 0                               otherwise

Both also exist at the level of the sequence. Then all tokens of a completion have one weight, the
product of their ratios:

    w = min(Π_t π_old(o_t) / π_sampler(o_t), C),  or 0 if the product is outside a … C

Only the product makes the whole gradient right, because the sampler drew all tokens. But it grows
or shrinks with the length. A ratio of 1.01 at each of 100 tokens is a product of 2.7. So in long
completions the ends take much (TRL's issues 4772 and 5814).

The ratios are biased if the sampler draws from a nucleus (top-p, top-k), because π_old is computed
over all tokens. Let S be the probability that the nucleus holds. If the sampler reports the
probabilities within the nucleus, each ratio is S times too small (TRL's issue 6789). If it reports
those over all tokens, the ratios hide the nucleus. train.py samples without one. If your sampler
has one, compute π_old with `family.deepseek_v32.kept_logprobs`.
"""

from functools import partial

import torch


def truncated_importance_weights(old_logp, sampled_logp, mask, *, cap, low=None):
    """w = min(π_old(o_t) / π_sampler(o_t), C): a factor of the loss weights.

    old_logp: (N, T), log π_old(o_t) as the trainer computes it. sampled_logp: (N, T), as the
    sampler computed it when it drew o_t, from the same weights of the model. mask: (N, T), 1 on
    completion tokens. cap: C, above 0. low: a. If a is given, the weight outside a … C is 0
    (IcePop). Then take a < 1 < C. If sampler and trainer agree on a token, its ratio is 1, but only
    up to rounding. Returns (N, T), 1 on padding, without a gradient. A token whose sampled_logp is
    NaN gets 1: some samplers do not report every token.

    If no ratio reaches an end, w corrects each token, given the tokens before it:
    Σ_o π_sampler(o) w(o) f(o) = Σ_o π_old(o) f(o). The sampler also drew the tokens before it, and
    w does not correct these. The cap bounds the variance. It biases the tokens whose ratio is above
    the cap. The loss keeps its ratio π_θ / π_old, because the policy is updated after the sampling.
    """
    assert old_logp.shape == sampled_logp.shape == mask.shape, (
        "old_logp, sampled_logp, mask: (N, T) each")
    ratio = (old_logp - sampled_logp).nan_to_num(nan=0.0).exp()
    # w = π_old / π_sampler, at most C; IcePop: 0 outside a … C
    weights = ratio.clamp(max=cap)
    if low is not None:
        weights = torch.where((low <= ratio) & (ratio <= cap), ratio, 0.0)
    return weights.masked_fill(~mask.bool(), 1.0).detach()


def sequence_importance_weights(old_logp, sampled_logp, mask, *, cap, low=0.0, masked=False):
    """w = Π_t π_old(o_t) / π_sampler(o_t), one for each completion: truncated, or masked.

    old_logp, sampled_logp, mask, cap, low: as of `truncated_importance_weights`; the ends are those
    of the product. masked=False: w lies in a … C. masked=True: w is 0 outside a … C, so the
    completion does not count. TRL calls the two sequence_truncate and sequence_mask. Returns
    (N, T): w on each token, 1 on padding, without a gradient.

    If no product reaches an end, w corrects the whole completion:
    Σ_o π_sampler(o) w(o) f(o) = Σ_o π_old(o) f(o).
    """
    assert old_logp.shape == sampled_logp.shape == mask.shape, (
        "old_logp, sampled_logp, mask: (N, T) each")
    mask = mask.bool()
    log_ratio = (old_logp - sampled_logp).nan_to_num(nan=0.0).masked_fill(~mask, 0.0)
    # w = Π_t π_old / π_sampler
    ratio = log_ratio.sum(1, keepdim=True).exp()
    weights = ratio.clamp(low, cap)
    if masked:
        weights = torch.where((low <= ratio) & (ratio <= cap), ratio, 0.0)
    return torch.where(mask, weights, 1.0).detach()


# the published corrections, under TRL's names: TIS, IcePop, and both at the level of the sequence
CORRECTIONS = {
    "token_truncate": partial(truncated_importance_weights, cap=2.0),
    "token_mask": partial(truncated_importance_weights, cap=5.0, low=0.5),
    "sequence_truncate": partial(sequence_importance_weights, cap=3.0),
    "sequence_mask": partial(sequence_importance_weights, cap=3.0, masked=True),
}

"""DeepSeek-V3.2's changes of GRPO (arXiv 2512.02556, section 3.1).

If updates go far from the policy that sampled, a run may become unstable. Three of them help:

- The unbiased KL. k3 is unbiased for samples of π_θ, but the samples come from π_old, and the
  gradient of k3 is that of another divergence. Multiplied by the ratio, k3 is unbiased in both:

      D_KL[π_θ‖π_ref] ≈ ρ k3 = π_θ/π_old (π_ref/π_θ − log π_ref/π_θ − 1)                  (eq. 7)

- The mask of off-policy negative sequences. A wrong answer that π_θ would hardly write any more
  teaches nothing, and it pushes hard. It loses its surrogate, but not its KL term:

      M = 0 if A < 0 and 1/|o| Σ_t log π_old/π_θ > δ,          otherwise M = 1            (eq. 9)

- The sampling mask is kept. If the sampler draws from a nucleus (top-p, top-k), π_old lives on this
  nucleus only. The trainer must compute π_θ and π_old on the same tokens (`kept_logprobs`).
  Otherwise every ratio to the sampler's probability is too small: by the share of the probability
  that the nucleus holds.

The advantage is r − mean(r), without the std. The fourth change, Keep Routing, is for mixtures of
experts: the trainer repeats the experts that the sampler chose. It is not here.

We read the formulas in TRL 1.16.0 and in the issues 4637 and 4697 of TRL, and of the report only
what others quote. The report gives neither β nor δ. TRL's example has δ = 0.5.
"""

import torch

from grpo import grpo_loss, kl_k3, sequence_mean_weights, token_logprobs


def unbiased_kl(logp, old_logp, ref_logp):
    """ρ k3: KL(π_θ ‖ π_ref) at each token, from samples of π_old. (eq. 7) All (N, T).

    Given the tokens before it, the mean over o_t ~ π_old is KL(π_θ ‖ π_ref), and the mean gradient
    is its gradient. So ρ keeps its gradient here, also where its value is 1. Both factors are
    bounded (`kl_k3`).
    """
    assert logp.shape == old_logp.shape, "logp, old_logp, ref_logp: (N, T) each"
    log_ratio = (logp - old_logp.detach()).clamp(max=20.0)
    # ρ k3
    return log_ratio.exp() * kl_k3(logp, ref_logp)


def off_policy_mask(advantages, logp, sampled_logp, mask, *, threshold=0.5):
    """M: False for a negative completion that the policy has moved away from. (eq. 9)

    advantages: (N,) or (N, T). logp, sampled_logp: (N, T), of π_θ and of the policy that sampled,
    as the sampler computed it. So M also sees a sampler that computes otherwise. mask: (N, T).
    threshold: δ, in nats per token. Returns bool, (N, 1) or (N, T). A token whose sampled_logp is
    NaN counts as one that has not moved.
    Example: A = −1, and each token has become e times less likely. The mean is 1 > 0.5, so M = 0.
    """
    assert logp.shape == sampled_logp.shape == mask.shape and len(advantages) == len(logp), (
        "logp, sampled_logp, mask: (N, T) each; advantages: (N,) or (N, T)")
    mask = mask.bool()
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    moved = (sampled_logp - logp).detach().masked_fill(~mask, 0.0).nan_to_num(nan=0.0)
    # 1/|o| Σ_t log π_old/π_θ
    mean = moved.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return ~((advantages < 0) & (mean > threshold))


def deepseek_v32_loss(
    logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.04, clip_low=0.2, clip_high=None,
    weights=None, sampled_logp=None, threshold=0.5,
):
    """−J of DeepSeek-V3.2: −Σ weights · (min(ρA, clip(ρ)A) M − β ρ k3).

    It takes the arguments of `grpo_loss`, and it returns the same; `kl` is the mean of ρ k3
    (`unbiased_kl`), and `masked_fraction` the share of the tokens with M = 0. sampled_logp: as of
    `off_policy_mask`; None means old_logp. threshold: δ. weights: None means
    `sequence_mean_weights`.
    """
    assert ref_logp is None or ref_logp.shape == logp.shape, "ref_logp must be (N, T), as logp"
    weights = sequence_mean_weights(mask) if weights is None else weights
    drawn = old_logp if sampled_logp is None else sampled_logp
    kept = off_policy_mask(advantages, logp, drawn, mask, threshold=threshold)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    loss, stats = grpo_loss(
        logp, old_logp, advantages * kept, mask, beta=0.0, clip_low=clip_low, clip_high=clip_high,
        weights=weights)
    total = weights.sum().clamp(min=1e-12)
    stats["masked_fraction"] = (weights * ~kept).sum() / total
    if ref_logp is None:
        return loss, stats
    padding = ~mask.bool()
    logp, old_logp, ref_logp = (x.masked_fill(padding, 0.0) for x in (logp, old_logp, ref_logp))
    kl = (weights * unbiased_kl(logp, old_logp, ref_logp.detach())).sum()
    return (loss + beta * kl if beta else loss), stats | {"kl": kl.detach() / total}


def kept_logprobs(logits, tokens, kept, *, temperature=1.0):
    """Log-probability of each sampled token among the tokens that the sampler could draw, by
    `token_logprobs`.

    logits: (N, T, V). tokens: (N, T) int64. kept: (N, T, V) bool, the sampler's nucleus at each
    token. The sampled token must be in it. Returns (N, T) float32. Take it for π_θ and π_old, with
    the same `kept`, and a sampler's log-probability of the truncated distribution.

    train.py does not need it: it samples from the whole policy, without top-p and top-k.
    """
    # log π restricted to the nucleus: outside of it the logits are −∞
    inside = logits.masked_fill(~kept, -torch.inf)
    return token_logprobs(inside, tokens, temperature=temperature)

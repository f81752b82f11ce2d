"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300, eq. 3 and 4; see also 2501.12948).

For every question q the old policy samples G completions o_1 … o_G. Each earns a reward r_i.
The objective is

    J(θ) = E 1/G Σ_i 1/|o_i| Σ_t { min(ρ_it A_i, clip(ρ_it, 1−ε, 1+ε) A_i) − β D_KL[π_θ‖π_ref]_it }

    ρ_it = π_θ(o_it | q, o_i<t) / π_old(o_it | q, o_i<t)          A_i = (r_i − mean(r)) / std(r)

It is maximised, so the loss is −J. With one weight per token, it is the loss of the whole family:

    loss = −Σ_it weights_it · (surrogate_it − β KL_it)            here: weights_it = 1 / (N |o_i|)

The paper does not say which std it means, and it has no eps. Here the std has the divisor G−1, and
eps is 1e-4, as in TRL and in CPPO's published code. The KL estimator is k3, the paper's eq. 4.

Shapes: Q questions, G completions of each, N completions in a batch, T tokens, V vocabulary.

Each function works pasted below `import torch`, a loss together with the functions that its
docstring names. An `assert` stands where torch would repeat a tensor of another shape in silence.
Nothing looks for NaN, because the host would wait for the GPU: check rewards before.
"""

import torch


def group_advantages(rewards, *, divide_by_std=True, eps=1e-4, ddof=1):
    """Advantage of each completion over its group: A = (r − mean) / (std + eps). (section 4.1.2)

    rewards: (Q, G), one row per question, all G completions of it. Whole numbers and bool count
    as float32. Returns (Q, G).
    A group whose rewards are all equal gets advantage 0: nothing is learned.
    ddof: 1 for the unbiased std, 0 for the population's. The paper does not say which.
    Not checked: a reward of NaN or ∞, or a group of `ddof` completions, makes its group NaN.

        rewards     1     0     0     1         mean 0.5, std 0.577
        advantages  0.87 −0.87 −0.87  0.87
    """
    assert rewards.dim() == 2, "rewards must be (Q, G), one row per question: rewards.view(-1, G)"
    rewards = 1.0 * rewards  # whole numbers become floats
    # this shift does not change A. Without it equal rewards would not give exact zeros, because
    # in floats the mean of 0.7, 0.7, … need not be 0.7
    rewards = rewards - rewards[:, :1]
    # A_i = (r_i − mean(r)) / (std(r) + eps)
    advantages = rewards - rewards.mean(1, keepdim=True)
    if divide_by_std:
        std = rewards.std(1, keepdim=True, correction=ddof)
        advantages = advantages / (std + eps)
    return advantages


def token_logprobs(logits, tokens, *, temperature=1.0):
    """Log-probability of each sampled token: log softmax(logits / temperature)[token].

    logits: (N, T, V), any float type. The logits at position t predict `tokens[:, t]`.
    tokens: (N, T) int64, on padding any token of the vocabulary (not −100). Returns (N, T) float32.
    temperature: the temperature of sampling, above 0. Another one scores another policy.
    """
    assert logits.shape[:-1] == tokens.shape, "the logits (N, T, V) at position t predict token t"
    # log π(· | q, o_<t)
    logp = (logits.float() / temperature).log_softmax(-1)
    # log π(o_t | q, o_<t)
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_entropies(logits, *, temperature=1.0):
    """Entropy of π(· | q, o_<t) in nats. logits: (N, T, V), any float type. (N, T) float32

    A word with the logit −∞ has the probability 0 and adds 0. (Masked or padded vocabularies.)
    """
    x = logits.float() / temperature
    log_sum = x.logsumexp(-1)
    p = x.softmax(-1)
    x = x.masked_fill(x == -torch.inf, 0.0)  # 0 · −∞ would be NaN
    # H = −Σ_v π_v log π_v = log Σ_v exp x_v − Σ_v π_v x_v
    return log_sum - (p * x).sum(-1)


# Three estimators of KL(π ‖ π_ref) from samples of π (Schulman, "Approximating KL divergence",
# 2020). With r = π_ref / π:  k1 = −log r,  k2 = ½ (log r)²,  k3 = r − 1 − log r.  All (N, T).


def kl_k1(logp, ref_logp):
    """k1 = log π − log π_ref. Unbiased, can be negative. (N, T)

    Never use k1 as a loss. Its gradient is 0 on average. (With 1/|o| it only pushes the length.)
    """
    return logp - ref_logp


def kl_k2(logp, ref_logp):
    """k2 = ½ (log π − log π_ref)². Biased, never negative. (N, T)

    As a loss, on-policy, k2 has at each token the gradient of the KL at this token, given the
    tokens before it. This leaves out how the token changes the KL of later tokens. Every loss that
    is summed token by token leaves it out.
    """
    return 0.5 * (logp - ref_logp) ** 2


def kl_k3(logp, ref_logp):
    """k3 = π_ref/π − log(π_ref/π) − 1. Unbiased, never negative. (2402.03300 eq. 4) (N, T)

    The value of k3 is unbiased. As a loss, on-policy, k3 has at each token the gradient of
    KL(π_ref ‖ π), the other direction. The two directions are close if π ≈ π_ref.
    log r is at most 20, where r is 5e8: without a bound exp(89) is ∞ in float32. Above it, k3 is a
    constant without a gradient.
    """
    assert logp.shape == ref_logp.shape, "logp and ref_logp must have one shape, (N, T)"
    log_r = (ref_logp - logp).clamp(max=20.0)
    # k3 = r − log r − 1; expm1 is exact if r is close to 1
    return torch.expm1(log_r) - log_r


def importance_ratio(logp, old_logp, mask):
    """ρ = π_θ / π_old of each token, and 1 on padding. (2402.03300 eq. 3)

    logp, old_logp, mask: (N, T). Returns (N, T).
    Only logp gets a gradient. It must not be float16, which holds no number above 65504.
    A log-ratio above 20 counts as 20, without a gradient. (verl has the bound 20, too.) So nothing
    overflows, also not where a clip multiplies the gradient by 0: 0 · ∞ would be NaN.
    """
    assert logp.shape == old_logp.shape == mask.shape and logp.dtype != torch.float16, (
        "logp, old_logp, mask: (N, T) each, and not float16")
    log_ratio = (logp - old_logp.detach()).masked_fill(~mask.bool(), 0.0)
    # ρ = π_θ / π_old = exp(log π_θ − log π_old)
    return log_ratio.clamp(max=20.0).exp()


def clipped_surrogate(ratio, advantages, *, clip_low=0.2, clip_high=None):
    """PPO's clipped objective, to be maximised. (1707.06347 eq. 7)

        min(ρ A, clip(ρ, 1−clip_low, 1+clip_high) A)

    ratio: (N, T), or (N,) if there is one per sequence. Returns the shape of ratio.
    advantages: (N,) or the shape of ratio; beside (N, T) also (N, 1). clip_high: None means
    clip_low.
    The min is right for both signs of A. It ends the gain from moving further in the direction
    of A. It never ends the gain from moving back. So exactly two cases have no gradient:
    ρ > 1+clip_high with A > 0, and ρ < 1−clip_low with A < 0.
    """
    if advantages.dim() < ratio.dim():
        advantages = advantages.unsqueeze(-1)
    if clip_high is None:
        clip_high = clip_low
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    # min(ρ A, clip(ρ, 1−ε_low, 1+ε_high) A)
    return torch.minimum(ratio * advantages, clipped * advantages)


def sequence_mean_weights(mask, *, num_sequences=None):
    """1 / (N |o_i|) on each token: the mean over a completion, then over completions. (eq. 3)

    mask: (N, T). Returns (N, T) float32, 0 on padding. An empty row counts in N.
    num_sequences: N of the whole batch, if `mask` is only a part of it (a micro-batch, a device).
    """
    mask = mask.float()
    if num_sequences is None:
        num_sequences = len(mask)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    # 1 / (N |o_i|)
    return mask / (num_sequences * lengths)


def surrogate_loss(
    ratio, advantages, logp, mask, weights, *, ref_logp=None, beta=0.0, clip_low=0.2,
    clip_high=None, surrogate=None,
):  # fmt: skip
    """The loss of the whole family: −Σ weights · (surrogate − β k3). (`kl_k3`)

    The algorithms differ in the ratio and in the weights, some in the surrogate: (N, T); None means
    `clipped_surrogate`. ratio, logp, weights: (N, T). advantages: (N,) or (N, T). mask: (N, T),
    bool or 0/1. The other arguments are those of `grpo_loss`.
    Returns (loss, stats), as `grpo_loss` does.
    """
    N, T = logp.shape
    shapes = {x.shape for x in (ratio, mask, weights, ref_logp, surrogate) if x is not None}
    assert shapes == {(N, T)} and advantages.shape in ((N,), (N, 1), (N, T)), (
        "ratio, logp, mask, weights, ref_logp, surrogate: (N, T) each; advantages: (N,) or (N, T)")
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    mask = mask.bool()
    if surrogate is None:
        surrogate = clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    # D_KL[π_θ ‖ π_ref], estimated by k3
    kl = torch.zeros_like(ratio)
    if ref_logp is not None:
        logp = logp.masked_fill(~mask, 0.0)
        ref_logp = ref_logp.detach().masked_fill(~mask, 0.0)
        kl = kl_k3(logp, ref_logp)
    objective = surrogate
    if beta:
        objective = surrogate - beta * kl
    # loss = −Σ weights · (surrogate − β KL)
    loss = -(weights * objective).sum()

    with torch.no_grad():
        # where the min is the clipped one, the clip ends the gradient
        clipped = surrogate < ratio * advantages
        total = weights.sum().clamp(min=1e-12)
        largest = ratio.new_zeros(())
        if ratio.numel():
            largest = ratio.masked_fill(~mask, 0.0).max()
        stats = {
            "kl": (weights * kl).sum() / total,
            "clip_fraction": (weights * clipped).sum() / total,
            "ratio_mean": (weights * ratio).sum() / total,
            "ratio_max": largest,
        }
    return loss, stats


def grpo_loss(
    logp, old_logp, advantages, mask, *,
    ref_logp=None, beta=0.04, clip_low=0.2, clip_high=None, weights=None,
):  # fmt: skip
    """−J of GRPO (2402.03300 eq. 3): loss = −Σ weights · (min(ρA, clip(ρ)A) − β k3).

    It is `surrogate_loss` with the `importance_ratio` of each token.
    Its gradient (CPPO's section 3.2): −Σ weights · [ρA·1(not clipped) + β(π_ref/π − 1)] ∇ log π.
    logp, old_logp, ref_logp: (N, T) float32, under the current, the sampling and the reference
    policy. Only `logp` needs a gradient. ref_logp=None: no KL. beta=0: the KL is only reported.
    advantages: (N,) or (N, T). mask: (N, T) bool or 0/1, EOS included.
    weights: (N, T), how much each token counts. None means `sequence_mean_weights`. If each
    part of a batch gets its rows of the batch's weights, the losses of the parts add up to the loss
    of the batch.

    Returns (loss, stats): a scalar for `.backward()`, and a dict of scalar tensors without a
    gradient. (Nothing waits for a GPU until you call `.item()`.) `kl` (0 without a reference),
    `ratio_mean` and `clip_fraction` (the share of the tokens whose gradient the clip ends) are
    means under `weights`. `ratio_max` is the largest ratio, or 0.
    The ratio and k3 are bounded. If logp and the advantages are finite, so are loss and gradient.
    Not checked: an advantage of NaN makes them NaN.
    """
    ratio = importance_ratio(logp, old_logp, mask)
    if weights is None:
        weights = sequence_mean_weights(mask)
    return surrogate_loss(
        ratio, advantages, logp, mask, weights,
        ref_logp=ref_logp, beta=beta, clip_low=clip_low, clip_high=clip_high)

"use strict";
// GRPO (arXiv 2402.03300): the functions of grpo.py, with the same names.
//
// rewards and advantages: a list for each question, with a number for each completion.
// logp, weights, …: a number for each token, completion after completion, without padding.

// A_i = (r_i − mean(r)) / (std(r) + eps)     std: with the divisor G − 1
// A group whose rewards are all equal gets 0.   1, 0, 0, 1 → 0.87, −0.87, −0.87, 0.87
function group_advantages(rewards, { divide_by_std = true, eps = 1e-4 } = {}) {
  return rewards.map((group) => {
    const shifted = group.map((r) => r - group[0]); // so equal rewards give exact zeros
    const mean = shifted.reduce((a, b) => a + b) / group.length;
    const centred = shifted.map((r) => r - mean);
    if (!divide_by_std) return centred;
    const squares = centred.reduce((sum, r) => sum + r * r, 0);
    const std = Math.sqrt(squares / (group.length - 1));
    return centred.map((r) => r / (std + eps));
  });
}

// k3 = r − log r − 1,   r = π_ref / π
function kl_k3(logp, ref_logp) {
  const log_r = ref_logp - logp;
  return Math.expm1(log_r) - log_r;
}

// min(ρ A, clip(ρ, 1 − ε, 1 + ε) A)
function clipped_surrogate(ratio, advantage, epsilon) {
  const clipped = Math.min(Math.max(ratio, 1 - epsilon), 1 + epsilon);
  return Math.min(ratio * advantage, clipped * advantage);
}

// The two cases in which the clip ends the gradient.
function is_clipped(ratio, advantage, epsilon) {
  return advantage > 0 ? ratio > 1 + epsilon : advantage < 0 && ratio < 1 - epsilon;
}

// 1 / (N |o_i|) on each token. lengths: |o_i| of these completions. N: of the whole batch.
function sequence_mean_weights(lengths, N = lengths.length) {
  return lengths.flatMap((length) => Array(length).fill(1 / (N * length)));
}

// Dr. GRPO (2503.20783): 1 / (N L) on each token. L: one length for all.
function constant_weights(lengths, L, N = lengths.length) {
  return lengths.flatMap((length) => Array(length).fill(1 / (N * L)));
}

// loss = −Σ weights · (min(ρ A, clip(ρ) A) − β k3),   ρ = π_θ / π_old
// ∂loss / ∂logp = −weights · (ρ A [not clipped] − β (1 − π_ref / π_θ))
//
// advantages, weights: of each token. ref_logp: may be missing; then kl is 0. kl and clip_fraction
// are sums with the weights of the loss, weight is the sum of these. gradient: ∂loss / ∂logp.
function grpo_loss(logp, { old_logp, ref_logp, advantages, weights }, { beta, epsilon }) {
  const gradient = new Float64Array(logp.length);
  const found = { loss: 0, kl: 0, clip_fraction: 0, weight: 0, gradient };
  logp.forEach((logp_t, t) => {
    const A = advantages[t], weight = weights[t], ref_logp_t = ref_logp?.[t] ?? logp_t;
    const ratio = Math.exp(logp_t - old_logp[t]);
    const clipped = is_clipped(ratio, A, epsilon);
    const kl = kl_k3(logp_t, ref_logp_t);
    found.loss -= weight * (clipped_surrogate(ratio, A, epsilon) - beta * kl);
    const slope = (clipped ? 0 : ratio * A) - beta * (1 - Math.exp(ref_logp_t - logp_t));
    gradient[t] = -weight * slope;
    found.weight += weight;
    found.kl += weight * kl;
    found.clip_fraction += clipped ? weight : 0;
  });
  return found;
}

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
// advantages: of each token. ref_logp: null if β is 0. The sums kl and clip_fraction have the
// weights of the loss. `gradient` is ∂loss / ∂logp.
function grpo_loss(logp, old_logp, advantages, weights, { ref_logp = null, beta, epsilon }) {
  const gradient = new Float64Array(logp.length);
  let loss = 0, kl = 0, clip_fraction = 0;
  for (let t = 0; t < logp.length; t++) {
    const ratio = Math.exp(logp[t] - old_logp[t]);
    const k3 = ref_logp ? kl_k3(logp[t], ref_logp[t]) : 0;
    const slope_k3 = ref_logp ? 1 - Math.exp(ref_logp[t] - logp[t]) : 0;
    const clipped = is_clipped(ratio, advantages[t], epsilon);
    const slope = clipped ? 0 : ratio * advantages[t];
    loss -= weights[t] * (clipped_surrogate(ratio, advantages[t], epsilon) - beta * k3);
    gradient[t] = -weights[t] * (slope - beta * slope_k3);
    kl += weights[t] * k3;
    clip_fraction += clipped ? weights[t] : 0;
  }
  return { loss, gradient, kl, clip_fraction };
}

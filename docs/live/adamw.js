"use strict";
// AdamW without weight decay, as torch.optim.AdamW(lr, weight_decay=0), and the limit of the
// gradient's norm, as torch.nn.utils.clip_grad_norm_.

const BETA_1 = 0.9;
const BETA_2 = 0.999;
const ADAM_EPS = 1e-8;
const MAX_GRAD_NORM = 1.0;

// Scales the gradient down to MAX_GRAD_NORM if it is longer. Returns its norm before.
function clip_gradient(gradient) {
  let squares = 0;
  for (let i = 0; i < gradient.length; i++) squares += gradient[i] * gradient[i];
  const norm = Math.sqrt(squares);
  const scale = Math.min(1, MAX_GRAD_NORM / (norm + 1e-6));
  for (let i = 0; i < gradient.length; i++) gradient[i] *= scale;
  return norm;
}

// m: mean of the gradients. v: mean of their squares.
function make_adamw(size) {
  return { m: new Float64Array(size), v: new Float64Array(size), step: 0 };
}

// m ← β₁ m + (1 − β₁) g     v ← β₂ v + (1 − β₂) g²
// θ ← θ − lr · m̂ / (√v̂ + eps),   m̂ = m / (1 − β₁ᵗ),   v̂ = v / (1 − β₂ᵗ)
function adamw_step(weights, gradient, state, lr) {
  state.step += 1;
  const { m, v } = state;
  const correction_1 = 1 - BETA_1 ** state.step;
  const correction_2 = 1 - BETA_2 ** state.step;
  for (let i = 0; i < weights.length; i++) {
    const g = gradient[i];
    m[i] += (1 - BETA_1) * (g - m[i]);
    v[i] += (1 - BETA_2) * (g * g - v[i]);
    weights[i] -= (lr * (m[i] / correction_1)) / (Math.sqrt(v[i] / correction_2) + ADAM_EPS);
  }
}

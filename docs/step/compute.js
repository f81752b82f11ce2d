"use strict";
// What the step computes with another G, P, ε or β, from the numbers that stand in the page: the
// reward and the length of each completion of the step, and log π, log π_old and log π_ref of each
// token of one question. It uses the functions of grpo.js and cppo.js of docs/live.

const sum = xs => xs.reduce((a, b) => a + b, 0);

// How many of the next questions fit, if `capacity` completions may be kept in all: allocate.fill
function fill(kept_counts, capacity) {
  let used = 0;
  const first_too_many = kept_counts.findIndex(count => (used += count) > capacity);
  return first_too_many < 0 ? kept_counts.length : first_too_many;
}

// The tokens of each device, if the longest completion goes first to the least busy one: allocate.balance
function balanced(lengths, devices) {
  const busy = Array(devices).fill(0);
  for (const n of [...lengths].sort((a, b) => b - a)) busy[busy.indexOf(Math.min(...busy))] += n;
  return busy;
}

// All numbers of the tokens of a completion in one update. N: completions of the step that are kept
function numbers_of_tokens({ update, logp, old, ref }, { A, reward, N }, { epsilon, beta }) {
  const weight = sequence_mean_weights([logp.length], N);
  const ratio = logp.map((x, t) => Math.exp(x - old[t]));
  const surrogate = ratio.map(x => clipped_surrogate(x, A, epsilon));
  const kl = logp.map((x, t) => kl_k3(x, ref[t]));
  const advantages = logp.map(() => A);
  const known = { old_logp: old, ref_logp: ref, advantages, weights: weight };
  const { gradient } = grpo_loss(logp, known, { beta, epsilon });
  // PPO's, with a critic that says 0 everywhere and γ = λ = 1
  const last = logp.length - 1;
  const token_reward = old.map((x, t) => -beta * (x - ref[t]) + (t === last ? reward : 0));
  const gae = token_reward.map((_, t) => sum(token_reward.slice(t)));
  return {
    update, logp, old, ref, weight, ratio, surrogate, kl, token_reward, gae, gradient: [...gradient],
    clipped: ratio.map(x => is_clipped(x, A, epsilon)),
    k1: logp.map((x, t) => x - ref[t]), k2: logp.map((x, t) => 0.5 * (x - ref[t]) ** 2),
    part: surrogate.map((x, t) => -weight[t] * (x - beta * kl[t])),
    ppo: ratio.map((x, t) => clipped_surrogate(x, gae[t], epsilon)),
  };
}

// settings: {G, P, epsilon, beta}. With a smaller G only the first G completions have been sampled.
function recomputed(data, settings) {
  const { G, P } = settings, at = data.number - 1;
  const rewards = data.rewards.map(group => group.slice(0, G));
  const A = group_advantages(rewards);
  const k = keep_count(G, P), N = k * A.length;
  const kept = prune(A, k);
  // of different questions equal |A| differ in their last digits
  const sizes = A.map(group => group.map(x => Number(Math.abs(x).toFixed(9))));
  const pooled = prune_pooled(sizes, N)[at];
  const gamma = Math.min(...kept[at].map(i => sizes[at][i]));
  const above = sizes.map(group => group.filter(x => x >= gamma).length);
  const lengths = kept.flatMap((rows, q) => rows.map(i => data.lengths[q][i]));
  const completions = data.completions.map(({ members, reward, passes }) => {
    const own = members.filter(i => kept[at].includes(i));
    const place = own[0] ?? members[0];
    const known = { A: A[at][place], reward, N };
    return {
      place, reward, advantage: known.A, threshold: known.A, kept: own.length, count: members.filter(i => i < G).length,
      passes: own.length ? passes.map(one => numbers_of_tokens(one, known, settings)) : [],
    };
  });
  const of_question = u => sum(completions.map(c => c.kept * sum(c.passes[u]?.part ?? [])));
  const objective = data.updates.map((_, u) => -A.length * of_question(u));  // the step's loss is a mean over questions
  // CPPO's section 3.2, without the KL: a completion adds a vector of this length to the first update's gradient
  const norms = A[at].map((_, i) => data.completions.find(c => c.members.includes(i)).norm);
  const added = norms.map((norm, i) => Math.abs(A[at][i]) * norm);
  const share = rows => sum(rows.map(i => added[i])) / (sum(added) || 1);
  return {
    k, N, gamma, above, pooled: pooled.length, allocation: questions_per_step(1, G, k), fill: fill(above, G),
    bucket: balanced(lengths, 2), micro: Math.ceil(N / data.rows), completions,
    rewards: rewards[at], advantages: A[at], kept: kept[at], norms, added,
    share: share(kept[at]), best: share(largest(added, k)),
    objective, whole: P ? recomputed(data, { ...settings, P: 0 }).objective : objective,
  };
}

"use strict";
// One turn of the algorithm box, as `train_step` of train.py. A lane is a model that learns.
// What differs from train.py: the learning rate is constant, no question is held out, and a
// question's kept completions are one micro-batch. What a page uses of this file:
//   default_settings(method) → settings
//   make_lane(model_bytes, settings, reward) → { step(), answers(questions) }

const METHODS = ["grpo", "cppo", "pooled", "random", "drgrpo"];

// As many questions as fill the places of one question's G completions. One question a step has the
// learning rate of Table 1, several have the toy's: their gradient is less noisy.
function default_settings(method) {
  const settings = {
    method, group_size: 16, pruning_rate: 0.875, beta: method === "drgrpo" ? 0 : 0.04, mu: 2,
    epsilon: 0.2, temperature: 1, seed: 1
  };
  const questions = questions_per_step(1, settings.group_size, k_of(settings));
  return { ...settings, questions_per_step: questions, lr: questions > 1 ? 3e-4 : 1e-4 };
}

// How many completions of a question are kept.
function k_of({ method, group_size, pruning_rate }) {
  return ["grpo", "drgrpo"].includes(method) ? group_size : keep_count(group_size, pruning_rate);
}

// model_bytes: as for `make_model`. reward: (completion, answer, question) → a number; true is 1.
function make_lane(model_bytes, settings, reward) {
  if (!METHODS.includes(settings.method)) throw new Error(`method: ${METHODS.join(", ")}`);
  const model = make_model(model_bytes);
  const [for_questions, for_tokens, for_rules] = [0, 1, 2].map((i) => make_rng(settings.seed, i));
  const memory = {};
  return {
    settings, reward, model, memory, for_questions, for_tokens, for_rules, steps: 0,
    reference: make_model(model_bytes), optimizer: make_adamw(model.weights.length),
    step() { return train_step(this); },
    answers(questions) {
      const greedy = { temperature: 0, max_new_tokens: MAX_NEW_TOKENS };
      return sample(model, questions.map(encode), 1, greedy, null, memory).map(decode);
    }
  };
}

// Calls `work`, and adds its seconds to seconds[name].
function timed(seconds, name, work) {
  const begin = performance.now();
  const result = work();
  seconds[name] += (performance.now() - begin) / 1000;
  return result;
}

function train_step(lane) {
  const { settings } = lane;
  const seconds = { sampling: 0, logprobs: 0, update: 0 };
  // 1 sample G completions of each question, 2 score them
  const groups = timed(seconds, "sampling", () => sample_and_score(lane));
  // 3 advantages A over all G completions of a question
  const divide_by_std = settings.method !== "drgrpo";
  const advantages = group_advantages(groups.map((group) => group.rewards), { divide_by_std });
  // 4 keep all of them (GRPO), or the k with the largest |A| (CPPO)
  const kept = keep(settings, advantages, lane.for_rules);
  groups.forEach((group, q) => Object.assign(group, { advantages: advantages[q], kept: kept[q] }));
  const batches = make_batches(groups, settings);
  // 5 log-probabilities of the reference policy, for the kept completions only
  timed(seconds, "logprobs", () => reference_logprobs(lane, batches));
  // 6 μ updates on the kept completions
  const stats = timed(seconds, "update", () => update(lane, batches));
  lane.steps += 1;
  const completions = lane.steps * groups.length * settings.group_size;
  return { step: lane.steps, seconds, completions, ...stats, ...report(groups) };
}

// Steps 1 and 2: a group for each question. completions: lists of tokens.
function sample_and_score({ settings, reward, model, for_questions, for_tokens, memory }) {
  const { group_size, temperature } = settings;
  const groups = [];
  while (groups.length < settings.questions_per_step) groups.push(draw_question(for_questions));
  const prompts = groups.map((group) => encode(group.question));
  const uniform = new Float64Array(groups.length * group_size * MAX_NEW_TOKENS).map(for_tokens);
  const sampling = { temperature, max_new_tokens: MAX_NEW_TOKENS };
  const tokens = sample(model, prompts, group_size, sampling, uniform, memory);
  return groups.map(({ question, answer }, q) => {
    const completions = tokens.slice(q * group_size, (q + 1) * group_size);
    const texts = completions.map(decode);
    const rewards = texts.map((text) => score(reward, text, answer, question));
    return { question, answer, prompt: prompts[q], completions, texts, rewards };
  });
}

function score(reward, text, answer, question) {
  let value;
  try {
    value = reward(text, answer, question);
  } catch (error) {
    throw new Error(`The reward fails: ${error?.message ?? error}`);
  }
  if (typeof value === "boolean") return Number(value);
  if (!Number.isFinite(value)) throw new Error(`The reward must be a finite number: ${value}`);
  return value;
}

// Step 4: the kept completions of each question.
function keep(settings, advantages, rng) {
  const k = k_of(settings);
  if (settings.method === "pooled") return prune_pooled(advantages, advantages.length * k);
  return prune(advantages, k, settings.method === "random" ? "random" : "largest_abs", rng);
}

// What is trained on, a batch for each question. There is none if every kept advantage is 0: AdamW
// would still move the weights, because it remembers earlier gradients.
function make_batches(groups, { method }) {
  const signal = groups.some(({ kept, advantages }) => kept.some((i) => advantages[i] !== 0));
  const learned = groups.filter(({ kept }) => signal && kept.length);
  const N = learned.reduce((sum, { kept }) => sum + kept.length, 0);
  return learned.map(({ prompt, completions, kept, advantages }) => {
    const batch = completion_batch(prompt, kept.map((i) => completions[i]));
    const { lengths } = batch;
    const constant = method === "drgrpo" && constant_weights(lengths, MAX_NEW_TOKENS, N);
    const weights = constant || sequence_mean_weights(lengths, N);
    const of_tokens = kept.flatMap((i, n) => Array(lengths[n]).fill(advantages[i]));
    return { ...batch, weights, advantages: of_tokens };
  });
}

// Step 5.
function reference_logprobs({ settings, reference, memory }, batches) {
  for (const batch of settings.beta ? batches : []) {
    const logits = forward(reference, batch, memory);
    batch.ref_logp = token_logprobs(logits, batch.targets, settings.temperature);
  }
}

// Step 6: μ passes with an optimizer step each. Returns the means over them; null without a batch.
function update({ settings, model, optimizer, memory }, batches) {
  const stats = { loss: null, kl: null, clip_fraction: null, gradient_norm: null, updates: 0 };
  for (let pass = 0; batches.length && pass < settings.mu; pass++) {
    const found = accumulate(model, settings, memory, batches);
    found.gradient_norm = clip_gradient(model.gradient);
    for (const name in found) stats[name] += found[name] / settings.mu;
    if (!(found.gradient_norm > 0 && found.gradient_norm < Infinity)) continue;
    adamw_step(model.weights, model.gradient, optimizer, settings.lr);
    stats.updates += 1;
  }
  return stats;
}

// The gradient of all batches, the loss, and means over the tokens. At first π_θ is still π_old.
function accumulate(model, { temperature, beta, epsilon }, memory, batches) {
  const sums = { loss: 0, kl: 0, clip_fraction: 0, weight: 0 };
  model.gradient.fill(0);
  for (const batch of batches) {
    const logits = forward(model, batch, memory);
    const logp = token_logprobs(logits, batch.targets, temperature);
    batch.old_logp ??= logp;
    const found = grpo_loss(logp, batch, { beta, epsilon });
    const numbers = batch.rows.length * TOKENS;
    const dlogits = room(memory, "dlogits", numbers).fill(0, 0, numbers);
    token_logprobs_backward(dlogits, found.gradient, logp, logits, batch.targets, temperature);
    backward(model, batch, memory, dlogits);
    for (const name in sums) sums[name] += found[name];
  }
  const { loss, kl, clip_fraction, weight } = sums;
  return { loss, kl: kl / weight, clip_fraction: clip_fraction / weight };
}

// What a page shows of a step. accuracy: by the true answer, whatever the reward is.
function report(groups) {
  const shown = groups.map(({ question, answer, completions, texts, ...of }) => {
    const show = (text, i) => {
      const numbers = { reward: of.rewards[i], advantage: of.advantages[i] };
      return { text, length: completions[i].length, ...numbers, kept: of.kept.includes(i) };
    };
    return { question, answer, completions: texts.map(show) };
  });
  const count = groups.length * groups[0].texts.length;
  const mean = (f) => groups.flatMap(f).reduce((a, b) => a + b) / count;
  return {
    accuracy: mean(({ texts, answer }) => texts.map((text) => answer_right(text, answer))),
    reward: mean(({ rewards }) => rewards),
    length: mean(({ completions }) => completions.map((tokens) => tokens.length)),
    thinks: mean(({ texts }) => texts.map((text) => Number(text.includes("<think>")))),
    groups: shown
  };
}

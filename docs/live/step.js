"use strict";
// One turn of the algorithm box, as `train_step` of train.py: a lane is a model that learns.
//
// What differs from train.py: the learning rate is constant, no question is held out, and a
// question's kept completions are one micro-batch.
//
// The interface of this file for a page:
//   default_settings(method) → settings       check_settings(settings) → a sentence, or null
//   make_lane(model_bytes, settings, reward) → { step(), answers(questions) }

const METHODS = ["grpo", "cppo", "pooled", "random", "drgrpo"];

function default_settings(method) {
  const settings = { method, group_size: 16, pruning_rate: 0.875, questions_per_step: 1 };
  const numbers = { lr: 3e-4, beta: 0.04, mu: 2, epsilon: 0.2, temperature: 1, seed: 1 };
  Object.assign(settings, numbers);
  if (method === "drgrpo") settings.beta = 0; // it has no KL term
  settings.questions_per_step = questions_per_step(1, settings.group_size, k_of(settings));
  return settings;
}

// How many completions of a question are kept.
function k_of({ method, group_size, pruning_rate }) {
  if (method === "grpo" || method === "drgrpo") return group_size;
  return keep_count(group_size, pruning_rate);
}

// [name, smallest, largest, must be a whole number]
const LIMITS = [
  ["group_size", 2, 64, true],
  ["pruning_rate", 0, 0.99, false],
  ["questions_per_step", 1, 64, true],
  ["lr", 0, 0.1, false],
  ["beta", 0, 10, false],
  ["mu", 1, 16, true],
  ["epsilon", 0.001, 10, false],
  ["temperature", 0.1, 5, false],
  ["seed", 0, 1e9, true]
];
const MOST_COMPLETIONS = 512; // of a step: about 200 MB of memory

// One sentence about the first setting that is wrong, or null.
function check_settings(settings) {
  if (!METHODS.includes(settings.method)) return `method must be one of ${METHODS.join(", ")}.`;
  for (const [name, smallest, largest, whole] of LIMITS) {
    const value = settings[name];
    const inside = value >= smallest && value <= largest;
    if (typeof value !== "number" || !inside || (whole && !Number.isInteger(value))) {
      const kind = whole ? "a whole number" : "a number";
      return `${name} must be ${kind} from ${smallest} to ${largest}.`;
    }
  }
  const { group_size, questions_per_step } = settings;
  if (group_size * questions_per_step > MOST_COMPLETIONS) {
    return `group_size times questions_per_step must be at most ${MOST_COMPLETIONS}.`;
  }
  try {
    k_of(settings);
  } catch (error) {
    return error.message;
  }
  return null;
}

// model_bytes: as for `make_model`. reward: (completion, answer, question) → a number.
function make_lane(model_bytes, settings, reward) {
  const sentence = check_settings(settings);
  if (sentence) throw new Error(sentence);
  const model = make_model(model_bytes);
  const lane = {
    settings, reward, model,
    reference: make_model(model_bytes),
    optimizer: make_adamw(model.weights.length),
    memory: {},
    for_questions: make_rng(settings.seed, 0),
    for_tokens: make_rng(settings.seed, 1),
    for_rules: make_rng(settings.seed, 2),
    steps: 0,
    completions: 0
  };
  lane.step = () => train_step(lane);
  lane.answers = (questions) => greedy_answers(lane, questions);
  return lane;
}

function greedy_answers({ model, memory }, questions) {
  const sampling = { temperature: 0, max_new_tokens: MAX_NEW_TOKENS };
  return sample(model, questions.map(encode), 1, sampling, null, memory).map(decode);
}

// Seconds of each phase: clock.phase(name, function) adds the time of the function.
function make_clock() {
  const seconds = { sampling: 0, logprobs: 0, update: 0 };
  const phase = (name, work) => {
    const begin = performance.now();
    const result = work();
    seconds[name] += (performance.now() - begin) / 1000;
    return result;
  };
  return { seconds, phase };
}

function train_step(lane) {
  const { settings } = lane;
  const clock = make_clock();
  // 1 sample G completions of each question, 2 score them
  const groups = clock.phase("sampling", () => sample_and_score(lane));
  // 3 advantages A over all G completions of a question
  const rewards = groups.map((group) => group.rewards);
  const divide_by_std = settings.method !== "drgrpo";
  const advantages = group_advantages(rewards, { divide_by_std });
  // 4 keep all of them (GRPO), or the k with the largest |A| (CPPO)
  const kept = keep(settings, advantages, lane.for_rules);
  groups.forEach((group, q) => Object.assign(group, { advantages: advantages[q], kept: kept[q] }));
  const batches = make_batches(groups, settings);
  let stats = NO_UPDATE;
  if (batches.length) { // else nobody has anything to learn
    // 5 log-probabilities of the reference policy, for the kept completions only
    clock.phase("logprobs", () => reference_logprobs(lane, batches));
    // 6 μ updates on the kept completions
    stats = clock.phase("update", () => update(lane, batches));
  }
  lane.steps += 1;
  lane.completions += groups.length * settings.group_size;
  return { step: lane.steps, seconds: clock.seconds, ...report(lane, groups), ...stats };
}

// [{ question, answer, prompt, completions (tokens), texts, rewards }], one for each question
function sample_and_score({ settings, model, memory, reward, for_questions, for_tokens }) {
  const { group_size, temperature } = settings;
  const groups = [];
  for (let q = 0; q < settings.questions_per_step; q++) groups.push(draw_question(for_questions));
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
  if (!Number.isFinite(value)) throw new Error(`The reward must be a finite number, not ${value}.`);
  return value;
}

// The places of the kept completions of each question.
function keep(settings, advantages, rng) {
  const k = k_of(settings);
  if (settings.method === "pooled") return prune_pooled(advantages, advantages.length * k);
  return prune(advantages, k, { rule: settings.method === "random" ? "random" : "largest_abs", rng });
}

// What is trained on, a batch for each question. None if every kept advantage is 0: then AdamW
// would still move the weights, because it remembers earlier gradients.
function make_batches(groups, { method }) {
  const with_kept = groups.filter((group) => group.kept.length);
  if (!groups.some((group) => group.kept.some((i) => group.advantages[i] !== 0))) return [];
  const N = with_kept.reduce((sum, group) => sum + group.kept.length, 0);
  return with_kept.map((group) => {
    const batch = completion_batch(group.prompt, group.kept.map((i) => group.completions[i]));
    const { lengths } = batch;
    batch.weights = method === "drgrpo"
      ? constant_weights(lengths, MAX_NEW_TOKENS, N)
      : sequence_mean_weights(lengths, N);
    const spread = (i, n) => Array(lengths[n]).fill(group.advantages[i]);
    batch.advantages = group.kept.flatMap(spread); // of each token
    return batch;
  });
}

function reference_logprobs({ settings, reference, memory }, batches) {
  for (const batch of settings.beta ? batches : []) {
    const logits = forward(reference, batch, memory);
    batch.ref_logp = token_logprobs(logits, batch.targets, settings.temperature);
  }
}

const NO_UPDATE = { loss: null, kl: null, clip_fraction: null, gradient_norm: null, updates: 0 };

// μ passes with an optimizer step each. Returns the means over them.
function update(lane, batches) {
  const { settings, model, optimizer } = lane;
  const sums = { loss: 0, kl: 0, clip_fraction: 0, gradient_norm: 0 };
  let updates = 0;
  for (let pass = 0; pass < settings.mu; pass++) {
    const found = accumulate(lane, batches);
    found.gradient_norm = clip_gradient(model.gradient);
    for (const name in sums) sums[name] += found[name] / settings.mu;
    if (!Number.isFinite(found.gradient_norm) || found.gradient_norm === 0) continue;
    adamw_step(model.weights, model.gradient, optimizer, settings.lr);
    updates += 1;
  }
  return { ...sums, updates };
}

// The gradient of all batches. In the first update π_θ is still π_old.
function accumulate({ settings, model, memory }, batches) {
  const { temperature, beta, epsilon } = settings;
  const sums = { loss: 0, kl: 0, clip_fraction: 0, weight: 0 };
  model.gradient.fill(0);
  for (const batch of batches) {
    const { targets, advantages, weights, ref_logp } = batch;
    const logits = forward(model, batch, memory);
    const logp = token_logprobs(logits, targets, temperature);
    batch.old_logp ??= logp;
    const options = { ref_logp, beta, epsilon };
    const found = grpo_loss(logp, batch.old_logp, advantages, weights, options);
    const dlogits = zeros(memory, "dlogits", batch.tokens.length * TOKENS);
    token_logprobs_backward(dlogits, found.gradient, logp, logits, targets, temperature);
    backward(model, batch, memory, dlogits);
    sums.loss += found.loss;
    sums.kl += found.kl;
    sums.clip_fraction += found.clip_fraction;
    sums.weight += weights.reduce((a, b) => a + b, 0);
  }
  sums.kl /= sums.weight;
  sums.clip_fraction /= sums.weight;
  return sums;
}

// What a page shows of a step. accuracy: by the true answer, whatever the reward is.
function report({ settings, completions }, groups) {
  const shown = groups.map((group) => ({
    question: group.question,
    answer: group.answer,
    completions: group.texts.map((text, i) => ({
      text,
      length: group.completions[i].length,
      reward: group.rewards[i],
      advantage: group.advantages[i],
      kept: group.kept.includes(i)
    }))
  }));
  const all = shown.flatMap((group) => group.completions);
  const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;
  const right = groups.flatMap(({ texts, answer }) => texts.map((text) => answer_right(text, answer)));
  return {
    completions,
    accuracy: mean(right),
    reward: mean(all.map((completion) => completion.reward)),
    length: mean(all.map((completion) => completion.length)),
    groups: shown
  };
}

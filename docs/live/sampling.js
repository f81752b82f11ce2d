"use strict";
// Completions: how they are sampled, and how their log-probabilities are computed. A prompt is
// computed once for all its completions. Batch and memory: see `forward` in model.js.

function make_batch(places, longest) {
  const columns = { tokens: [], position: [], place: [], start: [], prefix: [], shared: [] };
  return { ...columns, places, longest };
}

// One more row: a token, its position, and the places of its key and value, of its first own key
// and of its prompt's `shared` keys.
function add_row(batch, token, position, place, start, prefix, shared) {
  batch.tokens.push(token);
  batch.position.push(position);
  batch.place.push(place);
  batch.start.push(start);
  batch.prefix.push(prefix);
  batch.shared.push(shared);
}

function add_prompt(batch, prompt) {
  const start = batch.tokens.length;
  prompt.forEach((token, i) => add_row(batch, token, i, start + i, start, 0, 0));
  return start;
}

// The token v with p_1 + … + p_v > u · Σ p first, p = softmax(logits / temperature).
// Temperature 0 takes the most likely token. The logits are those of a row.
function sample_token(logits, row, temperature, u) {
  const own = logits.subarray(row * TOKENS, (row + 1) * TOKENS);
  const most = Math.max(...own);
  if (temperature === 0) return own.indexOf(most);
  const sums = [];
  let sum = 0;
  for (const x of own) {
    sum += Math.exp((x - most) / temperature);
    sums.push(sum);
  }
  return sums.findIndex((before) => before > u * sum);
}

// `group_size` completions of each prompt, question after question: lists of tokens, with EOS.
// uniform: number (c · max_new_tokens + t) draws token t of completion c.
function sample(model, prompts, group_size, { temperature, max_new_tokens }, uniform, memory) {
  const completions = Array.from({ length: prompts.length * group_size }, () => []);
  const longest = Math.max(...prompts.map((prompt) => prompt.length));
  const first = prompts.reduce((sum, prompt) => sum + prompt.length, 0); // after the prompts' keys
  const places = first + completions.length * max_new_tokens;
  let batch = make_batch(places, longest + max_new_tokens);
  const starts = prompts.map((prompt) => add_prompt(batch, prompt));
  let logits = forward(model, batch, memory);
  const question = (c) => Math.floor(c / group_size);
  const last = (c) => starts[question(c)] + prompts[question(c)].length - 1;
  let active = completions.map((_, c) => ({ c, row: last(c) }));
  for (let t = 0; t < max_new_tokens && active.length; t++) {
    const going_on = [];
    batch = make_batch(places, batch.longest);
    for (const { c, row } of active) {
      const token = sample_token(logits, row, temperature, uniform?.[c * max_new_tokens + t]);
      completions[c].push(token);
      if (token === EOS) continue; // a completion that has ended leaves the batch
      const q = question(c);
      const start = first + c * max_new_tokens;
      going_on.push({ c, row: going_on.length });
      const shared = prompts[q].length;
      add_row(batch, token, shared + t, start + t, start, starts[q], shared);
    }
    active = going_on;
    if (t + 1 < max_new_tokens) logits = forward(model, batch, memory);
  }
  return completions;
}

// A prompt and completions of it, to be scored together. targets: for each token of the
// completions the row that predicts it.
function completion_batch(prompt, completions) {
  const lengths = completions.map((tokens) => tokens.length);
  const rows = prompt.length + lengths.reduce((a, b) => a + b, 0) - completions.length;
  const batch = make_batch(rows, prompt.length + Math.max(...lengths));
  add_prompt(batch, prompt);
  const targets = [];
  for (const tokens of completions) {
    const start = batch.tokens.length;
    tokens.forEach((token, t) => {
      targets.push({ row: t === 0 ? prompt.length - 1 : start + t - 1, token });
      if (t + 1 === tokens.length) return; // nothing is predicted after the last token
      add_row(batch, token, prompt.length + t, start + t, start, 0, prompt.length);
    });
  }
  return { ...batch, targets, lengths };
}

// log π(o_t | q, o_<t) = x_o − log Σ_v exp x_v,   x = logits / temperature   for each target
function token_logprobs(logits, targets, temperature) {
  return Float64Array.from(targets, ({ row, token }) => {
    const x = logits.subarray(row * TOKENS, (row + 1) * TOKENS);
    const most = Math.max(...x);
    let sum = 0;
    for (let v = 0; v < TOKENS; v++) sum += Math.exp((x[v] - most) / temperature);
    return (x[token] - most) / temperature - Math.log(sum);
  });
}

// ∂ log π(o) / ∂ logits_v = (1[v = o] − π(v)) / temperature.   dlogits += that, times dlogp
function token_logprobs_backward(dlogits, dlogp, logp, logits, targets, temperature) {
  targets.forEach(({ row, token }, t) => {
    const x = row * TOKENS;
    for (let v = 0; v < TOKENS; v++) {
      // π(v) = π(o) exp((x_v − x_o) / temperature)
      const pi = Math.exp(logp[t] + (logits[x + v] - logits[x + token]) / temperature);
      dlogits[x + v] += ((v === token) - pi) * dlogp[t] / temperature;
    }
  });
}

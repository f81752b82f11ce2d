"use strict";
// Completions: how they are sampled, and how their log-probabilities are computed. A prompt is
// computed once for all its completions. Batches, rows and memory: see `forward` in model.js.

// The rows of a prompt whose first key lies at `start`.
function prompt_rows(prompt, start) {
  const own = { start, prefix: 0, shared: 0 };
  return prompt.map((token, i) => ({ token, position: i, place: start + i, ...own }));
}

// The first token v with p_1 + … + p_v > u Σ p,   p = softmax(logits / temperature)
// Temperature 0 takes the most likely token. logits: of one row.
function sample_token(logits, temperature, u) {
  const most = Math.max(...logits);
  if (temperature === 0) return logits.indexOf(most);
  const p = logits.map((x) => Math.exp((x - most) / temperature));
  const threshold = u * p.reduce((a, b) => a + b);
  let sum = 0;
  return p.findIndex((p_v) => (sum += p_v) > threshold);
}

// `group_size` completions of each prompt, question after question: lists of tokens, with EOS.
// uniform: number c · max_new_tokens + t of it draws token t of completion c.
function sample(model, prompts, group_size, { temperature, max_new_tokens }, uniform, memory) {
  const starts = prompts.map((_, q) => prompts.slice(0, q).flat().length);
  const prompted = prompts.flat().length; // after these places come the completions' keys
  const completions = Array.from({ length: prompts.length * group_size }, () => []);
  const places = prompted + completions.length * max_new_tokens;
  const longest = Math.max(...prompts.map((prompt) => prompt.length)) + max_new_tokens;
  let rows = prompts.flatMap((prompt, q) => prompt_rows(prompt, starts[q]));
  let logits = forward(model, { rows, places, longest }, memory);
  // the completions that have not ended, and the rows of their logits
  let active = completions.map((tokens, c) => {
    const q = Math.floor(c / group_size);
    const own = { start: prompted + c * max_new_tokens, prefix: starts[q] };
    return { tokens, c, own, shared: prompts[q].length, row: starts[q] + prompts[q].length - 1 };
  });
  for (let t = 0; t < max_new_tokens && active.length; t++) {
    for (const { tokens, c, row } of active) {
      const own = logits.subarray(row * TOKENS, (row + 1) * TOKENS);
      tokens.push(sample_token(own, temperature, uniform?.[c * max_new_tokens + t]));
    }
    active = active.filter(({ tokens }) => tokens[t] !== EOS); // who has ended leaves the batch
    rows = active.map(({ tokens, own, shared }, row) => {
      active[row].row = row;
      return { token: tokens[t], position: shared + t, place: own.start + t, shared, ...own };
    });
    if (t + 1 < max_new_tokens) logits = forward(model, { rows, places, longest }, memory);
  }
  return completions;
}

// A prompt and completions of it, to be scored together. targets: the tokens of the completions,
// each with the row that predicts it.
function completion_batch(prompt, completions) {
  const rows = prompt_rows(prompt, 0);
  const shared = prompt.length;
  const targets = [];
  for (const tokens of completions) {
    const start = rows.length;
    tokens.forEach((token, t) => {
      targets.push({ token, row: t === 0 ? shared - 1 : start + t - 1 });
      if (t + 1 === tokens.length) return; // the last token predicts nothing
      rows.push({ token, position: shared + t, place: start + t, start, prefix: 0, shared });
    });
  }
  const lengths = completions.map((tokens) => tokens.length);
  return { rows, targets, lengths, places: rows.length, longest: shared + Math.max(...lengths) };
}

// log π(o_t | q, o_<t) = x_o − log Σ_v exp x_v,   x = logits / temperature   for each target
function token_logprobs(logits, targets, temperature) {
  return Float64Array.from(targets, ({ row, token }) => {
    const x = logits.subarray(row * TOKENS, (row + 1) * TOKENS);
    const most = Math.max(...x);
    const sum = x.reduce((total, x_v) => total + Math.exp((x_v - most) / temperature), 0);
    return (x[token] - most) / temperature - Math.log(sum);
  });
}

// ∂ log π(o) / ∂ logits_v = (1[v = o] − π(v)) / temperature,   here += it times dlogp
function token_logprobs_backward(dlogits, dlogp, logp, logits, targets, temperature) {
  targets.forEach(({ row, token }, t) => {
    const x = row * TOKENS;
    for (let v = 0; v < TOKENS; v++) {
      // π(v) = π(o) exp((x_v − x_o) / temperature)
      const pi = Math.exp(logp[t] + (logits[x + v] - logits[x + token]) / temperature);
      dlogits[x + v] += (((v === token) - pi) * dlogp[t]) / temperature;
    }
  });
}

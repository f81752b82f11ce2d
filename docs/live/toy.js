"use strict";
// The toy's task, as in tasks/toy.py: mental arithmetic over five digits, and what an answer
// is worth, as in rewards.py. A completion is the text of its tokens without EOS.

const TAGS = ["<think>", "</think>", "<answer>", "</answer>"];
const VOCABULARY = ["<pad>", "<eos>", ...TAGS, ..."0123456789+-=?;\n"];
const EOS = 1;
const MAX_NEW_TOKENS = 48;
const OPERANDS = 5;
const LARGEST_DIGIT = 9;

// Text → tokens. Raises Error if a character is not in the vocabulary.
function encode(text) {
  const found = text.match(/<\/?(?:think|answer)>|[^]/g) ?? [];
  return found.map((piece) => {
    const token = VOCABULARY.indexOf(piece);
    if (token < 0) throw new Error(`The model knows only digits and + - = ? ; but not "${piece}".`);
    return token;
  });
}

// Tokens → text, without <pad> and <eos>.
function decode(tokens) {
  return tokens.filter((token) => token > EOS).map((token) => VOCABULARY[token]).join("");
}

// Uniform numbers in [0, 1). The generator counts in odd steps and mixes the bits of each count.
// stream: each stream of a seed gives other numbers.
function make_rng(seed, stream = 0) {
  const mix = (x) => {
    x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
    x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
    return (x ^ (x >>> 16)) >>> 0;
  };
  let count = mix(seed + 1) ^ mix(~stream);
  return () => {
    count = (count + 0x9e3779b9) | 0;
    return mix(count) / 2 ** 32;
  };
}

// A question and its answer. No running total is negative. (No question is held out here.)
function draw_question(rng) {
  const draw_digit = () => 1 + Math.floor(rng() * LARGEST_DIGIT);
  let total = draw_digit();
  let question = String(total);
  for (let i = 1; i < OPERANDS; i++) {
    const digit = draw_digit();
    const minus = digit <= total && rng() < 0.5;
    total += minus ? -digit : digit;
    question += (minus ? "-" : "+") + digit;
  }
  return { question: question + "=?", answer: String(total) };
}

// What stands in the last answer tag after the thoughts; null without one.
function extract_answer(completion) {
  const after = completion.split("</think>").at(-1);
  if (after.includes("<think>")) return null;
  const parts = after.split("</answer>").slice(0, -1);
  const last = parts.findLast((part) => part.includes("<answer>"));
  return last?.split("<answer>").at(-1).trim() || null;
}

// --- rewards: (completion, answer, question) → a number ---

// 1 for exactly the gold answer: rewards.py's toy_accuracy.
function answer_right(completion, answer) {
  return extract_answer(completion) === String(answer) ? 1 : 0;
}

// 1 for <think>…</think>, a new line or two, <answer>…</answer> and nothing else: format_reward.
function format(completion) {
  const no_tag = "(?:(?!</?(?:think|answer)>).)*";
  const form = `^<think>${no_tag}</think>\n{1,2}<answer>${no_tag}</answer>$`;
  return new RegExp(form, "s").test(completion) ? 1 : 0;
}

// From 1 for nothing to 0 for a completion of the largest length.
function short(completion) {
  return 1 - encode(completion).length / MAX_NEW_TOKENS;
}

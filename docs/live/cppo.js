"use strict";
// CPPO (arXiv 2503.22342): which completions are kept. The functions of cppo.py and allocate.py,
// with the same names. advantages: a list for each question, with a number for each completion.

// k = ⌊G (1 − P)⌋     The 1e-9 lifts a k such as 0.9999999999999998 to its whole number.
function keep_count(group_size, pruning_rate) {
  return Math.floor(group_size * (1 - pruning_rate) + 1e-9);
}

// ⌊B·G / k⌋: how many questions fill the places of B·G completions.
function questions_per_step(questions, group_size, k) {
  return Math.floor((questions * group_size) / k);
}

// The places of the n largest numbers, ascending. Of equal ones the first is taken: sort is stable.
function largest(scores, n) {
  const order = scores.map((_, i) => i).sort((a, b) => scores[b] - scores[a]);
  return order.slice(0, n).sort((a, b) => a - b);
}

const RULES = {
  largest_abs: (A) => Math.abs(A), // CPPO
  smallest_abs: (A) => -Math.abs(A),
  largest: (A) => A,
  random: (A, rng) => rng()
};

// I = the k completions of each question with the largest score: a list for each question.
//   −1.5, 0.3, 0.2, 1.0   k = 2 keeps 0 and 3
function prune(advantages, k, rule = "largest_abs", rng = null) {
  return advantages.map((group) => largest(group.map((A) => RULES[rule](A, rng)), k));
}

// What CPPO's published code keeps: the n largest |A| of all questions together, again as a list
// for each question, which may be empty.
function prune_pooled(advantages, n) {
  const rows = largest(advantages.flat().map(Math.abs), n);
  let first = 0;
  return advantages.map((group) => {
    const kept = group.map((_, i) => i).filter((i) => rows.includes(first + i));
    first += group.length;
    return kept;
  });
}

"use strict";
// The model that the visitor teaches, in a thread of its own: GRPO with one question a step, on the
// lane of ../live/step.js. Its rewards are the visitor's clicks.

const G = 16; // answers to a question
const MOST_ROWS = 9; // keys 1 to 9
const COUNTED = 2; // answers that count with CPPO
const SETTINGS = { ...default_settings("grpo"), group_size: G, lr: 1e-3, beta: 0, seed: 1 };
const PROBES = {
  "7+4-2-8+7=?": 8, "3-3+2+7+9=?": 18, "4-1+9+9+5=?": 26, "8+6-5+1-2=?": 8,
  "2+2+9-7+3=?": 9, "6-1-3+8+4=?": 14, "9+9-8+5-6=?": 9, "5+7+1-4+6=?": 15
};
let lane, untaught, group, rows;

const traits_of = (text, answer) => ({
  thinks: text.includes("<think>"), right: answer_right(text, answer) === 1,
  even: /[02468]$/.test(extract_answer(text))
});
const mean = (values) => values.reduce((a, b) => a + Number(b), 0) / values.length;

// Of 8 answers to each of 8 other questions. The random numbers are the same each time.
function measure_traits() {
  const asked = Object.keys(PROBES).flatMap((question) => Array(8).fill(question));
  const uniform = new Float64Array(asked.length * MAX_NEW_TOKENS).map(make_rng(77, 9));
  const sampling = { temperature: 1, max_new_tokens: MAX_NEW_TOKENS };
  const prompts = Object.keys(PROBES).map(encode);
  const tokens = sample(lane.model, prompts, 8, sampling, uniform, lane.memory);
  const found = tokens.map((own, i) => traits_of(decode(own), PROBES[asked[i]]));
  const share = (trait) => mean(found.map((traits) => traits[trait]));
  return {
    thinks: share("thinks"), right: share("right"), even: share("even"),
    tokens: mean(tokens.map((own) => own.length))
  };
}

// Equal answers are one row. If the rows are too many, answers of one form and one number are one.
function merge({ texts, answer }) {
  const form = (text) => `${traits_of(text).thinks} ${extract_answer(text)}`;
  const name = new Set(texts).size > MOST_ROWS ? form : (text) => text;
  return [...new Set(texts.map(name))].map((own) => {
    const places = [...texts.keys()].filter((i) => name(texts[i]) === own);
    const text = texts[places[0]], kinds = new Set(places.map((i) => texts[i])).size;
    return { text, places, kinds, ...traits_of(text, answer) };
  }).sort((a, b) => b.places.length - a.places.length);
}

function gradient_of(kept) {
  accumulate(lane.model, SETTINGS, lane.memory, make_batches([{ ...group, kept }], SETTINGS));
  return lane.model.gradient.slice();
}

const dot_product = (a, b) => a.reduce((sum, a_i, i) => sum + a_i * b[i], 0);

// How much of the gradient g of all answers comes from the kept ones, whose own gradient is h.
function compare(all, kept) {
  const g = gradient_of(all), h = gradient_of(kept);
  const [gg, gh, hh] = [dot_product(g, g), dot_product(g, h), dot_product(h, h)];
  const share = ((gh / gg) * kept.length) / all.length;
  return { share, cosine: gh / Math.sqrt(gg * hh), times: Math.sqrt(hh / gg) };
}

// A step on the newest group. liked: rows, by their places. few: whether only COUNTED answers
// count. quick: nothing is measured. share: of the 16 answers, those that were liked. pushed: for
// each trait, the sum of the advantages of the answers that have it and count.
function learn({ liked, few, quick }) {
  const places = liked.flatMap((row) => rows[row]?.places ?? []);
  const rewards = group.texts.map((_, i) => Number(places.includes(i)));
  const [advantages] = group_advantages([rewards]);
  Object.assign(group, { rewards, advantages });
  const all = [...rewards.keys()];
  const [largest] = prune([advantages], COUNTED);
  const gradient = !quick && advantages.some(Boolean) ? compare(all, largest) : null;
  group.kept = few ? largest : all;
  update(lane, make_batches([group], SETTINGS));
  const pushed = { thinks: 0, right: 0, even: 0 };
  for (const i of group.kept) {
    const traits = traits_of(group.texts[i], group.answer);
    for (const name in pushed) pushed[name] += traits[name] ? advantages[i] : 0;
  }
  return { share: mean(rewards), pushed, gradient };
}

function tell_answers() {
  [group] = sample_and_score(lane);
  rows = merge(group);
  const { question, answer } = group;
  postMessage({ question, answer, rows });
}

function begin({ weights }) {
  lane = make_lane(weights, SETTINGS, () => 0);
  untaught = make_lane(weights, SETTINGS, () => 0);
  tell_answers();
  postMessage({ traits: measure_traits() });
}

function teach(round) {
  postMessage({ learned: learn(round) });
  if (!round.quick) postMessage({ traits: measure_traits() });
  tell_answers();
}

function reply({ asked }) {
  postMessage({ replies: [untaught, lane].map((one) => one.answers([asked])[0]) });
}

// For tests: all that the model was taught, and its weights
function show() {
  postMessage({ weights: lane.model.weights });
}

const ACTIONS = { begin, teach, reply, show };
onmessage = ({ data }) => ACTIONS[data.action](data);

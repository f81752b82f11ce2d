"use strict";
// What one does: the settings, the two lanes in their workers, and the buttons.

const $ = id => document.getElementById(id);

// --- the settings: the page's own form, and the address holds them ---

const form = $("settings");
const LANES = [0, 1];
const OWN = ["pruning_rate", "questions_per_step", "lr"];
const SHARED = ["group_size", "mu", "beta", "epsilon", "temperature", "seed"];
const ONLY_SEEN = ["lang", "axis"];  // a change of these leaves the lanes as they are
const EXPRESSIONS = {
  right: "answer_right(completion, answer)",
  format: "format(completion)",
  short: "short(completion)",
};

const setting = name => form.elements[name].value;
const number = name => Number(setting(name));
const prunes = lane => !["grpo", "drgrpo"].includes(setting("method" + lane));
// k = ⌊G (1 − P)⌋
const keep = (G, P) => Math.floor(G * (1 - P) + 1e-9);

function choose(name, value) {
  const control = form.elements[name];
  const old = control?.value;
  if (old === undefined) return;
  control.value = value;
  if (control.value !== value || !value) control.value = old;  // there is no such choice
}

// GRPO prunes nothing, and the others keep at least one completion.
function make_valid() {
  for (const lane of LANES) {
    const name = "pruning_rate" + lane;
    const rates = [...form.elements[name].options].map(option => Number(option.value));
    const allowed = P => P <= number(name) && keep(number("group_size"), P) >= 1;
    choose(name, prunes(lane) ? String(rates.findLast(allowed)) : "0");
    form.elements[name].disabled = !prunes(lane);
  }
}

// The settings of a lane, as make_lane wants them
function lane_settings(lane) {
  const own = { method: setting("method" + lane) };
  for (const name of OWN) own[name] = number(name + lane);
  for (const name of SHARED) own[name] = number(name);
  return own;
}

// After each change: `names` says which settings are new.
function changed(names) {
  make_valid();
  speak(setting("lang"));
  const reward = setting("reward");
  if (reward !== "own") $("expression").value = EXPRESSIONS[reward];
  const chosen = [...form.elements].filter(control => control.name && control.type !== "text");
  const words = chosen.map(({ name }) => [name, setting(name)]);
  history.replaceState(null, "", "#" + new URLSearchParams(Object.fromEntries(words)));
  if (names.some(name => !ONLY_SEEN.includes(name))) reset();
  draw();
}

// What an address says. A word that makes no sense leaves the setting as it is.
function follow(address) {
  const words = new URLSearchParams(address.slice(1));
  for (const [name, value] of words) choose(name, value);
  changed([...words.keys()]);
}

// --- the lanes ---

const QUESTIONS = [
  { question: "7+4-2-8+7=?", answer: "8" },
  { question: "3-3+2+7+9=?", answer: "18" },
  { question: "4-1+9+9+5=?", answer: "26" },
];
const WINDOW = 512;  // completions whose mean is a point of a curve
const GOAL = 0.85;
const CURVES = ["accuracy", "length", "reward"];
const NO_SUMS = { accuracy: 0, length: 0, reward: 0 };
const NOTHING = { step: 0, seconds: 0, completions: 0, sums: NO_SUMS };
const CODE = URL.createObjectURL(new Blob([$("worker").textContent]));
const WEIGHTS = Uint8Array.from(atob($("weights").textContent), letter => letter.charCodeAt(0));
let lanes = [];
let running = false;
let said = "";
let stage = 0;  // the last part of the algorithm box that is shown; 0: all of them

function new_lane(index) {
  const worker = new Worker(CODE);
  const settings = lane_settings(index);
  const seconds = { sampling: 0, logprobs: 0, update: 0 };
  const lane = { worker, settings, seconds, points: [], group: 0 };
  worker.onmessage = ({ data }) => hear(lane, data);
  worker.onerror = event => hear(lane, { problem: event.message });
  const order = { action: "prepare", settings, weights: WEIGHTS, questions: QUESTIONS };
  worker.postMessage({ ...order, expression: $("expression").value });
  return lane;
}

function tell(action) {
  for (const { worker } of lanes) worker.postMessage({ action });
}

// A worker that is terminated stops at once, in the midst of a step.
function reset() {
  for (const { worker } of lanes) worker.terminate();
  running = false;
  stage = 0;
  lanes = LANES.map(new_lane);
  said = "Press Start, and give them a minute.";
}

function hear(lane, { result, seconds, answers, problem }) {
  if (problem) lane.problem = problem;
  if (answers) {
    lane.before ??= answers;
    lane.now = answers;
  }
  if (result) add_step(lane, result, seconds);
  if (lanes.every(other => other.problem)) running = false;
  draw_soon();
}

// A point of the curves: the mean of the newest completions, at most WINDOW of them.
// sums: of all completions so far
function add_step(lane, result, seconds) {
  const { step, completions } = result;
  const last = lane.points.at(-1) ?? NOTHING;
  const from = lane.points.findLast(at => at.completions <= completions - WINDOW) ?? NOTHING;
  const size = completions - from.completions;
  const point = { step, seconds, completions, sums: {} };
  for (const name of CURVES) {
    point.sums[name] = last.sums[name] + (completions - last.completions) * result[name];
    point[name] = (point.sums[name] - from.sums[name]) / size;
  }
  lane.points.push(point);
  if (point.accuracy >= GOAL && size >= WINDOW) lane.goal ??= point;
  for (const phase in lane.seconds) lane.seconds[phase] += result.seconds[phase];
  lane.result = result;
}

// For tests and for the curious: the newest state of the lanes
function newest({ settings, points }) {
  const { step, seconds, completions, accuracy = null, length = null } = points.at(-1) ?? NOTHING;
  return { method: settings.method, step, seconds, completions, accuracy, length };
}
Object.defineProperty(window, "live", { get: () => lanes.map(newest) });

// --- the buttons ---

function start_or_pause() {
  running = !running;
  stage = 0;
  tell(running ? "run" : "pause");
  said = running ? "Both models learn." : "Both models pause.";
  draw();
}

// The first press makes a step of both lanes, and each further one shows the next part of it.
function one_at_a_time() {
  if (running || stage % 6 === 0) {
    running = false;
    tell("pause");
    tell("step");
    said = "Both models pause.";
    stage = 1;
    document.querySelector(".box").scrollIntoView();
  } else {
    stage += 1;
  }
  draw();
}

function start_anew() {
  reset();
  draw();
}

function pick({ target: { name } }) {
  const lane = name.match(/^method(\d)/)?.[1];
  if (lane) {  // as default_settings: 16 completions are trained on in a step
    choose("pruning_rate" + lane, prunes(lane) ? "0.875" : "0");
    choose("questions_per_step" + lane, prunes(lane) ? "8" : "1");
    choose("lr" + lane, prunes(lane) ? "0.0003" : "0.0001");
  }
  if (name === "expression") choose("reward", "own");
  changed([name]);
}

function click(event) {
  const { dataset, id, hash, parentNode } = event.target;
  if (dataset.stage) stage = Number(dataset.stage);
  const lane = id.match(/^next(\d)/)?.[1];
  if (lane) lanes[lane].group += 1;
  if (dataset.stage || lane) draw();
  if (parentNode.className !== "try") return;
  event.preventDefault();  // a link to try leaves the settings that it does not name
  follow(hash);
}

function open_address() {
  const lang = setting("lang");
  form.reset();
  choose("lang", lang);
  follow(location.hash + "&again");
}

find_texts();
choose("lang", navigator.language.startsWith("zh") ? "zh" : "en");
$("run").addEventListener("click", start_or_pause);
$("one").addEventListener("click", one_at_a_time);
$("anew").addEventListener("click", start_anew);
document.addEventListener("change", pick);
document.addEventListener("click", click);
addEventListener("hashchange", open_address);
open_address();

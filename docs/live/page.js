"use strict";
// What one does: the settings, the two lanes in their workers, and the buttons.

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
const k_of = ({ group_size, pruning_rate }) => keep_count(group_size, pruning_rate);

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
    const allowed = P => P <= number(name) && keep_count(number("group_size"), P) >= 1;
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
const CURVES = ["accuracy", "length", "reward", "thinks"];
const NO_SUMS = { accuracy: 0, length: 0, reward: 0, thinks: 0 };
const NO_TIME = { sampling: 0, logprobs: 0, update: 0 };
const NOTHING = { step: 0, seconds: 0, completions: 0, sums: NO_SUMS };
const CODE = URL.createObjectURL(new Blob([$("worker").textContent]));
const WEIGHTS = Uint8Array.from(atob($("weights").textContent), letter => letter.charCodeAt(0));
const FILM = location.hash.startsWith("#film");
let lanes = [];
let running = false;
let said = "";
let seen_lane = 1;  // the one that a small window shows in the algorithm box
let stage = 0;  // the last part of the algorithm box that is shown; 0: all of them

function empty_lane(settings) {
  return { settings, seconds: { ...NO_TIME }, points: [], group: 0 };
}

function new_lane(index) {
  const worker = new Worker(CODE);
  const settings = lane_settings(index);
  const lane = { worker, ...empty_lane(settings) };
  worker.onmessage = ({ data }) => hear(lane, data);
  worker.onerror = event => hear(lane, { problem: event.message });
  const order = { action: "prepare", settings, weights: WEIGHTS, questions: QUESTIONS };
  worker.postMessage({ ...order, expression: $("expression").value });
  return lane;
}

// Both stand still, for example because of a broken reward. A change of it makes new lanes.
const all_failed = () => lanes.every(lane => lane.problem);

function tell(action) {
  for (const { worker } of lanes) worker.postMessage({ action });
}

// A worker that is terminated stops at once, in the midst of a step.
function reset() {
  for (const { worker } of lanes) worker.terminate();
  running = false;
  stage = 0;
  lanes = FILM ? earlier_until(0) : LANES.map(new_lane);
  said = "Press Start, and give them a minute.";
}

function hear(lane, { result, seconds, answers, problem }) {
  if (problem) lane.problem = problem;
  if (answers) {
    lane.before ??= answers;
    lane.now = answers;
  }
  if (result) add_step(lane, result, seconds);
  if (all_failed()) running = false;
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

// --- an earlier run with the first settings: experiments/live.js has recorded it ---

// steps: [seconds, accuracy, length, thinks] of each. told: [seconds, answers]
function earlier_lane({ settings, phases, steps, told }) {
  const lane = { ...empty_lane(settings), told };
  steps.forEach(([seconds, accuracy, length, thinks], i) => {
    const completions = (i + 1) * settings.group_size * settings.questions_per_step;
    const result = { step: i + 1, completions, accuracy, length, thinks, reward: accuracy };
    add_step(lane, { ...result, seconds: NO_TIME }, seconds);
  });
  return { ...lane, seconds: phases, result: undefined };
}

function earlier_until(seconds) {
  return earlier.map(lane => {
    const points = lane.points.filter(point => point.seconds <= seconds);
    const now = lane.told.findLast(([told]) => told <= seconds)[1];
    const goal = lane.goal?.seconds <= seconds ? lane.goal : undefined;
    return { ...lane, points, goal, before: lane.told[0][1], now };
  });
}

// For a moving picture: `live.html#film` (also #film&lang=zh) shows one chart and one question on
// 900 × 420, and trains nothing. film(seconds) draws the earlier run as it was after so many
// seconds; film.seconds says how many it has. So a script takes a picture after each call:
//     page = browser.open("docs/live.html#film", 900, 420)
//     page.run("film(12.5)"); page.ask("Page.captureScreenshot")
function film(seconds) {
  lanes = earlier_until(seconds);
  draw();
}

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
  } else {
    stage += 1;
  }
  draw();
  show_box();
}

function show_box() {
  document.querySelector(".box").scrollIntoView();
}

// Space starts and pauses, → goes one step on; a control that needs the key itself keeps it.
function press(event) {
  const { key, target, altKey, ctrlKey, metaKey, repeat } = event;
  const takes = key === " " ? "button, a, input, select" : "input, select";
  const action = { " ": start_or_pause, ArrowRight: one_at_a_time }[key];
  if (FILM || !action || all_failed() || altKey || ctrlKey || metaKey || target.closest(takes)) return;
  event.preventDefault();
  if (!repeat) action();
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
  const { dataset, id, hash } = event.target;
  if (dataset.stage) stage = Number(dataset.stage);
  const lane = id.match(/^next(\d)/)?.[1];
  if (lane) lanes[lane].group += 1;
  if (id === "other") seen_lane = 1 - seen_lane;
  if (dataset.stage || lane || id === "other") draw();
  if (!event.target.matches(".try [href^='#']")) return;
  event.preventDefault();  // a link to try leaves the settings that it does not name
  follow(hash);
}

function open_address() {
  const lang = setting("lang");
  form.reset();
  choose("lang", lang);
  follow(location.hash + "&again");
}

const earlier = JSON.parse($("earlier").textContent).map(earlier_lane);
film.seconds = Math.min(...earlier.map(lane => lane.points.at(-1).seconds));
document.body.classList.toggle("film", FILM);
find_texts();
choose("lang", navigator.language.startsWith("zh") ? "zh" : "en");
$("run").addEventListener("click", start_or_pause);
$("one").addEventListener("click", one_at_a_time);
$("anew").addEventListener("click", start_anew);
document.addEventListener("keydown", press);
document.addEventListener("change", pick);
document.addEventListener("click", click);
addEventListener("hashchange", open_address);
open_address();

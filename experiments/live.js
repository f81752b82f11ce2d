"use strict";
// A lane of docs/live.html in node, without the page: what it learns, and what its steps cost.
//
//     node experiments/live.js cppo                       default_settings, until 0.85 is reached
//     node experiments/live.js grpo seed=2 lr=3e-4 until=2 completions=8192
//     node experiments/live.js cppo pruning_rate=0.5 questions_per_step=2
//     node experiments/live.js cppo 'reward=short(completion)' until=1
//     node experiments/live.js record                     docs/live/earlier.json: 30 s of both
//
// Seconds are CPU seconds of this process. accuracy, reward and length are means over the last 512
// completions. The run ends when this accuracy has reached `until`. The weights are the page's.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const DOCS = path.join(__dirname, "..", "docs");
for (const name of ["model", "toy", "sampling", "grpo", "cppo", "adamw", "step"]) {
  vm.runInThisContext(fs.readFileSync(path.join(DOCS, "live", `${name}.js`), "utf8"), name);
}
const page = fs.readFileSync(path.join(DOCS, "live.html"), "utf8");
const bytes = Buffer.from(page.match(/<script id="weights"[^>]*>([^<]*)/)[1], "base64");
const WINDOW = 512; // completions

// Floating-point operations of the products; two for each multiplication and addition.
let operations = 0;
const uncounted = product;
globalThis.product = (C, ci, A, ai, al, B, bj, bl, I, J, L) => {
  operations += 2 * I * J * L;
  uncounted(C, ci, A, ai, al, B, bj, bl, I, J, L);
};

function options(words) {
  const settings = default_settings(words[0]);
  const own = { until: 0.85, completions: 24576, reward: "answer_right(completion, answer)" };
  for (const word of words.slice(1)) {
    const [name, ...rest] = word.split("=");
    const value = rest.join("=");
    const target = name in own ? own : settings;
    target[name] = name === "reward" ? value : Number(value);
  }
  return { settings, ...own };
}

function cpu_seconds() {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
}

// The means of the steps that hold the last WINDOW completions.
function recent(steps, per_step) {
  const last = steps.slice(-Math.ceil(WINDOW / per_step));
  const mean = (name) => last.reduce((sum, step) => sum + step[name], 0) / last.length;
  return ["accuracy", "reward", "length"].map((name) => `${name} ${mean(name).toFixed(3)}`);
}

function main(words) {
  const { settings, until, completions, reward } = options(words);
  const judge = new Function("completion", "answer", "question", `return (${reward});`);
  const lane = make_lane(bytes, settings, judge);
  const per_step = settings.group_size * settings.questions_per_step;
  const steps = [], phases = { sampling: 0, logprobs: 0, update: 0 };
  let seconds = 0, reached = false;
  while (!reached && steps.length * per_step < completions) {
    const begin = cpu_seconds();
    const step = lane.step();
    seconds += cpu_seconds() - begin;
    steps.push(step);
    for (const name in phases) phases[name] += step.seconds[name];
    const whole = steps.length * per_step >= WINDOW;
    const found = recent(steps, per_step);
    reached = whole && Number(found[0].split(" ")[1]) >= until;
    if (step.completions % (2 * WINDOW) === 0 || reached) {
      console.log(`${step.completions} completions, ${seconds.toFixed(1)} s: ${found.join(", ")}`);
    }
  }
  const count = steps.length, all = phases.sampling + phases.logprobs + phases.update;
  const share = Object.keys(phases).map((name) => `${name} ${(phases[name] / all).toFixed(2)}`);
  const updates = steps.reduce((sum, step) => sum + step.updates, 0);
  console.log(`${reached ? "reached" : "ended"} ${words.join(" ")}: ${seconds.toFixed(1)} s, ` +
    `${count * per_step} completions, ${count} steps, ${updates} updates, ` +
    `${(seconds / count).toFixed(3)} s a step (${share.join(", ")}), ` +
    `${(operations / count / 1e9).toFixed(2)} GFLOP a step, ` +
    `${(operations / seconds / 1e9).toFixed(2)} GFLOP/s`);
}

// The run that the page shows before it has one of its own: a lane of each method, with its answers
// to the page's three questions before the run and after each half second in which they change.
const QUESTIONS = [["7+4-2-8+7=?", "8"], ["3-3+2+7+9=?", "18"], ["4-1+9+9+5=?", "26"]];

function recorded(method, most) {
  const settings = default_settings(method);
  if (method === "grpo") settings.pruning_rate = 0;
  const lane = make_lane(bytes, settings, answer_right);
  const phases = { sampling: 0, logprobs: 0, update: 0 }, steps = [], told = [];
  let seconds = 0;
  const tell = () => {
    const texts = lane.answers(QUESTIONS.map(([question]) => question));
    const right = (text, i) => answer_right(text, QUESTIONS[i][1]) === 1;
    const answers = texts.map((text, i) => ({ text, right: right(text, i) }));
    const news = JSON.stringify(answers) !== JSON.stringify(told.at(-1)?.[1]);
    if (news) told.push([Number(seconds.toFixed(2)), answers]);
  };
  tell();
  for (let asked = 0; seconds < most;) {
    const begin = cpu_seconds();
    const step = lane.step();
    seconds += cpu_seconds() - begin;
    for (const name in phases) phases[name] += step.seconds[name];
    const numbers = [seconds, step.accuracy, step.length, step.thinks];
    steps.push(numbers.map((x) => Number(x.toFixed(3))));
    if (seconds - asked > 0.5) {
      tell();
      asked = seconds;
    }
  }
  const all = phases.sampling + phases.logprobs + phases.update;  // by the wall clock
  for (const name in phases) phases[name] = Number((phases[name] / all * seconds).toFixed(2));
  return { settings, phases, steps, told };
}

function record() {
  const lanes = ["grpo", "cppo"].map((method) => JSON.stringify(recorded(method, 30)));
  const lines = `[${lanes.join(",\n")}]\n`.replaceAll("],[", "],\n[");
  fs.writeFileSync(path.join(DOCS, "live", "earlier.json"), lines);
}

const words = process.argv.slice(2);
if (words[0] === "record") record();
else main(words.length ? words : ["cppo"]);

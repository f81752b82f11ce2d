"use strict";
// One lane in a thread of its own. It makes a step, tells the page about it, and goes on until the
// page says "pause". The page ends the whole thread at once for a reset.

const SECONDS_BETWEEN_ANSWERS = 2;
let lane, questions, answered;
let seconds = 0;
let running = false;

// The reader's expression as a function
function make_reward(expression) {
  const code = `"use strict"; return (${expression}\n);`;
  try {
    return new Function("completion", "answer", "question", code);
  } catch (error) {
    throw new Error(`The reward fails: ${error.message}`);
  }
}

// A greedy answer to each of the questions: [{text, right}]. The clock does not count it.
function tell_answers() {
  const texts = lane.answers(questions.map(({ question }) => question));
  const judged = (text, i) => ({ text, right: answer_right(text, questions[i].answer) === 1 });
  postMessage({ answers: texts.map(judged) });
  answered = seconds;
}

function prepare({ settings, weights, expression, questions: asked }) {
  questions = asked;
  lane = make_lane(weights, settings, make_reward(expression));
  tell_answers();
}

// The clock of a lane counts its own steps, and nothing between them.
function make_step() {
  const start = performance.now();
  const result = lane.step();
  seconds += (performance.now() - start) / 1000;
  postMessage({ result, seconds });
  if (!running || seconds - answered > SECONDS_BETWEEN_ANSWERS) tell_answers();
}

// Between two steps the thread looks for a message, for example "pause".
function go_on() {
  if (!running) return;
  attempt(make_step);
  setTimeout(go_on);
}

// If something throws, the page gets one sentence, and the lane pauses.
function attempt(action, message) {
  try {
    action(message);
  } catch (error) {
    running = false;
    postMessage({ problem: error.message });
  }
}

function run() {
  running = true;
  go_on();
}

function pause() {
  running = false;
  tell_answers();
}

const ACTIONS = { prepare, run, pause, step: make_step };
onmessage = ({ data }) => {
  if (lane || data.action === "prepare") attempt(ACTIONS[data.action], data);
};

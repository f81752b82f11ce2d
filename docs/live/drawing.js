"use strict";
// What one sees: each function draws one part of the page from the state of the lanes.

const sum = xs => xs.reduce((a, b) => a + b, 0);
const mean = xs => sum(xs) / xs.length;
const fixed = (x, digits) => x.toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "−");
const signed = x => (Number(x.toFixed(2)) > 0 ? "+" : "") + fixed(x, 2);
const brief = x => fixed(x, Number.isInteger(x) ? 0 : 2);
const grouped = n => n.toLocaleString("en");
// A completion in one line, with its tags in grey. Apart from tags it has no letters.
const TAG = /<(\/?\w+)>/g;
const colored = text =>
  text.replace(TAG, '<span class="tag">&lt;$1&gt;</span>').replaceAll("\n", " ");

// A text that is read aloud is written only if it is new.
function write(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// The name of a lane. If both lanes have one method, then also what they differ in.
function title_of({ settings }) {
  const { method, pruning_rate, questions_per_step } = settings;
  const name = document.querySelector(`option[value=${method}]`).textContent;
  if (lanes[0].settings.method !== lanes[1].settings.method) return name;
  return `${name}, P = ${pruning_rate}, Q = ${questions_per_step}`;
}

// --- the curves ---

const LEFT = 34, RIGHT = 392, TOP = 10, BOTTOM = 186;  // of a chart, which is 400 × 220
const MOST_POINTS = 300;
const DIGITS = { accuracy: 2, length: 1 };

// A step of an axis (1, 2 or 5 times a power of ten) that divides `most` into at most five parts
function tick_of(most) {
  const power = 10 ** Math.floor(Math.log10(most / 5));
  return power * [1, 2, 5, 10].find(times => power * times * 5 >= most);
}

const label = (x, y, side, text) => `<text x="${x}" y="${y}" text-anchor="${side}">${text}</text>`;

// The curves of both lanes. marks: the labels of the vertical axis, from 0 to the highest
function draw_chart(name, marks, goal) {
  const axis = setting("axis");
  const least = axis === "seconds" ? 10 : 1000;
  const most = Math.max(least, ...lanes.map(lane => lane.points.at(-1)?.[axis] ?? 0));
  const tick = tick_of(most);
  const parts = Math.ceil(most / tick);
  const x = value => LEFT + (RIGHT - LEFT) * value / (tick * parts);
  const y = value => BOTTOM - (BOTTOM - TOP) * value / marks.at(-1);
  const across = (style, value) => `<path class="${style}" d="M${LEFT} ${y(value)}H${RIGHT}"/>`;
  const rows = marks.map(mark => across("axis", mark) + label(LEFT - 6, y(mark) + 4, "end", mark));
  const columns = [...Array(parts + 1).keys()].map(i =>
    label(x(i * tick), 202, i === parts ? "end" : "middle", grouped(i * tick)));
  const unit = label(RIGHT, 217, "end", word(axis));
  const curves = lanes.map((lane, i) => curve(lane, `lane${i}`, p => [x(p[axis]), y(p[name])]));
  const drawn = [...rows, ...columns, unit, goal ? across("goal", goal) : "", ...curves].join("");
  $(name).innerHTML = `<div class="legend">${lanes.map(legend(name)).join("")}</div>
    <svg viewBox="0 0 400 220" aria-hidden="true">${drawn}</svg>`;
}

const legend = name => (lane, i) => {
  const point = lane.points.at(-1);
  const value = point ? fixed(point[name], DIGITS[name]) : "–";
  const differs = point && name === "accuracy" && setting("reward") !== "right";
  const reward = differs ? `<small>${say`reward ${fixed(point.reward, 2)}`}</small>` : "";
  return `<span class="lane${i}"><i></i>${title_of(lane)} <b>${value}</b> ${reward}</span>`;
};

function curve({ points }, style, place) {
  if (!points.length) return "";
  const stride = Math.ceil(points.length / MOST_POINTS);
  const seen = points.filter((_, i) => i % stride === 0);
  const line = seen.map(point => place(point).map(value => value.toFixed(1)).join());
  const [x, y] = place(points.at(-1));
  return `<polyline class="${style}" points="${line.join(" ")} ${x},${y}"/>
    <circle class="${style}" cx="${x}" cy="${y}" r="4.5"/>`;
}

// When each lane reached the goal, by both measures
function draw_reached() {
  const sentence = lane => {
    const { goal } = lane;
    if (!goal) return say`${title_of(lane)} has not reached ${GOAL} yet.`;
    const [seconds, completions] = [fixed(goal.seconds, 0), grouped(goal.completions)];
    const name = title_of(lane);
    return say`${name} reached ${GOAL} after ${seconds} s and ${completions} completions.`;
  };
  const begun = lanes.some(lane => lane.points.length);
  write("reached", begun ? lanes.map(sentence).join(" ") : say`The dotted line is ${GOAL}.`);
}

// --- where the time goes: for one question, so that lanes with different steps can be compared ---

// [[phase, milliseconds]]
function times_of({ seconds, settings, points }) {
  const questions = points.length * settings.questions_per_step || 1;
  return Object.entries(seconds).map(([phase, all]) => [phase, 1000 * all / questions]);
}

function draw_time() {
  const times = lanes.map(times_of);
  const totals = times.map(phases => sum(phases.map(([, ms]) => ms)));
  const longest = Math.max(...totals) || 1;
  const bar = ([phase, ms]) => `<i class="${phase}" style="width:${100 * ms / longest}%"></i>`;
  const row = (lane, i) => {
    const [sampling, logprobs, update] = times[i].map(([, ms]) => fixed(ms, 0));
    const spoken = say`sampling ${sampling}, log-probabilities ${logprobs}, update ${update} ms`;
    const { questions_per_step: Q } = lane.settings;
    const step = fixed(totals[i] * Q, 0);
    return `<span class="lane${i}">${title_of(lane)}</span><b>${say`${fixed(totals[i], 0)} ms`}</b>
      <div role="img" aria-label="${spoken}" title="${spoken}">${times[i].map(bar).join("")}</div>
      <p>${say`Questions in a step: ${Q}. A step takes ${step} ms.`}</p>`;
  };
  $("time").innerHTML = lanes.map(row).join("");
}

// --- the same three questions ---

function draw_questions() {
  const answer = (title, style, found) => `<div class="${style}"><h4>${title}</h4>
    <code>${found ? colored(found.text) : "…"}</code>
    <span class="mark">${found ? word(found.right ? "✓ right" : "✗ wrong") : ""}</span></div>`;
  const now = i => (lane, n) => answer(say`${title_of(lane)} now`, `lane${n}`, lane.now?.[i]);
  const row = ({ question, answer: gold }, i) => `
    <div class="asked"><h3>${question}</h3><span>${say`Right: ${gold}`}</span></div>
    ${answer(say`before`, "", lanes[0].before?.[i])}${lanes.map(now(i)).join("")}`;
  $("questions").innerHTML = QUESTIONS.map(row).join("");
}

// --- the algorithm box: what comes after the stage is hidden ---

function draw_stages() {
  for (const [i, button] of [...$("stages").children].entries()) {
    button.ariaPressed = i + 1 === stage;
    button.className = i < stage ? "done" : "";
  }
  document.querySelector(".box").dataset.stage = stage;
}

function completion_row({ text, reward, advantage, kept }, scale) {
  const width = 50 * Math.abs(advantage) / scale;
  const left = advantage < 0 ? 50 - width : 50;
  return `<tr class="${kept ? "kept" : "pruned"}"><td><code>${colored(text)}</code></td>
    <td class="from2">${brief(reward)}</td>
    <td class="from3"><span class="advantage"><i style="left:${left}%;width:${width}%"></i></span>
      <span class="value">${signed(advantage)}</span></td>
    <td class="from4">${word(kept ? "kept" : "pruned")}</td></tr>`;
}

function draw_lane(lane, i) {
  const heading = `<h3 class="lane${i}">${title_of(lane)}</h3>`;
  if (!lane.shown) {
    const hint = say`Press Start, or take one step at a time.`;
    $("lane" + i).innerHTML = `${heading}<p class="note">${hint}</p>`;
    return;
  }
  const { step, groups } = lane.shown;
  const n = groups.length;
  const at = lane.group % n;
  const { question, answer, completions } = groups[at];
  const scale = Math.max(1, ...completions.map(c => Math.abs(c.advantage)));
  const of = say`Question ${at + 1} of ${n}`;
  const next = `<button type="button" id="next${i}" ${n > 1 ? "" : "hidden"}>${of} ›</button>`;
  const size = say`Step ${step}: ${n} × ${lane.settings.group_size} completions`;
  $("lane" + i).innerHTML = `${heading}<p class="note">${size}</p>
    <p class="asked"><b>${question}</b> ${say`Right: ${answer}`} ${next}</p>
    <table><thead><tr><th>${word("completion")}</th><th class="from2">${word("reward")}</th>
      <th class="from3">A</th><th class="from4"></th></tr></thead>
      <tbody>${completions.map(c => completion_row(c, scale)).join("")}</tbody></table>
    ${formulas(lane, completions)}`;
}

const EPS = 1e-4;
function formulas({ shown, settings }, completions) {
  const { group_size: G, pruning_rate: P, beta } = settings;
  const line = (from, name, numbers, result) => `<div class="formula from${from}">
    <span>${name}</span> <span>= ${numbers}</span> <span>= <b>${result}</b></span></div>`;
  const rewards = completions.map(c => c.reward);
  const m = mean(rewards);
  // std(r) = √( Σ (r_i − mean(r))² / (G − 1) )
  const std = Math.sqrt(sum(rewards.map(r => (r - m) ** 2)) / (G - 1));
  const first = completions.find(c => c.kept) ?? completions[0];
  const by_std = settings.method === "drgrpo" ? "" : ` / (${fixed(std, 3)} + ${EPS})`;
  const A = say`A = (r − mean) / (std + ε)`;
  const advantage = `(${brief(first.reward)} − ${fixed(m, 3)})${by_std}`;
  const all = shown.groups.flatMap(group => group.completions);
  const kept = all.filter(c => c.kept).length;
  return `${line(3, by_std ? A : say`A = r − mean`, advantage, signed(first.advantage))}
    ${line(4, "k = ⌊G (1 − P)⌋", `⌊${G} · (1 − ${P})⌋`, keep(G, P))}
    <p class="from4">${say`Of the ${all.length} completions of this step, ${kept} are kept.`}</p>
    <p class="from5">${kl_text(shown, beta)}</p>
    <p class="from6">${update_text(shown)}</p>`;
}

function kl_text({ kl, updates }, beta) {
  if (!beta || !updates) return say`This part is not needed here.`;
  return say`KL to the model of the start: ${fixed(kl, 4)}, times β = ${beta}.`;
}

function update_text({ loss, clip_fraction, gradient_norm, updates }) {
  if (!updates) return say`All A are 0: no completion has a signal, and the weights stay.`;
  const [clipped, norm] = [fixed(100 * clip_fraction, 1), fixed(gradient_norm, 2)];
  const numbers = say`loss ${fixed(loss, 4)}, clipped ${clipped} %, norm of the gradient ${norm}`;
  return say`${updates} updates: ${numbers}.`;
}

// --- all of it, four times a second at most ---

const MS_BETWEEN_DRAWINGS = 250;
const MS_BETWEEN_BOXES = 1000;  // a step stays for a second, so that one can read it
let timer, box_drawn = 0;

function draw_buttons() {
  const begun = lanes.some(lane => lane.points.length);
  $("run").textContent = running ? say`Pause` : begun ? say`Go on` : say`Start`;
  const next = stage % 6 ? say`Next: ${stage + 1}. ${$("stages").children[stage].textContent}` : "";
  $("one").textContent = next || say`One step at a time`;
  const problem = lanes.find(lane => lane.problem)?.problem;
  write("status", word(said));
  write("problem", problem ? translate(problem) : "");
}

function draw_box() {
  const now = performance.now();
  if (!running || now - box_drawn > MS_BETWEEN_BOXES) {
    box_drawn = now;
    for (const lane of lanes) lane.shown = lane.result;
  }
  lanes.forEach(draw_lane);
}

function draw() {
  clearTimeout(timer);
  timer = undefined;
  const focused = document.activeElement.id;
  draw_chart("accuracy", [0, 0.25, 0.5, 0.75, 1], GOAL);
  draw_chart("length", [0, 10, 20, 30, 40, 50]);
  const parts = [draw_buttons, draw_reached, draw_time, draw_questions, draw_stages, draw_box];
  for (const part of parts) part();
  if (focused !== document.activeElement.id) $(focused)?.focus();
}

function draw_soon() {
  timer ??= setTimeout(draw, MS_BETWEEN_DRAWINGS);
}

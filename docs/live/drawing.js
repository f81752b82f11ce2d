"use strict";
// What one sees: each function draws one part of the page from the state of the lanes.

const mean = xs => sum(xs) / xs.length;
const brief = x => fixed(x, Number.isInteger(x) ? 0 : 2);
const grouped = n => n.toLocaleString("en");

// A text that is read aloud is written only if it is new.
function write(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

const method_name = method => document.querySelector(`option[value=${method}]`).textContent;

// The name of a lane. If both lanes have one method, then also what they differ in.
function title_of({ settings }) {
  const [first, second] = lanes.map(lane => lane.settings);
  const name = method_name(settings.method);
  if (first.method !== second.method) return name;
  const differs = [["pruning_rate", "P ="], ["questions_per_step", "Q ="], ["lr", word("rate")]];
  const parts = differs.filter(([key]) => first[key] !== second[key]);
  if (!parts.length) return `${name} ${settings === first ? 1 : 2}`;
  return [name, ...parts.map(([key, words]) => `${words} ${settings[key]}`)].join(", ");
}

// GRPO is grey and CPPO is blue, paler for a smaller P. Two lanes of one colour differ in dashes.
const SHARE_OF_BLUE = { 0: 30, 0.25: 40, 0.5: 55, 0.75: 75 };
const is_blue = ({ method }) => ["cppo", "pooled"].includes(method);

function color_of({ settings }) {
  if (!is_blue(settings)) return "var(--grey)";
  const share = SHARE_OF_BLUE[settings.pruning_rate];
  return share ? `color-mix(in srgb, var(--cppo) ${share}%, var(--card))` : "var(--cppo)";
}

function draw_colors() {
  const { style, classList } = document.body;
  const colors = lanes.map(color_of);
  lanes.forEach(({ settings }, i) => {
    style.setProperty(`--lane${i}`, colors[i]);
    style.setProperty(`--name${i}`, is_blue(settings) ? "var(--cppo)" : "var(--soft)");
  });
  classList.toggle("dashes", colors[0] === colors[1]);
}

// What decides the race, under the name of each lane
function draw_rivals() {
  const rival = ({ settings }, i) => {
    const { questions_per_step: Q, group_size: G, lr } = settings;
    const trained = [k_of(settings), G];
    const step = Q === 1 ? say`1 question a step` : say`${Q} questions a step`;
    const line = say`${step}, trains on ${trained[0]} of ${trained[1]}, rate ${lr}`;
    const title = `<h3 class="name${i}"><i class="lane${i}"></i>${title_of(lanes[i])}</h3>`;
    return `<div>${title}${line}</div>`;
  };
  $("rivals").innerHTML = lanes.map(rival).join("");
}

// --- the curves ---

const LEFT = 34, RIGHT = 384, TOP = 10, BOTTOM = 186;  // of a chart, which is 400 × 220
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
  const pale = FILM || shows_earlier() ? earlier : [];
  const ends = [...lanes, ...pale].map(lane => lane.points.at(-1)?.[axis] ?? 0);
  const most = Math.max(least, ...ends);
  const tick = tick_of(most);
  const parts = Math.floor(most / tick);
  const x = value => LEFT + (RIGHT - LEFT) * value / most;
  const y = value => BOTTOM - (BOTTOM - TOP) * value / marks.at(-1);
  const across = (style, value) => `<path class="${style}" d="M${LEFT} ${y(value)}H${RIGHT}"/>`;
  const rows = marks.map(mark => across("axis", mark) + label(LEFT - 6, y(mark) + 4, "end", mark));
  const columns = [...Array(parts + 1).keys()].map(i =>
    label(x(i * tick), 202, "middle", grouped(i * tick)));
  const unit = label(RIGHT, 217, "end", word(axis));
  const place = point => [x(point[axis]), y(point[name])];
  const seen = shows_earlier() ? earlier : lanes;
  const curves = seen.map((lane, i) => curve(lane, `lane${i}`, place));
  if (shows_earlier()) curves.push(label(RIGHT - 4, BOTTOM - 8, "end", say`an earlier run`));
  const line = goal ? across("goal", goal) + label(LEFT + 4, y(goal) - 5, "start",
    say`${hundredths(goal)} of 100 right`) : "";
  const drawn = [...rows, ...columns, unit, line, ...curves].join("");
  $(name).innerHTML = `<div class="legend">${lanes.map(legend(name)).join("")}</div>
    <svg viewBox="0 0 400 220" aria-hidden="true">${drawn}</svg>`;
}

// Before the start the page shows an earlier run, if it had the same settings.
function shows_earlier() {
  const as_now = ({ settings }, i) =>
    Object.entries(settings).every(([name, value]) => lanes[i].settings[name] === value);
  const begun = FILM || running || lanes.some(lane => lane.points.length);
  return !begun && setting("reward") === "right" && earlier.every(as_now);
}

const legend = name => (lane, i) => {
  const point = lane.points.at(-1);
  const value = point ? fixed(point[name], DIGITS[name]) : "–";
  const differs = point && name === "accuracy" && setting("reward") !== "right";
  const reward = differs ? `<small>${say`reward ${fixed(point.reward, 2)}`}</small>` : "";
  return `<span class="name${i}"><i class="lane${i}"></i>${title_of(lane)} <b>${value}</b>
    ${reward}</span>`;
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

// One sentence at a time: the newest one that is true
const THINKING = 0.6, LONGER = 3, ENOUGH = 128;
const hundredths = share => fixed(100 * share, 0);

function story() {
  if (shows_earlier()) return say`The pale curves are an earlier run. Press Start for your own.`;
  if (!lanes.every(lane => lane.points.length)) return "";
  const reached = lanes.filter(lane => lane.goal);
  if (reached.length === 2) return both_reached(reached);
  if (reached.length === 1) return one_reached(reached[0], lanes.find(lane => !lane.goal));
  if (setting("reward") !== "right") {
    const { reward, accuracy } = lanes[1].points.at(-1);
    const [name, paid, right] = [title_of(lanes[1]), fixed(reward, 2), hundredths(accuracy)];
    return say`${name} gets the reward ${paid}. Of 100 completions ${right} are right.`;
  }
  const enough = points => points.find(point => point.completions >= ENOUGH);
  const thinks = ({ points }) => enough(points) && points.at(-1).thinks >= THINKING;
  const thinkers = lanes.filter(thinks);
  if (thinkers.length === 2) return say`Both now think in most completions, because thinking pays.`;
  if (thinkers.length === 1) {
    return say`${title_of(thinkers[0])} now thinks in most completions, because thinking pays.`;
  }
  const is_longer = ({ points }) => points.at(-1).length > LONGER + enough(points)?.length;
  if (lanes.some(is_longer)) return say`The completions get longer. Nobody asked for that.`;
  return say`Both mostly guess.`;
}

function one_reached(winner, other) {
  const { seconds } = winner.goal;
  const then = other.points.findLast(point => point.seconds <= seconds) ?? other.points.at(-1);
  const [name, times, after] = [title_of(winner), hundredths(GOAL), fixed(seconds, 0)];
  const behind = say`${title_of(other)} is at ${fixed(then.accuracy, 2)}`;
  return say`After ${after} s ${name} is right ${times} times in 100; ${behind}.`;
}

// By the clock, and by the completions: the first one is not always the same.
function both_reached(reached) {
  const by = measure => {
    const [first, second] = reached.toSorted((a, b) => a.goal[measure] - b.goal[measure]);
    const of = ({ goal }) => grouped(Math.round(goal[measure]));
    return [title_of(first), of(first), title_of(second), of(second)];
  };
  const [a, b, c, d] = by("seconds"), [e, f, g, h] = by("completions");
  const clock = say`By the clock ${a} was first (${b} s, ${c} ${d} s)`;
  return clock + say`, by the completions ${e} (${f}, ${g} ${h}).`;
}

function draw_story() {
  write("story", story());
  const first = lanes.map(({ points }) => points.find(point => point.completions >= WINDOW));
  const [a, b] = lanes.map(title_of);
  const [c, d] = first.map(point => point && fixed(point.seconds, 0));
  const cost = say`The first 512 cost ${a} ${c} s and ${b} ${d} s; until then its curve says little.`;
  write("window", c && d ? cost : "");
}

// --- where the time goes: for one question, so that lanes with different steps can be compared ---

// [[phase, milliseconds]]
function times_of({ seconds, settings, points }) {
  const questions = points.length * settings.questions_per_step || 1;
  return Object.entries(seconds).map(([phase, all]) => [phase, 1000 * all / questions]);
}

function draw_time() {
  const times = (shows_earlier() ? earlier : lanes).map(times_of);
  const totals = times.map(phases => sum(phases.map(([, ms]) => ms)));
  const longest = Math.max(...totals) || 1;
  const bar = ([phase, ms]) => `<i class="${phase}" style="width:${100 * ms / longest}%"></i>`;
  const row = (lane, i) => {
    const [sampling, logprobs, update] = times[i].map(([, ms]) => fixed(ms, 0));
    const spoken = say`sampling ${sampling}, log-probabilities ${logprobs}, update ${update} ms`;
    return `<span class="name${i}">${title_of(lane)}</span><b>${say`${fixed(totals[i], 0)} ms`}</b>
      <div class="lane${i}" role="img" aria-label="${spoken}" title="${spoken}">
        ${times[i].map(bar).join("")}</div>`;
  };
  $("time").innerHTML = lanes.map(row).join("");
  write("bound", bound(times, totals));
}

// Amdahl's law: what a lane that prunes nothing could gain if its training cost nothing
function bound(times, totals) {
  const i = lanes.findIndex(({ settings }) => k_of(settings) === settings.group_size);
  if (!totals[i]) return "";
  const [[, sampling]] = times[i];
  const [name, most] = [title_of(lanes[i]), fixed(totals[i] / sampling, 1)];
  return say`Pruning does not shorten sampling. Alone it makes ${name} at most ${most} times as fast.`;
}

// --- the same three questions ---

function draw_questions() {
  const mark = ({ right }) => right ? `<span class="mark">${word("✓ right")}</span>` :
    `<span class="mark wrong">${word("✗ wrong")}</span>`;
  const answer = (title, style, found) => `<div class="${style}"><h4>${title}</h4>
    <code>${found ? colored(found.text) : "…"}</code> ${found ? mark(found) : ""}</div>`;
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
  [...$("stage_text").children].forEach((text, i) => text.hidden = i !== stage);
  Object.assign(document.querySelector(".box").dataset, { stage, seen: seen_lane });
  $("other").textContent = say`Show ${title_of(lanes[1 - seen_lane])}`;
}

// Equal completions are one row; from stage 4 on two, if some are kept and some are pruned.
function rows_of(completions) {
  const rows = new Map();
  const is_decided = stage === 0 || stage > 3;
  for (const completion of completions) {
    const key = completion.text + (is_decided && completion.kept);
    rows.set(key, { ...completion, times: (rows.get(key)?.times ?? 0) + 1 });
  }
  const size = ({ advantage }) => Math.abs(advantage);
  return [...rows.values()].toSorted((a, b) => b.kept - a.kept || size(b) - size(a));
}

function completion_row({ text, reward, advantage, kept, times }, scale) {
  const width = 50 * Math.abs(advantage) / scale;
  const left = advantage < 0 ? 50 - width : 50;
  return `<tr class="${kept ? "kept" : "pruned"}"><td><code>${colored(text)}</code></td>
    <td class="times">${times > 1 ? `× ${times}` : ""}</td>
    <td class="from2">${brief(reward)}</td>
    <td class="from3"><span class="advantage"><i style="left:${left}%;width:${width}%"></i></span>
      <span class="value">${signed(advantage)}</span></td>
    <td class="from4">${word(kept ? "kept" : "pruned")}</td></tr>`;
}

// If its rewards differ. Such questions are shown first.
const teaches = ({ completions }) => completions.some(c => c.reward !== completions[0].reward);

function draw_lane(lane, i) {
  const heading = `<h3 class="name${i}">${title_of(lane)}</h3>`;
  if (!lane.shown) {
    const hint = say`Press Start, or take one step at a time.`;
    $("lane" + i).innerHTML = `${heading}<p class="note">${hint}</p>`;
    return;
  }
  const { step } = lane.shown;
  const groups = lane.shown.groups.toSorted((a, b) => teaches(b) - teaches(a));
  const n = groups.length;
  const at = lane.group % n;
  const { question, answer, completions } = groups[at];
  const scale = Math.max(1, ...completions.map(c => Math.abs(c.advantage)));
  const of = say`Question ${at + 1} of ${n}`;
  const next = `<button type="button" id="next${i}" ${n > 1 ? "" : "hidden"}>${of} ›</button>`;
  const size = say`Step ${step}: ${n} × ${lane.settings.group_size} completions`;
  const style = completions.every(c => c.kept) ? "keeps_all" : "";
  const rows = rows_of(completions).map(row => completion_row(row, scale));
  $("lane" + i).innerHTML = `<div class="head">${heading}<span class="note">${size}</span></div>
    <p class="asked"><b>${question}</b> ${say`Right: ${answer}`} ${next}</p>
    <div class="formulas">${formulas(lane, completions)}</div>
    <table class="${style}"><thead><tr><th>${word("completion")}</th><th></th>
      <th class="from2">${word("reward")}</th><th class="from3">A</th><th class="from4"></th></tr></thead>
      <tbody>${rows.join("")}</tbody></table>`;
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
  const equal = teaches({ completions }) ? "" : say`All rewards are equal, so every A is 0.`;
  return `${line(3, by_std ? A : say`A = r − mean`, advantage, signed(first.advantage))}
    <p class="from3">${equal}</p>
    ${line(4, "k = ⌊G (1 − P)⌋", `⌊${G} · (1 − ${P})⌋`, k_of(settings))}
    <p class="from4">${say`Of the ${all.length} completions of this step, ${kept} are kept.`}
      ${tie(completions, settings)}</p>
    <p class="from5">${kl_text(shown, beta)}</p>
    <p class="from6">${update_text(shown)}</p>`;
}

// Rewards of 0 and 1 give only two values of |A|, so equal ones are kept and pruned.
function tie(completions, { method }) {
  const size = ({ advantage }) => Math.abs(advantage);
  const largest = Math.max(...completions.filter(c => !c.kept).map(size));
  const is_tie = largest === Math.min(...completions.filter(c => c.kept).map(size));
  return is_tie && method !== "random" ? say`Of equal |A| the first ones are kept.` : "";
}

function kl_text({ kl, updates }, beta) {
  if (!beta || !updates) return say`This part is not needed here.`;
  const [distance, counts] = [fixed(kl, 4), fixed(beta * kl, 4)];
  const name = say`Distance from the untrained model (KL): ${distance}.`;
  return `${name} ${say`In the loss it counts β · ${distance} = ${counts}.`}`;
}

function update_text({ loss, clip_fraction, gradient_norm, updates }) {
  if (!updates) return say`All A of this step are 0, so no weight changes.`;
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
  for (const id of ["run", "one"]) $(id).disabled = all_failed();
  $("run").textContent = running ? say`Pause` : begun ? say`Go on` : say`Start`;
  const next = stage % 6 ? say`Next: ${stage + 1}. ${$("stages").children[stage].textContent}` : "";
  $("one").textContent = next || say`One step at a time`;
  const problem = lanes.find(lane => lane.problem)?.problem;
  write("status", problem ? "" : word(said));
  const [sentence, ...rest] = (problem ?? "").split(": ");  // an error comes in English
  write("problem", [word(sentence), ...rest].join(": "));
}

function draw_box() {
  const now = performance.now();
  const is_new = lanes.some(lane => lane.shown !== lane.result);
  if (!running || now - box_drawn > MS_BETWEEN_BOXES) {
    box_drawn = now;
    for (const lane of lanes) lane.shown = lane.result;
  }
  lanes.forEach(draw_lane);
  if (stage && is_new) show_box();
}

function draw() {
  clearTimeout(timer);
  timer = undefined;
  const focused = document.activeElement.id;
  draw_chart("accuracy", [0, 0.25, 0.5, 0.75, 1], GOAL);
  draw_chart("length", [0, 10, 20, 30, 40, 50]);
  document.body.classList.toggle("earlier", shows_earlier());  // then the curves are pale
  const parts = [draw_colors, draw_rivals, draw_buttons, draw_story, draw_time, draw_questions,
    draw_stages, draw_box];
  for (const part of parts) part();
  if (focused !== document.activeElement.id) $(focused)?.focus();
}

function draw_soon() {
  timer ??= setTimeout(draw, MS_BETWEEN_DRAWINGS);
}

"use strict";
// What a click does, and what one sees. The worker holds the model.

const $ = (id) => document.getElementById(id);
const VERSION = document.documentElement.dataset.version;
const WEIGHTS = Uint8Array.from(atob($("weights").textContent), (letter) => letter.charCodeAt(0));
const TRAITS = { thinks: 1, right: 1, even: 1, tokens: 40 }; // the most that a bar can show
const CHANCE = 0.12; // two standard errors of a share of 64 answers
const ROUND = /^(\d+(\.\d+)*k?(-(?=\d)|$))+$/; // see `link`
let worker, clicker, taught, past, seen, first, liked, left;

const percent = (share) => `${Math.round(100 * share)}\u00a0%`; // on one line
const signed = (x) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(2);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const count = (row) => seen.rows[row].places.length;
const wait = (ms) => new Promise((wake) => setTimeout(wake, ms));
const order = (action, more) => worker.postMessage({ action, ...more });

// --- what a click does ---

// taught: rounds { liked: places of rows, few: whether only two answers count }; past: what each
// did; seen: the newest question, null while the model learns; left: rounds that it has to learn;
// clicker: the worker for which a program clicks
function start_anew(rounds = []) {
  worker?.terminate();
  worker = new Worker(URL.createObjectURL(new Blob([$("worker").textContent])));
  worker.onmessage = hear;
  [taught, past, first, liked, left] = [[], [], null, new Set(), 0];
  seen = null;
  order("begin", { weights: WEIGHTS });
  if (rounds.length) teach(rounds);
  draw();
}

function teach(rounds) {
  taught.push(...rounds);
  left = rounds.length;
  seen = null;
  order("teach", { rounds });
  history.replaceState(null, "", `${link()}&lang=${language}`);
  draw();
}

const teach_liked = () => teach([{ liked: [...liked], few: $("few").checked }]);
const differ = () => seen && liked.size > 0 && liked.size < seen.rows.length;
const is_free = () => seen && clicker !== worker; // the visitor's clicks count

function hear({ data }) {
  if (data.learned) {
    past.push(data.learned);
    left -= 1;
  }
  if (data.traits) first ??= data.traits;
  if (data.rows && !left) {
    [seen, liked] = [data, new Set()];
    draw_learned();
    reply();
  }
  if (data.replies) draw_replies(data.replies);
  draw();
}

function like(row) {
  if (!is_free() || !seen.rows[row]) return;
  if (!liked.delete(row)) liked.add(row);
  draw();
}

// A program clicks as you do: it sees the rows, likes some of them and presses Teach.
async function click_for(wish) {
  const mine = (clicker = worker);
  for (let round = 0; round < 8; round++) {
    while (!seen) await wait(50);
    if (worker !== mine) return;
    liked = new Set([...seen.rows.keys()].filter((row) => seen.rows[row][wish]));
    draw();
    await wait(400);
    if (worker !== mine) return; // the visitor has started anew
    teach_liked();
  }
  clicker = null;
  $("idea3").hidden = $("idea4").hidden = false;
}

function reply() {
  const asked = $("own").value.replace(/[\s=?]/g, "") + "=?";
  if (/^\d([+-]\d){4}=\?$/.test(asked)) order("reply", { asked });
  else $("replies").textContent =
    say`It knows only questions of five digits, such as ${"9-4+7+2-6=?"}`;
}

// --- the address: taught=1.3-2k-0 are three rounds. 0: nothing was liked; k: only two counted ---

function link() {
  const rounds = taught.map(({ liked: rows, few }) =>
    (rows.map((row) => row + 1).join(".") || "0") + (few ? "k" : ""));
  return `#version=${VERSION}&taught=${rounds.join("-")}`;
}

function follow() {
  const words = new URLSearchParams(location.hash.slice(1));
  const text = words.get("taught") || "";
  const is_ours = words.get("version") === VERSION && ROUND.test(text);
  const rounds = is_ours ? text.split("-").map((round) => ({
    liked: round.match(/\d+/g).map((row) => row - 1).filter((row) => row >= 0),
    few: round.endsWith("k")
  })) : [];
  speak(words.get("lang") ?? language);
  $("guess").hidden = !rounds.length;
  $("old").hidden = !text || is_ours;
  start_anew(rounds);
}

// --- what one sees ---

function draw_answers() {
  const focused = document.activeElement.dataset.row;
  $("question").textContent = seen.question;
  $("round").textContent = say`round ${taught.length + 1} · right: ${seen.answer}`;
  $("answers").innerHTML = seen.rows.map(({ text, kinds }, row) => {
    const others = kinds > 1 ? say` and ${kinds - 1} like it` : "";
    return `<button class="answer" data-row="${row}" aria-pressed="${liked.has(row)}"
      style="--share: ${count(row) / 16}"><i aria-hidden="true">${liked.has(row) ? "♥" : "♡"}</i>
      <code>${colored(text)}<span class="tag">${others}</span></code>
      <span class="count">${say`${count(row)} of 16`}</span></button>`;
  }).join("");
  document.querySelector(`[data-row="${focused}"]`)?.focus();
}

function hint() {
  if (left > 1) return say`${left} rounds are left …`;
  if (!seen) return say`It learns …`;
  if (seen.rows.length === 1) return say`All 16 answers are equal: there is nothing to learn.`;
  if (!liked.size && !past.length)
    return say`Perhaps you like thoughts, even numbers or short answers? Choose at least one.`;
  if (!liked.size) return say`Choose at least one.`;
  if (!differ()) return say`All are equal to you: there is nothing to learn. Leave one out.`;
  const n = sum([...liked].map(count));
  const [A] = group_advantages([Array.from({ length: 16 }, (_, i) => Number(i < n))]);
  const words = say`You like ${n} of 16. Each is pushed up by A = ${signed(A[0])}, each other one
    down by ${signed(A[15])}.`;
  return words + (n === 8 ? "" : say` The rarer kind has the larger |A|.`) +
    ($("few").checked ? say` Two answers with the largest |A| count, the others do not.` : "");
}

function draw_learned() {
  const names = { thinks: say`thinks`, right: say`is right`, even: say`even number`,
                  tokens: say`length in tokens` };
  $("traits").innerHTML = Object.entries(TRAITS).map(([name, most]) => {
    const show = (x) => (most === 1 ? percent(x) : x.toFixed(0));
    const [before, now] = [first, seen.traits].map((of) => of[name]);
    const [mark, width] = [before, now].map((x) => `${100 * Math.min(1, x / most)}%`);
    return `<div class="trait"><span>${names[name]}</span><span class="track">
      <i style="width: ${width}"></i><b style="left: ${mark}"></b></span>
      <span><span class="soft">${show(before)} →</span> <b>${show(now)}</b></span></div>`;
  }).join("");
  $("said").innerHTML = story(names).join(language === "zh" ? "" : " ");
  const { gradient } = past.findLast((round) => round.gradient) ?? {};
  $("share").textContent = !gradient ? "" :
    say`In the newest round that taught it something, two answers make ${percent(gradient.share)}
    of the gradient of all 16. The gradient of these two alone is ${gradient.times.toFixed(1)}
    times as long. The cosine between both gradients is ${gradient.cosine.toFixed(2)}.`;
  draw_curve();
}

function draw_curve() {
  const x = (i) => 12 + i * Math.min(26, 316 / Math.max(1, past.length - 1));
  const points = past.map(({ share }, i) => [x(i), 82 - 60 * share]);
  $("curve").innerHTML = `<path d="M12 82H332M12 22H332"/><text x="332" y="12" text-anchor="end">` +
    `${$("of-curve").textContent}</text><polyline points="${points.join(" ")}"/>` +
    points.map(([cx, cy]) => `<circle cx="${cx}" cy="${cy}" r="4"/>`).join("");
}

// What was measured, not what was meant
function story(names) {
  if (!past.length) return [say`Nothing yet.`];
  const clicks = sum(taught.map((round) => round.liked.length));
  const told = [say`Rounds: ${past.length}, clicks: ${clicks}.`];
  const from_to = (name) => `${percent(first[name])} → ${percent(seen.traits[name])}`;
  const gain = (name) => seen.traits[name] - first[name];
  for (const name of ["thinks", "even", "right"]) {
    if (gain(name) >= CHANCE) told.push(say`More likely: “${names[name]}”, ${from_to(name)}.`);
    else if (name !== "right" && gain(name) <= -CHANCE)
      told.push(say`Less likely: “${names[name]}”, ${from_to(name)}.`);
  }
  // the trait that the clicks have pushed most, up or down, and whether it has moved that way
  const pushed = (name) => sum(past.map((round) => round.pushed[name]));
  const force = (name) => Math.abs(pushed(name));
  const [most] = ["thinks", "even", "right"].sort((a, b) => force(b) - force(a));
  const has_moved = gain(most) * Math.sign(pushed(most)) >= CHANCE;
  const warm = (text) => `<span class="warm">${text}</span>`;
  if (gain("right") <= -CHANCE) {
    told.push(warm(say`It is right less often: ${from_to("right")}.`));
    if (most !== "right" && has_moved) told.push(
      warm(say`The clicks paid for something else, and got it: this is reward hacking.`));
  } else if (most === "thinks" && has_moved && gain("thinks") > 0 && gain("right") < CHANCE / 2) {
    told.push(say`It is not right more often: ${from_to("right")}.`,
              say`The clicks liked a form, and it learned a form.`);
  }
  return told.length > 1 ? told : [...told, say`No share has moved by more than chance.`];
}

function draw_replies(texts) {
  const row = (name, text) =>
    `<div class="reply"><span class="soft">${name}</span><code>${colored(text)}</code></div>`;
  $("replies").innerHTML = row(say`untaught`, texts[0]) + row(say`taught`, texts[1]);
}

// Each idea comes when it is needed.
function draw() {
  if (seen) draw_answers();
  $("answers").ariaBusy = !seen;
  $("hint").textContent = hint();
  $("go").disabled = !differ() || !is_free();
  $("other").hidden = differ();
  $("learned").hidden = !$("guess").hidden;
  $("link").href = link();
  const few = taught.some((round) => round.few);
  const has_learned = past.some((round) => round.gradient);
  [1, 2, Infinity, 5, few ? 1 : 8].forEach((rounds, i) => {
    if (has_learned && past.length >= rounds) $(`idea${i + 1}`).hidden = false;
  });
}

// --- the keys and the buttons ---

function click({ target, detail }) {
  const row = target.closest(".answer")?.dataset.row;
  if (row && detail < 2) like(Number(row)); // a double click likes, too
  if (target.dataset.wish && is_free()) click_for(target.dataset.wish);
}

function press(event) {
  const { key, target } = event;
  if (target.id === "own" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^[1-9]$/.test(key)) like(key - 1);
  if (key !== "Enter" || (target.closest("a, button") && !target.closest(".answer"))) return;
  event.preventDefault();
  if (differ() && is_free()) teach_liked();
}

function change_language() {
  speak(language === "en" ? "zh" : "en");
  history.replaceState(null, "", `${link()}&lang=${language}`);
  if (seen) draw_learned();
  reply();
  draw();
}

function start_again() {
  history.pushState(null, "", `#lang=${language}`);
  follow();
}

function reveal() {
  $("guess").hidden = true;
  draw();
}

if (navigator.language.startsWith("zh")) language = "zh";
find_texts();
document.addEventListener("click", click);
document.addEventListener("keydown", press);
addEventListener("hashchange", follow);
$("go").onclick = teach_liked;
$("other").onclick = () => is_free() && teach_liked();
$("anew").onclick = start_again;
$("few").onchange = draw;
$("reveal").onclick = reveal;
$("lang").onclick = change_language;
$("ask").onsubmit = (event) => { event.preventDefault(); reply(); };
follow();

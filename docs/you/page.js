"use strict";
// What a click does, and what one sees. The worker holds the model.

// A link holds the rows that were liked. VERSION goes up only if such a link no longer makes the
// same model, and tests/test_you.py says when that is.
const VERSION = "1";
const WEIGHTS = Uint8Array.from(atob($("weights").textContent), (letter) => letter.charCodeAt(0));
const TRAITS = { thinks: 1, right: 1, even: 1, tokens: 40 }; // the most that a bar can show
const GOALS = { thinks: 0.75, even: 0.75, wrong: 0.85 };
const CHANCE = 0.12; // two standard errors of a share of 64 answers
const ROUND = /^(\d+(\.\d+)*k?(-(?=\d)|$))+$/; // see `link`
const FLASH = 700; // milliseconds: a round of a lesson that is shown
let worker, player, taught, linked, guessed, seen, first, now, liked, reached;
const done = {}; // of each goal that was reached: the fewest clicks

const percent = (share) => `${Math.round(100 * share)}\u00a0%`; // on one line
const lessons = () => taught.filter(({ share }) => share > 0 && share < 1);
const clicks = () => sum(lessons().map((round) => round.liked.length));
const count = (row) => seen.rows[row].places.length;
const wait = (ms) => new Promise((wake) => setTimeout(wake, ms));
const order = (action, more) => worker.postMessage({ action, ...more });

// --- what a click does ---

// taught: questions { liked: places of rows, few: whether only two answers count, question, rows },
// and what the worker says about each; those that taught it something are `lessons`. linked: how
// many of them come from an address. seen: the newest question, null while the model learns.
// player: the worker for which a program clicks. first, now: what was measured.
function start_anew(rounds = []) {
  worker?.terminate();
  worker = new Worker(URL.createObjectURL(new Blob([$("worker").textContent])));
  worker.onmessage = hear;
  [taught, linked, liked] = [[], rounds.length, new Set()];
  seen = first = now = reached = player = guessed = null;
  order("begin", { weights: WEIGHTS });
  $("replies").textContent = $("shared").textContent = "";
  $("address").hidden = true;
  if (linked) play(rounds.map((round) => () => round), Math.min(FLASH, 12000 / linked));
  draw();
}

function teach(rows, few = $("few").checked) {
  taught.push({ liked: rows, few, question: seen.question, rows: seen.rows });
  seen = reached = null;
  order("teach", { liked: rows, few, quick: taught.length < linked });
  if (taught.length > linked) {
    guessed ??= "nothing";
    history.replaceState(null, "", `${link()}&lang=${language}`);
  }
  draw();
}

const teach_liked = () => teach([...liked]);
const differ = () => seen && liked.size > 0 && liked.size < seen.rows.length;
const is_free = () => seen && player !== worker; // the visitor's clicks count
const is_shown = () => taught.length < linked || (!seen && taught.length === linked); // a lesson

function hear({ data }) {
  if (data.learned) Object.assign(taught.at(-1), data.learned);
  if (data.traits) {
    now = data.traits;
    first ??= now;
    if (taught.length) taught.at(-1).traits = now;
    if (!linked) find_goals();
    draw_learned();
  }
  if (data.rows) {
    [seen, liked] = [data, new Set()];
    reply();
  }
  if (data.replies) draw_replies(data.replies);
  draw();
}

const share_of = (goal) => (goal === "wrong" ? 1 - now.right : now[goal]);

function find_goals() {
  for (const goal in GOALS) {
    if (share_of(goal) < GOALS[goal] || done[goal] <= clicks()) continue;
    reached = done[goal] = clicks();
  }
}

function like(row) {
  if (!is_free() || !seen.rows[row]) return;
  if (!liked.delete(row)) liked.add(row);
  draw();
}

// A program clicks as you do: it sees the rows, likes some of them and presses Teach. choices: for
// each round a function of the rows. pause: how long its choice is shown, in milliseconds
async function play(choices, pause) {
  const mine = (player = worker);
  for (const choose of choices) {
    while (!seen && worker === mine) await wait(50);
    if (worker !== mine) return; // the visitor has started anew
    const { liked: rows, few } = choose(seen.rows);
    liked = new Set(rows.filter((row) => seen.rows[row]));
    draw();
    await wait(pause);
    if (worker !== mine) return;
    teach([...liked], few);
  }
  player = null;
}

async function click_for(wish) {
  const choose = (rows) => ({ liked: [...rows.keys()].filter((row) => rows[row][wish]) });
  await play(Array(8).fill(choose), 400);
  $("idea3").hidden = $("idea4").hidden = false;
}

function reply() {
  const asked = $("own").value.replace(/[\s=?]/g, "") + "=?";
  if (/^\d([+-]\d){4}=\?$/.test(asked)) order("reply", { asked });
  else $("replies").textContent =
    say`It knows only questions of five digits, such as ${"9-4+7+2-6=?"}`;
}

// What all choices had in common, [trait, 1 or −1]: first what has come most. before: the traits
function wishes(rounds = lessons(), before = first) {
  const gain = (name) => now[name] - before[name];
  const pushed = (name) => sum(rounds.map((round) => round.pushed[name]));
  const all = (name, sign) => rounds.every((round) =>
    round.liked.every((row) => round.rows[row][name] === sign > 0));
  return ["thinks", "even", "right"].flatMap((name) => [[name, 1], [name, -1]])
    .filter(([name, sign]) => pushed(name) * sign > 0 && all(name, sign))
    .sort(([a, sign], [b, other]) => gain(b) * other - gain(a) * sign);
}

const in_words = (wish) => // "to think"
  document.querySelector(`[data-guess="${wish.join(" ")}"]`).textContent;

function verdict() {
  const names = wishes().map((wish) => wish.join(" "));
  const is_right = names.length ? names.includes(guessed) : guessed === "other";
  return (is_right ? say`Yes.` : say`No.`) + (names.length
    ? say` All choices asked it ${in_words(wishes()[0])}.`
    : say` The choices have nothing in common.`);
}

// Rows {question, chosen, rejected}, for examples/train_reward_model.py: each answer that was liked
// beside each one that was not
const pairs = () => taught.flatMap(({ question, rows, liked: own }) => own.flatMap((row) =>
  rows.filter((_, other) => !own.includes(other)).map(({ text: rejected }) =>
    ({ question, chosen: rows[row].text, rejected }))));

function save() {
  const file = document.createElement("a");
  file.href = URL.createObjectURL(new Blob(pairs().map((row) => JSON.stringify(row) + "\n")));
  file.download = "marks.jsonl";
  file.click();
}

// --- the address: taught=1.3-2k-0 are three rounds. 0: nothing was liked; k: only two counted ---

function link() {
  const rounds = taught.map(({ liked: rows, few }) =>
    (rows.map((row) => row + 1).join(".") || "0") + (few ? "k" : ""));
  return `#version=${VERSION}&taught=${rounds.join("-")}`;
}

async function challenge() {
  const url = location.href.split("#")[0] + `${link()}&lang=${language}`;
  $("address").value = url;
  try {
    if (navigator.share) return await navigator.share({ url });
    await navigator.clipboard.writeText(url);
    $("shared").textContent =
      say`The link is copied. It shows your lesson and asks what you wanted.`;
  } catch { // no permission, or no https
    $("shared").textContent = say`Copy the link with Ctrl+C (on a Mac ⌘C). It is selected.`;
    $("address").hidden = false;
    $("address").select();
  }
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
  $("old").hidden = !text || is_ours;
  start_anew(rounds);
}

// --- what one sees ---

function draw_answers() {
  const focused = document.activeElement.dataset.row;
  $("question").textContent = seen.question;
  $("round").textContent = say`round ${lessons().length + 1} · right: ${seen.answer}`;
  $("answers").innerHTML = seen.rows.map(({ text, kinds }, row) => {
    const others = kinds > 1 ? say` and ${kinds - 1} similar` : "";
    return `<button class="answer" data-row="${row}" aria-pressed="${liked.has(row)}"
      style="--share: ${count(row) / 16}">
      <i aria-hidden="true"><small>${row < 9 ? row + 1 : ""}</small>
        ${liked.has(row) ? "♥" : "♡"}</i>
      <code>${colored(text)}<span class="tag">${others}</span></code>
      <span class="count">${say`${count(row)} of 16`}</span></button>`;
  }).join("");
  document.querySelector(`[data-row="${focused}"]`)?.focus();
}

function hint() {
  if (is_shown()) return say`Question ${Math.min(taught.length + 1, linked)} of ${linked} …`;
  if (!seen) return say`It learns …`;
  if (seen.rows.length === 1) return say`All 16 answers are equal: there is nothing to learn.`;
  if (!liked.size && reached !== null)
    return say`Goal reached in ${reached} clicks! Challenge a friend, or try the next goal.`;
  if (!liked.size && !taught.length && seen.rows[0].thinks)
    return say`Start with the first answer: it shows its work.`;
  if (!liked.size) return say`Choose at least one.`;
  if (!differ()) return say`All are equal to you: there is nothing to learn. Leave one out.`;
  const n = sum([...liked].map(count));
  const [A] = group_advantages([Array.from({ length: 16 }, (_, i) => Number(i < n))]);
  const words = say`You like ${n} of 16. Each is pushed up by A = ${signed(A[0])}, each other one
    down by ${signed(A[15])}.`;
  return words + (n === 8 ? "" : say` The rarer kind has the larger |A|.`) +
    ($("few").checked ? say` Two answers with the largest |A| count, the others do not.` : "");
}

function draw_goals() {
  for (const own of document.querySelectorAll("[data-goal]")) {
    const { goal } = own.dataset;
    own.className = goal in done ? "done" : "";
    own.querySelector("span").textContent = goal in done ? say`✓ done in ${done[goal]} clicks`
      : now ? say`${percent(share_of(goal))}, goal ${percent(GOALS[goal])}` : "";
  }
}

function draw_learned() {
  Object.entries(TRAITS).forEach(([name, most], i) => {
    const show = (x) => (most === 1 ? percent(x) : x.toFixed(0));
    const [bar, mark, numbers] =
      $("traits").children[i].querySelectorAll("i, b, :scope > :last-child");
    [bar.style.width, mark.style.left] = [now, first].map((of) =>
      `${100 * Math.min(1, of[name] / most)}%`);
    numbers.innerHTML = `<span class="soft">${show(first[name])} →</span> <b>${show(now[name])}</b>`;
  });
  $("said").innerHTML = story().join(language === "zh" ? "" : " ");
  const { gradient } = taught.findLast((round) => round.gradient) ?? {};
  $("share").textContent = !gradient ? "" :
    say`In the newest round that taught it something, two answers make ${percent(gradient.share)}
    of the gradient of all 16. The gradient of these two alone is ${gradient.times.toFixed(1)}
    times as long. The cosine between both gradients is ${gradient.cosine.toFixed(2)}.`;
  draw_curve();
}

function draw_curve() {
  const shares = lessons();
  $("curve").toggleAttribute("hidden", shares.length < 2);
  const x = (i) => 12 + i * Math.min(26, 316 / Math.max(1, shares.length - 1));
  const points = shares.map(({ share }, i) => [x(i), 82 - 60 * share]);
  $("curve").innerHTML = `<path d="M12 82H332M12 22H332"/><text x="332" y="12" text-anchor="end">` +
    `${$("of-curve").textContent}</text><polyline points="${points.join(" ")}"/>` +
    points.map(([cx, cy]) => `<circle cx="${cx}" cy="${cy}" r="4"/>`).join("");
}

// What was asked for, in all rounds or in as many of the newest as have a wish in common, and what
// was measured since then
function story() {
  const rounds = lessons();
  if (!rounds.length) return [say`Nothing yet.`];
  const told = [say`Rounds: ${rounds.length}, clicks: ${clicks()}.`];
  const before = (i) => (i > 0 ? rounds[i - 1].traits : first); // a lesson that is shown is quick
  const start = rounds.findIndex((_, i) => before(i) && wishes(rounds.slice(i), before(i)).length);
  const from = before(start);
  if (start > 0) told.push(say`Since round ${start + 1}:`);
  const names = { thinks: say`thinks`, right: say`is right`, even: say`even number` };
  const from_to = (name) => `${percent(from[name])} → ${percent(now[name])}`;
  const gain = (name) => now[name] - from[name];
  const [wish, ...others] = start < 0 ? [] : wishes(rounds.slice(start), from);
  const came = wish ? gain(wish[0]) * wish[1] : 0;
  if (wish) {
    const [asked, name, shares] = [in_words(wish), names[wish[0]], from_to(wish[0])];
    told.push(Math.abs(came) < CHANCE
      ? say`You asked it ${asked}: “${name}” ${shares}, within chance.`
      : say`You asked it ${asked}: “${name}” ${shares}.`);
  }
  const moved = Object.keys(names).filter((name) =>
    name !== wish?.[0] && Math.abs(gain(name)) >= CHANCE);
  for (const name of moved) {
    if (name === "right" && gain(name) < 0) continue; // see below
    if (wish && came < CHANCE && !others.some(([own]) => own === name))
      told.push(say`It learned ${in_words([name, Math.sign(gain(name))])} instead.`);
    else if (gain(name) > 0) told.push(say`More likely: “${names[name]}”, ${from_to(name)}.`);
    else told.push(say`Less likely: “${names[name]}”, ${from_to(name)}.`);
  }
  const warm = (text) => `<span class="warm">${text}</span>`;
  if (wish?.[0] === "right" && wish[1] < 0 && came >= CHANCE) told.push(
    warm(say`The reward was wrong, so the model is. If nobody meant that, it is called reward
    hacking.`));
  else if (gain("right") <= -CHANCE) {
    told.push(warm(say`It is right less often: ${from_to("right")}.`));
    if (came >= CHANCE) told.push(
      warm(say`The clicks paid for something else, and got it: this is reward hacking.`));
  } else if (wish?.join(" ") === "thinks 1" && came >= CHANCE && gain("right") < CHANCE / 2)
    told.push(say`It is not right more often: ${from_to("right")}.`,
              say`The clicks liked a form, and it learned a form.`);
  if (!wish && told.length === 1) told.push(say`No share has moved by more than chance.`);
  return told;
}

function draw_replies(texts) {
  const row = (name, text) =>
    `<div class="reply"><span class="soft">${name}</span><code>${colored(text)}</code></div>`;
  $("replies").innerHTML = row(say`untaught`, texts[0]) + row(say`taught`, texts[1]);
}

// Each idea comes when it is needed.
function draw() {
  if (seen) draw_answers();
  const rounds = lessons().length;
  const is_riddle = linked && !guessed;
  $("answers").ariaBusy = !seen && !is_shown();
  document.body.className = seen ? "" : "learns";
  $("hint").textContent = hint();
  $("go").disabled = !differ() || !is_free();
  $("other").hidden = differ();
  $("learned").hidden = is_riddle;
  $("truth").hidden = rounds < 3;
  $("share-it").hidden = $("save").hidden = $("of-save").hidden = !rounds;
  $("goals").hidden = $("intro").hidden = linked > 0;
  draw_goals();
  $("riddle").hidden = !linked;
  $("watch").hidden = $("lesson").hidden = !is_shown();
  $("ask-what").hidden = is_shown();
  $("guesses").hidden = is_shown() || guessed;
  $("turn").hidden = !guessed;
  $("verdict").textContent = guessed && guessed !== "nothing" ? verdict() : "";
  [$("lesson").max, $("lesson").value] = [linked || 1, taught.length];
  const few = taught.some((round) => round.few);
  [1, 2, Infinity, 5, few ? 1 : 8].forEach((from, i) => {
    if (rounds >= from) $(`idea${i + 1}`).hidden = false;
  });
}

// --- the keys and the buttons ---

function click({ target, detail }) {
  const row = target.closest(".answer")?.dataset.row;
  if (row && detail < 2) like(Number(row)); // a double click likes, too
  if (target.dataset.guess) {
    guessed = target.dataset.guess;
    draw();
  }
  if (target.dataset.wish && is_free()) click_for(target.dataset.wish);
}

function press(event) {
  const { key, target } = event;
  if (target.matches("#own, #address") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^[1-9]$/.test(key)) like(key - 1);
  if (key !== "Enter" || (target.closest("a, button") && !target.closest(".answer"))) return;
  event.preventDefault();
  if (differ() && is_free()) teach_liked();
}

function change_language() {
  speak(language === "en" ? "zh" : "en");
  if (taught.length >= linked) history.replaceState(null, "", `${link()}&lang=${language}`);
  if (now) draw_learned();
  if (seen) reply();
  draw();
}

function start_again() {
  history.pushState(null, "", `#lang=${language}`);
  follow();
}

if (navigator.language.startsWith("zh")) language = "zh";
find_texts();
document.addEventListener("click", click);
document.addEventListener("keydown", press);
addEventListener("hashchange", follow);
$("go").onclick = teach_liked;
$("other").onclick = () => is_free() && teach([], false);
$("anew").onclick = $("turn").onclick = start_again;
$("challenge").onclick = challenge;
$("save").onclick = save;
$("few").onchange = draw;
$("lang").onclick = change_language;
$("ask").onsubmit = (event) => { event.preventDefault(); reply(); };
follow();

"use strict";
// The page: what a step computed for the token that the reader chooses. A completion is text, never
// markup: it becomes the text of an element, and nothing else.

const $ = id => document.getElementById(id);
const DATA = JSON.parse($("data").textContent);
const CHINESE = {
  "CPPO, equation by equation": "CPPO，逐条公式",
  "Left the equation, in the middle the line of {0} that computes it, right the number that it computed for the token that you choose.":
    "左边是公式，中间是 {0} 里计算它的那一行，右边是它为你选的 token 算出的数。",
  "Each equation has a block of its own. Below the equation: what it says, its line of {0}, the function to copy, its test and its notebook; last its number for the token that you choose.":
    "每条公式自成一块。公式下面依次是：它的意思，{0} 里计算它的那一行，可以取用的函数、它的测试和 notebook，最后是它为你选的 token 算出的数。",
  "Move P, G, ε and β, and all numbers are computed again.": "移动 P、G、ε 和 β，所有的数都会重新计算。",
  "Step {0} of {1} trains on {2} of the {3} completions of its {4} questions. It pushes {5} tokens, and {6} of them move: their log π changes by more than {7}. Choose a token.{8}":
    "{1} 的第 {0} 步有 {4} 道题目、{3} 个补全，用其中 {2} 个来训练，推动 {5} 个 token，其中 {6} 个动了：log π 的变化超过 {7}。选一个 token。{8}",
  " (Click it, or press ← → ↑ ↓.)": "（点击它，或按 ← → ↑ ↓。）",
  "completion {0}: reward {1}, A {2}, {3}": "补全 {0}：奖励 {1}，A {2}，{3}",
  "{0}: A {1}, π {2} → {3}": "{0}：A {1}，π {2} → {3}", ", ratio {0}, KL {1}": "，比率 {0}，KL {1}",
  "right: {0} · {1} of {2} are right": "正确答案：{0} · {2} 个中 {1} 个答对",
  "kept": "保留", "pruned": "剪掉", "sampled": "采样", "clip": "裁剪",
  "Bars:": "色条：", "what the step did to log π": "这一步怎样改变 log π", "gradient": "梯度",
  "more likely": "概率上升", "less likely": "概率下降", "Equal completions are shown once.": "相同的补全只显示一次。",
  "Token {0} of {1}:": "第 {0} 个 token，共 {1} 个：", "Update": "更新", "As in the step": "恢复",
  "{0} of {1}": "{1} 个中的 {0} 个",
  "in the step: {0}": "这一步里：{0}", "its answer is right": "答案正确", "its answer is wrong": "答案错误",
  "row {0}": "第 {0} 行", "not sampled": "未采样", "it reaches γ = {0}, as {1} of {2} do": "达到 γ = {0}；{2} 个中有 {1} 个达到",
  "it is below γ = {0}; {1} of {2} reach it": "低于 γ = {0}；{2} 个中有 {1} 个达到",
  "of this question's {0} would be kept": "这道题目的 {0} 个补全里会保留这么多个", "with B = 1": "取 B = 1",
  "the questions keep {0}; there are {1} places": "各题保留 {0} 个；共有 {1} 个位置", "tokens on one device, {0} on the other": "个 token 在一个设备上，另一个有 {0} 个",
  "N = {0}, up to {1} together": "N = {0}，一次至多 {1} 个", "not clipped": "未被裁剪", "clipped": "被裁剪",
  "times β = {0}": "乘以 β = {0}", "a mean over the {0} that are kept": "对保留的 {0} 个取均值", "a mean over all {0}": "对全部 {0} 个取均值",
  "all are equal to 0": "全部为 0", "The {0} kept add {1} of these lengths; the best {0} would add {2}.": "保留的 {0} 个占这些长度的 {1}；最好的 {0} 个会占 {2}。",
  "product": "乘积",
  "the sum of the rewards of {0} tokens": "{0} 个 token 的奖励之和",
  "Only the step itself was made.": "只做过原来的那一步。",
  "so: less likely": "因此：概率下降", "so: more likely": "因此：概率上升", "no gradient": "没有梯度",
  "not computed: pruned": "不计算：已剪掉", "not trained on": "不参与训练",
  "This completion was pruned: the step did not train on it.": "这个补全被剪掉了：这一步没有用它来训练。",
  "The gradient pushes all {0} tokens of this completion to be less likely, each about as hard.":
    "梯度以差不多的力度压低这个补全全部 {0} 个 token 的概率。",
  "The gradient pushes all {0} tokens of this completion to be more likely, each about as hard.":
    "梯度以差不多的力度抬高这个补全全部 {0} 个 token 的概率。",
  "The gradient pushes {0} of the {2} tokens of this completion to be less likely, and {1} to be more likely.":
    "在这个补全的 {2} 个 token 里，梯度把 {0} 个推向更低的概率，把 {1} 个推向更高的概率。",
  "{0} hardly moved: π {1} → {2}.": "{0} 几乎没动：π {1} → {2}。",
  "{0} became less likely: π {1} → {2}.": "{0} 的概率下降了：π {1} → {2}。",
  "{0} became more likely: π {1} → {2}.": "{0} 的概率上升了：π {1} → {2}。",
  "The model was nearly sure of it. Then log π hardly follows its logit: only {0} times as far, by 1 − π.":
    "模型对它几乎确定。这时 log π 几乎不随它的 logit 变化：变化只有 logit 的 {0} 倍，即 1 − π。",
  "Here the model had a choice.": "在这里，模型有别的选择。",
  "That is against its own gradient: the step follows the sum over all {0} kept completions, and AdamW remembers earlier steps.":
    "这与它自己的梯度相反：这一步沿着全部 {0} 个保留补全的总和走，而且 AdamW 记得先前的步。",
  "That is against its own gradient: the step follows the sum over all {0} kept completions, their KL pulls too, and AdamW remembers earlier steps.":
    "这与它自己的梯度相反：这一步沿着全部 {0} 个保留补全的总和走，它们的 KL 也在拉，而且 AdamW 记得先前的步。",
  "It moved all the same, because all completions share the same weights.": "它还是动了，因为所有补全共用同一组权重。",
  "Of the {0} tokens of this completion {1} moved by more than {2}.": "这个补全的 {0} 个 token 里，有 {1} 个变动超过 {2}。",
};
const state = { lang: "en", bars: "moved", completion: 0, token: 0, update: 1, settings: { ...DATA.settings } };
let now;  // what is computed with the reader's settings
let drawn = [];  // the elements of the tokens, completion by completion

// --- words and numbers ---

const word = english => (state.lang === "zh" && CHINESE[english]) || english;

// say`${n} kept`: the parts of a sentence, texts and elements, in the language of the page
function say(parts, ...values) {
  const key = parts.reduce((text, part, i) => `${text}{${i - 1}}${part}`);
  return word(key).split(/\{(\d)\}/).map((part, i) => (i % 2 ? values[part] : part));
}

const fixed = (x, digits) => x.toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "−");
const signed = (x, text) => (x > 0 ? "+" : "") + text;
const small = x => (x ? Number(x.toPrecision(2)).toString().replace(/-/g, "−") : "0");
const size_of = xs => xs.reduce((most, x) => Math.max(most, Math.abs(x)), 0);

// A probability: two digits, and near 1 two digits of 1 − π
function probability(logp) {
  const [p, rest] = [Math.exp(logp), -Math.expm1(logp)];
  if (p < 0.9) return p.toPrecision(2).replace("-", "−");
  return p.toFixed(rest < 1e-6 ? 6 : 1 + Math.ceil(-Math.log10(rest)));
}

// What is seen of a text: its newlines, its tabs and other characters without a picture
const UNSEEN = { "\n": "↵", "\t": "⇥", "": "·", "\x7f": "␡" };
const seen = text => text.replace(/[\x00-\x1f\x7f]/g, c => UNSEEN[c] ?? String.fromCharCode(0x2400 + c.charCodeAt()))
  || UNSEEN[""];

function element(tag, style, ...parts) {
  const made = document.createElement(tag);
  made.className = style;
  made.append(...parts);
  return made;
}

// --- the state ---

const completion = () => DATA.completions[state.completion];
const change = (c, t) => (c.before[t] === null ? 0 : c.after[t] - c.before[t]);
const own_tokens = c => c.before.filter(x => x !== null).length;  // |o|: not those of a tool
const moves = c => c.tokens.map((_, t) => Math.abs(change(c, t)) > DATA.least).filter(Boolean).length;
const in_update = c => c.passes.find(one => one.update === state.update);  // a mini-batch has some completions
const gradients = c => in_update(c)?.gradient ?? [];
const here = () => now.completions[state.completion];
const the_step = recomputed(DATA, DATA.settings);
const is_the_step = () => Object.entries(DATA.settings).every(([name, x]) => state.settings[name] === x);

// At first: the kept completion in which most tokens moved, and its token that moved most
function find_first() {
  const kept = DATA.completions.filter(c => c.kept);
  const most = size_of(kept.map(moves));
  const c = kept.find(one => moves(one) === most) ?? DATA.completions[0];
  const sizes = c.tokens.map((_, t) => Math.abs(change(c, t)));
  state.completion = DATA.completions.indexOf(c);
  state.token = sizes.indexOf(size_of(sizes));
  state.update = c.passes.at(-1)?.update;
}

// Choose a token. The page does not scroll up to it if the reader is at the equations.
function choose(i, t) {
  state.completion = Math.min(Math.max(i, 0), DATA.completions.length - 1);
  state.token = Math.max(0, Math.min(t, completion().tokens.length - 1));
  if (!in_update(completion())) state.update = completion().passes.at(-1)?.update ?? state.update;
  const below = $("strip").contains(document.activeElement) || $("completions").getBoundingClientRect().bottom < 60;
  draw_token();
  const token = below ? document.querySelector("#strip .chosen") : drawn[state.completion][state.token];
  token?.focus({ preventScroll: true });
  if (!below) token?.scrollIntoView({ block: "nearest" });
}

// --- left: the completions ---

// What a screen reader says of a token
function spoken(c, t) {
  const text = seen(c.tokens[t]).slice(0, 40);
  if (c.before[t] === null) return text;
  const [p, q] = [c.before[t], c.after[t]].map(probability);
  const [ratio, kl] = ["ratio", "kl"].map(name => in_update(c)?.[name]?.[t] ?? null);
  const trained = ratio === null ? [] : say`, ratio ${fixed(ratio, 3)}, KL ${small(kl)}`;
  return [...say`${text}: A ${signed(c.advantage, fixed(c.advantage, 2))}, π ${p} → ${q}`, ...trained].join("");
}

function token_element(c, i, t, most) {
  const made = element("span", /^<\/?\w+>$/.test(c.tokens[t]) ? "token tag" : "token", seen(c.tokens[t]));
  const x = state.bars === "moved" ? change(c, t) : -(gradients(now.completions[i])[t] ?? 0);
  if (Math.abs(x) > (state.bars === "moved" ? DATA.least : 0)) {
    const bar = element("i", x < 0 ? "less" : "more");
    bar.style.height = `${2 + 8 * (state.bars === "moved" ? Math.min(1, Math.abs(x) / 0.4) : Math.abs(x) / most)}px`;
    made.append(bar);
  }
  made.dataset.at = `${i} ${t}`;
  made.role = "option";
  made.tabIndex = -1;
  made.ariaLabel = spoken(c, t);
  return made;
}

function draw_completions() {
  const most = size_of(now.completions.flatMap(gradients));
  drawn = [];
  $("completions").replaceChildren(...DATA.completions.map((c, i) => {
    const { advantage, kept, count } = now.completions[i];
    const tokens = c.tokens.map((_, t) => token_element(c, i, t, most));
    drawn.push(tokens);
    const A = advantage === undefined ? "–" : signed(advantage, fixed(advantage, 2));
    const fate = word(kept ? "kept" : count ? "pruned" : "not sampled");
    const many = kept && count > 1 ? ` ${kept} / ${count}` : "";
    const facts = element("div", "facts", element("b", "", `${c.right ? "✓" : "✗"}${count > 1 ? ` ×${count}` : ""}`),
      element("span", "soft", `A ${A}`), element("span", "fate soft", fate + many));
    const text = element("div", "tokens");
    text.role = "listbox";
    text.ariaLabel = say`completion ${i + 1}: reward ${small(c.reward)}, A ${A}, ${fate}`.join("");
    for (const token of tokens) text.append(token);  // as arguments 100,000 would be too many
    return element("div", `completion ${kept ? "kept" : count ? "" : "out"}`, text, facts);
  }));
}

// The chosen completion once more, in one line that stays
function draw_strip() {
  const c = completion(), first = Math.max(0, state.token - 60);
  const most = size_of(now.completions.flatMap(gradients));
  const tokens = c.tokens.slice(first, first + 180).map((_, t) => token_element(c, state.completion, first + t, most));
  $("strip").replaceChildren(...tokens);
  const chosen = tokens[state.token - first];
  mark(chosen, true);
  if (chosen) $("strip").scrollLeft = chosen.offsetLeft - $("strip").clientWidth / 2;
}

// --- the book: each equation and each line has its number ---

const two = x => fixed(x, 2);
const logs = x => [fixed(x, 3), `π ${probability(x)}`];
const difference = (x, y) => `${fixed(x, 3)} − ${fixed(y, 3)}`.replace("− −", "+ ");
const kept_here = () => sum(now.completions.map(c => c.kept));
const beta = () => state.settings.beta;

// {row: what is shown of x, the row's number: [the number, words]}. one: the numbers of the update
const SHOWN = {
  reward: (x, one, t) => [small(x), word(x > 0 ? "its answer is right" : "its answer is wrong")],
  advantage: x => [signed(x, two(x)), spread()],
  k: x => [x, `⌊${state.settings.G} · (1 − ${state.settings.P})⌋`],
  kept: x => [word(x ? "kept" : "pruned"), [...say`${kept_here()} of ${now.rewards.length}`, " · ",
    ...say`row ${(DATA.number - 1) * state.settings.G + here().place}`], bars(["|A|", now.advantages])],
  threshold: reaches,
  pooled: x => [x, say`of this question's ${state.settings.G} would be kept`],
  allocation: x => [x, [`⌊${state.settings.G} / ${now.k}⌋ `, word("with B = 1")]],
  fill: x => [x, say`the questions keep ${now.above.join(", ")}; there are ${state.settings.G} places`],
  bucket: x => [Math.max(...x), say`tokens on one device, ${Math.min(...x)} on the other`],
  micro: x => [x, say`N = ${now.N}, up to ${DATA.rows} together`],
  ref: logs, logp: logs, old: logs,
  ratio: (x, one, t) => [fixed(x, 3), `exp(${difference(one.logp[t], one.old[t])})`],
  surrogate: (x, one, t) => [signed(x, fixed(x, 3)), one.clipped[t] ? word("clipped")
    : [word("not clipped"), `: ${fixed(one.ratio[t], 3)} · ${two(here().advantage)}`],
    curve(ratio => clipped_surrogate(ratio, here().advantage, state.settings.epsilon), 0.5, 1.5, one.ratio[t])],
  kl: (x, one, t) => [small(x), say`times β = ${beta()}`,
    curve(log_r => kl_k3(0, log_r), -1.5, 1.5, one.ref[t] - one.logp[t])],
  k1: (x, one, t) => [`${small(x)}, ${small(one.k2[t])}`, "k1, k2"],
  weight: x => [small(x), `1 / (${now.N} · ${own_tokens(completion())})`],
  part: (x, one, t) => [signed(x, small(x)), `−${small(one.weight[t])} · (${fixed(one.surrogate[t], 3)} − ${beta()} · ${small(one.kl[t])})`],
  whole: x => [signed(x, fixed(x, 3)), say`a mean over all ${now.rewards.length}`],
  objective: x => [signed(x, fixed(x, 3)), say`a mean over the ${now.k} that are kept`],
  gradient: x => [signed(x, small(x)), word(x > 0 ? "so: less likely" : x < 0 ? "so: more likely" : "no gradient")],
  contribution: x => [two(x), [`${two(Math.abs(here().advantage))} · ${two(now.norms[here().place])}. `, ...adds()],
    bars(["|A|", now.advantages], ["‖∇ log π‖", now.norms], [word("product"), now.added])],
  token_reward: (x, one, t) => [signed(x, small(x)), `−${beta()} · (${difference(one.old[t], one.ref[t])})${t === one.old.length - 1 ? ` + ${here().reward}` : ""}`],
  gae: (x, one, t) => [signed(x, fixed(x, 3)), say`the sum of the rewards of ${one.gae.length - t} tokens`],
  ppo: (x, one, t) => [signed(x, fixed(x, 3)), `ρ = ${fixed(one.ratio[t], 3)}, A = ${fixed(one.gae[t], 3)}`],
};
const OF_STEP = ["k", "pooled", "allocation", "fill", "bucket", "micro"];

function spread() {
  const n = now.rewards.length, mean = sum(now.rewards) / n;
  const std = Math.sqrt(sum(now.rewards.map(r => (r - mean) ** 2)) / (n - 1));
  return `(${small(here().reward)} − ${two(mean)}) / (${two(std)} + 0.0001)`;
}

function reaches(A) {
  const gamma = two(now.gamma), count = now.above[DATA.number - 1], G = state.settings.G;
  return [`|A| = ${two(Math.abs(A))}`, Math.abs(A) > now.gamma - 1e-6
    ? say`it reaches γ = ${gamma}, as ${count} of ${G} do` : say`it is below γ = ${gamma}; ${count} of ${G} reach it`];
}

// How much of what all completions add the kept ones add, and how much as many others could add
function adds() {
  const [share, best] = [now.share, now.best].map(x => `${Math.round(100 * x)} %`);
  return now.best === 0 ? [word("all are equal to 0")] : say`The ${now.k} kept add ${share} of these lengths; the best ${now.k} would add ${best}.`;
}

// --- small pictures ---

function svg(tag, attributes, ...parts) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, x] of Object.entries(attributes)) made.setAttribute(name, x);
  made.append(...parts);
  return made;
}

const picture = (height, ...parts) => svg("svg", { viewBox: `0 0 240 ${height}`, height, "aria-hidden": true }, ...parts);

// Of each completion of the question a bar for |x|, in one row or more. rows: [[its name, the numbers]]
function bars(...rows) {
  const high = 84, width = 240 / now.advantages.length, { members } = completion();
  return picture(rows.length * high, ...rows.flatMap(([name, xs], row) => {
    const bottom = row * high + 64, most = size_of(xs) || 1, label = svg("text", { x: 1, y: bottom + 15 }, name);
    return [label, ...xs.map((x, i) => {
      const height = 2 + 60 * Math.abs(x) / most, own = members.includes(i) ? "own" : "";
      return svg("rect", { x: i * width + 1, y: bottom - height, width: width - 3, height, class: `${now.kept.includes(i) ? "kept" : ""} ${own}` });
    })];
  }));
}

// f between two places, and where x is
function curve(f, from, to, x) {
  const xs = Array.from({ length: 61 }, (_, i) => from + (to - from) * i / 60), ys = xs.map(f);
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const place = x => [240 * (x - from) / (to - from), 62 - 60 * (f(x) - low) / (high - low || 1)];
  const [cx, cy] = place(Math.min(Math.max(x, from), to));
  return picture(64, svg("line", { x1: cx, x2: cx, y1: 0, y2: 64 }), svg("path", { d: `M${xs.map(place).join("L")}` }), svg("circle", { cx, cy, r: 5 }));
}

// --- the rows ---

// [number, words, picture, style] of a row
function shown(key) {
  const [c, t, own] = [completion(), state.token, here()];
  const one = in_update(own);
  if (key === "moved") {
    if (!is_the_step() || c.before[t] == null) return ["–", word("Only the step itself was made.")];
    const x = change(c, t);
    const style = Math.abs(x) > DATA.least ? (x < 0 ? "less" : "more") : "";
    return [signed(x, fixed(x, 3)), `${fixed(c.before[t], 3)} → ${fixed(c.after[t], 3)}`, null, style];
  }
  if (OF_STEP.includes(key)) return SHOWN[key](now[key]);
  if (own.advantage === undefined) return ["–", word("not sampled")];
  if (key === "contribution") return SHOWN[key](now.added[own.place]);
  const x = ["objective", "whole"].includes(key) ? now[key][state.update - 1] : key in own ? own[key] : one?.[key]?.[t];
  return x == null ? ["–", word(own.kept ? "not trained on" : "not computed: pruned")] : SHOWN[key](x, one, t);
}

// The numbers of the chosen token with the step's own settings
function in_the_step(rows) {
  const kept = [state.settings, now];
  [state.settings, now] = [DATA.settings, the_step];
  const found = rows.map(row => shown(row.id)[0]);
  [state.settings, now] = kept;
  return found;
}

function draw_rows() {
  const rows = [...document.querySelectorAll("article")];
  const before = is_the_step() ? [] : in_the_step(rows);
  rows.forEach((row, i) => {
    const [number, note, drawing, style = ""] = shown(row.id);
    const changed = before.length > 0 && before[i] !== number && before[i] !== "–";
    row.classList.toggle("changed", changed);
    row.classList.toggle("none", number === "–");
    const [big, words] = row.querySelector(".number").children;
    big.textContent = number;
    big.className = style;
    words.replaceChildren(...[note].flat(), ...(changed ? [element("br", ""), ...say`in the step: ${before[i]}`] : []));
    row.querySelector("svg")?.remove();
    if (drawing) words.after(drawing);
  });
}

// --- what can be changed ---

const LARGEST = { G: DATA.group, P: 0.9375, epsilon: 0.4, beta: 0.2 }, STEP = { G: 1, P: 0.0625, epsilon: 0.01, beta: 0.01 };

// The token of the step, then all numbers with the reader's settings
function set(name, x) {
  state.settings[name] = x;
  const { G, P } = state.settings;
  state.settings.P = Math.min(P, Math.floor(16 * (1 - 1 / G)) / 16);  // one completion is always kept
  now = recomputed(DATA, state.settings);
  draw_completions();
  draw_token();
}

function draw_sliders() {
  $("sliders").replaceChildren(...Object.entries({ P: ["P", "pruned"], G: ["G", "sampled"], epsilon: ["ε", "clip"], beta: ["β", "KL"] }).map(([name, [letter, what]]) => {
    const input = element("input", ""), label = element("label", "", element("span", "", letter, element("small", "", word(what))), element("output", ""), input);
    Object.assign(input, { type: "range", min: name === "G" ? 2 : 0, max: LARGEST[name], step: STEP[name] });
    input.oninput = () => set(name, Number(input.value));
    label.dataset.name = name;
    return label;
  }));
}

function draw_settings() {
  for (const label of $("sliders").children) {
    const x = state.settings[label.dataset.name];
    label.querySelector("input").value = x;
    label.querySelector("output").textContent = x;
    label.classList.toggle("changed", x !== DATA.settings[label.dataset.name]);
  }
}

// --- a sentence, made of what the step computed ---

function said() {
  const [c, t] = [completion(), state.token];
  const name = element("code", "", seen(c.tokens[t] ?? "").slice(0, 40));
  const n = own_tokens(c);
  const about = [];
  const all = gradients(c).filter(g => g !== null);
  const [less, more] = [all.filter(g => g > 0).length, all.filter(g => g < 0).length];
  const most = size_of(all);
  const even = all.every(g => 1.5 * Math.abs(g) >= most);
  if (!c.kept) about.push(say`This completion was pruned: the step did not train on it.`);
  else if (even && less === n)
    about.push(say`The gradient pushes all ${n} tokens of this completion to be less likely, each about as hard.`);
  else if (even && more === n)
    about.push(say`The gradient pushes all ${n} tokens of this completion to be more likely, each about as hard.`);
  else
    about.push(say`The gradient pushes ${less} of the ${n} tokens of this completion to be less likely, and ${more} to be more likely.`);
  if (c.before[t] != null) about.push(...about_token(c, t, name));
  about.push(say`Of the ${n} tokens of this completion ${moves(c)} moved by more than ${DATA.least}.`);
  return about.flatMap(sentence => [...sentence, state.lang === "zh" ? "" : " "]);
}

function about_token(c, t, name) {
  const x = change(c, t);
  const [p, q] = [c.before[t], c.after[t]].map(probability);
  const own = gradients(c)[t];
  const sure = c.before[t] > Math.log(0.9);
  if (Math.abs(x) <= DATA.least) {
    const rest = small(-Math.expm1(c.before[t]));
    const why = say`The model was nearly sure of it. Then log π hardly follows its logit: only ${rest} times as far, by 1 − π.`;
    return [say`${name} hardly moved: π ${p} → ${q}.`, ...(sure ? [why] : [])];
  }
  const what = x < 0 ? say`${name} became less likely: π ${p} → ${q}.` : say`${name} became more likely: π ${p} → ${q}.`;
  if (!c.kept) return [what, say`It moved all the same, because all completions share the same weights.`];
  if (own * x > 0) return [what, DATA.settings.beta
    ? say`That is against its own gradient: the step follows the sum over all ${DATA.trained} kept completions, their KL pulls too, and AdamW remembers earlier steps.`
    : say`That is against its own gradient: the step follows the sum over all ${DATA.trained} kept completions, and AdamW remembers earlier steps.`];
  return sure ? [what] : [what, say`Here the model had a choice.`];
}

// --- the page ---

// Buttons of which one is pressed. names: [[what it says, the value]]
function draw_switch(id, label, setting, names) {
  $(id).replaceChildren(element("div", "", label), ...names.map(([name, value]) => {
    const button = element("button", "", name);
    button.ariaPressed = state[setting] === value;
    button.onclick = () => {
      state[setting] = value;
      draw();
      $(id).querySelector("[aria-pressed=true]").focus();
    };
    return button;
  }));
}

// Tab leads to the chosen token, and arrows lead to the others.
function mark(token, is_chosen) {
  token?.classList.toggle("chosen", is_chosen);
  token?.setAttribute("aria-selected", is_chosen);
  if (token) token.tabIndex = is_chosen ? 0 : -1;
}

function draw_token() {
  const c = completion();
  for (const token of document.querySelectorAll("#completions .chosen")) mark(token, false);
  mark(drawn[state.completion][state.token], true);
  const name = element("code", "", seen(c.tokens[state.token] ?? "").slice(0, 40));
  $("where").replaceChildren(...say`Token ${state.token + 1} of ${c.tokens.length}:`, " ", name);
  const reset = element("button", "", "↺");
  reset.title = reset.ariaLabel = word("As in the step");
  reset.onclick = () => { Object.assign(state.settings, DATA.settings); set("G", DATA.settings.G); };
  const updates = c.passes.length > 1 ? c.passes.map(one => [one.update, one.update]) : [];
  draw_switch("updates", updates.length ? word("Update") : "", "update", updates);
  if (!is_the_step()) $("updates").append(reset);
  draw_strip();
  draw_settings();
  draw_rows();
  $("said").replaceChildren(...said());
}

function draw() {
  document.documentElement.lang = state.lang;
  document.title = document.querySelector("h1").textContent = word("CPPO, equation by equation");
  const file = () => element("code", "", "nano.py"), command = element("code", "", DATA.command);
  const keys = element("span", "", word(" (Click it, or press ← → ↑ ↓.)"));
  keys.id = "keys";
  $("about").replaceChildren(
    element("span", "wide", ...say`Left the equation, in the middle the line of ${file()} that computes it, right the number that it computed for the token that you choose.`),
    element("span", "narrow", ...say`Each equation has a block of its own. Below the equation: what it says, its line of ${file()}, the function to copy, its test and its notebook; last its number for the token that you choose.`),
    " ", word("Move P, G, ε and β, and all numbers are computed again."));
  $("words").replaceChildren(...say`Step ${DATA.step} of ${command} trains on ${DATA.trained} of the ${DATA.questions * DATA.group} completions of its ${DATA.questions} questions. It pushes ${DATA.tokens} tokens, and ${DATA.moved} of them move: their log π changes by more than ${DATA.least}. Choose a token.${keys}`);
  $("question").textContent = DATA.question;
  const right = DATA.completions.filter(c => c.right).reduce((n, c) => n + c.members.length, 0);
  $("answer").replaceChildren(...say`right: ${DATA.answer} · ${right} of ${DATA.group} are right`);
  $("key").replaceChildren(element("i", "more"), word("more likely"), element("i", "less"), word("less likely"), " · ",
    word("Equal completions are shown once."));
  draw_switch("language", "", "lang", [["English", "en"], ["中文", "zh"]]);
  draw_switch("bars", word("Bars:"), "bars", [[word("what the step did to log π"), "moved"], [word("gradient"), "gradient"]]);
  draw_sliders();
  draw_completions();
  draw_token();
}

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
document.addEventListener("keydown", event => {
  const by = STEPS[event.key];
  if (!by || event.target.type === "range" || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  event.preventDefault();
  choose(state.completion + by[0], state.token + by[1]);
});
for (const id of ["completions", "strip"]) $(id).addEventListener("click", ({ target }) => {
  const at = target.closest(".token")?.dataset.at;
  if (at) choose(...at.split(" ").map(Number));
});
function read_address() {
  const lang = new URLSearchParams(location.hash.slice(1)).get("lang") ?? navigator.language.slice(0, 2);
  state.lang = lang === "zh" ? "zh" : "en";
  draw();
}
addEventListener("hashchange", read_address);
find_first();
now = the_step;
read_address();

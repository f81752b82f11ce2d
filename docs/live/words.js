"use strict";
// What all pages say alike: completions, and two languages. A page is written in English;
// chinese.json holds what it says in Chinese, with {0}, {1}, … for the values.

const $ = id => document.getElementById(id);
const CHINESE = JSON.parse($("chinese").textContent);
const texts = new Map();  // each text that stands in the page itself: what it says in English
let language = "en";

const one_line = text => text.trim().replace(/\s+/g, " ");
const word = english => (language === "zh" && CHINESE[one_line(english)]) || english;

// say`${n} kept`: a sentence in the language of the page
function say(parts, ...values) {
  const key = parts.reduce((text, part, i) => `${text}{${i - 1}}${part}`);
  return word(key).replace(/\{(\d)\}/g, (_, i) => values[i]);
}

function find_texts() {
  const walker = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const is_text = node.parentNode.tagName !== "CODE";
    if (is_text && one_line(node.data) in CHINESE) texts.set(node, node.data);
  }
}

function speak(lang) {
  language = lang;
  document.documentElement.lang = lang;
  for (const [text, english] of texts) text.data = word(english);
}

const sum = xs => xs.reduce((a, b) => a + b, 0);
const fixed = (x, digits) => x.toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "−");
const signed = x => (Number(x.toFixed(2)) > 0 ? "+" : "") + fixed(x, 2);

// A completion in one line, with its tags in grey. Apart from tags it has no letters.
const colored = text =>
  text.replace(/<(\/?\w+)>/g, '<span class="tag">&lt;$1&gt;</span>').replaceAll("\n", " ");

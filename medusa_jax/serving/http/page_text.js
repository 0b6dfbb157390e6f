"use strict";
function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

function button(text, name, act) {
  const element = make("button", name, text);
  element.type = "button";
  element.addEventListener("click", () => act(element));
  return element;
}

// Text of an answer. It comes in runs, pairs of text and draft depth, and is shown block by block; unchanged
// blocks stay. Everything is made of text nodes: nothing that a model writes is HTML.

const textOf = answer => answer.runs.map(([text]) => text).join("");

function blocksOf(text, markdown) {
  const blocks = [];
  let fence = null, open = false, start = 0;  // open: the next line may belong to the last block
  for (const line of text.split(/(?<=\n)/)) {
    const end = start + line.length, last = blocks[blocks.length - 1], body = line.trimEnd();
    const add = (kind, skip = 0, more = {}) => blocks.push({kind, start: start + skip, end: start + body.length, ...more});
    const joined = kind => open && last && last.kind === kind;
    let mark;
    if (!markdown) blocks.push({kind: "line", start, end});
    else if (fence) {
      if (body.trim().startsWith(fence) && !body.trim().replaceAll(fence[0], "")) fence = null;
      else last.end = end;
      open = false;
    } else if ((mark = /^\s*(`{3,}|~{3,})\s*([^\s`]*)/.exec(body))) {
      fence = mark[1];
      blocks.push({kind: "code", start: end, end, name: mark[2]});
    } else if (!body.trim()) open = false;
    else if (/^\s*([-*_])(\s*\1){2,}$/.test(body)) add("rule");
    else if ((mark = /^#{1,6}\s+/.exec(body))) add("head", mark[0].length);
    else if ((mark = /^(\s*)([-*+]|\d{1,9}[.)])\s+/.exec(body))) {
      add("item", mark[0].length, {mark: mark[2].length > 1 ? mark[2] : "•", indent: mark[1].length});
      open = true;
    } else if ((mark = /^>\s?/.exec(body))) add("quote", mark[0].length);
    else if (/^\s*\|/.test(body)) {
      if (joined("table")) last.end = start + body.length; else add("table");
      open = true;
    } else if (joined("text") || joined("item")) last.end = start + body.length;
    else { add("text"); open = true; }
    start = end;
  }
  return blocks;
}

const TAGS = {head: "h3", rule: "hr", table: "pre", line: "span", item: "div", quote: "div", code: "div", text: "p"};

function blockElement(answer, text, block) {
  const element = make(TAGS[block.kind], block.kind);
  if (block.kind === "code") {
    const code = make("code"), bar = make("div", "bar"), pre = make("pre");
    runsInto(code, answer, block.start, block.end);
    bar.append(make("span", "", block.name), button("Copy", "small", it => copy(code, code.textContent, it)));
    pre.append(code);
    element.append(bar, pre);
  } else if (block.kind === "item") {
    const inside = make("span");
    element.style.marginInlineStart = block.indent / 2 + "rem";
    inlineInto(inside, answer, text, block.start, block.end);
    element.append(make("span", "", block.mark), inside);
  } else if (block.kind === "line" || block.kind === "table") runsInto(element, answer, block.start, block.end);
  else if (block.kind !== "rule") inlineInto(element, answer, text, block.start, block.end);
  return element;
}

// Code, strong and emphasised text within a block.
function inlineInto(parent, answer, text, start, end) {
  const marks = /(`+)(?!`)([^]{0,999}?[^`])\1(?!`)|(\*\*)(?=\S)([^]{0,999}?\S)\*\*|(\*)(?=[^\s*])([^*\n]*[^\s*])\*/g;
  let done = start;
  for (const found of text.slice(start, end).matchAll(marks)) {
    const mark = (found[1] || found[3] || found[5]).length, from = start + found.index;
    const to = from + found[0].length, inside = make(found[1] ? "code" : found[3] ? "strong" : "em");
    runsInto(parent, answer, done, from);
    (found[1] ? runsInto : (p, a, x, y) => inlineInto(p, a, text, x, y))(inside, answer, from + mark, to - mark);
    parent.append(inside);
    done = to;
  }
  runsInto(parent, answer, done, end);
}

const sums = new WeakMap();  // of an answer: where each of its runs ends

function endsOf(answer) {
  const ends = sums.get(answer) || [];
  sums.set(answer, ends);
  while (ends.length < answer.runs.length) ends.push((ends.at(-1) || 0) + answer.runs[ends.length][0].length);
  return ends;
}

function runsInto(parent, answer, start, end) {
  const ends = endsOf(answer);
  let at = 0;
  for (let rest = ends.length; at < rest;) {  // the first run that ends after the start
    const middle = (at + rest) >> 1;
    if (ends[middle] > start) rest = middle; else at = middle + 1;
  }
  for (; at < ends.length; at += 1) {
    const [text, depth] = answer.runs[at], begin = ends[at] - text.length;
    if (begin >= end) return;
    const shown = text.slice(Math.max(0, start - begin), end - begin), word = depth ? shown.trimStart() : shown;
    if (word !== shown) parent.append(make("span", "", shown.slice(0, shown.length - word.length)));  // the blank is not marked
    const part = make("span", !depth ? "" : depth < 0 ? "d copied" : `d d${Math.min(depth, 5)}`, word);
    if (depth) part.title = depth < 0 ? "copied from the text and accepted" : `guessed at depth ${depth} and accepted`;
    parent.append(part);
  }
}

async function copy(element, text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // only pages of this machine or over TLS have one
    getSelection().selectAllChildren(element);
    document.execCommand("copy");
    getSelection().removeAllRanges();
  }
  pressed.textContent = "Copied";
  setTimeout(() => { pressed.textContent = "Copy"; }, 1500);
}

// Needs page_text.js.
const at = id => document.getElementById(id);
const KEPT = "medusa_jax", SETTINGS = ["system", "temperature", "top_p", "top_k", "seed", "limit", "plain", "markdown"];
const GONE = "The server does not answer.";
const EXAMPLES = {
  chat: ["What is the capital of France?", "Write a Python function that reverses a list.",
    "Explain in three sentences why the sky is blue."],
  text: ["def parse(", "class Stack:\n    def __init__(self):", "import os\n\nfor name in"],
};
let turns = [];        // of the conversation: {question, body, answers}; what is shown of one is in `views`
let running = null;    // AbortController of the answer that is being written
let model = null;      // as the server describes it
const views = new WeakMap();

// What is kept for a reload of this tab: all but the key.

function keep() {
  const values = SETTINGS.map(id => [id, at(id).type === "checkbox" ? at(id).checked : at(id).value]);
  const kept = {turns, values, question: at("question").value};
  try { sessionStorage.setItem(KEPT, JSON.stringify(kept)); } catch { /* full or forbidden */ }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT));
    for (const [id, value] of kept.values) at(id)[at(id).type === "checkbox" ? "checked" : "value"] = value;
    for (const answer of kept.turns.flatMap(turn => turn.answers)) {
      if (answer.state === "running") Object.assign(answer, {state: "stopped", numbers: answer.numbers + " (stopped)"});
    }
    at("question").value = kept.question;
    turns = kept.turns;
    return true;
  } catch {  // nothing there, forbidden, or of another version
    return false;
  }
}

// The server.

function headers() {
  const out = {"content-type": "application/json"};
  if (at("key").value) out.authorization = "Bearer " + at("key").value;
  return out;
}

async function call(path, options) {
  const response = await fetch(path, {headers: headers(), ...options}).catch(error => {
    if (error.name === "AbortError") throw error;
    throw new Error(/[^ -~]/.test(at("key").value) ? "The key has characters that cannot be sent." : GONE);
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (response.status === 401) at("keyfield").hidden = false;
  throw new Error(body && body.error ? body.error.message : "HTTP " + response.status);
}

// What the model is; asked again until the server answers.
async function loadModel() {
  try {
    const found = (await (await call("/v1/models")).json()).data[0], more = found.medusa;
    if (!model && !restored) at("markdown").checked = more.chat;
    model = found;
    const about = `${model.id}, weights in ${more.weights}, drafter ${more.drafter}, ${more.tree_nodes} nodes`;
    at("about").textContent = about;
    showReadiness(about);
    at("about").classList.remove("error");
    legend(more);
    examples();
  } catch (error) {
    at("about").textContent = error.message;
    at("about").classList.add("error");
    if (error.message === GONE) setTimeout(loadModel, 3000);
  }
}

// The colours that the drafter of this model can give.
function legend({depth, copies}) {
  const parts = [];
  if (depth) parts.push("the head of depth ");
  for (let d = 1; d <= Math.min(depth, 5); d += 1) parts.push(d > 1 ? " " : "", make("span", "d d" + d, d < depth && d === 5 ? "5+" : d));
  if (copies) parts.push(depth ? " or " : "", make("span", "d copied", "a copy"), " of earlier text");
  at("legend").replaceChildren(...(parts.length ? ["Who guessed a token: ", ...parts, "; unmarked: the model itself."] : []));
}

// What the model is; until its first program is compiled, that an answer waits for it.
async function showReadiness(about) {
  const state = await fetch("/health").then(response => response.json()).catch(() => null);
  const compiling = state && state.error && state.error.code === "compiling";
  at("about").textContent = about + (compiling ? "; compiling, the first answer waits for it" : "");
  if (compiling) setTimeout(showReadiness, 1000, about);
}

// Server-sent events of a response, as the objects that they hold.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function show(answer) {
  const {card, body, numbers} = views.get(answer), markdown = at("markdown").checked;
  const text = textOf(answer), shown = views.get(answer).blocks || [];
  const blocks = blocksOf(text, markdown).map(block => ({...block, markdown}));
  let same = 0;  // the last block may have grown within
  while (same < blocks.length - 1 && same < shown.length - 1
    && JSON.stringify(blocks[same]) === JSON.stringify(shown[same])) same += 1;
  while (body.children.length > same) body.lastChild.remove();
  body.append(...blocks.slice(same).map(block => blockElement(answer, text, block)));
  views.get(answer).blocks = blocks;
  body.classList.toggle("raw", !markdown);
  numbers.textContent = answer.numbers;
  numbers.classList.toggle("error", answer.state === "failed");
  card.dataset.state = answer.state;
  card.setAttribute("aria-busy", String(answer.state === "running"));
}

// Pieces come faster than a screen shows them: one redraw a frame.
let due = 0;
function showSoon(answer) {
  due = due || requestAnimationFrame(() => {
    due = 0;
    const follow = nearEnd();
    show(answer);
    if (follow) toEnd();
  });
}

function drawAnswer(turn, answer) {
  const card = make("section", "answer"), head = make("h2", "", answer.drafts ? "With drafts" : "Plain decoding");
  const faster = make("span", "faster"), same = make("span", "badge"), cut = make("p", "cut");
  const body = make("div", "text"), numbers = make("p", "numbers"), again = make("div", "row again");
  card.setAttribute("aria-label", answer.drafts ? "Answer with drafts" : "Answer of plain decoding");
  cut.textContent = "Cut at the limit of “Most tokens”.";
  head.append(faster, same, button("Copy", "small", it => copy(body, textOf(answer), it)));
  card.append(head, body, cut, numbers, again);
  again.append(button("Send again", "main", () => { if (takeBack(turn)) send(); }), button("Edit", "", () => takeBack(turn)));
  views.get(turn).querySelector(".answers").append(card);
  views.set(answer, {card, body, numbers, again, faster, same, cut});
  settle(answer);
}

function settle(answer) {
  show(answer);
  const {faster, same, cut} = views.get(answer), times = answer.faster || 0;
  faster.textContent = times ? `${times.toFixed(1)}x as fast` : "";
  faster.classList.toggle("slower", times < 1);
  same.hidden = answer.same === undefined;
  same.textContent = answer.same ? "the same text" : "another text";
  same.classList.toggle("differs", answer.same === false);
  cut.hidden = !answer.cut;
  views.get(answer).again.hidden = !(answer.state === "failed" && answer.drafts);
}

function drawTurn(turn) {
  const element = make("section", "turn");
  element.append(make("p", "question", turn.question), make("div", "answers"));
  at("log").append(element);
  views.set(turn, element);
  turn.answers.forEach(answer => drawAnswer(turn, answer));
}

function examples() {
  const shown = document.querySelector(".examples");
  if (shown) shown.remove();
  if (turns.length || !model) return;
  const box = make("div", "examples");
  box.append(make("p", "", "Ask something, or begin with one of these. Each answer comes with drafts and without: the same text at two speeds."));
  box.append(...EXAMPLES[model.medusa.chat ? "chat" : "text"].map(text => button(text, "", () => {
    at("question").value = text;
    send();
  })));
  at("log").append(box);
}

// A question that was not answered comes back to where it can be sent again.
function takeBack(turn) {
  if (running) return false;
  views.get(turn).remove();
  turns = turns.filter(one => one !== turn);
  at("question").value = turn.question;
  at("question").focus();
  keep();
  return true;
}

// Write one answer into a new card.
async function write(turn, drafts) {
  const answer = {drafts, runs: [], numbers: "", state: "running"};
  turn.answers.push(answer);
  drawAnswer(turn, answer);
  running = new AbortController();
  buttons();
  let tokens = 0, steps = 0, first = 0;
  try {
    const response = await call("/v1/chat/completions", {
      method: "POST", signal: running.signal,
      body: JSON.stringify({...turn.body, ...(model && {model: model.id}), stream: true, drafts}),
    });
    let done = false;
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        const more = choice.medusa;
        if (!more) continue;
        for (const [piece, depth] of more.parts) {
          answer.runs.push([piece, depth]);
          if (!depth && tokens) steps += 1;
        }
        tokens += more.tokens;
        first = first || performance.now();
        const seconds = (performance.now() - first) / 1000;
        const rate = seconds > 0 ? ((tokens - 1) / seconds).toFixed(0) : "…";
        const mean = steps ? ((tokens - 1) / steps).toFixed(2) : "…";
        answer.numbers = `${tokens} tokens, ${rate} tokens/s, accepted length ${mean}`;
        if (choice.finish_reason) {
          done = true;
          answer.rate = more.tokens_per_second;
          answer.cut = choice.finish_reason === "length";
          answer.numbers = `${more.new_tokens} tokens, ${more.tokens_per_second.toFixed(0)} tokens/s, ` +
            `accepted length ${more.mean_accepted_length.toFixed(2)}, ${more.steps} steps`;
        }
        showSoon(answer);
      }
    }
    if (!done) throw new Error(GONE);
    answer.state = "done";
  } catch (error) {
    const stopped = error.name === "AbortError", broken = error instanceof TypeError;
    answer.state = stopped ? "stopped" : "failed";
    answer.numbers = stopped ? answer.numbers + " (stopped)" : broken ? GONE : error.message;
    if (answer.numbers === GONE) loadModel();
  }
  running = null;
  settle(answer);
  keep();
  at("status").textContent = answer.state === "failed" ? answer.numbers : `${textOf(answer)} (${answer.numbers})`;
  buttons();
  toEnd();
  return answer;
}

const box = () => at("log").parentElement;
const nearEnd = () => box().scrollHeight - box().scrollTop - box().clientHeight < 80;
const toEnd = () => { box().scrollTop = 1e9; };

// The same question with the same seed, plainly, next to the answer with drafts.
async function answerPlainly(turn) {
  const [drafted, other] = turn.answers;
  if (other || drafted.state !== "done") return;
  const plain = await write(turn, false);
  if (plain.state === "done") {
    plain.same = textOf(plain) === textOf(drafted);
    drafted.faster = drafted.rate / plain.rate;
    settle(plain);
    settle(drafted);
    keep();
  }
}

async function send(event) {
  if (event) event.preventDefault();
  const question = at("question").value;
  if (running || !question.trim()) return;
  const number = id => Number(at(id).value), system = at("system").value;
  const messages = system.trim() ? [{role: "system", content: system}] : [];
  for (const {question, answers: [{state, runs}]} of turns) {
    if (state === "failed") continue;
    messages.push({role: "user", content: question}, {role: "assistant", content: textOf({runs})});
  }
  messages.push({role: "user", content: question});
  const body = {
    messages, temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"),
    seed: number("seed"), max_tokens: number("limit"),
  };
  const turn = {question, body, answers: []};
  turns.push(turn);
  examples();
  drawTurn(turn);
  toEnd();
  at("question").value = "";
  at("question").focus();
  await write(turn, true);
  if (at("plain").checked) await answerPlainly(turn);
}

function buttons() {
  at("send").disabled = at("clear").disabled = Boolean(running);
  at("stop").disabled = !running;
}

at("form").addEventListener("submit", send);
at("stop").addEventListener("click", () => running && running.abort());
at("plain").addEventListener("change", () => {
  if (at("plain").checked && turns.length && !running) answerPlainly(turns[turns.length - 1]);
});
at("markdown").addEventListener("change", () => turns.flatMap(turn => turn.answers).forEach(show));
at("clear").addEventListener("click", () => {
  turns = [];
  at("log").replaceChildren();
  examples();
  keep();
  at("question").focus();
});
at("question").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
at("key").addEventListener("change", loadModel);
addEventListener("pagehide", keep);
const wide = matchMedia("(min-width: 40rem)").matches, restored = restore();
turns.forEach(drawTurn);
toEnd();
if (wide) at("question").focus();
loadModel();

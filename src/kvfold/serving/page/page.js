// The page as a whole: which models face each other, and what both are asked.

import { servedModels } from "./server.js";
import { Side } from "./side.js";

const KEY = "kvfold.key";
const at = (id) => document.getElementById(id);
const sides = [];
let running = null;

// A tab that may not keep anything still works, and asks for the key again.
function keptKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

let key = keptKey();

function keepKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // See above.
  }
}

async function load() {
  at("trouble").hidden = at("key-form").hidden = true;
  try {
    show(await servedModels(key));
  } catch (error) {
    at("about").textContent = "";
    if (error.status === 401) askForKey(error.message);
    else {
      at("trouble").hidden = false;
      at("trouble-text").textContent = error.message;
    }
  }
}

function askForKey(reason) {
  at("key-form").hidden = false;
  at("key-reason").textContent = reason;
  at("key").focus();
}

// The first folded model beside the plain one; two folded ones, or one alone, if that is all.
function opponents(models) {
  const folded = models.filter((model) => model.folded);
  const plain = models.filter((model) => !model.folded);
  return [...folded.slice(0, plain.length ? 1 : 2), ...plain].slice(0, 2);
}

function show(models) {
  const chosen = opponents(models);
  sides.splice(0, sides.length, ...chosen.map((one) => new Side(at("side"), models, one, rescale)));
  at("sides").replaceChildren(...sides.map((side) => side.root));
  document.body.classList.toggle("single", sides.length === 1);
  at("in-turn-label").hidden = sides.length === 1;
  at("about").textContent =
    sides.length > 1
      ? "The same question to both sides, and the bytes that each one's cache takes"
      : "A chat, and the bytes that its cache takes";
  for (const id of ["anew", "question", "send"]) at(id).disabled = false;
  at("question").focus();
}

// One scale for the bars of all sides, so that they can be compared by eye.
function rescale() {
  const scale = Math.max(0, ...sides.map((side) => side.figures.reach));
  for (const side of sides) side.figures.draw(scale);
}

function numberIn(id) {
  const value = at(id).valueAsNumber;
  return Number.isNaN(value) ? undefined : value;
}

async function ask() {
  const question = at("question").value.trim();
  if (!question || running || !sides.length) return;
  at("question").value = "";
  running = new AbortController();
  showRunning();
  // One seed for both, so that only the caches make a difference.
  const options = {
    temperature: numberIn("temperature"),
    max_tokens: numberIn("max-tokens"),
    seed: Math.floor(Math.random() * 2 ** 31),
  };
  const put = (side) => side.ask(question, options, key, running.signal);
  const outcomes = [];
  if (at("in-turn").checked) {
    for (const side of sides) if (!running.signal.aborted) outcomes.push(await put(side));
  } else {
    outcomes.push(...(await Promise.all(sides.map(put))));
  }
  running = null;
  showRunning();
  tell(question, outcomes);
}

function tell(question, outcomes) {
  at("announcer").textContent = outcomes.map((outcome) => outcome.told).join(" ");
  const statuses = outcomes.map((outcome) => outcome.status);
  // What nobody answered need not be typed again.
  if (!statuses.includes(undefined)) at("question").value ||= question;
  if (statuses.includes(401)) askForKey("The server does not take this key any more.");
}

function showRunning() {
  at("send").hidden = at("anew").disabled = running !== null;
  at("stop").hidden = running === null;
  at("announcer").textContent = running ? "Asked." : "";
  if (!running && [null, document.body, at("stop")].includes(document.activeElement)) {
    at("question").focus();
  }
}

function stop() {
  running?.abort();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
at("stop").addEventListener("click", stop);
at("anew").addEventListener("click", () => {
  for (const side of sides) side.forget();
  at("question").focus();
});
at("again").addEventListener("click", load);
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(at("key").value.trim());
  if (sides.length) at("key-form").hidden = true;
  else load();
});

load();

// One side of the page: a model, its conversation, and the figures of its latest answer.

import { Figures, bytesText, timesText } from "./figures.js";
import { chat } from "./server.js";

const NEAR_END = 40; // pixels from its end within which the talk follows new text

export class Side {
  // models: as the server lists them. chosen: the one to begin with. changed: see Figures.
  constructor(template, models, chosen, changed) {
    this.root = template.content.cloneNode(true).firstElementChild;
    this.talk = this.root.querySelector(".talk");
    this.title = this.root.querySelector("h2");
    this.models = models;
    this.history = [];
    this.figures = new Figures(this.root.querySelector(".figures"), changed);
    this.select = this.root.querySelector("select");
    this.select.append(...models.map((model) => new Option(model.id, model.id)));
    this.select.value = chosen.id;
    this.select.addEventListener("change", () => this.showModel());
    this.showModel();
    this.forget();
  }

  get model() {
    return this.models.find((model) => model.id === this.select.value);
  }

  get kind() {
    return this.model.folded ? "Folded" : "Plain";
  }

  showModel() {
    this.title.textContent = this.kind;
    this.root.classList.toggle("folded", this.model.folded);
    this.root.setAttribute("aria-label", `${this.kind}: ${this.model.id}`);
    this.talk.setAttribute("aria-label", `Conversation with ${this.model.id}`);
    if (!this.history.length) this.showEmpty();
    this.figures.clear(this.model.folded);
  }

  // Begin a new conversation.
  forget() {
    this.history = [];
    this.showEmpty();
    this.figures.clear(this.model.folded);
  }

  showEmpty() {
    const told = document.createElement("p");
    told.className = "empty";
    told.textContent = this.model.folded
      ? "Answers here come from a folded cache: the add-on keeps what was said in fewer bytes."
      : "Answers here come from the model as it is, whose cache keeps every token whole.";
    this.talk.replaceChildren(told);
  }

  busy(is) {
    this.select.disabled = is;
    this.talk.setAttribute("aria-busy", is);
  }

  // Put a question and show the answer as it comes. Returns what to say of it, and the
  // status of an answer that the server refused.
  async ask(question, options, key, signal) {
    const answer = this.begin(question);
    const messages = [...this.history, { role: "user", content: question }];
    let outcome;
    try {
      outcome = await this.receive(answer, { ...options, messages }, key, signal);
    } catch (error) {
      outcome = this.failed(answer, error);
    }
    answer.root.classList.remove("waiting");
    if (answer.text.data || outcome.complete) {
      this.history = [...messages, { role: "assistant", content: answer.text.data }];
    }
    if (outcome.note) this.note(answer, outcome.note);
    this.busy(false);
    const said = `${this.kind}: ${outcome.status === undefined ? "answered" : "failed"}.`;
    return { status: outcome.status, told: `${said} ${outcome.note} ${this.bytesTold()}` };
  }

  begin(question) {
    this.talk.querySelector(".empty")?.remove();
    this.figures.clear(this.model.folded);
    this.busy(true);
    this.addMessage("question", "You", question);
    const answer = this.addMessage("answer", this.model.id, "");
    answer.root.classList.add("waiting");
    return answer;
  }

  // A message whose text is only ever a text node: nothing in it can become markup.
  addMessage(kind, who, said) {
    const root = document.createElement("article");
    root.className = `message ${kind}`;
    const name = document.createElement("h3");
    name.textContent = who;
    const body = document.createElement("p");
    const text = document.createTextNode(said);
    body.append(text);
    root.append(name, body);
    this.talk.append(root);
    this.talk.scrollTop = this.talk.scrollHeight;
    return { root, text };
  }

  async receive(answer, wanted, key, signal) {
    const started = performance.now();
    const clock = { started, begun: null };
    let reason = null;
    for await (const chunk of chat({ ...wanted, model: this.model.id }, key, signal)) {
      const now = performance.now();
      if (clock.begun === null) this.figures.setTimes({ first: (now - started) / 1000 });
      clock.begun ??= { at: now, tokens: null };
      for (const choice of chunk.choices) {
        if (choice.delta.content) this.append(answer, choice.delta.content);
        if (choice.kvfold_cache) this.showSize(choice.kvfold_cache, clock.begun, now);
        reason = choice.finish_reason ?? reason;
      }
      if (chunk.usage) this.figures.setCached(chunk.usage.prompt_tokens_details.cached_tokens);
    }
    if (reason === "length") return { complete: true, note: "Cut off at the longest answer allowed." };
    return { complete: true, note: answer.text.data ? "" : "An empty answer." };
  }

  append(answer, text) {
    const talk = this.talk;
    const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR_END;
    answer.root.classList.remove("waiting");
    answer.text.appendData(text);
    if (follows) talk.scrollTop = talk.scrollHeight;
  }

  // The first size comes with the first token: a cache has seen all tokens but the last.
  showSize(size, begun, now) {
    begun.tokens ??= size.tokens;
    this.figures.setSize(size);
    const made = size.tokens - begun.tokens;
    if (made > 0) this.figures.setTimes({ speed: (1000 * made) / (now - begun.at) });
  }

  failed(answer, error) {
    if (error.name === "AbortError") return { complete: false, note: "Stopped." };
    const told = document.createElement("p");
    told.className = "error";
    told.setAttribute("role", "alert");
    told.textContent = error.status ? `${error.status}: ${error.message}` : error.message;
    answer.root.append(told);
    this.talk.scrollTop = this.talk.scrollHeight;
    return { complete: false, note: "", status: error.status };
  }

  note(answer, said) {
    const note = document.createElement("p");
    note.className = "note";
    note.textContent = said;
    answer.root.append(note);
    this.talk.scrollTop = this.talk.scrollHeight;
  }

  bytesTold() {
    const size = this.figures.size;
    if (!size) return "";
    const times = timesText(size.bytes, size.plain_bytes);
    return `Its cache takes ${bytesText(size.bytes)}${times && `, ${times} than the plain one`}.`;
  }
}

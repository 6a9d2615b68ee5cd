// The figures under one side: how many bytes its cache takes, against the plain cache's.

const PARTS = {
  anchors: "first tokens, kept exact",
  window: "last tokens, kept exact",
  slots: "folded history",
  scales: "scales of packed values",
  pending: "not folded yet",
  plain: "layers that are not folded",
  recurrent: "recurrent states",
  unused: "room to grow",
};
const SAME = 0.01; // so much of a difference is none worth a word

export function bytesText(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit && count < 99.95 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

// "1.7× smaller", "1.2× larger", or "" where both are the same.
export function timesText(takes, need) {
  if (Math.abs(takes - need) <= SAME * need) return "";
  const [times, word] = takes < need ? [need / takes, "smaller"] : [takes / need, "larger"];
  return `${times.toFixed(times < 1.1 ? 2 : 1)}× ${word}`;
}

export class Figures {
  constructor(root, changed) {
    this.root = root;
    this.changed = changed; // called when sizes change, to find the scale that all sides share
    this.size = null;
  }

  at(name) {
    return this.root.querySelector(name);
  }

  // Forget the last answer's.
  clear(folded) {
    this.folded = folded;
    this.size = null;
    for (const name of [".takes-text", ".tokens", ".first", ".speed", ".cached"]) {
      this.at(name).textContent = "–";
    }
    this.at(".need-text").textContent = "";
    this.at(".times").hidden = this.at(".parts").hidden = true;
    this.at(".bar").setAttribute("aria-valuetext", "nothing yet");
    this.changed();
  }

  // The larger of what the cache takes and what the plain one would.
  get reach() {
    return this.size ? Math.max(this.size.bytes, this.size.plain_bytes) : 0;
  }

  setSize(size) {
    this.size = size;
    this.at(".tokens").textContent = size.tokens.toLocaleString("en");
    this.at(".takes-text").textContent = bytesText(size.bytes);
    const times = timesText(size.bytes, size.plain_bytes);
    const need = bytesText(size.plain_bytes);
    this.at(".need-text").textContent =
      this.folded || times ? `of ${need} for the plain cache` : "the plain cache";
    this.at(".times").textContent = times || "no smaller";
    this.at(".times").hidden = !this.folded && !times;
    this.at(".times").classList.toggle("larger", size.bytes > size.plain_bytes || !times);
    this.showParts(size);
    this.changed();
  }

  // The bar, where `scale` bytes fill it.
  draw(scale) {
    const bar = this.at(".bar");
    const { bytes, plain_bytes: need } = this.size ?? { bytes: 0, plain_bytes: 0 };
    const width = (count) => `${scale ? (100 * count) / scale : 0}%`;
    bar.querySelector(".takes").style.width = width(bytes);
    bar.querySelector(".need").style.width = width(need);
    bar.classList.toggle("nothing", !this.size);
    bar.setAttribute("aria-valuemax", scale || 1);
    bar.setAttribute("aria-valuenow", bytes);
    if (this.size) {
      const told = `${bytesText(bytes)}, where the plain cache needs ${bytesText(need)}`;
      bar.setAttribute("aria-valuetext", told);
    }
  }

  showParts(size) {
    const items = Object.entries(size.parts).map(([name, count]) => {
      const item = document.createElement("li");
      const told = document.createElement("span");
      told.textContent = !this.folded && name === "plain" ? "keys and values" : PARTS[name] ?? name;
      const bytes = document.createElement("span");
      bytes.textContent = bytesText(count);
      item.append(told, bytes);
      return item;
    });
    this.at(".parts ul").replaceChildren(...items);
    this.at(".parts").hidden = false;
    const shared = this.at(".shared");
    shared.hidden = size.rows === 1;
    shared.textContent =
      `This answer shares its memory with ${size.rows - 1} more that the server gives now. ` +
      `Its part has room for the longest of them, ${size.longest.toLocaleString("en")} tokens.`;
  }

  setTimes({ first, speed }) {
    if (first !== undefined) this.at(".first").textContent = secondsText(first);
    if (speed !== undefined) this.at(".speed").textContent = speed.toFixed(speed < 100 ? 1 : 0);
  }

  setCached(tokens) {
    this.at(".cached").textContent = tokens ? `${tokens.toLocaleString("en")} tokens` : "none";
  }
}

function secondsText(seconds) {
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
}

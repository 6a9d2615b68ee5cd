// What the page asks of the server: OpenAI's API, and kvfold's figures beside the text.

// An answer that is no success; the message is the server's own.
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const address = (path) => new URL(path, document.baseURI);

function headers(key) {
  const made = { "content-type": "application/json" };
  if (key) made.authorization = `Bearer ${key}`;
  return made;
}

async function asked(path, options) {
  let answer;
  try {
    answer = await fetch(address(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(`The server can't be reached (${error.message}).`, 0);
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let told = text || answer.statusText;
  try {
    told = JSON.parse(text).error.message;
  } catch {
    // Not the server's own shape, such as a proxy's page: shown as it is.
  }
  throw new Refusal(told, answer.status);
}

export async function servedModels(key) {
  const answer = await asked("v1/models", { headers: headers(key) });
  return (await answer.json()).data;
}

// Yields the objects of a streamed chat completion, in the order they come.
export async function* chat(wanted, key, signal) {
  const body = JSON.stringify({
    ...wanted,
    stream: true,
    stream_options: { include_usage: true },
    kvfold_cache: true,
  });
  const options = { method: "POST", headers: headers(key), body, signal };
  const answer = await asked("v1/chat/completions", options);
  for await (const data of eventData(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message, answer.status);
    yield chunk;
  }
  throw new Refusal("The answer broke off: the server closed the connection.", answer.status);
}

function brokenOff(error) {
  if (error.name === "AbortError") throw error;
  throw new Refusal(`The answer broke off (${error.message}).`, 0);
}

async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read().catch(brokenOff);
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

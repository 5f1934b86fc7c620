// Calls to this server, with the key that the user gave. Keys stay in this tab.

const KEY = "sgl-pipeline-key";
export const ROOT = new URL("../", document.baseURI);

export const key = {
  get value() {
    try { return sessionStorage.getItem(KEY) ?? ""; } catch { return this.kept ?? ""; }
  },
  set value(text) {
    this.kept = text;
    try { sessionStorage.setItem(KEY, text); } catch { /* kept in `kept` */ }
  },
};

/** The administrator's, where the server has one beside the API key; for as long as the page is open. */
export const adminKey = { value: "" };

/** Fetches `path` of this server; `options` are fetch's, and `isAdmin` for an administrator's routes. */
export function call(path, { isAdmin = false, ...options } = {}) {
  const headers = new Headers(options.headers);
  const bearer = (isAdmin && adminKey.value) || key.value;
  if (bearer) headers.set("Authorization", `Bearer ${bearer}`);
  if (options.body) headers.set("Content-Type", "application/json");
  return fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store" });
}

/** What a reply that refuses says. */
export async function refusal(reply) {
  const body = await reply.json().catch(() => ({}));
  const error = body.error?.message ?? body.error ?? body.message ?? body.detail;
  return typeof error === "string" ? error : `the server answered ${reply.status}`;
}

/** The events of a text/event-stream: {name, data}; OpenAI's last one, [DONE], is no JSON. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value.replaceAll("\r", "")).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      let name = "message";
      const data = [];
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      const text = data.join("\n");
      yield { name, data: text === "[DONE]" ? text : JSON.parse(text) };
    }
  }
}

// The stream of /pipeline/events: connects, connects again, and says how it is doing.

import { call, events, refusal } from "./api.js";

const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 5000;
// The server says something at least once a second.
const SILENCE_MS = 8000;

/**
 * Follows the server for ever. `on.hello(facts)`, `on.tick(tick)`, `on.dropped(count)`,
 * `on.status(state, text)` with state live, lost or wait; `on.key()` resolves when there is a key.
 */
export async function follow(on) {
  let retryMs = FIRST_RETRY_MS;
  for (;;) {
    const stop = new AbortController();
    let watchdog;
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => stop.abort(), SILENCE_MS);
    };
    try {
      heard();
      const reply = await call("pipeline/events", { signal: stop.signal });
      if (reply.status === 401) {
        clearTimeout(watchdog);
        on.status("wait", "needs a key");
        await on.key();
        continue;
      }
      if (!reply.ok) throw new Error(await refusal(reply));
      for await (const event of events(reply)) {
        heard();
        retryMs = FIRST_RETRY_MS;
        if (event.name === "hello") on.hello(event.data);
        else if (event.name === "tick") on.tick(event.data);
        else if (event.name === "dropped") on.dropped(event.data.events);
        on.status("live", "live");
      }
      on.status("lost", "the server has ended the stream");
    } catch (error) {
      const isNetwork = error.name === "AbortError" || error instanceof TypeError;
      on.status("lost", isNetwork ? "no connection; trying again" : error.message);
    } finally {
      clearTimeout(watchdog);
    }
    await new Promise((resolve) => setTimeout(resolve, retryMs));
    retryMs = Math.min(2 * retryMs, LONGEST_RETRY_MS);
  }
}

"use strict";
// The operators' page: what /admin/events says once a second, releases, and a chat. All text goes in as textContent.

const HISTORY = 300; // seconds of tokens/s that are drawn
const RETRY_MS = 2000;
const byId = (id) => document.getElementById(id);
const stored = (name) => sessionStorage.getItem(`trident.${name}`) || "";
const histories = new Map(); // by pool: tokens/s
const counters = new Map(); // by name: [time, value] of the latest event
let connection = null;

function element(tag, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}

function put(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

/** Keep one child of ``parent`` for each item, so that focus and what is typed outlive an update. */
function keyed(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const key = keyOf(item);
    let child = old.get(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    old.delete(key);
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] || null);
    update(child, item);
  });
  for (const gone of old.values()) gone.remove();
}

const round = (value, digits = 0) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
function seconds(value) {
  if (!value) return "–";
  return value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

/** Return how fast a counter grows per second; 0 at first and after a restart. */
function rate(name, value, at) {
  const [before, had] = counters.get(name) || [at, value];
  counters.set(name, [at, value]);
  return at > before && value >= had ? (value - had) / (at - before) : 0;
}

// ---------------------------------------------------------------------------------------------------- the connection

async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:"));
      if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

function connected(on, text) {
  byId("connection").dataset.state = on ? "on" : "off";
  put(byId("connection"), text);
}

function signedIn(on) {
  byId("sign-in").hidden = on;
  byId("live").hidden = byId("sign-out").hidden = !on;
}

function signOut(problem) {
  if (connection) connection.abort();
  connection = null;
  sessionStorage.removeItem("trident.token");
  signedIn(false);
  connected(false, "not connected");
  put(byId("sign-in-problem"), problem);
  byId("token").focus();
}

async function follow() {
  const own = (connection = new AbortController());
  let shown = false;
  while (connection === own) {
    try {
      const headers = { authorization: `Bearer ${stored("token")}` };
      const response = await fetch("/admin/events", { headers, signal: own.signal, cache: "no-store" });
      if (response.status === 401) return signOut("This token is not the gateway's.");
      if (response.status === 403) return signOut(await problemOf(response));
      if (!response.ok) throw new Error(await problemOf(response));
      for await (const data of serverSentEvents(response)) {
        if (!shown) {
          signedIn(true);
          loadModels();
        }
        shown = true;
        const state = JSON.parse(data);
        connected(true, state.draining ? "the gateway stops" : state.ready ? "ready" : "no replica is ready");
        show(state);
      }
      throw new Error("the gateway ended the connection");
    } catch (error) {
      if (connection !== own) return;
      connected(false, `not connected: ${error.message}`);
      if (!shown) put(byId("sign-in-problem"), error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status}`;
  }
}

// ------------------------------------------------------------------------------------------------------ what is shown

function show(state) {
  put(byId("gateway-problem"), state.problem ? `The configuration file cannot be used: ${state.problem}` : "");
  const at = state.time;
  const sample = (name, labels) =>
    (state.samples[name] || []).find(([found]) => Object.entries(labels).every(([k, v]) => found[k] === v))?.[1];
  const replicas = (state.samples.breaker_state || []).map(([labels]) => {
    const of = (name) => sample(name, labels);
    const speed = rate(`tokens ${labels.replica}`, of("replica_tokens_total") || 0, at);
    const registered = state.registered.find((entry) => entry.address === labels.replica);
    return { ...labels, of, speed, registered };
  });
  for (const entry of state.registered) {
    if (!replicas.some((replica) => replica.replica === entry.address)) {
      replicas.push({ replica: entry.address, pool: entry.pool, of: () => undefined, speed: 0, registered: entry });
    }
  }
  showPools(state, replicas, sample);
  showReplicas(replicas);
  showReleases(state.releases);
  showScaling(state.scaling);
}

const POOL_ROWS = ["Requests / places", "Waiting", "Waiting by class", "First token p50 / p95", "Between tokens p95", "Errors", "Refused"];

function showPools(state, replicas, sample) {
  keyed(
    byId("pool-cards"),
    Object.entries(state.pools),
    ([pool]) => pool,
    ([pool]) =>
      element(
        "article",
        { class: "card", "aria-label": `pool ${pool || "(default)"}` },
        element("div", { class: "head" }, element("h3", { text: pool || "default pool" }), element("span", { class: "state" })),
        element("div", { class: "big" }, element("span"), element("small", { text: " tokens/s" })),
        history(),
        element("dl", {}, ...POOL_ROWS.flatMap((row) => [element("dt", { text: row }), element("dd")])),
      ),
    (card, [pool, seen]) => {
      const own = replicas.filter((replica) => replica.pool === pool && replica.of("replica_healthy") !== undefined);
      const healthy = own.filter((replica) => replica.of("replica_healthy") && replica.of("breaker_state") !== 2).length;
      const starting = sample("pool_starting", { pool }) || 0;
      const state_ = card.querySelector(".state");
      put(state_, `${healthy} of ${own.length} healthy${starting ? `, ${starting} start` : ""}`);
      state_.className = `state ${healthy === 0 ? "bad" : healthy < own.length ? "warn" : "good"}`;
      const speed = own.reduce((sum, replica) => sum + replica.speed, 0);
      put(card.querySelector(".big span"), round(speed, speed < 10 ? 1 : 0));
      drawn(card.querySelector("polyline"), pool, speed);
      const queues = (state.samples.queue_depth || []).filter(([labels, count]) => labels.pool === pool && count > 0);
      const values = [
        `${sample("pool_running", { pool }) ?? "–"} / ${sample("pool_limit", { pool }) ?? "–"}`,
        sample("pool_waiting", { pool }) ?? "–",
        queues.map(([labels, count]) => `${labels.priority}: ${count}`).join(", ") || "none",
        `${seconds(seen.ttft_p50_s)} / ${seconds(seen.ttft_p95_s)}`,
        seconds(seen.itl_p95_s),
        `${seen.errors} of ${seen.requests}`,
        seen.refusals,
      ];
      card.querySelectorAll("dd").forEach((cell, place) => put(cell, values[place]));
    },
  );
}

function history() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "history");
  svg.setAttribute("viewBox", `0 0 ${HISTORY} 30`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  return svg;
}

function drawn(line, pool, speed) {
  const past = histories.get(pool) || [];
  past.push(speed);
  if (past.length > HISTORY) past.shift();
  histories.set(pool, past);
  const most = Math.max(1, ...past);
  const first = HISTORY - past.length;
  line.setAttribute("points", past.map((value, place) => `${first + place},${(29 - (27 * value) / most).toFixed(1)}`).join(" "));
}

const BREAKER = ["closed", "half open", "open"];
const REPLICA_CELLS = ["Pool", "State", "Breaker", "Requests / slots", "Waiting", "KV cache", "Tokens/s", "Capacity in tokens/s"];

function replicaState({ of, registered }) {
  if (registered && registered.state !== "ready") return [registered.state, "warn"];
  if (of("replica_healthy") === undefined) return registered ? ["registered", "warn"] : ["upstream", ""];
  return of("replica_healthy") ? ["healthy", "good"] : ["not healthy", "bad"];
}

function showReplicas(replicas) {
  keyed(
    byId("replica-rows"),
    replicas,
    (replica) => `${replica.pool} ${replica.replica}`,
    (replica) => {
      const cells = REPLICA_CELLS.map((label) =>
        element("td", { "data-label": label, class: /Req|Wait|[Tt]ok/.test(label) ? "number" : "" }),
      );
      cells[5].append(element("progress", { max: 1, "aria-label": "KV cache in use" }));
      return element("tr", {}, element("th", { scope: "row", text: replica.replica }), ...cells);
    },
    (row, replica) => {
      const { of } = replica;
      const [pool, state, breaker, requests, waiting, cache, speed, most] = row.querySelectorAll("td");
      const [text, kind] = replicaState(replica);
      put(pool, replica.pool || "default");
      put(state, text);
      state.className = kind;
      put(breaker, BREAKER[of("breaker_state")] ?? "–");
      breaker.className = of("breaker_state") ? "bad" : "";
      put(requests, `${of("replica_outstanding") ?? "–"} / ${of("replica_slots") || "?"}`);
      put(waiting, of("replica_waiting") ?? "–");
      const used = of("replica_kv_usage_ratio");
      const bar = cache.querySelector("progress");
      bar.hidden = used === undefined;
      bar.value = used || 0;
      bar.title = `${round(100 * used)} %`;
      put(speed, round(replica.speed, 1));
      put(most, of("replica_tokens_per_second") ? round(of("replica_tokens_per_second")) : "–");
    },
  );
}

const RELEASE_ROWS = [
  ["Requests", (seen) => seen.requests],
  ["Errors", (seen) => seen.errors],
  ["Refused", (seen) => seen.refusals],
  ["Tokens in", (seen) => seen.input_tokens],
  ["Tokens out", (seen) => seen.output_tokens],
  ["First token p50", (seen) => seconds(seen.ttft_p50_s)],
  ["First token p95", (seen) => seconds(seen.ttft_p95_s)],
  ["Between tokens p95", (seen) => seconds(seen.itl_p95_s)],
];

function showReleases(releases) {
  byId("no-releases").hidden = releases.length > 0;
  keyed(byId("release-cards"), releases, (release) => release.name, releaseCard, (card, release) => {
    const { stable, candidate, rollback, burn_rates: burns } = release;
    const stopped = release.state === "rolled back";
    put(card.querySelector(".state"), release.state);
    card.querySelector(".state").className = `state ${stopped ? "bad" : release.state === "running" ? "good" : "warn"}`;
    const what = release.kind === "shadow" ? `copies of ${release.weight} % go to` : `${release.weight} % go to`;
    put(card.querySelector(".what"), stopped ? `Nothing goes to ${candidate.pool}: ${release.rolled_back}` : `${release.kind}: ${what} ${candidate.pool}`);
    put(card.querySelector(".stable"), stable.pool || "default");
    put(card.querySelector(".candidate"), candidate.pool);
    card.querySelectorAll("tbody tr").forEach((row, place) => {
      put(row.children[1], RELEASE_ROWS[place][1](stable));
      put(row.children[2], RELEASE_ROWS[place][1](candidate));
    });
    const rates = Object.entries(burns).map(([name, burn]) => `${name.replace("_", " ")} ${round(burn.short, 1)} / ${round(burn.long, 1)}`);
    const limit = rollback.automatic ? `rolled back from ${rollback.burn_rate} on` : "not rolled back automatically";
    put(card.querySelector(".burn"), `Burn rates, short / long window: ${rates.join(", ") || "none yet"}; ${limit}.`);
    const copies = Object.entries(candidate.copies).map(([result, count]) => `${count} ${result}`);
    put(card.querySelector(".copies"), copies.length ? `Copies: ${copies.join(", ")}` : "");
    for (const control of card.querySelectorAll(".shift input, .shift button")) control.disabled = stopped;
    card.querySelector(".danger").disabled = stopped;
    card.querySelector(".again").hidden = !stopped;
    card.querySelector(".finish").hidden = stopped || release.weight !== 100 || release.kind === "shadow";
  });
}

function releaseCard(release) {
  const name = release.name;
  const weight = element("input", { type: "number", min: 0, max: 100, step: "any", value: release.weight, "aria-label": `weight of ${name} in percent` });
  const shift = element("button", { type: "button", text: "Shift" });
  const back = element("button", { type: "button", class: "danger", text: "Roll back" });
  const again = element("button", { type: "button", class: "again", text: "Start again" });
  const finish = element("button", { type: "button", class: "finish", text: "Finish" });
  finish.addEventListener("click", () =>
    ask(`End ${name}: ${release.candidate.pool} takes the place of ${release.stable.pool || "default"} in the file?`, "Finish", () => changeRelease(name, { action: "finish" })),
  );
  shift.addEventListener("click", () => {
    if (!weight.reportValidity() || weight.value === "") return;
    const to = Number(weight.value);
    ask(`Give ${to} % to the candidate of ${name}?`, `Shift to ${to} %`, () => changeRelease(name, { action: "shift", to }));
  });
  weight.addEventListener("keydown", (event) => event.key === "Enter" && shift.click());
  back.addEventListener("click", () =>
    ask(`Send nothing to the candidate of ${name} any more?`, "Roll back", () => changeRelease(name, { action: "rollback", reason: "by an operator at the console" })),
  );
  again.addEventListener("click", () =>
    ask(`Start ${name} again with its last weight?`, "Start again", () => changeRelease(name, { action: "start" })),
  );
  const head = element("tr", {}, element("td"), element("th", { scope: "col", class: "stable number" }), element("th", { scope: "col", class: "candidate number" }));
  const rows = RELEASE_ROWS.map(([label]) =>
    element("tr", {}, element("th", { scope: "row", text: label }), element("td", { class: "number" }), element("td", { class: "number" })),
  );
  return element(
    "article",
    { class: "card", "aria-label": `release ${name}` },
    element("div", { class: "head" }, element("h3", { text: name }), element("span", { class: "state" })),
    element("p", { class: "what" }),
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)),
    element("p", { class: "note burn" }),
    element("p", { class: "note copies" }),
    element("div", { class: "buttons" }, element("span", { class: "shift" }, weight, element("span", { text: "%" }), shift), back, again, finish),
  );
}

async function changeRelease(name, change) {
  const headers = { authorization: `Bearer ${stored("token")}`, "content-type": "application/json" };
  const path = `/admin/releases/${encodeURIComponent(name)}`;
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(change) });
  if (!response.ok) throw new Error(await problemOf(response));
  showReleases((await response.json()).releases);
}

function ask(text, yes, run) {
  const dialog = byId("confirm");
  put(byId("confirm-text"), text);
  put(byId("confirm-problem"), "");
  put(byId("confirm-yes"), yes);
  byId("confirm-yes").disabled = false;
  byId("confirm-yes").onclick = async () => {
    byId("confirm-yes").disabled = true;
    try {
      await run();
      dialog.close();
    } catch (error) {
      put(byId("confirm-problem"), error.message);
      byId("confirm-yes").disabled = false;
    }
  };
  dialog.showModal();
}

function showScaling(decisions) {
  byId("no-scaling").hidden = decisions.length > 0;
  keyed(
    byId("scaling-rows"),
    decisions,
    (decision) => `${decision.at} ${decision.pool} ${decision.replicas}`,
    (decision) => {
      const at = new Date(decision.at * 1000);
      return element(
        "li",
        {},
        element("time", { datetime: at.toISOString(), text: at.toLocaleTimeString([], { hour12: false }) }),
        element("strong", { text: `${decision.pool || "default pool"}: ${decision.replicas} replicas` }),
        element("p", { text: decision.reason }),
      );
    },
    () => {},
  );
}

// ------------------------------------------------------------------------------------------------------ the playground

let chat = [];
let speaking = null;

function keyHeaders() {
  return stored("api-key") ? { authorization: `Bearer ${stored("api-key")}` } : {};
}

async function loadModels() {
  const response = await fetch("/v1/models", { headers: keyHeaders() }).catch(() => null);
  const models = response && response.ok ? (await response.json()).data : [];
  const chosen = byId("model").value;
  byId("model").replaceChildren(...models.map((model) => element("option", { value: model.id, text: model.id })));
  if (models.some((model) => model.id === chosen)) byId("model").value = chosen;
}

function message(role, text) {
  const body = element("p", { text });
  const timing = element("p", { class: "note" });
  const box = element("article", { class: `message ${role}`, "aria-label": role === "user" ? "You" : "The model" }, body, timing);
  byId("messages").append(box);
  return { body, timing };
}

async function say(text) {
  const turns = chat; // a Clear during the answer begins another list
  turns.push({ role: "user", content: text });
  message("user", text);
  const { body, timing } = message("assistant", "");
  const own = (speaking = new AbortController());
  const times = [];
  const began = performance.now();
  let usage = null;
  let answer = "";
  let problem = "";
  byId("send").disabled = !(byId("stop").disabled = false);
  byId("messages").setAttribute("aria-busy", "true");
  try {
    const request = {
      model: byId("model").value,
      messages: turns,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Number(byId("max-tokens").value),
      temperature: Number(byId("temperature").value),
    };
    const headers = { "content-type": "application/json", ...keyHeaders() };
    const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(request), signal: own.signal });
    if (!response.ok) throw new Error(await problemOf(response));
    for await (const data of serverSentEvents(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      const delta = event.choices?.[0]?.delta;
      const added = (delta?.reasoning_content || "") + (delta?.content || "");
      if (!added) continue;
      times.push(performance.now());
      answer += added;
      put(body, answer);
      put(timing, timings(began, times, usage));
    }
  } catch (error) {
    problem = error.name === "AbortError" ? "stopped" : error.message;
  }
  speaking = null;
  byId("stop").disabled = !(byId("send").disabled = false);
  byId("messages").setAttribute("aria-busy", "false");
  put(timing, [timings(began, times, usage), problem].filter(Boolean).join(" · "));
  if (problem && problem !== "stopped") timing.className = "problem";
  // Without an answer the question is not part of the next request.
  if (answer) turns.push({ role: "assistant", content: answer });
  else turns.pop();
}

function timings(began, times, usage) {
  if (!times.length) return "";
  const total = (times[times.length - 1] - times[0]) / 1000;
  const gaps = times.slice(1).map((time, place) => time - times[place]).sort((a, b) => a - b);
  const parts = [`first token ${seconds((times[0] - began) / 1000)}`];
  if (gaps.length) parts.push(`between events p50 ${seconds(gaps[gaps.length >> 1] / 1000)}, p95 ${seconds(gaps[Math.floor(gaps.length * 0.95)] / 1000)}`);
  if (usage) {
    if (total > 0) parts.push(`${round((usage.completion_tokens - 1) / total, 1)} tokens/s`);
    parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens in ${seconds((times[times.length - 1] - began) / 1000)}`);
  }
  return parts.join(" · ");
}

// ---------------------------------------------------------------------------------------------------------- the start

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("trident.token", byId("token").value.trim());
  byId("token").value = "";
  put(byId("sign-in-problem"), "");
  if (connection) connection.abort();
  follow();
});
byId("sign-out").addEventListener("click", () => signOut(""));
byId("confirm-no").addEventListener("click", () => byId("confirm").close());
byId("api-key").addEventListener("change", () => {
  sessionStorage.setItem("trident.api-key", byId("api-key").value.trim());
  loadModels();
});
byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || speaking) return;
  byId("prompt").value = "";
  say(text);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat-form").requestSubmit();
});
byId("stop").addEventListener("click", () => speaking?.abort());
byId("clear").addEventListener("click", () => {
  speaking?.abort();
  chat = [];
  byId("messages").replaceChildren();
  byId("prompt").focus();
});
if (stored("token")) follow();
else byId("token").focus();

// The dashboard's page: asks for tasks, and for the chosen one's history, every two seconds.
// Texts come from workers, so they are only ever set as text, never as HTML.
"use strict";

const EVERY_MS = 2000, POINTS = 400, SILENT_S = 10;
const CHARTS = [
  { title: "mean reward", lines: ["eval_reward0", "reward0"] },
  { title: "loss", lines: ["loss"] },
  { title: "updates/s, env steps/s", lines: ["updates_per_s", "env_steps_per_s"] },
];
const byId = (id) => document.getElementById(id);
let chosen = decodeURIComponent(location.hash.slice(1)), known = "", rows = [], last = "0";

function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function drawn(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

async function ask(path) {
  const answer = await fetch(path);
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error);
  return data;
}

function duration(seconds) {
  const s = Math.round(seconds), m = Math.floor(s / 60), h = Math.floor(m / 60);
  return h ? `${h}h${String(m % 60).padStart(2, "0")}m` : m ? `${m}m${String(s % 60).padStart(2, "0")}s` : `${s}s`;
}

function number(value, digits = 5) {
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

function bytes(count) {
  const unit = count >= 2 ** 30 ? [2 ** 30, "GiB"] : count >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  return `${number(count / unit[0], 3)} ${unit[1]}`;
}

function showTasks(tasks) {
  const newest = [...tasks].reverse();
  if (!newest.some((task) => task.task === chosen)) chosen = newest.length ? newest[0].task : "";
  byId("nothing").hidden = newest.length > 0;
  byId("run").hidden = newest.length === 0;
  byId("tasks").replaceChildren(...newest.map((task) => {
    const button = element("button", task.task, { "aria-current": String(task.task === chosen) });
    button.append(element("small", `${task.state}, train ${number(task.train_count, 12)}`, { class: task.state }));
    button.onclick = () => { location.hash = encodeURIComponent(chosen = task.task); refresh(); };
    return button;
  }));
}

function facts(status, cost) {
  const found = { elapsed: duration(status.elapsed_s) };
  if (status.remaining_s !== null && !final(status)) found.left = duration(status.remaining_s);
  found.train = number(status.train_count, 12) + (status.max_train_count ? ` of ${number(status.max_train_count, 12)}` : "");
  found["env steps"] = number(status.env_steps, 12);
  if (status.evaluation) {
    const { mean_reward: mean, episodes, train_count: at } = status.evaluation;
    found["last evaluation"] = `${number(mean)} (${episodes} episodes at train ${number(at, 12)})`;
  }
  found.memory = `${number(status.memory_size, 12)} of ${number(status.memory_capacity, 12)}`;
  found.backlog = bytes(status.backlog_bytes);
  if (cost) found.cost = cost;
  if (status.messages_refused) found["messages refused"] = number(status.messages_refused, 12);
  if (status.messages_lost) found["messages lost"] = number(status.messages_lost, 12);
  return found;
}

function final(status) {
  return ["done", "failed", "cancelled"].includes(status.state);
}

function workerRow(name, age_s, ...cells) {
  const row = element("tr"), silent = age_s > SILENT_S;
  const beat = age_s === null ? "" : silent ? `silent for ${duration(age_s)}` : `${duration(age_s)} ago`;
  row.append(element("td", name), element("td", beat, { class: silent ? "silent" : "" }));
  row.append(...cells.map((cell) => element("td", cell)));
  return row;
}

function showRun({ status, errors, cost }) {
  byId("name").textContent = document.title = status.task;
  byId("state").textContent = status.state;
  byId("state").className = `state ${status.state}`;
  byId("done").hidden = !status.max_train_count;
  byId("done").value = status.train_count / (status.max_train_count || 1);
  byId("facts").replaceChildren(...Object.entries(facts(status, cost)).map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
  }));
  const missing = [];
  if (!final(status) && !status.trainer) missing.push("no trainer has joined yet (srl trainer)");
  if (!final(status) && !status.actors.length) missing.push("no actor has joined yet (srl actor)");
  byId("hint").textContent = missing.join("; ");
  const workers = [], left = final(status);  // whoever worked for a task that is over does something else by now
  if (status.trainer) {
    const t = status.trainer;
    workers.push(workerRow("trainer", left ? null : t.heartbeat_age_s, `${number(t.updates_per_s, 3)} updates/s`, `${number(status.train_count, 12)} updates`, "", left ? "" : t.waiting_for ? `waiting: ${t.waiting_for}` : "learning"));
  }
  for (const a of status.actors) {
    workers.push(workerRow(a.worker, left ? null : a.heartbeat_age_s, `${number(a.env_steps_per_s, 3)} env steps/s`, `${number(a.env_steps, 12)} env steps`, String(Math.max(0, status.parameter_version - a.parameter_version)), left ? "" : a.waiting_for ? `waiting: ${a.waiting_for}` : "playing"));
  }
  byId("workers").tBodies[0].replaceChildren(...workers);
  const told = [...errors].reverse().slice(0, 20).map((e) => element("li", `${new Date(e.time_ms).toLocaleTimeString()} ${e.worker}: ${e.message}`));
  if (status.error) told.unshift(element("li", status.error));
  byId("errors").replaceChildren(...told);
}

function points(column) {
  const found = rows.filter((row) => Number.isFinite(row[column])).map((row) => [row.time, row[column]]);
  found.sort((a, b) => a[0] - b[0]);
  const size = Math.ceil(found.length / POINTS), means = [];
  for (let i = 0; i < found.length; i += size) {
    const part = found.slice(i, i + size);
    means.push([0, 1].map((axis) => part.reduce((sum, point) => sum + point[axis], 0) / part.length));
  }
  return means;
}

function chart({ title, lines }) {
  const figure = element("figure"), caption = element("figcaption"), series = lines.map(points);
  caption.append(element("h3", title));
  series.forEach((line, i) => line.length && caption.append(element("span", lines[i], { class: `line${i}` })));
  figure.append(caption);
  const all = series.flat();
  if (!all.length) return null;
  const [W, H, LEFT, BOTTOM] = [400, 160, 44, 16];
  const start = Math.min(...all.map((p) => p[0])), end = Math.max(...all.map((p) => p[0]), start + 1);
  let low = Math.min(...all.map((p) => p[1])), high = Math.max(...all.map((p) => p[1]));
  if (low === high) [low, high] = [low - 1, high + 1];
  const x = (t) => LEFT + (t - start) / (end - start) * (W - LEFT), y = (v) => 6 + (high - v) / (high - low) * (H - BOTTOM - 6);
  const svg = drawn("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(drawn("line", { x1: LEFT, x2: W, y1: y(value), y2: y(value), class: "grid" }));
    svg.append(drawn("text", { x: LEFT - 4, y: y(value) + 3, "text-anchor": "end" }, number(value, 3)));
  }
  svg.append(drawn("text", { x: LEFT, y: H - 2 }, duration(start)), drawn("text", { x: W, y: H - 2, "text-anchor": "end" }, duration(end)));
  series.forEach((line, i) => svg.append(drawn("polyline", { points: line.map((p) => `${x(p[0])},${y(p[1])}`).join(" "), class: `line${i}` })));
  figure.append(svg);
  return figure;
}

async function refresh() {
  try {
    const { address, tasks } = await ask("api/tasks");
    byId("address").textContent = address;
    showTasks(tasks);
    if (chosen) {
      if (chosen !== known) [known, rows, last] = [chosen, [], "0"];
      const asked = chosen, after = last;
      const run = await ask(`api/task?id=${encodeURIComponent(asked)}&after=${encodeURIComponent(after)}`);
      if (asked === known && after === last) {  // else another refresh was faster
        rows.push(...run.rows);
        last = run.last;
        showRun(run);
        byId("charts").replaceChildren(...CHARTS.map(chart).filter(Boolean));
      }
    }
    byId("trouble").textContent = "";
  } catch (error) {
    byId("trouble").textContent = error.message;
  }
}

addEventListener("hashchange", () => { chosen = decodeURIComponent(location.hash.slice(1)); refresh(); });
(async function forever() {
  await refresh();
  setTimeout(forever, EVERY_MS);
})();

"use strict";
// The script of a policy server's pages: the form that acts, tokens, and times in the reader's zone.

const $ = (selector, within = document) => within.querySelector(selector);
const TOKEN = "replaylake-token";

function remembered() {
  try { return sessionStorage.getItem(TOKEN) ?? ""; } catch { return ""; }
}

function remember(token) {
  try { sessionStorage.setItem(TOKEN, token); } catch { /* private: asked for on each page */ }
}

function showTimes() {
  for (const element of document.querySelectorAll("time[datetime]")) {
    const at = new Date(element.dateTime);
    element.title = element.textContent;
    element.textContent = at.toLocaleString("sv", { dateStyle: "short", timeStyle: "short" });
  }
}

// A page of a server with tokens: a browser's link carries none, so the script asks for it again.
async function openWith(token) {
  const headers = { accept: "text/html", authorization: `Bearer ${token}` };
  let answer;
  try {
    answer = await fetch(location.href, { headers });
  } catch {
    sayUnanswered();
    return;
  }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (answer.ok) remember(token);
  document.title = page.title;
  document.body.replaceWith(document.adoptNode(page.body));
  start();
  if (answer.ok && location.hash) $(`[id="${CSS.escape(location.hash.slice(1))}"]`)?.scrollIntoView();
}

function sayUnanswered() {
  $("#unanswered")?.remove();
  const said = document.createElement("p");
  Object.assign(said, { id: "unanswered", className: "wrong", textContent: "The server does not answer. Try again once it runs." });
  said.setAttribute("role", "alert");
  $("#token-form").after(said);
}

function startTokenForm(isFirst) {
  const form = $("#token-form");
  if (!form) return;
  form.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    openWith($("#token").value.trim());
  });
  if (isFirst && remembered()) openWith(remembered());
  else $("#token").focus();
}

// The body is put together as text: numbers stay as they were typed, however long.
function writeBody() {
  const observation = $("#observation").value;
  JSON.parse(observation);
  const options = [...document.querySelectorAll("[data-option]")].filter((one) => one.value !== "");
  const parts = options.map((one) => `, "${one.dataset.option}": ${one.value}`);
  return `{"observation": ${observation}${parts.join("")}}`;
}

function showAnswer(text, isGood) {
  const box = $("#answer").parentElement;
  $("code", box).textContent = text;
  const facts = [];
  if (isGood) {
    const said = JSON.parse(text);
    for (const name of ["action", "action_name", "log_prob", "policy", "version"]) {
      if (said[name] === undefined) continue;
      const item = document.createElement("div");
      item.append(document.createElement("dt"), document.createElement("dd"));
      item.firstChild.textContent = name.replace("_", " ");
      item.lastChild.textContent = typeof said[name] === "string" ? said[name] : JSON.stringify(said[name]);
      facts.push(item);
    }
  }
  $("#answer").replaceChildren(...facts);
  $("#answer").hidden = !facts.length;
  box.hidden = false;
}

function startTryForm() {
  const form = $("#try");
  if (!form) return;
  const status = $("#status"), button = $("button", form);
  form.hidden = false;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let body;
    try { body = writeBody(); } catch (error) { status.textContent = `the observation is no JSON: ${error.message}`; return; }
    const headers = { "content-type": "application/json", accept: "application/json" };
    const token = $("#act-token")?.value.trim();
    if (token) headers.authorization = `Bearer ${token}`;
    button.disabled = true;
    status.textContent = "waiting";
    const since = performance.now();
    try {
      const answer = await fetch(form.dataset.address, { method: "POST", headers, body });
      const text = await answer.text();
      status.textContent = `${answer.status}, ${(performance.now() - since).toFixed(1)} ms`;
      showAnswer(text, answer.ok);
    } catch {
      status.textContent = "the server does not answer";
    }
    button.disabled = false;
  });
}

function start(isFirst = false) {
  showTimes();
  startTryForm();
  startTokenForm(isFirst);
}

document.addEventListener("DOMContentLoaded", () => start(true));

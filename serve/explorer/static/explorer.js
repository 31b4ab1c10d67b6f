"use strict";
// The explorer's only script. Every page works without it; what it adds: times in the reader's
// zone, plots with one cursor, rows that follow on scrolling, pages that follow running work, keys for
// labels, and the SQL console's comforts.

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

// Makes an element; texts become text nodes, never markup.
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function readData(id) {
  const block = document.getElementById(id);
  return block ? JSON.parse(block.textContent) : null;
}

// Times: written in UTC, shown in the reader's zone, whole in the tooltip.
function showLocalTimes(within = document) {
  const whole = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });
  for (const element of $$("time[datetime]", within)) {
    const at = new Date(element.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    const two = (number) => String(number).padStart(2, "0");
    element.textContent =
      `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ` +
      `${two(at.getHours())}:${two(at.getMinutes())}` +
      ("seconds" in element.dataset ? `:${two(at.getSeconds())}` : "");
    element.title = whole.format(at);
  }
}

document.addEventListener("DOMContentLoaded", () => {
  showLocalTimes();
});

// Plots: one cursor for all of a page, moved by the pointer, the slider or the arrow keys.
const COLORS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const SHOWN_AT_FIRST = 6;
const WHOLE_INCREMENTS = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function formatNumber(value) {
  if (value === null || value === undefined) return "";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-4 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

class PlotGroup {
  constructor(box, data, onMove) {
    this.box = box;
    this.data = data;
    this.onMove = onMove;
    this.key = `group-${box.dataset.plots}`;
    this.hidden = new Set();
    this.plots = [];
    this.index = null;
    this.smoothing = 0;
    this.build();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", () => this.build());
    let width = box.clientWidth;
    new ResizeObserver(() => {
      if (box.clientWidth === width) return;
      width = box.clientWidth;
      for (const plot of this.plots) {
        plot.setSize({ width: plot.root.parentElement.clientWidth, height: this.height() });
      }
    }).observe(box);
  }

  height() {
    return Number(this.box.dataset.height || 170);
  }

  build() {
    for (const plot of this.plots) plot.destroy();
    this.box.replaceChildren();
    // All boxes first: how wide one is depends on the others.
    const blocks = this.data.plots.map((one) => {
      const block = make("div", { class: "plot" }, make("h3", {}, one.title));
      this.box.append(block);
      return block;
    });
    this.plots = this.data.plots.map((one, place) => this.make(one, place, blocks[place]));
  }

  smooth(values) {
    // Exponential moving average, corrected for its start as TensorBoard's is.
    if (!this.smoothing) return values;
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = this.smoothing * mean + (1 - this.smoothing) * value;
      weight = this.smoothing * weight + 1 - this.smoothing;
      return mean / weight;
    });
  }

  make(one, place, block) {
    const canvas = make("div", { class: "canvas" });
    const keys = make("div", { class: "series" });
    block.append(keys, canvas);
    const axis = {
      stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 },
      ticks: { stroke: style("--line"), width: 1, size: 4 }, font: "12px system-ui, sans-serif",
    };
    const values = [];
    const series = one.series.map((line, number) => {
      const id = `${place}/${number}`;
      if (number >= (this.data.shown ?? SHOWN_AT_FIRST) && !this.hidden.has(`seen ${id}`)) this.hidden.add(id);
      this.hidden.add(`seen ${id}`);
      const color = COLORS[(line.color ?? number) % COLORS.length];
      const box = make("input", { type: "checkbox" });
      box.checked = !this.hidden.has(id);
      box.style.setProperty("--key", `var(${color})`);
      const value = make("span", { class: "value" });
      values.push(value);
      keys.append(make("label", {}, box, make("span", {}, line.name), value));
      box.addEventListener("change", () => {
        if (box.checked) this.hidden.delete(id); else this.hidden.add(id);
        plot.setSeries(number + 1, { show: box.checked });
      });
      // Many discrete values are dots: the lines between them would fill the plot.
      const isDotted = one.stepped && line.values.length > 100;
      return {
        label: line.name, stroke: style(color), width: 1.5, show: box.checked, spanGaps: true,
        points: { show: isDotted || line.values.length <= 40, size: isDotted ? 3 : 5, fill: isDotted ? style(color) : undefined },
        paths: isDotted ? () => null : one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        dash: number >= COLORS.length ? [6, 3] : undefined,
      };
    });
    const plot = new uPlot(
      {
        width: canvas.clientWidth, height: this.height(),
        scales: { x: { time: false }, y: { range: chooseRange } },
        axes: [
          // Steps and updates are whole numbers.
          { ...axis, size: 28, incrs: WHOLE_INCREMENTS },
          { ...axis, size: 58, values: (_, ticks) => ticks.map(formatNumber) },
        ],
        series: [{ label: this.data.label }, ...series],
        legend: { show: false },
        cursor: { y: false, sync: { key: this.key, setSeries: false }, points: { size: 7 }, drag: { x: true, y: false } },
        hooks: {
          setCursor: [(self) => {
            const index = self.cursor.idx;
            self.data.slice(1).forEach((column, number) => {
              const value = index === null || index === undefined ? null : column[index];
              values[number].textContent = formatNumber(value);
            });
            if (index !== null && index !== undefined && index !== this.index) {
              this.index = index;
              this.onMove?.(index);
            }
          }],
        },
      },
      [one.x ?? this.data.x, ...one.series.map((line) => this.smooth(line.values))],
      canvas,
    );
    $("canvas", canvas).setAttribute("aria-hidden", "true");
    return plot;
  }

  // Draw newer data of the same kind; what is chosen, smoothed and zoomed into stays.
  update(data) {
    const kind = (all) => JSON.stringify(all.plots.map((one) => [one.title, one.series.map((line) => line.name)]));
    const isSame = kind(data) === kind(this.data);
    this.data = data;
    if (!isSame) { this.build(); return; }
    this.plots.forEach((plot, place) => {
      const one = data.plots[place], before = plot.data[0], shown = plot.scales.x;
      const isWhole = !(shown.min > before[0] || shown.max < before[before.length - 1]);
      plot.setData([one.x ?? data.x, ...one.series.map((line) => this.smooth(line.values))], isWhole);
      if (!isWhole) plot.redraw();
    });
  }

  // Put the cursor of all plots at a place of the data.
  moveTo(index) {
    this.index = index;
    for (const plot of this.plots) {
      const left = plot.valToPos(plot.data[0][index], "x");
      plot.setCursor({ left, top: plot.over.clientHeight / 2 }, true, false);
    }
  }
}

const plotGroups = new Map();

function startPlots() {
  const scrub = $("#scrub");
  const output = $("#scrubbed");
  const steps = readData("curves")?.x;
  const pictures = $$("img[data-frame]");
  let waiting = null;
  const show = (index) => {
    if (scrub) scrub.value = index;
    const step = steps ? steps[index] : index;
    if (output) output.textContent = steps ? `${step} of ${steps[steps.length - 1]}` : String(step);
    if (scrub) scrub.setAttribute("aria-valuetext", `step ${step}`);
    // While a frame is on its way, only the newest wish is remembered.
    for (const picture of pictures) {
      const address = `${picture.dataset.frame}&step=${step}`;
      const load = () => {
        picture.src = address;
        picture.alt = picture.alt.replace(/step \d+$/, `step ${step}`);
      };
      if (picture.complete) load();
      else { waiting = load; picture.onload = () => { const next = waiting; waiting = null; next?.(); }; }
    }
  };
  for (const box of $$("[data-plots]")) {
    const data = readData(box.dataset.plots);
    if (!data || !window.uPlot || plotGroups.has(box)) continue;
    const group = new PlotGroup(box, data, box.dataset.plots === "curves" ? show : null);
    plotGroups.set(box, group);
    if (scrub && box.dataset.plots === "curves") {
      scrub.addEventListener("input", () => { group.moveTo(Number(scrub.value)); show(Number(scrub.value)); });
    }
    const smoothing = $("#smoothing");
    smoothing?.addEventListener("input", () => { group.smoothing = Number(smoothing.value); group.build(); });
  }
  if (scrub && !steps) scrub.addEventListener("input", () => show(Number(scrub.value)));
  if (scrub) show(0);
}

// Pages of running work: the explorer sends what changes, and it is put in place: the place of the
// window, the focus, and what is open or chosen stay. Where it sends nothing (too many pages are
// followed, or a proxy is in the way), and in a window that is not seen, the page is read again.
const HIDDEN_PAUSE_S = 60;
const FOCUSABLE = "a[href], button, input, select, summary, textarea, [tabindex]";

// A constant line is drawn in the middle: uPlot's default range for a constant 0 goes up to 100.
function chooseRange(_, low, high) {
  if (low === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  const margin = Math.max(1, Math.abs(low) / 10);
  return [low - margin, high + margin];
}

class Follower {
  // The first event comes at once. Where it does not, a proxy holds events back.
  static patienceMs = 10_000;

  constructor(box) {
    this.box = box;
    this.say = $("span", box);
    this.words = this.say.textContent;
    this.button = $("button", box);
    this.written = new Map();
    this.isPaused = false;
    this.isReading = false;
    this.stream = null;
    // Which panels are shown; what is put in place of them is known to differ.
    this.seen = $("meta[name=seen]")?.content ?? "";
    this.hasStreams = "EventSource" in window;
    this.button.addEventListener("click", () => this.pause(!this.isPaused));
    document.addEventListener("visibilitychange", () => this.start());
    addEventListener("pagehide", () => this.stop());
    addEventListener("pageshow", (event) => { if (event.persisted) this.start(); });
    box.hidden = false;
    if (document.hidden) this.wait(); else this.start();
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    this.button.textContent = isPaused ? "Resume" : "Pause";
    this.say.textContent = isPaused ? "This page is not updated" : this.words;
    if (isPaused) this.stop(); else this.start();
  }

  stop() {
    this.stream?.close();
    this.stream = null;
    clearTimeout(this.timer);
  }

  // A browser opens few connections to one server, so only a window that is seen has a stream.
  start() {
    this.stop();
    if (this.isPaused || !this.box.isConnected) return;
    if (document.hidden) { this.wait(); return; }
    if (!this.hasStreams) { this.read(); return; }
    const address = new URL(location.href);
    address.searchParams.set("seen", this.seen);
    const stream = this.stream = new EventSource(address);
    this.timer = setTimeout(() => { this.hasStreams = false; this.start(); }, Follower.patienceMs);
    stream.addEventListener("page", (event) => {
      clearTimeout(this.timer);
      this.say.textContent = "This page is updated when it changes";
      const page = new DOMParser().parseFromString(JSON.parse(event.data), "text/html");
      this.seen = $("meta[name=seen]", page).content;
      this.show(page);
    });
    stream.addEventListener("end", () => this.stop());
    stream.onerror = () => { if (this.stream === stream) { this.stop(); this.read(); } };
  }

  wait() {
    const seconds = Number(this.box.dataset.refresh);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.read(), 1000 * (document.hidden ? Math.max(seconds, HIDDEN_PAUSE_S) : seconds));
  }

  async read() {
    if (this.isPaused || this.isReading || this.stream || !this.box.isConnected) return;
    this.isReading = true;
    try {
      const answer = await fetch(location.href);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!answer.ok) throw new Error($("main", page)?.textContent);
      if (!this.isPaused) { this.show(page); this.seen = $("meta[name=seen]", page)?.content ?? ""; }
      if (!this.isPaused) this.say.textContent = this.words;
    } catch {
      this.say.textContent = "The explorer does not answer, or no longer has this page";
    }
    this.isReading = false;
    if (this.box.isConnected && !this.isPaused && !this.stream) this.wait();
  }

  show(page) {
    document.title = page.title;
    for (const part of ["main > .title h1", "main > .lead", "main > .facts"]) {
      const old = $(part), fresh = $(part, page);
      if (old && fresh) this.replace(part, old, fresh);
    }
    const panels = $(".panels");
    const old = new Map($$(":scope > section", panels).map((one) => [$("h2", one).textContent, one]));
    let place = panels.firstElementChild;
    for (const fresh of $$(".panels > section", page)) {
      const title = $("h2", fresh).textContent;
      const known = old.get(title);
      old.delete(title);
      if ("same" in fresh.dataset) {
        if (known && known !== place) panels.insertBefore(known, place);
        if (known) place = known.nextElementSibling;
        continue;
      }
      if (!known) { panels.insertBefore(document.adoptNode(fresh), place); showLocalTimes(fresh); continue; }
      if (known !== place) panels.insertBefore(known, place);
      place = this.replace(title, known, fresh).nextElementSibling;
    }
    for (const gone of old.values()) gone.remove();
    if ($$("[data-plots]").some((box) => !plotGroups.has(box))) startPlots();
    if (!$("[data-refresh]", page)) { this.stop(); this.box.remove(); }
  }

  // Returns what is there now: the old element where the server wrote the same before.
  replace(name, old, fresh) {
    const written = fresh.innerHTML;
    if (this.written.get(name) === written) return old;
    this.written.set(name, written);
    const box = $("[data-plots]", old), block = $("script[type='application/json']", fresh);
    if (box && block && plotGroups.has(box)) {
      plotGroups.get(box).update(JSON.parse(block.textContent));
      return old;
    }
    const checked = new Set($$("#compare [type=checkbox]:checked", old).map((one) => one.value));
    const focused = $$(FOCUSABLE, old).indexOf(document.activeElement);
    const open = $$("details", old).map((one) => one.open);
    const scrolled = $$(".scroll", old).map((one) => [one.scrollLeft, one.scrollTop]);
    const now = document.adoptNode(fresh);
    old.replaceWith(now);
    showLocalTimes(now);
    $$("details", now).forEach((one, number) => { one.open = open[number] ?? one.open; });
    $$(".scroll", now).forEach((one, number) => { [one.scrollLeft, one.scrollTop] = scrolled[number] ?? [0, 0]; });
    for (const one of $$("#compare [type=checkbox]", now)) one.checked = checked.has(one.value);
    showSelected();
    if (focused >= 0) $$(FOCUSABLE, now)[focused]?.focus({ preventScroll: true });
    return now;
  }
}

function startFollower() {
  const box = $("[data-refresh]");
  if (box) new Follower(box);
}

// Rows follow on scrolling: of the next page, as far as a browser handles well.
const MAX_FOLLOWING_ROWS = 2000;

function startFollowing() {
  const link = $("a[data-next]");
  const body = $("#episodes tbody");
  if (!link || !body) return;
  let isLoading = false;
  const observer = new IntersectionObserver(async (entries) => {
    if (isLoading || !entries.some((entry) => entry.isIntersecting)) return;
    if (body.rows.length >= MAX_FOLLOWING_ROWS) { observer.disconnect(); return; }
    isLoading = true;
    try {
      const answer = await fetch(link.href);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      // The link stays, so that the reader sees that there are more, and can try again.
      if (!answer.ok) throw new Error($("main", page)?.textContent.trim());
      const rows = $$("#episodes tbody tr", page);
      body.append(...rows.map((row) => document.adoptNode(row)));
      showLocalTimes(body);
      const next = $("a[data-next]", page);
      if (next && rows.length) {
        link.href = next.getAttribute("href");
        // What is seen already says nothing again.
        observer.unobserve(link);
        observer.observe(link);
      } else { observer.disconnect(); link.remove(); }
    } catch (error) {
      observer.disconnect();
      const words = error instanceof TypeError ? "The explorer does not answer." : error.message;
      link.after(make("span", { class: "wrong", role: "alert" }, `More rows could not be read. ${words}`));
    }
    isLoading = false;
  }, { rootMargin: "400px" });
  observer.observe(link);
}

// Compares the selected rows of a list: at most as many episodes as there are colors, or two runs.
function showSelected() {
  const form = $("#compare");
  if (!form) return;
  const least = Number(form.dataset.least), most = Number(form.dataset.most);
  const num = $$("input[type=checkbox]:checked", form).length;
  $("#selected").textContent = num > most ? `${num} selected, at most ${most} are compared` : num ? `${num} selected` : "";
  $("button[form=compare]").disabled = num < least || num > most;
}

function startComparing() {
  // On the document, because following a page replaces its form.
  document.addEventListener("change", (event) => { if (event.target.closest("#compare")) showSelected(); });
  // Going back shows the boxes as they were left.
  addEventListener("pageshow", showSelected);
  showSelected();
}

document.addEventListener("DOMContentLoaded", () => {
  startPlots();
  startFollowing();
  startComparing();
  startFollower();
  startTokens();
});

// The arrow keys, a click or a touch select a token, and show the text of its tooltip.
function startTokens() {
  const say = $("#token-facts");
  if (!say) return;
  let chosen = null;
  const choose = (token) => {
    if (!token) return;
    chosen?.classList.remove("chosen");
    chosen = token;
    token.classList.add("chosen");
    say.hidden = false;
    say.textContent = `${JSON.stringify(token.textContent)}: ${token.title}`;
    token.scrollIntoView({ block: "nearest" });
  };
  for (const box of $$(".tokens")) {
    box.addEventListener("click", (event) => choose(event.target.closest(".token")));
    box.addEventListener("focus", () => { if (!box.contains(chosen) && box.matches(":focus-visible")) choose(box.firstElementChild); });
    box.addEventListener("keydown", (event) => {
      const at = box.contains(chosen) ? chosen : box.firstElementChild;
      const next = {
        ArrowRight: at.nextElementSibling ?? at, ArrowLeft: at.previousElementSibling ?? at,
        Home: box.firstElementChild, End: box.lastElementChild,
      }[event.key];
      if (!next) return;
      event.preventDefault();
      choose(next);
    });
  }
}

// Keys: a letter or digit presses the button, or enters the field, that names it. A reader may turn
// them off, since a speech input or a screen reader may have other uses for letters.
const KEYS = "replaylake keys";

function startKeys() {
  const box = $("#keys");
  if (!box) return;
  const show = (areOn) => {
    for (const hint of $$("kbd")) hint.hidden = !areOn;
    for (const one of $$("[data-key]")) {
      if (areOn) one.setAttribute("aria-keyshortcuts", one.dataset.key); else one.removeAttribute("aria-keyshortcuts");
    }
  };
  try { box.checked = localStorage.getItem(KEYS) !== "off"; } catch { /* not remembered */ }
  box.parentElement.hidden = false;
  show(box.checked);
  box.addEventListener("change", () => {
    try { localStorage.setItem(KEYS, box.checked ? "on" : "off"); } catch { /* not remembered */ }
    show(box.checked);
  });
  addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input:not([type=checkbox], [type=range]), select, textarea");
    if (event.key === "Escape" && isTyping) { event.target.blur(); return; }
    if (!box.checked || isTyping || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
    const target = $(`[data-key="${CSS.escape(event.key)}"]`);
    if (!target) return;
    event.preventDefault();
    if (target.tagName === "INPUT") target.focus(); else target.click();
  });
}

// A form is sent once, however often its button or key is pressed.
function startForms() {
  addEventListener("submit", (event) => {
    const form = event.target;
    if (form.method !== "post") return;
    if (form.dataset.isSent) event.preventDefault();
    form.dataset.isSent = "yes";
  });
  // What the browser shows again on the way back may be sent again.
  addEventListener("pageshow", () => { for (const form of $$("form[data-is-sent]")) delete form.dataset.isSent; });
}

document.addEventListener("DOMContentLoaded", () => {
  startKeys();
  startForms();
});

// The SQL console: completion, history in this browser, and a query that can be cancelled.
const WORDS = ("SELECT FROM WHERE GROUP BY ORDER LIMIT JOIN ON AS AND OR NOT NULL IS IN BETWEEN LIKE DESC ASC " +
  "DISTINCT COUNT AVG SUM MIN MAX CASE WHEN THEN ELSE END WITH HAVING USING UNION").split(" ");
const HISTORY = "replaylake sql history";
const MAX_HISTORY = 50;

// Suggestions for the word before the caret of a field: columns after `table.`, else everything.
class Completion {
  constructor(field, suggest) {
    this.field = field;
    this.suggest = suggest;
    this.list = make("ul", { class: "suggest", role: "listbox", id: `${field.id}-suggestions`, hidden: "" });
    field.parentElement.append(this.list);
    for (const [name, value] of Object.entries({
      role: "combobox", "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": this.list.id,
    })) field.setAttribute(name, value);
    field.addEventListener("input", () => this.update(false));
    field.addEventListener("keydown", (event) => this.onKey(event));
    field.addEventListener("blur", () => setTimeout(() => this.close(), 150));
  }

  word() {
    const before = this.field.value.slice(0, this.field.selectionStart);
    return /[A-Za-z_][\w.]*$/.exec(before)?.[0] ?? "";
  }

  update(isAsked) {
    const word = this.word();
    this.found = word.length > 1 || isAsked ? this.suggest(word, this.field.value).slice(0, 40) : [];
    if (!this.found.length || (this.found.length === 1 && this.found[0].text === word)) return this.close();
    this.list.replaceChildren(...this.found.map((one, place) => {
      const item = make("li", { role: "option", id: `${this.list.id}-${place}` },
        make("span", {}, one.text), make("span", { class: "quiet" }, one.kind));
      item.addEventListener("mousedown", (event) => { event.preventDefault(); this.take(place); });
      return item;
    }));
    this.list.hidden = false;
    this.field.setAttribute("aria-expanded", "true");
    this.list.style.top = `${this.field.offsetTop + this.top()}px`;
    this.choose(0);
  }

  top() {
    // Below the line of the caret, as far as the field is tall.
    if (this.field.tagName === "INPUT") return this.field.offsetHeight + 2;
    const lines = this.field.value.slice(0, this.field.selectionStart).split("\n").length;
    const height = parseFloat(getComputedStyle(this.field).lineHeight) || 19;
    return Math.min(this.field.offsetHeight, lines * height + 10 - this.field.scrollTop);
  }

  choose(place) {
    this.place = (place + this.found.length) % this.found.length;
    [...this.list.children].forEach((item, number) => {
      item.setAttribute("aria-selected", String(number === this.place));
      if (number === this.place) item.scrollIntoView({ block: "nearest" });
    });
    this.field.setAttribute("aria-activedescendant", `${this.list.id}-${this.place}`);
  }

  take(place) {
    const { text } = this.found[place];
    const end = this.field.selectionStart;
    this.field.setRangeText(text, end - this.word().length, end, "end");
    this.close();
  }

  close() {
    this.list.hidden = true;
    this.field.setAttribute("aria-expanded", "false");
    this.field.removeAttribute("aria-activedescendant");
  }

  onKey(event) {
    if (event.key === " " && event.ctrlKey) { event.preventDefault(); this.update(true); return; }
    if (this.list.hidden || event.ctrlKey) return;
    if (event.key === "ArrowDown") this.choose(this.place + 1);
    else if (event.key === "ArrowUp") this.choose(this.place - 1);
    else if (event.key === "Tab" || event.key === "Enter") this.take(this.place);
    else if (event.key === "Escape") this.close();
    else return;
    event.preventDefault();
  }
}

function suggestSql(tables) {
  const names = Object.keys(tables);
  return (word, text) => {
    const lower = word.toLowerCase();
    const table = names.find((name) => lower.startsWith(`${name}.`));
    if (table) {
      return tables[table].filter((one) => `${table}.${one}`.startsWith(lower))
        .map((one) => ({ text: `${table}.${one}`, kind: "column" }));
    }
    // Columns of the tables that the query names come first.
    const named = names.filter((name) => text.includes(name));
    const columns = [...new Set((named.length ? named : names).flatMap((name) => tables[name]))];
    const all = [
      ...columns.map((one) => ({ text: one, kind: "column" })),
      ...names.map((one) => ({ text: one, kind: "table" })),
      ...WORDS.map((one) => ({ text: one, kind: "" })),
    ];
    return all.filter((one) => one.text.toLowerCase().startsWith(lower));
  };
}

// A chart of two columns of a result, drawn when it is opened and when another choice is made.
function startChart() {
  const box = $("#chart"), columns = readData("chart-data");
  if (!box || !columns || !window.uPlot) return;
  const choices = ["kind", "x", "y"].map((name) => $(`#chart-${name}`));
  const canvas = $("#chart-canvas");
  let plot = null;
  const draw = () => {
    plot?.destroy();
    plot = null;
    if (!box.open) return;
    const [kind, x, y] = choices.map((one) => one.value);
    plot = drawChart(canvas, kind, x || "row", x ? columns[x] : null, y, columns[y].values);
  };
  for (const one of choices) one.addEventListener("change", draw);
  box.addEventListener("toggle", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(() => plot?.setSize({ width: canvas.clientWidth, height: CHART_HEIGHT })).observe(box);
  box.hidden = false;
}

const CHART_HEIGHT = 260;

function drawChart(canvas, kind, xName, along, yName, ys) {
  const isTime = along?.kind === "time";
  // Texts are places side by side, in the order in which they come.
  const names = along?.kind === "text" ? [...new Set(along.values)] : null;
  const place = names && new Map(names.map((name, number) => [name, number]));
  const isBar = kind === "bar";
  let points = ys
    .map((value, number) => [!along ? number : names ? place.get(along.values[number]) : along.values[number], value])
    .filter(([at, value]) => at !== null && value !== null)
    .sort((one, other) => one[0] - other[0]);
  const places = new Map();
  for (const [at, value] of points) places.set(at, (places.get(at) ?? 0) + value);
  const isSummed = isBar && places.size < points.length;
  if (isSummed) points = [...places];
  $("#chart-note").hidden = !isSummed;
  const low = Math.min(...points.map(([, value]) => value)), high = Math.max(...points.map(([, value]) => value));
  canvas.setAttribute("aria-label", points.length
    ? `${yName} by ${xName}: ${points.length} points from ${formatNumber(low)} to ${formatNumber(high)}`
    : `${yName} by ${xName}: no points`);
  const axis = {
    stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 },
    ticks: { stroke: style("--line"), width: 1, size: 4 }, font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif", labelSize: 18,
  };
  const xAxis = { ...axis, label: xName, size: 28 };
  if (names) {
    xAxis.incrs = WHOLE_INCREMENTS;
    xAxis.values = (_, ticks) => ticks.map((at) => String(names[at] ?? "").slice(0, 14));
  } else if (!isTime) xAxis.values = (_, ticks) => ticks.map(formatNumber);
  const edge = isBar || names ? 0.6 : 0;
  const plot = new uPlot(
    {
      width: canvas.clientWidth, height: CHART_HEIGHT, legend: { show: false },
      scales: {
        x: { time: isTime, range: edge && !isTime ? (_, min, max) => [min - edge, max + edge] : undefined },
        // Bars begin at 0, so that their lengths can be compared.
        y: isBar ? { range: (_, min, max) => uPlot.rangeNum(Math.min(0, min), Math.max(0, max), 0.1, true) } : {},
      },
      axes: [xAxis, { ...axis, label: yName, size: 58, values: (_, ticks) => ticks.map(formatNumber) }],
      series: [{ label: xName }, {
        label: yName, stroke: style("--c0"), width: kind === "line" ? 1.5 : 1, spanGaps: false,
        fill: isBar ? style("--c0") : undefined,
        paths: isBar ? uPlot.paths.bars({ size: [0.8, 60] }) : kind === "scatter" ? () => null : undefined,
        points: { show: kind === "scatter" || (kind === "line" && points.length <= 40), size: 6, fill: style("--c0") },
      }],
    },
    [points.map(([at]) => at), points.map(([, value]) => value)],
    canvas,
  );
  for (const part of canvas.children) part.setAttribute("aria-hidden", "true");
  return plot;
}

function readHistory() {
  try { return JSON.parse(localStorage.getItem(HISTORY)) ?? []; } catch { return []; }
}

function showHistory() {
  const list = $("#history");
  if (!list) return;
  const queries = readHistory();
  $("#no-history").hidden = queries.length > 0;
  list.replaceChildren(...queries.map((query) => {
    const button = make("button", { type: "button" }, query);
    button.addEventListener("click", () => { const field = $("#q"); field.value = query; field.focus(); });
    return make("li", {}, button);
  }));
}

function startConsole() {
  const form = $("#console");
  if (!form) return;
  const field = $("#q"), status = $("#status"), cancel = $("#cancel"), run = $("button[type=submit]", form);
  new Completion(field, suggestSql(readData("tables")));
  startChart();
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running || !field.value.trim()) return;
    const address = `${form.action}?${new URLSearchParams(new FormData(form))}`;
    const queries = [field.value, ...readHistory().filter((one) => one !== field.value)];
    try { localStorage.setItem(HISTORY, JSON.stringify(queries.slice(0, MAX_HISTORY))); } catch { /* full */ }
    running = new AbortController();
    run.disabled = true;
    cancel.hidden = false;
    const since = performance.now();
    const clock = setInterval(() => { status.textContent = `running, ${((performance.now() - since) / 1000).toFixed(1)} s`; }, 100);
    let text;
    try {
      const answer = await fetch(address, { signal: running.signal });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const panel = $("#result", page)?.closest("section");
      // An error of a query has its panel. Others are of the request: what is shown stays.
      if (!panel && !answer.ok) throw new Error($("main", page)?.textContent.trim());
      const panels = $(".panels");
      for (const old of $$("section", panels).slice(1)) old.remove();
      for (const fresh of $$(".panels > section", page).slice(1)) panels.append(document.adoptNode(fresh));
      text = panel ? `${((performance.now() - since) / 1000).toFixed(2)} s` : "no answer";
      history.pushState(null, "", address);
      showLocalTimes();
      startChart();
    } catch (error) {
      if (error.name === "AbortError") text = "cancelled";
      else text = error instanceof TypeError ? "the explorer does not answer: is it still running?" : error.message;
    }
    clearInterval(clock);
    running = null;
    run.disabled = false;
    cancel.hidden = true;
    status.textContent = text;
    showHistory();
  });
  cancel.addEventListener("click", () => running?.abort());
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); }
  });
  addEventListener("popstate", () => location.reload());
  showHistory();
}

document.addEventListener("DOMContentLoaded", () => {
  startConsole();
  const where = $("input[data-complete]");
  if (where) {
    const columns = where.dataset.complete.split(" ").map((one) => (one === "return" ? '"return"' : one));
    new Completion(where, (word) => columns
      .filter((one) => one.replace('"', "").startsWith(word.toLowerCase()))
      .map((one) => ({ text: one, kind: "column" })));
  }
});

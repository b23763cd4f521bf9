// Live parts of the page, the switch of themes, and keys. Every page works without this file, too.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

function showTheme() {
  const button = document.getElementById("theme");
  button.textContent = isDark() ? "Light" : "Dark"; // what it changes to
}
document.getElementById("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
  showTheme();
});
dark.addEventListener("change", showTheme);
showTheme();

// On a phone a table is a list of cards: each cell says which column it is of.
function nameCells() {
  for (const table of document.querySelectorAll(".scroll table")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => (head.querySelector("[data-all]") ? "Choose" : head.textContent.trim()));
    for (const row of table.tBodies[0]?.rows ?? [])
      [...row.cells].forEach((cell, at) => (cell.dataset.label = row.cells.length === heads.length ? heads[at] : ""));
  }
}
nameCells();
new MutationObserver(nameCells).observe(document.getElementById("main"), { childList: true, subtree: true });

// The server sends the HTML of a part under the part's id. It is escaped there: what arrives is as safe as the page.
const parts = document.body.matches(".still") ? [] : [...document.querySelectorAll("[data-live]")]; // a form that came back
const pulse = document.getElementById("pulse");
const trouble = document.getElementById("trouble");
let source = null;

function setPulse(state, text) {
  pulse.className = `pulse ${state}`;
  pulse.setAttribute("aria-label", text);
  pulse.title = text;
}

function isInUse(part) {
  const selection = getSelection();
  return !selection.isCollapsed && part.contains(selection.anchorNode);
}

const scrollers = (part) => [...part.querySelectorAll(".scroll, .events")];

const stops = (part) => [...part.querySelectorAll("a, button, input, select, summary, [tabindex]")]; // of the Tab key

function replace(part, html) {
  if (isInUse(part)) return; // whoever is selecting text keeps it; the next change comes in a second
  const focused = document.activeElement;
  const place = stops(part).indexOf(focused);
  const open = [...part.querySelectorAll("details[open][id]")].map((item) => item.id);
  const scrolled = scrollers(part).map((item) => [item.scrollLeft, item.scrollTop]);
  part.innerHTML = html;
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  scrollers(part).forEach((item, index) => (scrolled[index] ? item.scrollTo(...scrolled[index]) : undefined));
  if (place < 0) return;
  const same = (focused.id && document.getElementById(focused.id)) || stops(part)[place];
  same?.focus({ preventScroll: true });
}

let isPaused = false;
const pause = document.getElementById("pause");
pause.hidden = !parts.length;
pause.addEventListener("click", () => {
  isPaused = !isPaused;
  pause.textContent = isPaused ? "Resume" : "Pause";
  if (isPaused) stop();
  else start();
});

function start() {
  if (source || !parts.length || isPaused) return;
  source = new EventSource(location.pathname + location.search);
  source.addEventListener("open", () => setPulse("on", "live"));
  source.addEventListener("error", () => setPulse("off", "the console does not answer"));
  source.addEventListener("trouble", (event) => {
    trouble.textContent = "";
    trouble.insertAdjacentHTML("beforeend", event.data);
    trouble.hidden = !event.data;
  });
  for (const part of parts) source.addEventListener(part.id, (event) => replace(part, event.data));
}

function stop() {
  source?.close();
  source = null;
  setPulse("", "not live");
}

// A browser has six connections to a host: a page that nobody sees gives its own back.
document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
addEventListener("pagehide", stop);
addEventListener("pageshow", start);

document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select")) return;
  const field = document.querySelector('[data-key="/"]');
  if (!field) return;
  event.preventDefault();
  field.focus();
});
for (const box of document.querySelectorAll("[data-all]")) {
  const items = () => [...document.querySelectorAll(`input[name="${box.dataset.all}"]`)];
  const apply = () => items().forEach((item) => (item.checked = box.checked));
  box.addEventListener("change", apply);
  if (box.checked && !items().some((item) => item.checked)) apply(); // it was checked before this file had loaded
}

// In a wide window a message opens beside its list. Elsewhere, and without this file, its link leads to its page.
const panel = document.getElementById("panel");
const shown = document.getElementById("panel-message");
let opener = null;

async function openPanel(link) {
  const answer = await fetch(link.href);
  if (!answer.ok) return location.assign(link.href); // which says why
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const inner of page.querySelectorAll("main a[href]")) inner.href = new URL(inner.getAttribute("href"), link.href).href;
  shown.replaceChildren(...page.querySelectorAll("main > section"));
  offerCopies();
  document.getElementById("panel-title").textContent = link.title || link.textContent;
  document.getElementById("panel-page").href = link.href;
  panel.hidden = false;
  panel.scrollTop = 0;
  opener = link.id;
  document.getElementById("panel-close").focus();
}

function closePanel() {
  panel.hidden = true;
  document.getElementById(opener)?.focus(); // a live list may have another element of that name by now
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-panel]");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey || innerWidth < 1000) return;
  event.preventDefault();
  openPanel(link).catch(() => location.assign(link.href));
});
document.getElementById("panel-close").addEventListener("click", closePanel);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !panel.hidden) closePanel();
});

// Copies the text of an element. Only pages over HTTPS, or from this machine, may write to the clipboard.
function offerCopies() {
  if (navigator.clipboard) for (const button of document.querySelectorAll("[data-copy]")) button.hidden = false;
}
offerCopies();
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), 1500);
});

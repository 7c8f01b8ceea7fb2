// The page: one panel for each device of each file, and what they share.

import "./style.css";
import type { Theme } from "./colours";
import { Moment } from "./moment";
import type { Marked } from "./raster";
import { EmbeddedSource, ServedSource, type Source, type StackRow } from "./source";
import { Timeline } from "./timeline";
import { bytes, whole } from "./units";

function element<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found as T;
}

function failed(error: unknown): void {
  const place = element("error");
  place.hidden = false;
  place.textContent = error instanceof Error ? error.message : String(error);
}

async function open(): Promise<Source> {
  const embedded = document.getElementById("lastref-data");
  if (embedded) return EmbeddedSource.decode(embedded.textContent ?? "");
  const token = new URLSearchParams(location.search).get("token") ?? "";
  return ServedSource.open(token);
}

const tip = element("tip");
function showTip(text: string | undefined, x: number, y: number): void {
  tip.hidden = text === undefined;
  if (text === undefined) return;
  tip.textContent = text;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(4, y + height + 24 > innerHeight ? y - height - 10 : y + 16)}px`;
}

interface Panel {
  readonly file: number;
  readonly timeline: Timeline;
  readonly moment: Moment;
}

/** What grew between the peaks of two files, by stack title, since numbers of stacks differ. */
async function compare(source: Source): Promise<HTMLElement | undefined> {
  const [a, b] = source.about.files;
  if (!a || !b || !a.devices[0] || !b.devices[0]) return undefined;
  const [before, after] = await Promise.all([
    source.stacks(0, 0, a.devices[0].peakEntry),
    source.stacks(1, 0, b.devices[0].peakEntry),
  ]);
  const sums = new Map<string, [number, number]>();
  const add = (rows: StackRow[], side: 0 | 1) => {
    for (const row of rows) {
      const sum = sums.get(row.title) ?? [0, 0];
      sum[side] += row.bytes;
      sums.set(row.title, sum);
    }
  };
  add(before, 0);
  add(after, 1);
  const section = document.createElement("section");
  section.className = "panel";
  section.id = "compare";
  const title = document.createElement("h2");
  title.textContent = `From ${a.name} to ${b.name}, at their peaks`;
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const name of ["change", "before", "after", "allocated by"]) {
    const cell = document.createElement("th");
    cell.textContent = name;
    head.append(cell);
  }
  const body = table.createTBody();
  const changes = [...sums].filter(([, [x, y]]) => x !== y);
  changes.sort(([, [ax, ay]], [, [bx, by]]) => Math.abs(by - bx) - Math.abs(ay - ax));
  for (const [name, [x, y]] of changes.slice(0, 200)) {
    const row = body.insertRow();
    row.insertCell().textContent = (y > x ? "+" : "") + bytes(y - x);
    row.insertCell().textContent = bytes(x);
    row.insertCell().textContent = bytes(y);
    row.insertCell().textContent = name;
  }
  const rows = document.createElement("div");
  rows.className = "rows";
  rows.append(table);
  section.append(title, rows);
  return section;
}

async function start(): Promise<void> {
  const source = await open();
  const panels: Panel[] = [];
  let theme: Theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const marked: Marked[] = source.about.files.map(() => undefined);
  let current = 0;

  const refresh = () => {
    document.documentElement.dataset.theme = theme;
    for (const panel of panels) {
      panel.timeline.show(theme, marked[panel.file]);
      panel.moment.show(theme, marked[panel.file]);
    }
  };

  const scale =
    Math.max(
      1,
      ...source.about.files.flatMap((file) => file.devices.map((d) => Math.max(d.peakReservedBytes, d.peakBytes))),
    ) * 1.04;
  source.about.files.forEach((file, f) => {
    file.devices.forEach((device, d) => {
      const section = document.createElement("section");
      section.className = "panel";
      const head = document.createElement("div");
      head.className = "head";
      const title = document.createElement("h2");
      title.textContent = `${file.name}, device ${device.device}`;
      const facts = document.createElement("span");
      facts.className = "quiet";
      facts.textContent =
        `peak ${bytes(device.peakBytes)} after ${whole(device.peakEntry)} of ${whole(device.entries)} entries, ` +
        `${bytes(device.peakReservedBytes)} reserved at most, ${whole(device.allocations)} allocations`;
      head.append(title, facts);
      section.append(head);
      for (const text of device.notes) {
        const note = document.createElement("p");
        note.className = "note";
        note.textContent = text;
        section.append(note);
      }
      const moment = new Moment(source, f, d, {
        picked(stack) {
          marked[f] = stack === undefined ? undefined : new Set([stack]);
          refresh();
        },
        tip: showTip,
        failed,
      });
      const index = panels.length;
      const timeline = new Timeline(source, f, d, device, scale, {
        chosen(entry) {
          current = index;
          moment.choose(entry);
        },
        tip: showTip,
        failed,
      });
      timeline.element.addEventListener("focusin", () => (current = index));
      section.append(timeline.element, moment.element);
      element("panels").append(section);
      panels.push({ file: f, timeline, moment });
      moment.choose(device.peakEntry);
    });
  });
  if (panels.length === 0) element("panels").append("These files hold no history and no segments.");

  const compared = await compare(source);
  if (compared) element("panels").append(compared);

  let asked = 0;
  const search = element<HTMLInputElement>("search");
  const find = async () => {
    const turn = ++asked;
    const text = search.value.trim();
    const found = await Promise.all(source.about.files.map((_, f) => (text ? source.search(f, text) : undefined)));
    if (turn !== asked) return;
    found.forEach((stacks, f) => (marked[f] = stacks && new Set(stacks)));
    const count = found.reduce((sum, stacks) => sum + (stacks?.length ?? 0), 0);
    element("found").textContent = text ? `${whole(count)} stack${count === 1 ? "" : "s"}` : "";
    refresh();
  };
  search.addEventListener("input", () => void find().catch(failed));

  const actions: Record<string, () => void> = {
    "0": () => panels.forEach((panel) => panel.timeline.whole()),
    p: () => panels.forEach((panel, i) => panel.timeline.goTo(peaks[i])),
    o: () => panels[current]?.timeline.nextMark(),
    t: () => {
      theme = theme === "dark" ? "light" : "dark";
      refresh();
    },
    "/": () => search.focus(),
    "?": () => element<HTMLDialogElement>("keys").showModal(),
  };
  const peaks = source.about.files.flatMap((file) => file.devices.map((device) => device.peakEntry));
  for (const [id, key] of [["whole", "0"], ["peak", "p"], ["mark", "o"], ["theme", "t"], ["help", "?"]]) {
    element(id).addEventListener("click", () => actions[key]());
  }
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.target === search) {
      if (event.key === "Escape") {
        search.value = "";
        search.blur();
        void find().catch(failed);
      }
      return;
    }
    const action = actions[event.key];
    if (action) action();
    else if (!panels[current]?.timeline.key(event.key)) return;
    event.preventDefault();
  });
  refresh();
  // For tests that drive the page, and for the curious.
  Object.assign(window, { lastref: { shown: () => panels.map((panel) => panel.timeline.shown) } });
  document.body.dataset.ready = "yes";
}

start().catch(failed);

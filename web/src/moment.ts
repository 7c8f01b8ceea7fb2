// What one moment looks like: the segment map and the table of stacks.

import { colourOf, css, PALETTES, type Theme } from "./colours";
import { drawSegments, segmentRow, type Marked } from "./raster";
import type { Source, StackRow, State } from "./source";
import { bytes, whole } from "./units";

const ROW_HEIGHT = 14;
/** Rows of the table that are drawn; the sum of the others is the last line. */
const MOST_ROWS = 500;

export class Moment {
  readonly element = document.createElement("div");
  private readonly words = document.createElement("p");
  private readonly map = document.createElement("div");
  private readonly canvas = document.createElement("canvas");
  private readonly rows = document.createElement("div");
  private state: State | undefined;
  private table: StackRow[] = [];
  private theme: Theme = "light";
  private marked: Marked;
  private turn = 0;
  private entry = -1;
  private timer = 0;

  constructor(
    private readonly source: Source,
    private readonly file: number,
    private readonly position: number,
    private readonly events: {
      picked(stack: number | undefined): void;
      tip(text: string | undefined, x: number, y: number): void;
      failed(error: unknown): void;
    },
  ) {
    this.words.className = "note";
    this.map.className = "map";
    this.map.append(this.canvas);
    this.canvas.style.width = "100%";
    this.canvas.style.display = "block";
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "segments of this moment, one a row, with their blocks");
    this.rows.className = "rows";
    const below = document.createElement("div");
    below.className = "below";
    below.append(this.map, this.rows);
    this.element.append(this.words, below);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.events.tip(undefined, 0, 0));
    new ResizeObserver(() => this.draw()).observe(this.map);
  }

  show(theme: Theme, marked: Marked): void {
    this.theme = theme;
    this.marked = marked;
    this.draw();
    this.list();
  }

  /** Shows this moment, as soon as no later one is chosen. */
  choose(entry: number): void {
    if (entry === this.entry) return;
    this.entry = entry;
    clearTimeout(this.timer);
    // Holding a key down passes many moments: the last one is asked for.
    this.timer = window.setTimeout(() => void this.load(entry), 40);
  }

  private async load(entry: number): Promise<void> {
    const turn = ++this.turn;
    try {
      const [state, table] = await Promise.all([
        this.source.state(this.file, this.position, entry),
        this.source.stacks(this.file, this.position, entry),
      ]);
      if (turn !== this.turn) return;
      this.state = state;
      this.table = table;
      this.words.textContent =
        `After ${whole(entry)} entries: ${bytes(state.liveBytes)} in use of ${bytes(state.reservedBytes)} reserved, ` +
        `in ${whole(state.segments.length)} segment${state.segments.length === 1 ? "" : "s"}.`;
      this.element.dataset.entry = String(entry);
      this.draw();
      this.list();
    } catch (error) {
      this.events.failed(error);
    }
  }

  private across(): number {
    return Math.max(1, ...(this.state?.segments ?? []).map((segment) => segment.bytes));
  }

  private draw(): void {
    const width = Math.max(Math.round(this.map.clientWidth), 1);
    const segments = this.state?.segments ?? [];
    const height = Math.max(segments.length * ROW_HEIGHT, 1);
    this.canvas.width = width;
    this.canvas.height = height;
    const context = this.canvas.getContext("2d", { alpha: false });
    if (!context) return;
    const image = context.createImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    drawSegments({ width, height, pixels }, segments, ROW_HEIGHT, this.across(), PALETTES[this.theme], this.marked);
    context.putImageData(image, 0, 0);
  }

  private list(): void {
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const name of ["bytes", "blocks", "allocated by"]) {
      const cell = document.createElement("th");
      cell.textContent = name;
      head.append(cell);
    }
    const body = table.createTBody();
    const shown = this.table.filter((row) => !this.marked || this.marked.has(row.stack));
    for (const row of shown.slice(0, MOST_ROWS)) {
      const line = body.insertRow();
      line.tabIndex = 0;
      line.dataset.stack = String(row.stack);
      line.insertCell().textContent = bytes(row.bytes);
      line.insertCell().textContent = whole(row.count);
      const chip = document.createElement("span");
      chip.className = "chip";
      const palette = PALETTES[this.theme];
      chip.style.background = css(palette.stacks[colourOf(row.stack, palette.stacks.length)]);
      line.insertCell().append(chip, row.title);
      const pick = () => {
        const chosen = line.classList.toggle("chosen");
        this.events.picked(chosen ? row.stack : undefined);
      };
      line.addEventListener("click", pick);
      line.addEventListener("keydown", (event) => {
        if (event.key === "Enter") pick();
      });
      if (this.marked?.size === 1) line.classList.add("chosen");
    }
    const rest = shown.slice(MOST_ROWS);
    if (rest.length > 0) {
      const line = body.insertRow();
      line.insertCell().textContent = bytes(rest.reduce((sum, row) => sum + row.bytes, 0));
      line.insertCell().textContent = whole(rest.reduce((sum, row) => sum + row.count, 0));
      line.insertCell().textContent = `${whole(rest.length)} more stacks`;
    }
    this.rows.replaceChildren(table);
  }

  private point(event: PointerEvent): void {
    const row = Math.floor(event.offsetY / ROW_HEIGHT);
    const segment = this.state?.segments[row];
    if (!segment || event.offsetY >= segmentRow(row, ROW_HEIGHT).bottom) {
      this.events.tip(undefined, 0, 0);
      return;
    }
    const address = segment.address + (event.offsetX / Math.max(this.canvas.clientWidth, 1)) * this.across();
    const where = `segment of ${bytes(segment.bytes)} at 0x${segment.address.toString(16)}`;
    const block = segment.blocks.find((b) => b.address <= address && address < b.address + b.bytes);
    if (!block) {
      this.events.tip(address < segment.address + segment.bytes ? `free\n${where}` : undefined, event.clientX, event.clientY);
      return;
    }
    const title = this.table.find((entry) => entry.stack === block.stack)?.title ?? "";
    const state = block.state === "pending" ? "given back, and a stream may still use it" : "in use";
    this.events.tip(`${bytes(block.bytes)} at 0x${block.address.toString(16)}, ${state}\n${title}\n${where}`, event.clientX, event.clientY);
  }
}

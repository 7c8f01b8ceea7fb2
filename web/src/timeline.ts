// The timeline of one device: the picture, what is written over it, the pointer and the keys.

import { PALETTES, type Theme } from "./colours";
import { drawTimeline, hitTimeline, type Marked, type Window } from "./raster";
import type { DeviceAbout, Source } from "./source";
import { Tiles } from "./tiles";
import { bytes, ticks, whole } from "./units";
import { centre, clamp, move, zoom, type Range } from "./window";

export interface TimelineEvents {
  /** A moment was chosen. */
  chosen(entry: number): void;
  tip(text: string | undefined, x: number, y: number): void;
  failed(error: unknown): void;
}

export class Timeline {
  readonly element: HTMLElement;
  private readonly picture = document.createElement("canvas");
  private readonly over = document.createElement("canvas");
  private readonly tiles: Tiles;
  private image: ImageData | undefined;
  private range: Range;
  private top: number;
  private bottom = 0;
  private moment: number;
  private marked: Marked;
  private theme: Theme = "light";
  private asked = 0;
  private frames = 0;
  private hover = 0;

  constructor(
    private readonly source: Source,
    private readonly file: number,
    position: number,
    private readonly device: DeviceAbout,
    /** The bytes at the top when nothing is zoomed; shared by devices that are compared. */
    private readonly scale: number,
    private readonly events: TimelineEvents,
  ) {
    this.range = { first: 0, last: Math.max(device.entries, 1) };
    this.top = scale;
    this.moment = device.peakEntry;
    this.tiles = new Tiles(source, file, position, device, () => this.redraw(), events.failed);
    this.element = document.createElement("div");
    this.element.className = "stage timeline";
    this.picture.className = "picture";
    this.over.className = "over";
    this.over.tabIndex = 0;
    this.over.setAttribute("role", "img");
    this.over.setAttribute(
      "aria-label",
      `memory in use over ${whole(device.entries)} entries; the peak is ${bytes(device.peakBytes)} after ${whole(device.peakEntry)} of them`,
    );
    this.element.append(this.picture, this.over);
    this.listen(position);
    new ResizeObserver(() => this.redraw()).observe(this.element);
  }

  /** What is shown, for tests and for a second timeline that follows. */
  get shown(): Range & { readonly top: number; readonly moment: number; readonly frames: number } {
    return { ...this.range, top: this.top, moment: this.moment, frames: this.frames };
  }

  show(theme: Theme, marked: Marked): void {
    this.theme = theme;
    this.marked = marked;
    this.redraw();
  }

  whole(): void {
    this.top = this.scale;
    this.bottom = 0;
    this.look({ first: 0, last: this.device.entries });
  }

  /** Looks at a moment, from close by. */
  goTo(entry: number): void {
    this.look(centre(this.range, entry, Math.max(2000, this.device.entries / 50), this.device.entries));
    this.choose(entry);
  }

  nextMark(): void {
    const failures = this.device.marks.filter((mark) => mark.kind === "out_of_memory");
    const next = failures.find((mark) => mark.entry > this.moment) ?? failures[0];
    if (next) this.goTo(next.entry);
  }

  key(key: string): boolean {
    const { entries } = this.device;
    switch (key) {
      case "ArrowLeft": this.look(move(this.range, -0.2, entries)); return true;
      case "ArrowRight": this.look(move(this.range, 0.2, entries)); return true;
      case "+": case "=": this.look(zoom(this.range, 0.5, 0.6, entries)); return true;
      case "-": this.look(zoom(this.range, 0.5, 1 / 0.6, entries)); return true;
      case ",": this.choose(this.moment - 1); return true;
      case ".": this.choose(this.moment + 1); return true;
      default: return false;
    }
  }

  choose(entry: number): void {
    this.moment = Math.min(Math.max(Math.round(entry), 0), this.device.entries);
    this.redraw();
    this.events.chosen(this.moment);
  }

  private look(range: Range): void {
    this.range = clamp(range, this.device.entries);
    this.redraw();
  }

  private redraw(): void {
    if (this.asked) return;
    this.asked = requestAnimationFrame(() => {
      this.asked = 0;
      this.draw();
    });
  }

  private view(): Window {
    return { firstEntry: this.range.first, lastEntry: this.range.last, bottom: this.bottom, top: this.top };
  }

  private draw(): void {
    const box = this.element.getBoundingClientRect();
    const width = Math.max(Math.round(box.width), 1);
    const height = Math.max(Math.round(box.height), 1);
    for (const canvas of [this.picture, this.over]) {
      if (canvas.width !== width || canvas.height !== height) {
        canvas.width = width;
        canvas.height = height;
        this.image = undefined;
      }
    }
    const context = this.picture.getContext("2d", { alpha: false });
    if (!context) return;
    this.image ??= context.createImageData(width, height);
    const pixels = new Uint32Array(this.image.data.buffer);
    const found = this.tiles.finder(this.range.first, this.range.last, width);
    const palette = PALETTES[this.theme];
    if (found) {
      drawTimeline({ width, height, pixels }, this.view(), found.find, found.entriesPerColumn, palette, this.marked);
    } else {
      pixels.fill(palette.ground);
    }
    context.putImageData(this.image, 0, 0);
    this.annotate(width, height);
    this.frames++;
    this.element.dataset.ready = found ? "yes" : "no";
  }

  private annotate(width: number, height: number): void {
    const context = this.over.getContext("2d");
    if (!context) return;
    const style = getComputedStyle(this.element);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    const x = (entry: number) => ((entry - this.range.first) / (this.range.last - this.range.first)) * width;
    const y = (count: number) => height - ((count - this.bottom) / (this.top - this.bottom)) * height;
    const label = (text: string, atX: number, atY: number, ink: string) => {
      context.strokeStyle = colour("--ground");
      context.lineWidth = 3;
      context.strokeText(text, atX, atY);
      context.fillStyle = ink;
      context.fillText(text, atX, atY);
    };
    context.lineWidth = 1;
    for (const count of ticks(this.bottom, this.top, 6, 2)) {
      context.fillStyle = colour("--line");
      context.globalAlpha = 0.6;
      context.fillRect(0, Math.round(y(count)), width, 1);
      context.globalAlpha = 1;
      if (count > 0) label(bytes(count), 4, y(count) - 3, colour("--text"));
    }
    for (const entry of ticks(this.range.first, this.range.last, Math.floor(width / 110), 10)) {
      label(whole(entry), x(entry) + 2, height - 4, colour("--quiet"));
    }
    // A mark is always drawn, its text where the one before leaves room.
    let free = 0;
    for (const mark of this.device.marks) {
      if (mark.entry < this.range.first || mark.entry > this.range.last) continue;
      const failure = mark.kind === "out_of_memory";
      context.fillStyle = colour(failure ? "--alarm" : "--accent");
      context.fillRect(Math.round(x(mark.entry)), 0, failure ? 2 : 1, failure ? height : 14);
      const text = failure ? "out of memory" : mark.text;
      const from = x(mark.entry) + 4;
      if (from < free) continue;
      label(text, from, failure ? 12 : 24, context.fillStyle);
      free = from + context.measureText(text).width + 8;
    }
    context.fillStyle = colour("--text");
    context.fillRect(Math.round(x(this.moment)), 0, 1, height);
  }

  private listen(position: number): void {
    const { over } = this;
    const share = (event: MouseEvent) => event.offsetX / Math.max(over.clientWidth, 1);
    over.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const factor = Math.exp(Math.sign(event.deltaY || event.deltaX) * Math.min(Math.abs(event.deltaY || event.deltaX), 200) * 0.002);
        if (event.shiftKey) {
          const at = this.bottom + (1 - event.offsetY / Math.max(over.clientHeight, 1)) * (this.top - this.bottom);
          const height = Math.min(Math.max((this.top - this.bottom) * factor, 4096), this.scale);
          const below = (at - this.bottom) / (this.top - this.bottom);
          this.bottom = Math.min(Math.max(at - below * height, 0), this.scale - height);
          this.top = this.bottom + height;
          this.redraw();
        } else {
          this.look(zoom(this.range, share(event), factor, this.device.entries));
        }
      },
      { passive: false },
    );
    let from: { x: number; range: Range; moved: boolean } | undefined;
    over.addEventListener("pointerdown", (event) => {
      over.setPointerCapture(event.pointerId);
      from = { x: event.offsetX, range: this.range, moved: false };
    });
    over.addEventListener("pointermove", (event) => {
      if (from && event.buttons) {
        const by = (from.x - event.offsetX) / Math.max(over.clientWidth, 1);
        from.moved ||= Math.abs(from.x - event.offsetX) > 3;
        if (from.moved) this.look(move(from.range, by, this.device.entries));
        return;
      }
      void this.point(event, position);
    });
    over.addEventListener("pointerup", (event) => {
      if (from && !from.moved) {
        const range = this.range;
        this.choose(range.first + share(event) * (range.last - range.first));
      }
      from = undefined;
    });
    over.addEventListener("pointerleave", () => {
      this.hover++;
      this.events.tip(undefined, 0, 0);
    });
  }

  private async point(event: PointerEvent, position: number): Promise<void> {
    const turn = ++this.hover;
    const { width, height } = this.over;
    const found = this.tiles.finder(this.range.first, this.range.last, width);
    const hit = found && hitTimeline({ width, height }, this.view(), found.find, found.entriesPerColumn, event.offsetX, event.offsetY);
    if (!hit) {
      this.events.tip(undefined, 0, 0);
      return;
    }
    const { tile } = hit.layout;
    const where = `entry ${whole(tile.moment[hit.column])}: ${bytes(tile.live[hit.column])} in use of ${bytes(tile.reserved[hit.column])} reserved`;
    if (hit.kind === "small") {
      const small = bytes(tile.small[hit.column]);
      this.events.tip(`${small} in allocations under ${bytes(tile.smallBelow)} each: zoom in to see them\n${where}`, event.clientX, event.clientY);
    } else if (hit.kind === "reserved") {
      this.events.tip(`reserved and not in use\n${where}`, event.clientX, event.clientY);
    } else {
      try {
        const allocation = await this.source.allocation(this.file, position, tile.id[hit.span]);
        const stack = await this.source.stack(this.file, allocation.stack);
        if (turn !== this.hover) return;
        const began = allocation.start === null ? "before the history" : `entry ${whole(allocation.start)}`;
        const ended = allocation.end === null ? "not freed in it" : `freed at ${whole(allocation.end)}`;
        const frames = stack.frames.slice(0, 12).join("\n");
        this.events.tip(`${bytes(allocation.bytes)}, ${began}, ${ended}\n${where}\n${frames || stack.title}`, event.clientX, event.clientY);
      } catch (error) {
        this.events.failed(error);
      }
    }
  }
}

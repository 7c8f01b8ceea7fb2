// The tiles that are here, laid out, and the ones that are asked for. While a tile is on its way
// the picture is drawn from the next coarser level that is here, so zooming never waits.

import { layOut, type Layout } from "./layout";
import { finder, type ColumnFinder } from "./raster";
import type { DeviceAbout, Source } from "./source";

/** Laid-out tiles kept for one device. The least recently drawn ones go first. */
const KEPT = 96;
/** Requests at once, so that a long zoom does not queue up tiles that nobody will look at. */
const AT_ONCE = 4;

export class Tiles {
  private readonly byLevel = new Map<number, Map<number, Layout>>();
  private readonly used = new Map<string, number>();
  private readonly asked = new Set<string>();
  private clock = 0;

  constructor(
    private readonly source: Source,
    private readonly file: number,
    private readonly position: number,
    private readonly device: DeviceAbout,
    private readonly changed: () => void,
    private readonly failed: (error: unknown) => void,
  ) {}

  /** The level at which every pixel has one column, or two. */
  levelFor(entries: number, pixels: number): number {
    const wanted = Math.floor(Math.log2(Math.max(entries / pixels, 1)));
    return Math.min(Math.max(wanted, this.device.finest), this.device.levels - 1);
  }

  private indices(level: number, first: number, last: number): [number, number] {
    const width = 2 ** level * this.source.about.columnsPerTile;
    const end = Math.floor(Math.max(this.device.entries, 0) / width);
    return [Math.max(0, Math.floor(first / width)), Math.min(end, Math.floor(last / width))];
  }

  /** Asks for what a window needs, and gives the best finder there is now. */
  finder(first: number, last: number, pixels: number): { find: ColumnFinder; entriesPerColumn: number } | undefined {
    const wanted = this.levelFor(last - first, pixels);
    const [from, to] = this.indices(wanted, first, last);
    for (let index = from; index <= to; index++) this.ask(wanted, index);
    // The coarsest tile is one, and shows something at once, everywhere.
    this.ask(this.device.levels - 1, 0);
    for (let level = wanted; level < this.device.levels; level++) {
      const here = this.byLevel.get(level);
      const [low, high] = this.indices(level, first, last);
      let complete = here !== undefined;
      for (let index = low; complete && index <= high; index++) {
        complete = here!.has(index);
        this.used.set(`${level}/${index}`, ++this.clock);
      }
      if (complete) {
        return { find: finder(level, here!, this.source.about.columnsPerTile), entriesPerColumn: 2 ** level };
      }
    }
    return undefined;
  }

  private ask(level: number, index: number): void {
    const key = `${level}/${index}`;
    if (this.byLevel.get(level)?.has(index) || this.asked.has(key) || this.asked.size >= AT_ONCE) return;
    this.asked.add(key);
    this.source
      .tile(this.file, this.position, level, index)
      .then((tile) => {
        let tiles = this.byLevel.get(level);
        if (!tiles) this.byLevel.set(level, (tiles = new Map()));
        tiles.set(index, layOut(tile));
        this.used.set(key, ++this.clock);
        this.forget();
      })
      .catch(this.failed)
      .finally(() => {
        this.asked.delete(key);
        this.changed();
      });
  }

  private forget(): void {
    const top = `${this.device.levels - 1}/0`;
    const here = [...this.byLevel].flatMap(([level, tiles]) => [...tiles.keys()].map((index) => `${level}/${index}`));
    here.sort((a, b) => (this.used.get(a) ?? 0) - (this.used.get(b) ?? 0));
    for (const key of here.slice(0, Math.max(0, here.length - KEPT))) {
      if (key === top) continue;
      const [level, index] = key.split("/").map(Number);
      this.byLevel.get(level)?.delete(index);
      this.used.delete(key);
    }
  }
}

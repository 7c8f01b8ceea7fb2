import { describe, expect, it } from "vitest";
import { colourOf, PALETTES } from "../src/colours";
import { readTile, writeTile, type Tile } from "../src/format";
import { entryAt, layOut } from "../src/layout";
import { columnAt, drawSegments, drawTimeline, finder, hitTimeline } from "../src/raster";

/** Four columns: a (30) throughout, b (20) in columns 1 and 2, c (40) in 2 and 3; 10 small bytes. */
function example(): Tile {
  return {
    level: 0,
    firstEntry: 0,
    columns: 4,
    smallBelow: 16,
    live: Float64Array.of(40, 60, 100, 80),
    small: Float64Array.of(10, 10, 10, 10),
    reserved: Float64Array.of(100, 100, 120, 120),
    bytes: Float64Array.of(30, 20, 40),
    moment: Uint32Array.of(0, 1, 2, 3),
    id: Uint32Array.of(7, 8, 9),
    stack: Uint32Array.of(0, 1, 2),
    startColumn: Uint16Array.of(0, 1, 2),
    endColumn: Uint16Array.of(4, 3, 4),
  };
}

const find = (tile: Tile) => finder(tile.level, new Map([[0, layOut(tile)]]), 512);

describe("tiles", () => {
  it("come back as they were written", () => {
    expect(readTile(writeTile(example()))).toEqual(example());
  });

  it("that are cut off, or something else, are refused", () => {
    const whole = writeTile(example());
    expect(() => readTile(whole.slice(0, 12))).toThrow(/12 bytes are less than a header/);
    expect(() => readTile(whole.slice(0, whole.byteLength - 4))).toThrow(/4 columns and 3 allocations take/);
    const other = whole.slice(0);
    new DataView(other).setUint32(0, 1, true);
    expect(() => readTile(other)).toThrow(/LRT1/);
  });
});

describe("layout", () => {
  it("stacks later allocations on earlier ones, and lets them fall when one below ends", () => {
    const layout = layOut(example());
    const column = (c: number) =>
      [...layout.span.slice(layout.first[c], layout.first[c + 1])].map((span, i) => [
        span,
        layout.base[layout.first[c] + i],
      ]);
    expect(column(0)).toEqual([[0, 10]]);
    expect(column(1)).toEqual([[0, 10], [1, 40]]);
    expect(column(2)).toEqual([[0, 10], [1, 40], [2, 60]]);
    expect(column(3)).toEqual([[0, 10], [2, 40]]);
  });

  it("finds what covers a byte", () => {
    const layout = layOut(example());
    const spanAt = (column: number, bytes: number) => layout.span[entryAt(layout, column, bytes)];
    expect(entryAt(layout, 2, 9)).toBe(-1);
    expect(spanAt(2, 10)).toBe(0);
    expect(spanAt(2, 39)).toBe(0);
    expect(spanAt(2, 40)).toBe(1);
    expect(spanAt(2, 99)).toBe(2);
    expect(entryAt(layout, 2, 100)).toBe(-1);
  });
});

describe("the timeline's picture", () => {
  const palette = PALETTES.light;
  const window = { firstEntry: 0, lastEntry: 4, bottom: 0, top: 120 };
  const picture = () => ({ width: 4, height: 120, pixels: new Uint32Array(480) });
  const stackColour = (stack: number) => palette.stacks[colourOf(stack, palette.stacks.length)];

  it("is exact to the pixel", () => {
    const drawn = picture();
    drawTimeline(drawn, window, find(example()), 1, palette, undefined);
    const at = (x: number, bytes: number) => drawn.pixels[(119 - bytes) * 4 + x];
    expect(at(0, 0)).toBe(palette.small);
    expect(at(0, 9)).toBe(palette.small);
    expect(at(0, 10)).toBe(stackColour(0));
    expect(at(0, 38)).toBe(stackColour(0));
    expect(at(0, 39)).toBe(palette.edges[colourOf(0, palette.edges.length)]);
    expect(at(0, 40)).toBe(palette.reserved);
    expect(at(0, 99)).toBe(palette.reserved);
    expect(at(0, 100)).toBe(palette.ground);
    expect(at(2, 60)).toBe(stackColour(2));
    expect(at(3, 40)).toBe(stackColour(2));
    expect(at(3, 119)).toBe(palette.reserved);
  });

  it("fades what is not marked", () => {
    const drawn = picture();
    drawTimeline(drawn, window, find(example()), 1, palette, new Set([2]));
    expect(drawn.pixels[(119 - 20) * 4 + 0]).toBe(palette.faded[colourOf(0, palette.faded.length)]);
    expect(drawn.pixels[(119 - 60) * 4 + 3]).toBe(stackColour(2));
  });

  it("shows the fullest of the columns that share a pixel", () => {
    const found = columnAt(find(example()), window, 1, 0, 1);
    expect(found?.column).toBe(2);
  });

  it("says what is under the pointer", () => {
    const hit = (x: number, bytes: number) =>
      hitTimeline({ width: 4, height: 120 }, window, find(example()), 1, x, 119.5 - bytes);
    expect(hit(2.5, 5)?.kind).toBe("small");
    expect(hit(2.5, 70)).toMatchObject({ kind: "allocation", span: 2 });
    expect(hit(2.5, 110)?.kind).toBe("reserved");
    expect(hit(0.5, 110)).toBeUndefined();
    expect(hit(7, 10)).toBeUndefined();
  });
});

describe("the segment map", () => {
  it("draws blocks where they lie, and free memory between them", () => {
    const palette = PALETTES.dark;
    const drawn = { width: 100, height: 28, pixels: new Uint32Array(2800) };
    const block = { address: 1020, bytes: 30, stack: 4, state: "active" as const };
    const given = { address: 2000, bytes: 50, stack: 4, state: "pending" as const };
    drawSegments(
      drawn,
      [
        { address: 1000, bytes: 100, blocks: [block] },
        { address: 2000, bytes: 50, blocks: [given] },
      ],
      14,
      100,
      palette,
      undefined,
    );
    const at = (x: number, y: number) => drawn.pixels[y * 100 + x];
    expect(at(10, 5)).toBe(palette.reserved);
    expect(at(30, 5)).toBe(palette.stacks[colourOf(4, palette.stacks.length)]);
    expect(at(60, 5)).toBe(palette.reserved);
    expect(at(30, 13)).toBe(palette.ground);
    expect(at(30, 20)).toBe(palette.small);
    expect(at(70, 20)).toBe(palette.ground);
  });
});

describe("colours", () => {
  it("differ from each other and from what is around them", () => {
    for (const palette of Object.values(PALETTES)) {
      const all = [palette.ground, palette.small, palette.reserved, ...palette.stacks];
      expect(new Set(all).size).toBe(all.length);
    }
  });
});

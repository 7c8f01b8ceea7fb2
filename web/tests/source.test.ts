import { gzipSync } from "node:zlib";
import { describe, expect, it } from "vitest";
import { EmbeddedSource } from "../src/source";

const NEVER = 0xffff_ffff;

/**
 * One device: two stretches of a range that can grow, 1000 bytes from moment 1 on, with two blocks in them, one
 * of which is given back late; and a segment that touches the range.
 */
function page(): string {
  const bytes = new ArrayBuffer(2 * 36 + 3 * 36 + 4);
  const put = (at: number, count: number, columns: number[][]) => {
    const kinds = [Float64Array, Float64Array, ...Array.from({ length: 5 }, () => Uint32Array)];
    let place = at;
    columns.forEach((column, i) => {
      new kinds[i](bytes, place, count).set(column);
      place += count * kinds[i].BYTES_PER_ELEMENT;
    });
  };
  put(0, 2, [[5000, 5600], [600, 100], [2, 3], [4, NEVER], [6, NEVER], [0, 1], [0, 0]]);
  const never = [NEVER, NEVER, NEVER];
  put(72, 3, [[6000, 5500, 5000], [200, 500, 500], [1, 1, 1], never, never, [0, 0, 0], [0, 1, 1]]);
  const about = { version: "test", columnsPerTile: 512, files: [] };
  const files = [
    {
      stacks: [
        { title: "train.py:3 Forward", frames: ["train.py:3 Forward"] },
        { title: "data.py:8 load", frames: ["data.py:8 load", "train.py:1 main"] },
      ],
      devices: [{ tiles: [], allocations: { at: 0, count: 2 }, segments: { at: 72, count: 3 } }],
    },
  ];
  let header = JSON.stringify({ about, files });
  header += " ".repeat((8 - ((4 + header.length) % 8)) % 8);
  const whole = new Uint8Array(4 + header.length + bytes.byteLength);
  new DataView(whole.buffer).setUint32(0, header.length, true);
  whole.set(new TextEncoder().encode(header), 4);
  whole.set(new Uint8Array(bytes), 4 + header.length);
  return gzipSync(whole).toString("base64");
}

describe("a page with its data", () => {
  it("gives the state of any moment", async () => {
    const source = await EmbeddedSource.decode(page());
    expect(await source.state(0, 0, 0)).toEqual({ entry: 0, liveBytes: 0, reservedBytes: 0, segments: [] });
    const state = await source.state(0, 0, 4);
    expect(state.liveBytes).toBe(700);
    expect(state.reservedBytes).toBe(1200);
    expect(state.segments.map(({ address, bytes }) => [address, bytes])).toEqual([
      [5000, 1000],
      [6000, 200],
    ]);
    expect(state.segments[0].blocks.map((block) => block.state)).toEqual(["pending", "active"]);
    expect((await source.state(0, 0, 6)).liveBytes).toBe(100);
  });

  it("gives its stacks by weight, its allocations, and what a search finds", async () => {
    const source = await EmbeddedSource.decode(page());
    expect((await source.stacks(0, 0, 3)).map((row) => [row.title, row.bytes])).toEqual([
      ["train.py:3 Forward", 600],
      ["data.py:8 load", 100],
    ]);
    expect(await source.allocation(0, 0, 0)).toMatchObject({ bytes: 600, start: 1, end: 5 });
    expect(await source.allocation(0, 0, 1)).toMatchObject({ end: null });
    expect(await source.search(0, "FORWARD")).toEqual([0]);
    expect(await source.search(0, "train.py")).toEqual([0, 1]);
  });

  it("says which tile it does not have", async () => {
    const source = await EmbeddedSource.decode(page());
    await expect(source.tile(0, 0, 3, 2)).rejects.toThrow("this page has no tile 2 of level 3");
  });
});

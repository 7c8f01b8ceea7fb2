import { describe, expect, it } from "vitest";
import { bytes, ticks, whole } from "../src/units";
import { centre, clamp, move, zoom } from "../src/window";

describe("what is shown", () => {
  it("keeps the entry under the pointer", () => {
    const range = zoom({ first: 100, last: 300 }, 0.25, 0.5, 1000);
    expect(range).toEqual({ first: 125, last: 225 });
  });

  it("stays inside the history and never shrinks to nothing", () => {
    expect(move({ first: 0, last: 100 }, -0.5, 1000)).toEqual({ first: 0, last: 100 });
    expect(move({ first: 900, last: 1000 }, 0.5, 1000)).toEqual({ first: 900, last: 1000 });
    expect(clamp({ first: -50, last: 5000 }, 1000)).toEqual({ first: 0, last: 1000 });
    const closest = zoom({ first: 10, last: 18 }, 0.5, 1e-9, 1000);
    expect(closest.last - closest.first).toBe(8);
    expect(clamp({ first: 0, last: 0 }, 0)).toEqual({ first: 0, last: 1 });
  });

  it("centres a moment without zooming out", () => {
    expect(centre({ first: 0, last: 1000 }, 500, 100, 1000)).toEqual({ first: 450, last: 550 });
    expect(centre({ first: 0, last: 50 }, 500, 100, 1000)).toEqual({ first: 475, last: 525 });
  });
});

describe("numbers", () => {
  it("are binary for bytes", () => {
    expect(bytes(0)).toBe("0 B");
    expect(bytes(1536)).toBe("1.50 KiB");
    expect(bytes(-3 * 2 ** 30)).toBe("-3.00 GiB");
    expect(bytes(200 * 2 ** 20)).toBe("200.0 MiB");
    expect(whole(1234567)).toBe("1,234,567");
  });

  it("make few, round marks on an axis", () => {
    expect(ticks(0, 100, 5, 10)).toEqual([0, 20, 40, 60, 80, 100]);
    expect(ticks(0, 3 * 2 ** 30, 6, 2).map(bytes)).toEqual([
      "0 B", "512.0 MiB", "1.00 GiB", "1.50 GiB", "2.00 GiB", "2.50 GiB", "3.00 GiB",
    ]);
    expect(ticks(5, 5, 4, 10)).toEqual([]);
  });
});

import type { ChildProcess } from "node:child_process";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import type { Browser, Page } from "playwright-core";
import { afterAll, beforeAll, describe, expect, it } from "vitest";
import { browser, open, page as write, serve, shown, snapshot, temporary } from "./lab";

const ONE = snapshot("transformer-training.pickle.gz");
const OTHER = snapshot("federated.pickle.gz");

let chromium: Browser;
beforeAll(async () => {
  chromium = await browser();
});
afterAll(async () => {
  await chromium?.close();
});

/** What people do with the page; the same for a served page and for a file. */
function behaves(address: () => string): void {
  let page: Page;
  beforeAll(async () => {
    page = await open(chromium, address());
  });
  afterAll(async () => {
    await page?.close();
  });
  const middle = async () => {
    const box = (await page.locator(".timeline").first().boundingBox())!;
    return { x: box.x + box.width / 2, y: box.y + box.height / 2, box };
  };

  it("draws something other than the ground", async () => {
    const colours = await page.evaluate(() => {
      const canvas = document.querySelector<HTMLCanvasElement>("canvas.picture")!;
      const { data } = canvas.getContext("2d")!.getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size;
    });
    expect(colours).toBeGreaterThan(4);
  });

  it("zooms with the wheel, around the pointer", async () => {
    const before = (await shown(page))[0];
    const { x, y } = await middle();
    await page.mouse.move(x, y);
    for (let i = 0; i < 5; i++) await page.mouse.wheel(0, -200);
    await expect.poll(async () => (await shown(page))[0].last - (await shown(page))[0].first).toBeLessThan(
      (before.last - before.first) / 4,
    );
    const after = (await shown(page))[0];
    const centre = (range: { first: number; last: number }) => (range.first + range.last) / 2;
    expect(Math.abs(centre(after) - centre(before))).toBeLessThan((before.last - before.first) / 20);
    await page.waitForSelector('.timeline[data-ready="yes"]');
  });

  it("moves when it is dragged", async () => {
    const before = (await shown(page))[0];
    const { x, y } = await middle();
    await page.mouse.move(x, y);
    await page.mouse.down();
    await page.mouse.move(x + 200, y, { steps: 4 });
    await page.mouse.up();
    const after = (await shown(page))[0];
    expect(after.first).toBeLessThan(before.first);
    expect(after.last - after.first).toBeCloseTo(before.last - before.first, 6);
  });

  it("shows the whole history again", async () => {
    await page.keyboard.press("0");
    await expect.poll(async () => (await shown(page))[0].first).toBe(0);
  });

  it("jumps to the peak, and says what is there", async () => {
    await page.click("#peak");
    const facts = await page.locator(".panel .quiet").first().textContent();
    const peak = Number(/after ([\d,]+) of/.exec(facts!)![1].replaceAll(",", ""));
    await expect.poll(async () => (await shown(page))[0].moment).toBe(peak);
    await page.waitForSelector(`[data-entry="${peak}"]`);
    expect(await page.locator(".note", { hasText: "in use of" }).first().textContent()).toMatch(/^After/);
  });

  it("tells what is under the pointer", async () => {
    const { box } = await middle();
    await page.mouse.move(box.x + box.width / 2, box.y + box.height - 30);
    await page.waitForSelector("#tip:not([hidden])");
    expect(await page.locator("#tip").textContent()).toMatch(/in use of .* reserved/);
  });

  it("draws the segments of the chosen moment, and follows it", async () => {
    const { x, y } = await middle();
    await page.mouse.click(x, y);
    const chosen = (await shown(page))[0].moment;
    await page.waitForSelector(`[data-entry="${chosen}"]`);
    await page.keyboard.press(".");
    await page.waitForSelector(`[data-entry="${chosen + 1}"]`);
    const box = (await page.locator(".map canvas").first().boundingBox())!;
    await page.mouse.move(box.x + 3, box.y + 3);
    await page.waitForSelector("#tip:not([hidden])");
    expect(await page.locator("#tip").textContent()).toMatch(/segment of/);
  });

  it("finds stacks, and fades the others", async () => {
    await page.click("#peak");
    const row = page.locator(".rows tbody tr").first();
    await row.waitFor();
    const all = await page.locator(".rows tbody tr").count();
    const title = (await row.locator("td").last().textContent())!;
    await page.keyboard.press("/");
    await page.keyboard.type(title.slice(0, 12));
    await expect.poll(() => page.locator("#found").textContent()).toMatch(/^[1-9][\d,]* stack/);
    const found = await page.locator(".rows tbody tr").count();
    expect(found).toBeGreaterThan(0);
    expect(found).toBeLessThanOrEqual(all);
    await page.fill("#search", "no such function anywhere");
    await expect.poll(() => page.locator("#found").textContent()).toBe("0 stacks");
    await page.locator("#search").press("Escape");
    await expect.poll(() => page.locator(".rows tbody tr").count()).toBe(all);
  });

  it("is there in dark and in light", async () => {
    const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const before = await ground();
    await page.keyboard.press("t");
    expect(await ground()).not.toBe(before);
    await page.keyboard.press("t");
  });
}

describe("the served page", () => {
  let served: { url: string; process: ChildProcess };
  beforeAll(async () => {
    served = await serve([ONE]);
  });
  afterAll(() => {
    served?.process.kill();
  });
  behaves(() => served.url);

  it("answers nobody without the token", async () => {
    const base = served.url.split("?")[0];
    for (const path of ["", "api/about", "api/0/0/state/0", "?token=00000000000000000000000000000000"]) {
      expect((await fetch(base + path)).status).toBe(403);
    }
    const token = new URL(served.url).searchParams.get("token");
    const known = await fetch(`${base}api/about`, { headers: { authorization: `Bearer ${token}` } });
    expect(known.status).toBe(200);
  });

  it("says what is not there", async () => {
    const token = new URL(served.url).searchParams.get("token");
    const answer = await fetch(`${served.url.split("?")[0]}api/0/0/tile/63/0`, {
      headers: { authorization: `Bearer ${token}` },
    });
    expect(answer.status).toBe(404);
    expect(await answer.text()).toContain("no such tile");
  });
});

describe("one file, offline", () => {
  const out = join(temporary(), "page.html");
  beforeAll(() => write([ONE], out));
  behaves(() => pathToFileURL(out).href);
});

describe("two files", () => {
  let served: { url: string; process: ChildProcess };
  beforeAll(async () => {
    served = await serve([ONE, OTHER]);
  });
  afterAll(() => {
    served?.process.kill();
  });

  it("are shown side by side at one scale, with what changed between their peaks", async () => {
    const page = await open(chromium, served.url);
    const panels = await shown(page);
    expect(panels.length).toBeGreaterThanOrEqual(2);
    expect(new Set(panels.map((panel) => panel.top)).size).toBe(1);
    const rows = page.locator("#compare tbody tr");
    await expect.poll(() => rows.count()).toBeGreaterThan(0);
    expect(await rows.first().locator("td").first().textContent()).toMatch(/^[+-]/);
    await page.close();
  });
});

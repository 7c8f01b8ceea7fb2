// How fast the page is with a large file: LASTREF_LARGE=FILE npm run measure. Prints, fails nothing
// by the clock.

import { writeFileSync } from "node:fs";
import { expect, it } from "vitest";
import { browser, open, serve, shown } from "../browser/lab";

const file = process.env.LASTREF_LARGE;

it.runIf(file)("shows a large file", async () => {
  const start = performance.now();
  const served = await serve([file!]);
  const readable = performance.now();
  const chromium = await browser();
  try {
    const opened = performance.now();
    const page = await open(chromium, served.url);
    const picture = performance.now();
    const box = (await page.locator(".timeline").first().boundingBox())!;
    await page.mouse.move(box.x + box.width * 0.6, box.y + box.height / 2);
    // Every animation frame has one step of the wheel; what is drawn in a second is counted.
    const rates = await page.evaluate(async () => {
      const over = document.querySelector<HTMLCanvasElement>(".timeline .over")!;
      const frames = () => (window as unknown as { lastref: { shown(): { frames: number }[] } }).lastref.shown()[0].frames;
      const rates: number[] = [];
      for (const deltaY of [-30, -30, 30, 30, -60, 60]) {
        const [first, start] = [frames(), performance.now()];
        while (performance.now() - start < 1000) {
          over.dispatchEvent(
            new WheelEvent("wheel", { deltaY, clientX: over.getBoundingClientRect().x + 700, bubbles: true, cancelable: true }),
          );
          await new Promise(requestAnimationFrame);
        }
        rates.push(((frames() - first) * 1000) / (performance.now() - start));
      }
      return rates;
    });
    const result = {
      read_and_laid_out_ms: Math.round(readable - start),
      first_picture_ms: Math.round(readable - start + (picture - opened)),
      frames_per_second_while_zooming: rates.map((rate) => Math.round(rate)),
      entries: (await shown(page))[0].last,
    };
    console.log(JSON.stringify(result));
    if (process.env.LASTREF_OUT) writeFileSync(process.env.LASTREF_OUT, JSON.stringify(result));
    expect(Math.min(...rates)).toBeGreaterThan(0);
  } finally {
    await chromium.close();
    served.process.kill();
  }
}, 300_000);

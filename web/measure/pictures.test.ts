// The pictures in docs/view.md: LASTREF_PICTURES=DIR npm run measure.

import { join } from "node:path";
import { it } from "vitest";
import { browser, open, serve, snapshot } from "../browser/lab";

const to = process.env.LASTREF_PICTURES;

it.runIf(to)("are taken", async () => {
  const chromium = await browser();
  const one = await serve([snapshot("transformer-training.pickle.gz")]);
  const two = await serve([snapshot("transformer-training.pickle.gz"), snapshot("federated.pickle.gz")]);
  try {
    for (const dark of [false, true]) {
      const page = await open(chromium, one.url, dark);
      await page.click("#peak");
      await page.click("#whole");
      await page.waitForSelector(".rows tbody tr");
      await page.waitForTimeout(300);
      await page.screenshot({ path: join(to!, dark ? "view-dark.png" : "view-light.png") });
      await page.close();
    }
    const page = await open(chromium, two.url);
    await page.waitForSelector("#compare tbody tr");
    await page.screenshot({ path: join(to!, "view-compare.png"), fullPage: true });
  } finally {
    await chromium.close();
    one.process.kill();
    two.process.kill();
  }
}, 120_000);

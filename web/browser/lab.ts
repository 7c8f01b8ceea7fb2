// What the tests of the page in a real browser share: the command, the browser, the files.

import { execFileSync, spawn, type ChildProcess } from "node:child_process";
import { existsSync, mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { chromium, type Browser, type Page } from "playwright-core";

export const ROOT = resolve(import.meta.dirname, "../..");

/** The command, as `LASTREF` names it. */
export function command(): string {
  const path = process.env.LASTREF ?? join(ROOT, "target/release/lastref");
  if (!existsSync(path)) throw new Error(`there is no ${path}: build the command, or set LASTREF to where it is`);
  return path;
}

export const snapshot = (name: string) => join(ROOT, "crates/lastref-snapshot/testdata", name);

export function temporary(): string {
  return mkdtempSync(join(tmpdir(), "lastref-view-"));
}

export async function browser(): Promise<Browser> {
  return chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"],
  });
}

/** Runs `lastref view FILES` and gives the address it prints. */
export async function serve(files: string[]): Promise<{ url: string; process: ChildProcess }> {
  const process = spawn(command(), ["view", ...files], { stdio: ["ignore", "pipe", "inherit"] });
  const url = await new Promise<string>((done, failed) => {
    let said = "";
    process.stdout!.on("data", (data) => {
      said += String(data);
      if (said.includes("\n")) done(said.trim());
    });
    process.on("exit", (code) => failed(new Error(`lastref view ended with status ${code}`)));
  });
  return { url, process };
}

export function page(files: string[], out: string): void {
  execFileSync(command(), ["view", ...files, "--html", out], { stdio: "inherit" });
}

/** The page, once its first picture is drawn. Anything it asks of another host fails the test. */
export async function open(browser: Browser, url: string, dark = false): Promise<Page> {
  const page = await browser.newPage({
    viewport: { width: 1280, height: 900 },
    colorScheme: dark ? "dark" : "light",
  });
  const host = url.startsWith("file:") ? "" : new URL(url).host;
  page.on("request", (request) => {
    const asked = new URL(request.url());
    if (asked.protocol !== "data:" && asked.protocol !== "blob:" && asked.host !== host) {
      throw new Error(`the page asked for ${request.url()}`);
    }
  });
  page.on("pageerror", (error) => {
    throw error;
  });
  await page.goto(url);
  await page.waitForSelector('body[data-ready="yes"]');
  await page.waitForSelector('.timeline[data-ready="yes"]');
  return page;
}

export interface Shown {
  first: number;
  last: number;
  top: number;
  moment: number;
  frames: number;
}

export async function shown(page: Page): Promise<Shown[]> {
  return page.evaluate(() => (window as unknown as { lastref: { shown(): Shown[] } }).lastref.shown());
}

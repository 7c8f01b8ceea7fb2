import { defineConfig } from "vitest/config";
import { viteSingleFile } from "vite-plugin-singlefile";

// One file, because the same page is served by the command and written, with its data, by `--html`.
// It is built into the crate that embeds it, so that the crate's package is complete.
export default defineConfig({
  plugins: [viteSingleFile()],
  build: {
    outDir: "../crates/lastref-cli/viewer",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
  },
  test: { testTimeout: 60_000, hookTimeout: 120_000 },
});

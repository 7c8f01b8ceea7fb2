// Where each allocation of a tile lies in each column: later ones on top of earlier ones, so that
// what stays long makes a calm ground and what comes and goes moves above it.

import type { Tile } from "./format";

export interface Layout {
  readonly tile: Tile;
  /** Column c has the entries from `first[c]` up to `first[c + 1]`. */
  readonly first: Uint32Array;
  /** By entry: the allocation, as a position in the tile's arrays. */
  readonly span: Uint32Array;
  /** By entry: the bytes below it. */
  readonly base: Float64Array;
}

export function layOut(tile: Tile): Layout {
  const { columns, bytes, startColumn, endColumn } = tile;
  const spans = bytes.length;
  // Counting first gives every column its place; the allocations come in their order of beginning,
  // so filling in that order stacks them.
  const first = new Uint32Array(columns + 1);
  for (let i = 0; i < spans; i++) {
    for (let c = startColumn[i]; c < endColumn[i]; c++) first[c + 1]++;
  }
  for (let c = 0; c < columns; c++) first[c + 1] += first[c];
  const next = first.slice(0, columns);
  const top = tile.small.slice();
  const span = new Uint32Array(first[columns]);
  const base = new Float64Array(first[columns]);
  for (let i = 0; i < spans; i++) {
    for (let c = startColumn[i]; c < endColumn[i]; c++) {
      const entry = next[c]++;
      span[entry] = i;
      base[entry] = top[c];
      top[c] += bytes[i];
    }
  }
  return { tile, first, span, base };
}

/** The entry of a column that covers this many bytes from the bottom, or -1. */
export function entryAt(layout: Layout, column: number, bytes: number): number {
  let low = layout.first[column];
  let high = layout.first[column + 1];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (layout.base[middle] <= bytes) low = middle + 1;
    else high = middle;
  }
  const entry = low - 1;
  if (entry < layout.first[column]) return -1;
  return bytes < layout.base[entry] + layout.tile.bytes[layout.span[entry]] ? entry : -1;
}

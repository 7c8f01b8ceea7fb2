// Draws timelines and segment maps into an array of pixels. What is painted is bounded by the
// picture, not by the number of allocations, and a million rectangles through a canvas or WebGL
// without a GPU take seconds: so the pixels are written here.

import { colourOf, type Palette } from "./colours";
import { entryAt, type Layout } from "./layout";

export interface Picture {
  readonly width: number;
  readonly height: number;
  readonly pixels: Uint32Array;
}

/** Which part of the history and of the bytes a picture shows. */
export interface Window {
  readonly firstEntry: number;
  readonly lastEntry: number;
  /** Bytes at the bottom and at the top of the picture. */
  readonly bottom: number;
  readonly top: number;
}

/** What is marked: nothing, or these stacks. Others are faded. */
export type Marked = ReadonlySet<number> | undefined;

/** Finds the layout and the column that show an entry of the history. */
export type ColumnFinder = (entry: number) => { layout: Layout; column: number } | undefined;

/** A finder over the tiles of one level. */
export function finder(level: number, layouts: ReadonlyMap<number, Layout>, columnsPerTile: number): ColumnFinder {
  const width = 2 ** level;
  return (entry) => {
    const at = Math.floor(entry / width);
    const layout = layouts.get(Math.floor(at / columnsPerTile));
    const column = at % columnsPerTile;
    return layout && column >= 0 && column < layout.tile.columns ? { layout, column } : undefined;
  };
}

/** The fullest of the columns that fall into pixel `x`, so that no peak is lost between pixels. */
export function columnAt(
  find: ColumnFinder,
  window: Window,
  width: number,
  x: number,
  entriesPerColumn: number,
): { layout: Layout; column: number } | undefined {
  const perPixel = (window.lastEntry - window.firstEntry) / width;
  const from = window.firstEntry + x * perPixel;
  let best = find(from);
  for (let entry = from + entriesPerColumn; entry < from + perPixel; entry += entriesPerColumn) {
    const other = find(entry);
    if (!other) continue;
    if (!best || other.layout.tile.live[other.column] > best.layout.tile.live[best.column]) best = other;
  }
  return best;
}

export function drawTimeline(
  picture: Picture,
  window: Window,
  find: ColumnFinder,
  entriesPerColumn: number,
  palette: Palette,
  marked: Marked,
): void {
  const { width, height, pixels } = picture;
  pixels.fill(palette.ground);
  const colours = palette.stacks.length;
  const scale = height / (window.top - window.bottom);
  const row = (bytes: number) => Math.round(height - (bytes - window.bottom) * scale);
  const fill = (x: number, from: number, to: number, colour: number) => {
    // Rows are counted from the top, so `to` is the upper end.
    const end = Math.min(from, height);
    for (let y = Math.max(to, 0), at = y * width + x; y < end; y++, at += width) pixels[at] = colour;
  };
  for (let x = 0; x < width; x++) {
    const found = columnAt(find, window, width, x, entriesPerColumn);
    if (!found) continue;
    const { layout, column } = found;
    const { tile } = layout;
    const live = row(tile.live[column]);
    fill(x, live, row(tile.reserved[column]), palette.reserved);
    fill(x, height, row(tile.small[column]), palette.small);
    const end = layout.first[column + 1];
    for (let entry = layout.first[column]; entry < end; entry++) {
      const i = layout.span[entry];
      const bottom = row(layout.base[entry]);
      const top = row(layout.base[entry] + tile.bytes[i]);
      if (top >= bottom || bottom <= 0 || top >= height) continue;
      const stack = tile.stack[i];
      const colour = colourOf(stack, colours);
      if (marked && !marked.has(stack)) {
        fill(x, bottom, top, palette.faded[colour]);
        continue;
      }
      fill(x, bottom, top, palette.stacks[colour]);
      // An edge tells neighbours of one colour apart, where there is room for one.
      if (bottom - top > 3) fill(x, top + 1, top, palette.edges[colour]);
    }
  }
}

/** What lies under a pixel: a position in the tile's arrays, the small ones, reserved memory, or nothing. */
export type Hit =
  | { kind: "allocation"; layout: Layout; column: number; span: number }
  | { kind: "small"; layout: Layout; column: number }
  | { kind: "reserved"; layout: Layout; column: number }
  | undefined;

export function hitTimeline(
  picture: { width: number; height: number },
  window: Window,
  find: ColumnFinder,
  entriesPerColumn: number,
  x: number,
  y: number,
): Hit {
  const found = columnAt(find, window, picture.width, Math.floor(x), entriesPerColumn);
  if (!found) return undefined;
  const bytes = window.bottom + ((picture.height - y) / picture.height) * (window.top - window.bottom);
  if (bytes < 0) return undefined;
  const { layout, column } = found;
  const { tile } = layout;
  if (bytes < tile.small[column]) return { kind: "small", ...found };
  const entry = entryAt(layout, column, bytes);
  if (entry >= 0) return { kind: "allocation", ...found, span: layout.span[entry] };
  return bytes < tile.reserved[column] ? { kind: "reserved", ...found } : undefined;
}

/** A row of the segment map. */
export interface MapSegment {
  readonly address: number;
  readonly bytes: number;
  readonly blocks: readonly MapBlock[];
}

export interface MapBlock {
  readonly address: number;
  readonly bytes: number;
  readonly stack: number;
  /** `active`, `pending`; what no block covers is free. */
  readonly state: "active" | "pending";
}

/** The rectangle of each segment: rows of equal height, every segment at the same scale. */
export function segmentRow(index: number, rowHeight: number): { top: number; bottom: number } {
  return { top: index * rowHeight, bottom: (index + 1) * rowHeight - (rowHeight > 4 ? 2 : 0) };
}

export function drawSegments(
  picture: Picture,
  segments: readonly MapSegment[],
  rowHeight: number,
  bytesAcross: number,
  palette: Palette,
  marked: Marked,
): void {
  const { width, height, pixels } = picture;
  pixels.fill(palette.ground);
  const colours = palette.stacks.length;
  segments.forEach((segment, index) => {
    const { top, bottom } = segmentRow(index, rowHeight);
    if (top >= height) return;
    const end = Math.min(bottom, height);
    const paint = (address: number, bytes: number, colour: number, edge: number) => {
      const from = Math.max(0, Math.round(((address - segment.address) / bytesAcross) * width));
      const to = Math.min(width, Math.max(from + 1, Math.round(((address - segment.address + bytes) / bytesAcross) * width)));
      for (let y = top; y < end; y++) pixels.fill(colour, y * width + from, y * width + to);
      if (to - from > 3) for (let y = top; y < end; y++) pixels[y * width + from] = edge;
    };
    paint(segment.address, segment.bytes, palette.reserved, palette.small);
    for (const block of segment.blocks) {
      const colour = colourOf(block.stack, colours);
      const fill = block.state === "pending" ? palette.small : palette.stacks[colour];
      paint(
        block.address,
        block.bytes,
        marked && !marked.has(block.stack) ? palette.faded[colour] : fill,
        palette.edges[colour],
      );
    }
  });
}

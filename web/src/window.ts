// The part of a history that a timeline shows: moving and zooming, with bounds.

export interface Range {
  readonly first: number;
  readonly last: number;
}

/** Fewer entries than this are never shown: at that width each has many pixels. */
const NARROWEST = 8;

export function clamp(range: Range, entries: number): Range {
  const whole = Math.max(entries, 1);
  const width = Math.min(Math.max(range.last - range.first, Math.min(NARROWEST, whole)), whole);
  const first = Math.min(Math.max(range.first, 0), whole - width);
  return { first, last: first + width };
}

/** Zooms so that the entry under the pointer (`share` from the left) stays there. */
export function zoom(range: Range, share: number, factor: number, entries: number): Range {
  const width = (range.last - range.first) * factor;
  const at = range.first + share * (range.last - range.first);
  return clamp({ first: at - share * width, last: at + (1 - share) * width }, entries);
}

export function move(range: Range, share: number, entries: number): Range {
  const by = share * (range.last - range.first);
  return clamp({ first: range.first + by, last: range.last + by }, entries);
}

/** Shows an entry in the middle, at this many entries or what is shown now, if that is less. */
export function centre(range: Range, entry: number, width: number, entries: number): Range {
  const shown = Math.min(width, range.last - range.first);
  return clamp({ first: entry - shown / 2, last: entry + shown / 2 }, entries);
}

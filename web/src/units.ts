// Numbers as people read them. Bytes are binary, as on the command line.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count: number): string {
  let unit = 0;
  let shown = Math.abs(count);
  while (shown >= 1024 && unit < UNITS.length - 1) {
    shown /= 1024;
    unit++;
  }
  const text = unit === 0 ? String(shown) : shown.toFixed(shown < 100 ? 2 : 1);
  return `${count < 0 ? "-" : ""}${text} ${UNITS[unit]}`;
}

export function whole(count: number): string {
  return Math.round(count).toLocaleString("en-US");
}

/** At most `most` round values inside [from, to], for the marks of an axis; binary ones for bytes. */
export function ticks(from: number, to: number, most: number, base: 2 | 10): number[] {
  const span = to - from;
  if (!(span > 0) || most < 1) return [];
  let step: number;
  if (base === 2) {
    step = 2 ** Math.ceil(Math.log2(span / most));
  } else {
    const power = 10 ** Math.floor(Math.log10(span / most));
    step = power * ([1, 2, 5, 10].find((factor) => span / (power * factor) <= most) ?? 10);
  }
  step = Math.max(step, 1);
  const marks: number[] = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) marks.push(at);
  return marks;
}

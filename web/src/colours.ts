// Colours that differ in lightness as well as in hue, so that they stay apart for people who see
// fewer hues. The hues are those of Okabe and Ito (2008), thinned towards the ground in two steps.

export type Theme = "light" | "dark";

const HUES: readonly (readonly [number, number, number])[] = [
  [0x00, 0x72, 0xb2],
  [0xe6, 0x9f, 0x00],
  [0x00, 0x9e, 0x73],
  [0xcc, 0x79, 0xa7],
  [0x56, 0xb4, 0xe9],
  [0xd5, 0x5e, 0x00],
  [0xf0, 0xe4, 0x42],
];

const GROUND: Record<Theme, readonly [number, number, number]> = {
  light: [0xff, 0xff, 0xff],
  dark: [0x16, 0x1a, 0x20],
};

/** A colour as ImageData wants it on a little-endian machine: alpha, blue, green, red. */
export function packed(red: number, green: number, blue: number): number {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

function mix(colour: readonly number[], ground: readonly number[], share: number): [number, number, number] {
  return [0, 1, 2].map((i) => Math.round(colour[i] * share + ground[i] * (1 - share))) as [
    number,
    number,
    number,
  ];
}

export interface Palette {
  readonly ground: number;
  readonly small: number;
  readonly reserved: number;
  readonly stacks: Uint32Array;
  readonly edges: Uint32Array;
  readonly faded: Uint32Array;
}

function makePalette(theme: Theme): Palette {
  const ground = GROUND[theme];
  const shades = [1, 0.72, 0.48];
  const colours = shades.flatMap((share) => HUES.map((hue) => mix(hue, ground, share)));
  const pack = (list: [number, number, number][]) => Uint32Array.from(list.map((c) => packed(...c)));
  const grey: [number, number, number] = theme === "light" ? [0x9a, 0xa0, 0xa8] : [0x6a, 0x72, 0x7c];
  return {
    ground: packed(...(ground as [number, number, number])),
    small: packed(...grey),
    reserved: packed(...mix(grey, ground, 0.28)),
    stacks: pack(colours),
    edges: pack(colours.map((colour) => mix(colour, ground, 0.55))),
    faded: pack(colours.map((colour) => mix(colour, ground, 0.16))),
  };
}

export const PALETTES: Record<Theme, Palette> = {
  light: makePalette("light"),
  dark: makePalette("dark"),
};

/** Which colour of a palette a stack has: the same everywhere on the page. */
export function colourOf(stack: number, colours: number): number {
  // Neighbouring stacks are often seen side by side: a multiplication spreads them.
  return (Math.imul(stack + 1, 0x9e3779b1) >>> 8) % colours;
}

export function css(colour: number): string {
  return `rgb(${colour & 255} ${(colour >>> 8) & 255} ${(colour >>> 16) & 255})`;
}

// Where the page gets its data: from the command that serves it, or from the page itself where it
// was written with `--html`. Both give the same.

import { readTile, type Tile } from "./format";
import type { MapBlock, MapSegment } from "./raster";

export interface Mark {
  readonly entry: number;
  readonly kind: "out_of_memory" | "annotation";
  readonly text: string;
}

export interface DeviceAbout {
  readonly device: number;
  /** Entries of the history. Moments are counted from 0, before the first, to this, after the last. */
  readonly entries: number;
  readonly allocations: number;
  readonly peakBytes: number;
  readonly peakEntry: number;
  readonly peakReservedBytes: number;
  /** Levels of detail; the last one is a single tile. */
  readonly levels: number;
  /** The finest level that is there: 0, but where a page was kept small. */
  readonly finest: number;
  readonly marks: readonly Mark[];
  /** What this history can't tell, in sentences. */
  readonly notes: readonly string[];
}

export interface FileAbout {
  readonly name: string;
  readonly stacks: number;
  readonly devices: readonly DeviceAbout[];
}

export interface About {
  readonly version: string;
  readonly columnsPerTile: number;
  readonly files: readonly FileAbout[];
}

export interface Stack {
  readonly title: string;
  readonly frames: readonly string[];
}

export interface Allocation {
  readonly id: number;
  readonly bytes: number;
  readonly address: number;
  readonly stack: number;
  /** The entry that made it, and the one that ended it; null where the history doesn't say. */
  readonly start: number | null;
  readonly end: number | null;
}

export interface State {
  readonly entry: number;
  readonly liveBytes: number;
  readonly reservedBytes: number;
  readonly segments: readonly MapSegment[];
}

export interface StackRow {
  readonly stack: number;
  readonly title: string;
  readonly bytes: number;
  readonly count: number;
}

export interface Source {
  readonly about: About;
  tile(file: number, device: number, level: number, index: number): Promise<Tile>;
  /** What lay where when this many entries of the history had happened. */
  state(file: number, device: number, entry: number): Promise<State>;
  /** Who held how much at that moment, the heaviest first. */
  stacks(file: number, device: number, entry: number): Promise<StackRow[]>;
  stack(file: number, stack: number): Promise<Stack>;
  allocation(file: number, device: number, id: number): Promise<Allocation>;
  /** The stacks that have this text in a frame, in any case of its letters. */
  search(file: number, text: string): Promise<number[]>;
}

/** The command that serves the page, on this machine. */
export class ServedSource implements Source {
  private constructor(
    readonly about: About,
    private readonly token: string,
  ) {}

  static async open(token: string): Promise<ServedSource> {
    const about = await (await ServedSource.ask("api/about", token)).json();
    return new ServedSource(about, token);
  }

  private static async ask(path: string, token: string): Promise<Response> {
    const answer = await fetch(path, { headers: { authorization: `Bearer ${token}` } });
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${(await answer.text()).trim()}`);
    return answer;
  }

  private async json<T>(path: string): Promise<T> {
    return (await (await ServedSource.ask(`api/${path}`, this.token)).json()) as T;
  }

  async tile(file: number, device: number, level: number, index: number): Promise<Tile> {
    const answer = await ServedSource.ask(`api/${file}/${device}/tile/${level}/${index}`, this.token);
    return readTile(await answer.arrayBuffer());
  }

  state(file: number, device: number, entry: number): Promise<State> {
    return this.json(`${file}/${device}/state/${entry}`);
  }

  stacks(file: number, device: number, entry: number): Promise<StackRow[]> {
    return this.json(`${file}/${device}/stacks/${entry}`);
  }

  stack(file: number, stack: number): Promise<Stack> {
    return this.json(`${file}/stack/${stack}`);
  }

  allocation(file: number, device: number, id: number): Promise<Allocation> {
    return this.json(`${file}/${device}/allocation/${id}`);
  }

  search(file: number, text: string): Promise<number[]> {
    return this.json(`${file}/search?text=${encodeURIComponent(text)}`);
  }
}

/** What `--html` writes into the page, before its bytes; see `EmbeddedSource.decode`. */
interface EmbeddedHeader {
  readonly about: About;
  readonly files: readonly {
    readonly stacks: readonly Stack[];
    readonly devices: readonly {
      /** `[level, index, offset, bytes]`. */
      readonly tiles: readonly [number, number, number, number][];
      /** Where the columns of the allocations and of the segments begin. */
      readonly allocations: { readonly at: number; readonly count: number };
      readonly segments: { readonly at: number; readonly count: number };
    }[];
  }[];
}

const NEVER = 0xffff_ffff;

/** By allocation or segment; a moment is the number of entries before it. */
interface Spans {
  readonly address: Float64Array;
  readonly bytes: Float64Array;
  /** From this moment on. */
  readonly start: Uint32Array;
  /** Given back by its owner at this moment, though a stream may still use it. */
  readonly given: Uint32Array;
  /** Up to this moment. */
  readonly end: Uint32Array;
  readonly stack: Uint32Array;
  /** 1 where it is mapped into a range that can grow. */
  readonly growable: Uint32Array;
}

/** Data that came inside the page. */
export class EmbeddedSource implements Source {
  private readonly tiles = new Map<string, [number, number]>();
  private readonly allocations: Spans[][] = [];
  private readonly segments: Spans[][] = [];

  private constructor(
    private readonly header: EmbeddedHeader,
    private readonly data: ArrayBuffer,
  ) {
    header.files.forEach((file, f) => {
      this.allocations.push(file.devices.map((device) => this.spans(device.allocations)));
      this.segments.push(file.devices.map((device) => this.spans(device.segments)));
      file.devices.forEach((device, d) => {
        for (const [level, index, at, bytes] of device.tiles) {
          this.tiles.set(`${f}/${d}/${level}/${index}`, [at, bytes]);
        }
      });
    });
  }

  /** Takes apart base64 of gzip of: the header's length (u32), the header (JSON), padding, bytes. */
  static async decode(text: string): Promise<EmbeddedSource> {
    const packed = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const whole = await new Response(stream).arrayBuffer();
    const length = new DataView(whole).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(whole, 4, length)));
    // Copied, so that offsets inside are multiples of eight as typed arrays want them.
    return new EmbeddedSource(header, whole.slice(4 + length));
  }

  get about(): About {
    return this.header.about;
  }

  private spans({ at, count }: { at: number; count: number }): Spans {
    return {
      address: new Float64Array(this.data, at, count),
      bytes: new Float64Array(this.data, at + count * 8, count),
      start: new Uint32Array(this.data, at + count * 16, count),
      given: new Uint32Array(this.data, at + count * 20, count),
      end: new Uint32Array(this.data, at + count * 24, count),
      stack: new Uint32Array(this.data, at + count * 28, count),
      growable: new Uint32Array(this.data, at + count * 32, count),
    };
  }

  async tile(file: number, device: number, level: number, index: number): Promise<Tile> {
    const place = this.tiles.get(`${file}/${device}/${level}/${index}`);
    if (!place) throw new Error(`this page has no tile ${index} of level ${level}`);
    return readTile(this.data.slice(place[0], place[0] + place[1]));
  }

  async state(file: number, device: number, entry: number): Promise<State> {
    const there: { address: number; bytes: number; growable: number }[] = [];
    let reservedBytes = 0;
    const reserved = this.segments[file][device];
    for (let i = 0; i < reserved.start.length; i++) {
      if (reserved.start[i] > entry || entry >= reserved.end[i]) continue;
      const [address, bytes] = [reserved.address[i], reserved.bytes[i]];
      there.push({ address, bytes, growable: reserved.growable[i] });
      reservedBytes += bytes;
    }
    there.sort((a, b) => a.address - b.address);
    // Stretches of a range that can grow are one segment where they touch.
    const segments: { address: number; bytes: number; blocks: MapBlock[] }[] = [];
    let grows = 0;
    for (const { address, bytes, growable } of there) {
      const last = segments.at(-1);
      if (last && grows && growable && last.address + last.bytes === address) last.bytes += bytes;
      else segments.push({ address, bytes, blocks: [] });
      grows = growable;
    }
    let liveBytes = 0;
    const held = this.allocations[file][device];
    for (let i = 0; i < held.start.length; i++) {
      if (held.start[i] > entry || entry >= held.end[i]) continue;
      liveBytes += held.bytes[i];
      let low = 0;
      let high = segments.length;
      while (low < high) {
        const middle = (low + high) >>> 1;
        if (segments[middle].address <= held.address[i]) low = middle + 1;
        else high = middle;
      }
      segments[low - 1]?.blocks.push({
        address: held.address[i],
        bytes: held.bytes[i],
        stack: held.stack[i],
        state: entry >= held.given[i] ? "pending" : "active",
      });
    }
    for (const segment of segments) segment.blocks.sort((a, b) => a.address - b.address);
    return { entry, liveBytes, reservedBytes, segments };
  }

  async stacks(file: number, device: number, entry: number): Promise<StackRow[]> {
    const held = this.allocations[file][device];
    const rows = new Map<number, { bytes: number; count: number }>();
    for (let i = 0; i < held.start.length; i++) {
      if (held.start[i] > entry || entry >= held.end[i]) continue;
      const row = rows.get(held.stack[i]) ?? { bytes: 0, count: 0 };
      row.bytes += held.bytes[i];
      row.count++;
      rows.set(held.stack[i], row);
    }
    return [...rows]
      .map(([stack, row]) => ({ stack, title: this.header.files[file].stacks[stack].title, ...row }))
      .sort((a, b) => b.bytes - a.bytes || a.stack - b.stack);
  }

  async stack(file: number, stack: number): Promise<Stack> {
    return this.header.files[file].stacks[stack];
  }

  async allocation(file: number, device: number, id: number): Promise<Allocation> {
    const held = this.allocations[file][device];
    return {
      id,
      bytes: held.bytes[id],
      address: held.address[id],
      stack: held.stack[id],
      start: held.start[id] === 0 ? null : held.start[id] - 1,
      end: held.end[id] === NEVER ? null : held.end[id] - 1,
    };
  }

  async search(file: number, text: string): Promise<number[]> {
    const wanted = text.toLowerCase();
    const found: number[] = [];
    this.header.files[file].stacks.forEach((stack, id) => {
      if ([stack.title, ...stack.frames].some((frame) => frame.toLowerCase().includes(wanted))) found.push(id);
    });
    return found;
  }
}

// The bytes of a tile, and nothing else knows them. The writer is `timeline.rs` of lastref-snapshot.
//
// A tile is a stretch of the history at one level of detail: at level L a column stands for 2^L
// entries of the history, and a tile has up to 512 columns. A column shows the moment inside it at
// which most memory was in use. Allocations that are too small to be seen at the tile's scale are
// summed up in a band at the bottom.

/** What is drawn of one stretch of the history. */
export interface Tile {
  readonly level: number;
  /** The entry of the history at which the first column begins. */
  readonly firstEntry: number;
  readonly columns: number;
  /** Bytes below which an allocation is part of the band at the bottom. */
  readonly smallBelow: number;
  /** By column: bytes in use, at the column's moment. */
  readonly live: Float64Array;
  /** By column: those of them in the band at the bottom. */
  readonly small: Float64Array;
  /** By column: bytes reserved, at most. */
  readonly reserved: Float64Array;
  /** By column: the entry of the history that is its moment. */
  readonly moment: Uint32Array;
  /** By allocation, in the order of their beginnings. */
  readonly bytes: Float64Array;
  readonly id: Uint32Array;
  readonly stack: Uint32Array;
  readonly startColumn: Uint16Array;
  readonly endColumn: Uint16Array;
}

const MAGIC = 0x3154524c; // "LRT1"
const HEADER_BYTES = 32;

/** Reads a tile. Throws a RangeError that says what is wrong with it. */
export function readTile(buffer: ArrayBuffer): Tile {
  if (buffer.byteLength < HEADER_BYTES) {
    throw new RangeError(`tile: ${buffer.byteLength} bytes are less than a header of ${HEADER_BYTES}`);
  }
  const view = new DataView(buffer);
  if (view.getUint32(0, true) !== MAGIC) {
    throw new RangeError("tile: it does not begin with LRT1");
  }
  const level = view.getUint32(4, true);
  const columns = view.getUint32(8, true);
  const spans = view.getUint32(12, true);
  const wanted = HEADER_BYTES + columns * (3 * 8 + 4) + spans * (8 + 4 + 4 + 2 + 2);
  if (buffer.byteLength !== wanted) {
    throw new RangeError(
      `tile: ${buffer.byteLength} bytes, where ${columns} columns and ${spans} allocations take ${wanted}`,
    );
  }
  let at = HEADER_BYTES;
  const take = <T>(
    make: { new (buffer: ArrayBuffer, at: number, length: number): T; BYTES_PER_ELEMENT: number },
    length: number,
  ): T => {
    const taken = new make(buffer, at, length);
    at += length * make.BYTES_PER_ELEMENT;
    return taken;
  };
  return {
    level,
    columns,
    firstEntry: view.getFloat64(16, true),
    smallBelow: view.getFloat64(24, true),
    live: take(Float64Array, columns),
    small: take(Float64Array, columns),
    reserved: take(Float64Array, columns),
    bytes: take(Float64Array, spans),
    moment: take(Uint32Array, columns),
    id: take(Uint32Array, spans),
    stack: take(Uint32Array, spans),
    startColumn: take(Uint16Array, spans),
    endColumn: take(Uint16Array, spans),
  };
}

/** Writes a tile; for tests. */
export function writeTile(tile: Tile): ArrayBuffer {
  const { columns } = tile;
  const spans = tile.bytes.length;
  const buffer = new ArrayBuffer(HEADER_BYTES + columns * 28 + spans * 20);
  const view = new DataView(buffer);
  view.setUint32(0, MAGIC, true);
  view.setUint32(4, tile.level, true);
  view.setUint32(8, columns, true);
  view.setUint32(12, spans, true);
  view.setFloat64(16, tile.firstEntry, true);
  view.setFloat64(24, tile.smallBelow, true);
  let at = HEADER_BYTES;
  for (const array of [
    tile.live,
    tile.small,
    tile.reserved,
    tile.bytes,
    tile.moment,
    tile.id,
    tile.stack,
    tile.startColumn,
    tile.endColumn,
  ]) {
    new Uint8Array(buffer, at).set(new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
    at += array.byteLength;
  }
  return buffer;
}

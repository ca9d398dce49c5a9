"use strict";
// The reverse of report/page/blob.py: base64 -> inflate -> JSON head and integer arrays.

async function decodePage(encoded) {
  const binary = atob(encoded.trim());
  const packed = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) packed[i] = binary.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const whole = new Uint8Array(await new Response(stream).arrayBuffer());
  const headBytes = new DataView(whole.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(whole.subarray(4, 4 + headBytes)));
  const body = whole.subarray(4 + headBytes);
  return { head, array: (where) => (where ? decodeArray(body, where) : null) };
}

// Byte planes of zigzag differences; sums stay exact below 2^53.
function decodeArray(body, [offset, count, width, unit]) {
  const values = new Float64Array(count);
  if (width === 0) return values;
  const planes = [0, 1, 2, 3].map((p) => (p < width ? body.subarray(offset + p * count, offset + (p + 1) * count) : null));
  const [a, b, c, d] = planes;
  let sum = 0;
  for (let i = 0; i < count; i++) {
    // The four low bytes fit in one integer; higher bytes, which only addresses have, are numbers.
    let folded = a[i];
    if (b) folded |= b[i] << 8;
    if (c) folded |= c[i] << 16;
    if (d) folded |= d[i] << 24;
    const odd = folded & 1;
    let half = folded >>> 1;
    for (let p = 4, factor = 2 ** 31; p < width; p++, factor *= 256) half += body[offset + p * count + i] * factor;
    sum += odd ? -half - 1 : half;
    values[i] = sum * unit;
  }
  return values;
}

// Strings, frames and stacks by id, in the form that the graphics show.
class TextTables {
  constructor(head, array) {
    this.strings = head.strings;
    this.file = array(head.file);
    this.line = array(head.line);
    this.name = array(head.name);
    this.isLibrary = array(head.is_library);
    this.stackStart = array(head.stack_start);
    this.stackFrames = array(head.stack_frames);
  }

  frame(id) {
    const line = this.line[id];
    const where = line > 0 && line < 2 ** 31 ? `${this.strings[this.file[id]]}:${line}` : this.strings[this.file[id]];
    return { file: where || "(unknown file)", name: this.strings[this.name[id]], isLibrary: this.isLibrary[id] === 1 };
  }

  // People look for the last part of the path; the panel shows the whole path.
  short(id) {
    const { file, name } = this.frame(id);
    const tail = file.split(/[\\/]/).pop();
    return name ? `${tail} ${name}` : tail;
  }

  stack(id) {
    return id < 0 ? [] : Array.from(this.stackFrames.subarray(this.stackStart[id], this.stackStart[id + 1]));
  }

  userFrame(id) {
    const frames = this.stack(id);
    const own = frames.find((f) => this.isLibrary[f] === 0);
    return own === undefined ? frames[0] : own;
  }
}

// Draws the KV-cache pool of a replica. Each cell is one block, or several blocks of a large pool.

import { byId, colour, context, count, percent, themed } from "./text.js";

const [BLANK, CACHED, HELD, SHARED, RETAINED] = ["1", "2", "3", "4", "5"];
const STATES = {
  [BLANK]: "blank: free, without cached tokens",
  [CACHED]: "cached: free, but its tokens are cached for prompts until the block is reused",
  [HELD]: "held",
  [SHARED]: "shared by several requests",
  [RETAINED]: "cached for a paused program: free, reused after other cached blocks",
};

export class Pool {
  constructor() {
    this.canvas = byId("blocks");
    this.blocks = undefined;
    this.blockSize = 0;
    this.nameOf = (key) => `request ${key}`;
    this.pointed = -1;
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.pointed = -1;
      this.draw();
    });
  }

  set(blocks, blockSize, nameOf) {
    this.blocks = blocks;
    this.blockSize = blockSize;
    this.nameOf = nameOf;
  }

  draw() {
    const { drawing, width, height } = context(this.canvas);
    if (!this.blocks) {
      byId("pool-says").textContent = this.blocks === null ? "the pool does not answer" : "";
      return;
    }
    const { states, owners } = this.blocks;
    const grid = this.#grid(width, height);
    for (let cell = 0; cell < states.length; cell++) {
      const x = (cell % grid.columns) * grid.side;
      const y = Math.floor(cell / grid.columns) * grid.side;
      const side = grid.side - (grid.side > 4 ? 1 : 0.4);
      drawing.fillStyle = fill(states[cell], owners[cell]);
      drawing.fillRect(x, y, side, side);
      if (states[cell] === SHARED) mark(drawing, x, y, side);
      if (cell === this.pointed) {
        drawing.strokeStyle = themed("--text");
        drawing.strokeRect(x, y, side, side);
      }
    }
    this.#say();
  }

  #grid(width, height) {
    const cells = Math.max(1, this.blocks.states.length);
    let side = Math.min(26, Math.floor(Math.sqrt((width * height) / cells)));
    while (side > 2 && Math.ceil(cells / Math.floor(width / side)) * side > height) side -= 1;
    side = Math.max(2, side);
    return { side, columns: Math.max(1, Math.floor(width / side)) };
  }

  #say() {
    const { num_blank, num_cached, num_retained, num_held, num_shared } = this.blocks;
    const { blocks_per_cell } = this.blocks;
    const all = num_blank + num_cached + num_held + num_shared + num_retained;
    const paused = num_retained ? `of paused programs ${count(num_retained)}, ` : "";
    const cells = blocks_per_cell > 1 ? `; a cell is ${blocks_per_cell} blocks` : "";
    byId("pool-says").textContent =
      `${count(all)} blocks of ${this.blockSize} tokens: held ${count(num_held + num_shared)} ` +
      `(${percent(num_held + num_shared, all)}), ${count(num_shared)} of them shared, ` +
      `${paused}cached ${count(num_cached)}, blank ${count(num_blank)}${cells}`;
    if (this.pointed >= 0 && this.pointed < this.blocks.states.length) {
      const [state, owner] = [this.blocks.states[this.pointed], this.blocks.owners[this.pointed]];
      const first = this.pointed * blocks_per_cell + 1;
      const last = Math.min(first + blocks_per_cell - 1, all);
      const which = last > first ? `blocks ${first} to ${last}` : `block ${first}`;
      const whose = owner ? ` by ${this.nameOf(owner)}` : "";
      byId("block-detail").textContent = `${which}: ${STATES[state]}${state === HELD ? whose : ""}`;
    }
  }

  #point(event) {
    if (!this.blocks) return;
    const bounds = this.canvas.getBoundingClientRect();
    const grid = this.#grid(bounds.width, bounds.height);
    const column = Math.floor((event.clientX - bounds.left) / grid.side);
    const row = Math.floor((event.clientY - bounds.top) / grid.side);
    const cell = row * grid.columns + column;
    this.pointed = column < grid.columns && cell < this.blocks.states.length ? cell : -1;
    this.draw();
  }
}

function fill(state, owner) {
  if (state === BLANK) return themed("--blank");
  if (state === CACHED) return themed("--cached");
  if (state === RETAINED) return themed("--retained");
  return colour(owner);
}

/** Draws a hole in the cell of a block that several requests share. */
function mark(drawing, x, y, side) {
  const hole = side / 3;
  drawing.fillStyle = themed("--card");
  drawing.fillRect(x + hole, y + hole, hole, hole);
}

"use strict";
// The toy's Qwen2, forward and backward, by hand: 2 layers, 64 wide, 4 heads, 22 tokens.
//
// M rows, one for each token that is read. A matrix lies in memory row after row. A function writes
// its result into its first argument. Where it says "+=", it adds to what is there. All numbers are
// Float64: this is as fast as Float32 here, because JavaScript computes in 64 bits.

const WIDTH = 64;
const HEADS = 4;
const HEAD = WIDTH / HEADS;
const INNER = 192; // of the SwiGLU
const TOKENS = 22; // in the vocabulary
const NORM_EPS = 1e-6;
const ROPE_BASE = 1000;
const POSITIONS = 128;

// The weights, in the order of their file. q, k and v stand side by side, gate and up, too: so one
// product computes all three, or both.
const LAYER_TENSORS = [
  ["input_layernorm.weight", [64]],
  ["self_attn.q_proj.weight", [64, 64]],
  ["self_attn.k_proj.weight", [64, 64]],
  ["self_attn.v_proj.weight", [64, 64]],
  ["self_attn.q_proj.bias", [64]],
  ["self_attn.k_proj.bias", [64]],
  ["self_attn.v_proj.bias", [64]],
  ["self_attn.o_proj.weight", [64, 64]],
  ["post_attention_layernorm.weight", [64]],
  ["mlp.gate_proj.weight", [192, 64]],
  ["mlp.up_proj.weight", [192, 64]],
  ["mlp.down_proj.weight", [64, 192]]
];
const TENSORS = [
  ["model.embed_tokens.weight", [22, 64]],
  ...LAYER_TENSORS.map(([name, shape]) => [`model.layers.0.${name}`, shape]),
  ...LAYER_TENSORS.map(([name, shape]) => [`model.layers.1.${name}`, shape]),
  ["model.norm.weight", [64]]
];

// The number that a float16 stands for: (−1)^sign · 2^(exponent − 15) · 1.fraction
function from_float16(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1024 + fraction) * 2 ** (exponent - 25);
}

// The tensors of a flat array, in the order of TENSORS. They are views, not copies.
function parts_of(flat) {
  let end = 0;
  const take = (size) => flat.subarray(end, (end += size));
  const layer = () => ({
    norm_1: take(WIDTH),
    qkv: take(3 * WIDTH * WIDTH),
    qkv_bias: take(3 * WIDTH),
    o: take(WIDTH * WIDTH),
    norm_2: take(WIDTH),
    gate_up: take(2 * INNER * WIDTH),
    down: take(WIDTH * INNER),
  });
  return { embedding: take(TOKENS * WIDTH), layers: [layer(), layer()], norm: take(WIDTH) };
}

// bytes: Uint8Array, the weights of TENSORS in little-endian float16.
function make_model(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const weights = new Float64Array(bytes.byteLength / 2);
  for (let i = 0; i < weights.length; i++) {
    weights[i] = from_float16(view.getUint16(2 * i, true));
  }
  const gradient = new Float64Array(weights.length);
  return { weights, gradient, parts: parts_of(weights), gradients: parts_of(gradient) };
}

// An array of at least `size` numbers under this name. It is made once, and grows if it must.
function room(memory, name, size) {
  if (!memory[name] || memory[name].length < size) memory[name] = new Float64Array(size);
  return memory[name];
}

// The same, with zeros in its first `size` places.
function zeros(memory, name, size) {
  return room(memory, name, size).fill(0, 0, size);
}

// --- products ---

// 4 × 4 numbers of `product` at once. 16 sums stay in registers, and 8 loads feed 32 operations.
function block(C, c, ci, A, a0, ai, al, B, b0, bj, bl, L) {
  const a1 = a0 + ai, a2 = a1 + ai, a3 = a2 + ai;
  const b1 = b0 + bj, b2 = b1 + bj, b3 = b2 + bj;
  let c00 = 0, c01 = 0, c02 = 0, c03 = 0;
  let c10 = 0, c11 = 0, c12 = 0, c13 = 0;
  let c20 = 0, c21 = 0, c22 = 0, c23 = 0;
  let c30 = 0, c31 = 0, c32 = 0, c33 = 0;
  for (let l = 0, a = 0, b = 0; l < L; l++, a += al, b += bl) {
    const x0 = A[a0 + a], x1 = A[a1 + a], x2 = A[a2 + a], x3 = A[a3 + a];
    let y = B[b0 + b];
    c00 += x0 * y, c10 += x1 * y, c20 += x2 * y, c30 += x3 * y;
    y = B[b1 + b];
    c01 += x0 * y, c11 += x1 * y, c21 += x2 * y, c31 += x3 * y;
    y = B[b2 + b];
    c02 += x0 * y, c12 += x1 * y, c22 += x2 * y, c32 += x3 * y;
    y = B[b3 + b];
    c03 += x0 * y, c13 += x1 * y, c23 += x2 * y, c33 += x3 * y;
  }
  C[c] += c00, C[c + 1] += c01, C[c + 2] += c02, C[c + 3] += c03;
  c += ci;
  C[c] += c10, C[c + 1] += c11, C[c + 2] += c12, C[c + 3] += c13;
  c += ci;
  C[c] += c20, C[c + 1] += c21, C[c + 2] += c22, C[c + 3] += c23;
  c += ci;
  C[c] += c30, C[c + 1] += c31, C[c + 2] += c32, C[c + 3] += c33;
}

// C[i, j] += Σ_l A[i, l] B[j, l]   for i < I, j < J, l < L
// A number A[i, l] lies at i·ai + l·al, and so on. So a transposed matrix is only other steps.
function product(C, ci, A, ai, al, B, bj, bl, I, J, L) {
  const I4 = I - (I % 4);
  const J4 = J - (J % 4);
  for (let i = 0; i < I4; i += 4) {
    for (let j = 0; j < J4; j += 4) {
      block(C, i * ci + j, ci, A, i * ai, ai, al, B, j * bj, bj, bl, L);
    }
  }
  for (let i = 0; i < I; i++) { // what is left at the edges
    for (let j = i < I4 ? J4 : 0; j < J; j++) {
      let sum = 0;
      for (let l = 0; l < L; l++) sum += A[i * ai + l * al] * B[j * bj + l * bl];
      C[i * ci + j] += sum;
    }
  }
}

// y += x Wᵀ     x: (M, inputs), W: (outputs, inputs), y: (M, outputs)
function linear(y, x, W, M, outputs, inputs) {
  product(y, outputs, x, inputs, 1, W, inputs, 1, M, outputs, inputs);
}

// ∂x += ∂y W     ∂W += ∂yᵀ x
function linear_backward(dx, dW, dy, x, W, M, outputs, inputs) {
  product(dx, inputs, dy, outputs, 1, W, 1, inputs, M, inputs, outputs);
  product(dW, inputs, dy, 1, outputs, x, 1, inputs, outputs, inputs, M);
}

// --- the parts of a layer ---

// 1 / √(mean x² + eps) of the row of x that begins at `from`
function inverse_rms(x, from) {
  let sum = 0;
  for (let d = 0; d < WIDTH; d++) sum += x[from + d] * x[from + d];
  return 1 / Math.sqrt(sum / WIDTH + NORM_EPS);
}

// RMSNorm: y = w x r,   r = 1 / √(mean x² + eps)
function rms_norm(y, x, w, M) {
  for (let row = 0; row < M * WIDTH; row += WIDTH) {
    const r = inverse_rms(x, row);
    for (let d = 0; d < WIDTH; d++) y[row + d] = w[d] * x[row + d] * r;
  }
}

// ∂x += r w ∂y − x r³ mean(w x ∂y)     ∂w += Σ_rows x r ∂y
function rms_norm_backward(dx, dw, dy, x, w, M) {
  for (let row = 0; row < M * WIDTH; row += WIDTH) {
    const r = inverse_rms(x, row);
    let sum = 0;
    for (let d = 0; d < WIDTH; d++) {
      sum += w[d] * x[row + d] * dy[row + d];
      dw[d] += x[row + d] * r * dy[row + d];
    }
    const mean = (sum / WIDTH) * r * r * r;
    for (let d = 0; d < WIDTH; d++) dx[row + d] += r * w[d] * dy[row + d] - x[row + d] * mean;
  }
}

// cos and sin of position · θ_j,   θ_j = base^(−2j / HEAD)
const HALF = HEAD / 2;
const COS = new Float64Array(POSITIONS * HALF);
const SIN = new Float64Array(POSITIONS * HALF);
for (let i = 0; i < COS.length; i++) {
  const angle = Math.floor(i / HALF) * ROPE_BASE ** (-(i % HALF) / HALF);
  COS[i] = Math.cos(angle);
  SIN[i] = Math.sin(angle);
}

// Rotary positions: in each head turn the pair (x_j, x_j+HALF) by position · θ_j.
// One row, from x at `from` to y at `to`. direction: 1, or −1 for the backward pass.
function rotate(y, to, x, from, position, direction) {
  for (let head = 0; head < WIDTH; head += HEAD) {
    for (let j = 0; j < HALF; j++) {
      const cos = COS[position * HALF + j];
      const sin = SIN[position * HALF + j] * direction;
      const a = x[from + head + j];
      const b = x[from + head + j + HALF];
      y[to + head + j] = a * cos - b * sin;
      y[to + head + j + HALF] = b * cos + a * sin;
    }
  }
}

// qkv (M, 3·WIDTH) → turned q (M, WIDTH), and turned k beside v at the rows' places in kv.
function rotary(q, kv, qkv, batch) {
  for (let i = 0; i < batch.tokens.length; i++) {
    const from = i * 3 * WIDTH;
    const place = batch.place[i] * 2 * WIDTH;
    rotate(q, i * WIDTH, qkv, from, batch.position[i], 1);
    rotate(kv, place, qkv, from + WIDTH, batch.position[i], 1);
    for (let d = 0; d < WIDTH; d++) kv[place + WIDTH + d] = qkv[from + 2 * WIDTH + d];
  }
}

function rotary_backward(dqkv, dq, dkv, batch) {
  for (let i = 0; i < batch.tokens.length; i++) {
    const to = i * 3 * WIDTH;
    const place = batch.place[i] * 2 * WIDTH;
    rotate(dqkv, to, dq, i * WIDTH, batch.position[i], -1);
    rotate(dqkv, to + WIDTH, dkv, place, batch.position[i], -1);
    for (let d = 0; d < WIDTH; d++) dqkv[to + 2 * WIDTH + d] = dkv[place + WIDTH + d];
  }
}

// Σ_d A[a + d] B[b + d] over the numbers of a head. Four sums do not wait for each other.
function dot(A, a, B, b) {
  let s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  for (let d = 0; d < HEAD; d += 4) {
    s0 += A[a + d] * B[b + d];
    s1 += A[a + d + 1] * B[b + d + 1];
    s2 += A[a + d + 2] * B[b + d + 2];
    s3 += A[a + d + 3] * B[b + d + 3];
  }
  return s0 + s1 + (s2 + s3);
}

// x ← softmax(x) for the n numbers from `from` on
function softmax(x, from, n) {
  let largest = -Infinity;
  for (let j = from; j < from + n; j++) largest = Math.max(largest, x[j]);
  let total = 0;
  for (let j = from; j < from + n; j++) {
    x[j] = Math.exp(x[j] - largest);
    total += x[j];
  }
  for (let j = from; j < from + n; j++) x[j] /= total;
}

// The keys that a row sees: those of its prompt, then its own up to itself. Key n lies at the place
//   n + (n < shared ? prefix : own)
// shared: how many are the prompt's. A prompt is computed once for all its completions.
function keys_of(batch, i) {
  const shared = batch.shared[i];
  const own = batch.start[i] - shared;
  return { prefix: batch.prefix[i], own, shared, n: batch.place[i] + 1 - own };
}

// a_h = Σ_n p_n v_n,   p = softmax_n(q_h · k_n / √HEAD)   in each head h. p: (M, HEADS, longest)
function attention(a, p, q, kv, batch) {
  a.fill(0, 0, batch.tokens.length * WIDTH);
  for (let i = 0; i < batch.tokens.length; i++) {
    const { prefix, own, shared, n } = keys_of(batch, i);
    for (let h = 0; h < HEADS; h++) {
      const at = i * WIDTH + h * HEAD;
      const row = (i * HEADS + h) * batch.longest;
      for (let m = 0; m < n; m++) {
        const key = (m + (m < shared ? prefix : own)) * 2 * WIDTH + h * HEAD;
        p[row + m] = dot(q, at, kv, key) / Math.sqrt(HEAD);
      }
      softmax(p, row, n);
      for (let m = 0; m < n; m++) {
        const value = (m + (m < shared ? prefix : own)) * 2 * WIDTH + WIDTH + h * HEAD;
        const weight = p[row + m];
        for (let d = 0; d < HEAD; d++) a[at + d] += weight * kv[value + d];
      }
    }
  }
}

// ∂v_n += p_n ∂a     ∂s_n = p_n (∂a · v_n − Σ_m p_m ∂a · v_m) / √HEAD     s: the scores
// ∂q += Σ_n ∂s_n k_n     ∂k_n += ∂s_n q     and Σ_m p_m ∂a · v_m = ∂a · a
function attention_backward(dq, dkv, da, a, p, q, kv, batch) {
  for (let i = 0; i < batch.tokens.length; i++) {
    const { prefix, own, shared, n } = keys_of(batch, i);
    for (let h = 0; h < HEADS; h++) {
      const at = i * WIDTH + h * HEAD;
      const row = (i * HEADS + h) * batch.longest;
      const mean = dot(da, at, a, at);
      for (let m = 0; m < n; m++) {
        const key = (m + (m < shared ? prefix : own)) * 2 * WIDTH + h * HEAD;
        const value = key + WIDTH;
        const weight = p[row + m];
        const ds = (weight * (dot(da, at, kv, value) - mean)) / Math.sqrt(HEAD);
        for (let d = 0; d < HEAD; d++) {
          dkv[value + d] += weight * da[at + d];
          dkv[key + d] += ds * q[at + d];
          dq[at + d] += ds * kv[key + d];
        }
      }
    }
  }
}

// SwiGLU: s = silu(gate) up,   silu(x) = x σ(x),   σ(x) = 1 / (1 + exp(−x)).   gu: gate beside up
function swiglu(s, gu, M) {
  for (let i = 0; i < M; i++) {
    for (let d = 0; d < INNER; d++) {
      const gate = gu[2 * i * INNER + d];
      s[i * INNER + d] = (gate / (1 + Math.exp(-gate))) * gu[(2 * i + 1) * INNER + d];
    }
  }
}

// ∂up = silu(gate) ∂s     ∂gate = σ (1 + gate (1 − σ)) up ∂s
function swiglu_backward(dgu, ds, gu, M) {
  for (let i = 0; i < M; i++) {
    for (let d = 0; d < INNER; d++) {
      const gate = gu[2 * i * INNER + d];
      const sigma = 1 / (1 + Math.exp(-gate));
      const upstream = ds[i * INNER + d];
      dgu[(2 * i + 1) * INNER + d] = gate * sigma * upstream;
      dgu[2 * i * INNER + d] =
        sigma * (1 + gate * (1 - sigma)) * gu[(2 * i + 1) * INNER + d] * upstream;
    }
  }
}

// --- a layer, and the whole model ---

// middle = x + o(attention(norm x)),   y = middle + down(swiglu(norm middle))
// memory keeps what the backward pass needs.
function layer_forward(w, x, batch, memory) {
  const M = batch.tokens.length;
  const h_1 = room(memory, "h_1", M * WIDTH);
  rms_norm(h_1, x, w.norm_1, M);
  const qkv = room(memory, "qkv", M * 3 * WIDTH);
  for (let i = 0; i < M; i++) qkv.set(w.qkv_bias, i * 3 * WIDTH);
  linear(qkv, h_1, w.qkv, M, 3 * WIDTH, WIDTH);
  const q = room(memory, "q", M * WIDTH);
  const kv = room(memory, "kv", batch.places * 2 * WIDTH);
  rotary(q, kv, qkv, batch);
  const a = room(memory, "a", M * WIDTH);
  const p = room(memory, "p", M * HEADS * batch.longest);
  attention(a, p, q, kv, batch);
  const middle = room(memory, "middle", M * WIDTH);
  middle.set(x.subarray(0, M * WIDTH));
  linear(middle, a, w.o, M, WIDTH, WIDTH);
  const h_2 = room(memory, "h_2", M * WIDTH);
  rms_norm(h_2, middle, w.norm_2, M);
  const gu = zeros(memory, "gu", M * 2 * INNER);
  linear(gu, h_2, w.gate_up, M, 2 * INNER, WIDTH);
  const s = room(memory, "s", M * INNER);
  swiglu(s, gu, M);
  const y = room(memory, "y", M * WIDTH);
  y.set(middle.subarray(0, M * WIDTH));
  linear(y, s, w.down, M, WIDTH, INNER);
  memory.x = x;
  return y;
}

// g: on entry ∂y, on return ∂x. Adds to the layer's gradients dw. scratch: memory for all layers.
function layer_backward(g, w, dw, batch, memory, scratch) {
  const M = batch.tokens.length;
  const ds = zeros(scratch, "ds", M * INNER);
  linear_backward(ds, dw.down, g, memory.s, w.down, M, WIDTH, INNER);
  const dgu = room(scratch, "dgu", M * 2 * INNER);
  swiglu_backward(dgu, ds, memory.gu, M);
  const dh_2 = zeros(scratch, "dh", M * WIDTH);
  linear_backward(dh_2, dw.gate_up, dgu, memory.h_2, w.gate_up, M, 2 * INNER, WIDTH);
  rms_norm_backward(g, dw.norm_2, dh_2, memory.middle, w.norm_2, M);
  const da = zeros(scratch, "da", M * WIDTH);
  linear_backward(da, dw.o, g, memory.a, w.o, M, WIDTH, WIDTH);
  const dq = zeros(scratch, "dq", M * WIDTH);
  const dkv = zeros(scratch, "dkv", batch.places * 2 * WIDTH);
  attention_backward(dq, dkv, da, memory.a, memory.p, memory.q, memory.kv, batch);
  const dqkv = room(scratch, "dqkv", M * 3 * WIDTH);
  rotary_backward(dqkv, dq, dkv, batch);
  for (let i = 0; i < M * 3 * WIDTH; i++) dw.qkv_bias[i % (3 * WIDTH)] += dqkv[i];
  const dh_1 = zeros(scratch, "dh", M * WIDTH);
  linear_backward(dh_1, dw.qkv, dqkv, memory.h_1, w.qkv, M, 3 * WIDTH, WIDTH);
  rms_norm_backward(g, dw.norm_1, dh_1, memory.x, w.norm_1, M);
}

// Logits (M, TOKENS) of the next token after each row. memory: {}, kept from call to call.
//
// batch: what is read. Of each row its token, its position, the place of its key and value, the
// place where its own keys start, and of its prompt the first place (prefix) and the length
// (shared). places: how many there are. longest: the most keys that a row sees.
function forward(model, batch, memory) {
  const { embedding, layers, norm } = model.parts;
  const M = batch.tokens.length;
  memory.layers ??= [{}, {}];
  let x = room(memory, "x", M * WIDTH);
  batch.tokens.forEach((token, i) => {
    x.set(embedding.subarray(token * WIDTH, (token + 1) * WIDTH), i * WIDTH);
  });
  layers.forEach((layer, l) => {
    x = layer_forward(layer, x, batch, memory.layers[l]);
  });
  const h = room(memory, "h", M * WIDTH);
  rms_norm(h, x, norm, M);
  const logits = zeros(memory, "logits", M * TOKENS);
  linear(logits, h, embedding, M, TOKENS, WIDTH); // the head is tied to the embedding
  return logits;
}

// Adds the gradient of the weights to model.gradient. dlogits: (M, TOKENS). After `forward`.
function backward(model, batch, memory, dlogits) {
  const { embedding, layers, norm } = model.parts;
  const d = model.gradients;
  const M = batch.tokens.length;
  const dh = zeros(memory, "dh", M * WIDTH);
  linear_backward(dh, d.embedding, dlogits, memory.h, embedding, M, TOKENS, WIDTH);
  const g = zeros(memory, "g", M * WIDTH);
  rms_norm_backward(g, d.norm, dh, memory.layers[1].y, norm, M);
  for (const l of [1, 0]) {
    layer_backward(g, layers[l], d.layers[l], batch, memory.layers[l], memory);
  }
  batch.tokens.forEach((token, i) => {
    for (let j = 0; j < WIDTH; j++) d.embedding[token * WIDTH + j] += g[i * WIDTH + j];
  });
}

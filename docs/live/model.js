"use strict";
// The toy's Qwen2, forward and backward, by hand. It reads M rows, one for each token. A matrix
// lies in memory row after row. A function writes into its first arguments. If its formula says +=,
// it adds to what is there. Numbers have 64 bits, as JavaScript computes: so it is fastest.

const [WIDTH, HEADS, INNER, TOKENS] = [64, 4, 192, 22]; // INNER: of the SwiGLU
const HEAD = WIDTH / HEADS;
const HALF = HEAD / 2;
const ROW = 3 * WIDTH; // q, k and v of a token, side by side
const [NORM_EPS, ROPE_BASE, POSITIONS] = [1e-6, 1000, 128];

// The weights in the order of their file. q, k, v and gate, up stand together: each is one product.
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
const of_layer = (l) => LAYER_TENSORS.map(([name, shape]) => [`model.layers.${l}.${name}`, shape]);
const EMBEDDING = ["model.embed_tokens.weight", [22, 64]];
const TENSORS = [EMBEDDING, ...of_layer(0), ...of_layer(1), ["model.norm.weight", [64]]];

// A flat array cut into these tensors. They are views, not copies.
function parts_of(flat) {
  let end = 0;
  const take = (size) => flat.subarray(end, (end += size));
  const layer = () => ({
    norm_1: take(WIDTH),
    qkv: take(ROW * WIDTH),
    qkv_bias: take(ROW),
    o: take(WIDTH * WIDTH),
    norm_2: take(WIDTH),
    gate_up: take(2 * INNER * WIDTH),
    down: take(WIDTH * INNER)
  });
  return { embedding: take(TOKENS * WIDTH), layers: [layer(), layer()], norm: take(WIDTH) };
}

// What a float16 stands for: (−1)^sign · 2^(exponent − 15) · 1.fraction
function from_float16(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = (bits & 1023) + (exponent ? 1024 : 0);
  return (bits & 0x8000 ? -1 : 1) * fraction * 2 ** (Math.max(exponent, 1) - 25);
}

// bytes: Uint8Array, the weights of TENSORS in little-endian float16.
function make_model(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset);
  const gradient = new Float64Array(bytes.length / 2);
  const weights = gradient.map((_, i) => from_float16(view.getUint16(2 * i, true)));
  return { weights, gradient, parts: parts_of(weights), gradients: parts_of(gradient) };
}

// An array of at least `size` numbers under this name. It is made once, and grows if it must.
function room(memory, name, size) {
  if (!(memory[name]?.length >= size)) memory[name] = new Float64Array(size);
  return memory[name];
}

// --- products ---

// 4 × 2 numbers of `product`. Their 8 sums stay in registers and do not wait for each other.
function block(C, c, ci, A, a0, ai, al, B, b0, bj, bl, L) {
  const a1 = a0 + ai, a2 = a1 + ai, a3 = a2 + ai, b1 = b0 + bj;
  let c00 = 0, c10 = 0, c20 = 0, c30 = 0;
  let c01 = 0, c11 = 0, c21 = 0, c31 = 0;
  for (let l = 0, a = 0, b = 0; l < L; l++, a += al, b += bl) {
    const x0 = A[a0 + a], x1 = A[a1 + a], x2 = A[a2 + a], x3 = A[a3 + a];
    const y0 = B[b0 + b], y1 = B[b1 + b];
    c00 += x0 * y0, c10 += x1 * y0, c20 += x2 * y0, c30 += x3 * y0;
    c01 += x0 * y1, c11 += x1 * y1, c21 += x2 * y1, c31 += x3 * y1;
  }
  C[c] += c00, C[c + 1] += c01;
  C[c + ci] += c10, C[c + ci + 1] += c11;
  C[c + 2 * ci] += c20, C[c + 2 * ci + 1] += c21;
  C[c + 3 * ci] += c30, C[c + 3 * ci + 1] += c31;
}

// C[i, j] += Σ_l A[i, l] B[j, l]   for i < I, j < J, l < L; J is even.
// A[i, l] lies at i·ai + l·al, and so on: a transposed matrix has its two steps exchanged.
function product(C, ci, A, ai, al, B, bj, bl, I, J, L) {
  const whole = I - (I % 4);
  for (let i = 0; i < whole; i += 4) {
    for (let j = 0; j < J; j += 2) {
      block(C, i * ci + j, ci, A, i * ai, ai, al, B, j * bj, bj, bl, L);
    }
  }
  for (let i = whole; i < I; i++) { // up to three rows are left
    for (let j = 0; j < J; j++) {
      for (let l = 0; l < L; l++) C[i * ci + j] += A[i * ai + l * al] * B[j * bj + l * bl];
    }
  }
}

// y += x Wᵀ     x: (M, inputs), W: (outputs, inputs), y: (M, outputs)
function linear(y, x, W, M, outputs, inputs) {
  product(y, outputs, x, inputs, 1, W, inputs, 1, M, outputs, inputs);
  return y;
}

// ∂x = ∂y W     ∂W += ∂yᵀ x
function linear_backward(dx, dW, dy, x, W, M, outputs, inputs) {
  dx.fill(0, 0, M * inputs);
  product(dx, inputs, dy, outputs, 1, W, 1, inputs, M, inputs, outputs);
  product(dW, inputs, dy, 1, outputs, x, 1, inputs, outputs, inputs, M);
  return dx;
}

// --- the parts of a layer ---

// 1 / √(mean x² + eps) of the row of x that begins at `row`
function inverse_rms(x, row) {
  let sum = 0;
  for (let d = row; d < row + WIDTH; d++) sum += x[d] * x[d];
  return 1 / Math.sqrt(sum / WIDTH + NORM_EPS);
}

// RMSNorm: y = w x r,   r = 1 / √(mean x² + eps)
function rms_norm(y, x, w, M) {
  for (let row = 0; row < M * WIDTH; row += WIDTH) {
    const r = inverse_rms(x, row);
    for (let d = 0; d < WIDTH; d++) y[row + d] = w[d] * x[row + d] * r;
  }
  return y;
}

// ∂x += r w ∂y − x r³ mean(w x ∂y)     ∂w += Σ_rows x r ∂y
function rms_norm_backward(dx, dw, dy, x, w, M) {
  for (let row = 0; row < M * WIDTH; row += WIDTH) {
    const r = inverse_rms(x, row);
    let mean = 0;
    for (let d = 0; d < WIDTH; d++) {
      mean += (w[d] * x[row + d] * dy[row + d]) / WIDTH;
      dw[d] += x[row + d] * r * dy[row + d];
    }
    for (let d = 0; d < WIDTH; d++) {
      dx[row + d] += r * w[d] * dy[row + d] - x[row + d] * r ** 3 * mean;
    }
  }
}

// Rotary positions: a head of q or k is HALF pairs (x_j, x_j+HALF). Each pair is turned by the
// angle position · θ_j,   θ_j = base^(−j / HALF)
// y: at the rows' places. x: in the order of the rows. direction −1 is the backward pass.
function rotary(y, x, rows, direction) {
  for (let i = 0; i < rows.length; i++) {
    const to = rows[i].place * ROW;
    for (let d = 0; d < ROW; d++) y[to + d] = x[i * ROW + d];
    for (let j = 0; j < HALF; j++) {
      const angle = direction * rows[i].position * ROPE_BASE ** (-j / HALF);
      const cos = Math.cos(angle), sin = Math.sin(angle);
      for (let first = to + j; first < to + 2 * WIDTH; first += HEAD) { // the heads of q, then of k
        const a = y[first], b = y[first + HALF];
        y[first] = a * cos - b * sin;
        y[first + HALF] = b * cos + a * sin;
      }
    }
  }
  return y;
}

// Writes into KEYS where the keys of a row begin in qkv, and returns how many they are: first the
// `shared` keys of its prompt, then its own ones up to itself. A value lies WIDTH after its key.
const KEYS = new Int32Array(POSITIONS);
function find_keys({ place, start, prefix, shared }) {
  const keys = shared + place - start + 1;
  for (let m = 0; m < keys; m++) {
    KEYS[m] = (m < shared ? prefix + m : start + m - shared) * ROW + WIDTH;
  }
  return keys;
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
  return s0 + s1 + s2 + s3;
}

// x ← softmax(x) for the n numbers from `from` on
function softmax(x, from, n) {
  let largest = -Infinity, total = 0;
  for (let i = from; i < from + n; i++) largest = Math.max(largest, x[i]);
  for (let i = from; i < from + n; i++) total += x[i] = Math.exp(x[i] - largest);
  for (let i = from; i < from + n; i++) x[i] /= total;
}

// a_h = Σ_m p_m v_m,   p = softmax_m(q_h · k_m / √HEAD)   in each head h
// a: (M, WIDTH). p: (M, HEADS, longest). qkv: at the rows' places.
function attention(a, p, qkv, { rows, longest }) {
  a.fill(0, 0, rows.length * WIDTH);
  for (let i = 0; i < rows.length; i++) {
    const keys = find_keys(rows[i]);
    for (let h = 0; h < HEADS; h++) {
      const head = h * HEAD, to = i * WIDTH + head, first = (i * HEADS + h) * longest;
      for (let m = 0; m < keys; m++) {
        p[first + m] = dot(qkv, rows[i].place * ROW + head, qkv, KEYS[m] + head) / Math.sqrt(HEAD);
      }
      softmax(p, first, keys);
      for (let m = 0; m < keys; m++) {
        const weight = p[first + m], value = KEYS[m] + WIDTH + head;
        for (let d = 0; d < HEAD; d++) a[to + d] += weight * qkv[value + d];
      }
    }
  }
  return a;
}

// ∂v_m += p_m ∂a     ∂s_m = p_m (∂a · v_m − Σ_n p_n ∂a · v_n),   and the sum is ∂a · a
// ∂q += Σ_m ∂s_m k_m / √HEAD     ∂k_m += ∂s_m q / √HEAD
function attention_backward(dqkv, da, a, p, qkv, { rows, longest }) {
  dqkv.fill(0, 0, rows.length * ROW);
  for (let i = 0; i < rows.length; i++) {
    const keys = find_keys(rows[i]);
    for (let h = 0; h < HEADS; h++) {
      const head = h * HEAD, at = i * WIDTH + head, query = rows[i].place * ROW + head;
      const sum = dot(da, at, a, at);
      for (let m = 0; m < keys; m++) {
        const key = KEYS[m] + head, value = key + WIDTH;
        const weight = p[(i * HEADS + h) * longest + m];
        const ds = (weight * (dot(da, at, qkv, value) - sum)) / Math.sqrt(HEAD);
        for (let d = 0; d < HEAD; d++) {
          dqkv[value + d] += weight * da[at + d];
          dqkv[key + d] += ds * qkv[query + d];
          dqkv[query + d] += ds * qkv[key + d];
        }
      }
    }
  }
  return dqkv;
}

// SwiGLU: s = gate σ(gate) up,   σ(x) = 1 / (1 + exp(−x)).   gu: gate beside up, (M, 2·INNER)
function swiglu(s, gu, M) {
  for (let i = 0; i < M * INNER; i++) {
    const gate = i + i - (i % INNER), up = gate + INNER;
    s[i] = (gu[gate] * gu[up]) / (1 + Math.exp(-gu[gate]));
  }
  return s;
}

// ∂up = gate σ ∂s     ∂gate = σ (1 + gate (1 − σ)) up ∂s
function swiglu_backward(dgu, ds, gu, M) {
  for (let i = 0; i < M * INNER; i++) {
    const gate = i + i - (i % INNER), up = gate + INNER;
    const sigma = 1 / (1 + Math.exp(-gu[gate]));
    dgu[up] = gu[gate] * sigma * ds[i];
    dgu[gate] = sigma * (1 + gu[gate] * (1 - sigma)) * gu[up] * ds[i];
  }
  return dgu;
}

// --- a layer, and the whole model ---

// middle = x + o(attention(norm x)),   y = middle + down(swiglu(norm middle))
// memory keeps what the backward pass needs.
function layer_forward(w, x, batch, memory) {
  const M = batch.rows.length;
  const make = (name, columns, count = M) => room(memory, name, count * columns);
  memory.x = x;
  const h_1 = rms_norm(make("h_1", WIDTH), x, w.norm_1, M);
  const raw = make("raw", ROW);
  for (let i = 0; i < M; i++) raw.set(w.qkv_bias, i * ROW);
  linear(raw, h_1, w.qkv, M, ROW, WIDTH);
  const qkv = rotary(make("qkv", ROW, batch.places), raw, batch.rows, 1);
  const a = attention(make("a", WIDTH), make("p", HEADS * batch.longest), qkv, batch);
  const middle = make("middle", WIDTH);
  middle.set(x.subarray(0, M * WIDTH));
  linear(middle, a, w.o, M, WIDTH, WIDTH);
  const h_2 = rms_norm(make("h_2", WIDTH), middle, w.norm_2, M);
  const gu = make("gu", 2 * INNER).fill(0, 0, M * 2 * INNER);
  linear(gu, h_2, w.gate_up, M, 2 * INNER, WIDTH);
  const s = swiglu(make("s", INNER), gu, M);
  const y = make("y", WIDTH);
  y.set(middle.subarray(0, M * WIDTH));
  return linear(y, s, w.down, M, WIDTH, INNER);
}

// g: on entry ∂y, on return ∂x. dw: the layer's gradients, += theirs. make: see `backward`.
function layer_backward(g, w, dw, batch, memory, make) {
  const M = batch.rows.length;
  const { x, h_1, qkv, a, p, middle, h_2, gu, s } = memory;
  const ds = linear_backward(make("ds", INNER), dw.down, g, s, w.down, M, WIDTH, INNER);
  const dgu = swiglu_backward(make("dgu", 2 * INNER), ds, gu, M);
  const dh = make("dh", WIDTH);
  linear_backward(dh, dw.gate_up, dgu, h_2, w.gate_up, M, 2 * INNER, WIDTH);
  rms_norm_backward(g, dw.norm_2, dh, middle, w.norm_2, M);
  const da = linear_backward(make("da", WIDTH), dw.o, g, a, w.o, M, WIDTH, WIDTH);
  const dqkv = attention_backward(make("dqkv", ROW), da, a, p, qkv, batch);
  rotary(dqkv, dqkv, batch.rows, -1); // in training row i lies at place i
  for (let i = 0; i < M * ROW; i++) dw.qkv_bias[i % ROW] += dqkv[i];
  linear_backward(dh, dw.qkv, dqkv, h_1, w.qkv, M, ROW, WIDTH);
  rms_norm_backward(g, dw.norm_1, dh, x, w.norm_1, M);
}

// Logits (M, TOKENS) of the token after each row. memory: {}, kept from call to call.
//
// batch.rows: what is read. Of each row its token, its position, the place of its q, k and v, the
// place where its own keys start, and of its prompt the first place (prefix) and the length
// (shared). places: how many places there are. longest: the most keys that a row sees.
function forward(model, batch, memory) {
  const { embedding, layers, norm } = model.parts;
  const M = batch.rows.length;
  memory.layers ??= [{}, {}];
  let x = room(memory, "x", M * WIDTH);
  batch.rows.forEach(({ token }, i) => {
    x.set(embedding.subarray(token * WIDTH, (token + 1) * WIDTH), i * WIDTH);
  });
  for (const l of [0, 1]) x = layer_forward(layers[l], x, batch, memory.layers[l]);
  const h = rms_norm(room(memory, "h", M * WIDTH), x, norm, M);
  const logits = room(memory, "logits", M * TOKENS).fill(0, 0, M * TOKENS);
  return linear(logits, h, embedding, M, TOKENS, WIDTH); // the head is tied to the embedding
}

// After `forward`: adds the gradient of the weights to model.gradient. dlogits: (M, TOKENS).
function backward(model, batch, memory, dlogits) {
  const { embedding, layers, norm } = model.parts;
  const d = model.gradients;
  const M = batch.rows.length;
  const make = (name, columns) => room(memory, name, M * columns);
  const dh = make("dh", WIDTH);
  linear_backward(dh, d.embedding, dlogits, memory.h, embedding, M, TOKENS, WIDTH);
  const g = make("g", WIDTH).fill(0, 0, M * WIDTH);
  rms_norm_backward(g, d.norm, dh, memory.layers[1].y, norm, M);
  for (const l of [1, 0]) {
    layer_backward(g, layers[l], d.layers[l], batch, memory.layers[l], make);
  }
  batch.rows.forEach(({ token }, i) => {
    if (token === 0) return; // as in PyTorch: <pad> learns nothing from being read
    for (let j = 0; j < WIDTH; j++) d.embedding[token * WIDTH + j] += g[i * WIDTH + j];
  });
}

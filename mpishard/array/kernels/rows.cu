// Operations along rows: layer norm, column sums, attention's softmax, the loss. One block works on one row unless said
// otherwise. Passes over a row read it again from memory (the caches hold it), so rows may have any length.

// --- layer norm (Ba et al. 2016, section 3.1)

// y = (x - mean) * rstd * weight + bias; y may be x.
extern "C" __global__ void layernorm(const T* x, const T* weight, const T* bias, T* y, A* mean, A* rstd, i64 rows,
                                     i64 width, A eps) {
    i64 row = blockIdx.x;
    if (row >= rows) return;
    x += row * width;
    y += row * width;

    A sum = 0;
    for (i64 c = threadIdx.x; c < width; c += BLOCK) sum += load(x + c);
    A center = block_sum(sum) / (A)width;
    // The squares of the differences, not the difference of squares: nothing cancels where the mean is large.
    A squares = 0;
    for (i64 c = threadIdx.x; c < width; c += BLOCK) {
        A t = load(x + c) - center;
        squares += t * t;
    }
    A scale = (A)1 / sqrt_of(block_sum(squares) / (A)width + eps);

    for (i64 c = threadIdx.x; c < width; c += BLOCK)
        store(y + c, (load(x + c) - center) * scale * load(weight + c) + load(bias + c));
    if (threadIdx.x == 0) {
        mean[row] = center;
        rstd[row] = scale;
    }
}

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * weight; dx may be dy.
extern "C" __global__ void layernorm_backward_input(const T* x, const T* weight, const A* mean, const A* rstd,
                                                    const T* dy, T* dx, i64 rows, i64 width) {
    i64 row = blockIdx.x;
    if (row >= rows) return;
    x += row * width;
    dy += row * width;
    dx += row * width;
    A center = mean[row], scale = rstd[row];

    A sum = 0, along = 0;
    for (i64 c = threadIdx.x; c < width; c += BLOCK) {
        A g = load(dy + c) * load(weight + c);
        sum += g;
        along += g * ((load(x + c) - center) * scale);
    }
    sum = block_sum(sum) / (A)width;
    along = block_sum(along) / (A)width;

    for (i64 c = threadIdx.x; c < width; c += BLOCK) {
        A g = load(dy + c) * load(weight + c);
        A xhat = (load(x + c) - center) * scale;
        store(dx + c, (g - sum - xhat * along) * scale);
    }
}

// --- sums over rows: one thread a column and part; a part is rows_per_part rows, grid = parts * ceil(width / BLOCK)

struct Part {
    i64 index, column, start, stop;
};

__device__ inline Part part_of(i64 rows, i64 width, i64 rows_per_part) {
    i64 blocks = (width + BLOCK - 1) / BLOCK;
    i64 index = blockIdx.x / blocks;
    i64 start = index * rows_per_part;
    i64 stop = start + rows_per_part < rows ? start + rows_per_part : rows;
    return {index, (blockIdx.x - index * blocks) * BLOCK + threadIdx.x, start, stop};
}

// weights, biases (parts, width): each part's sums of dy * xhat and of dy
extern "C" __global__ void layernorm_backward_params(const T* x, const A* mean, const A* rstd, const T* dy, A* weights,
                                                     A* biases, i64 rows, i64 width, i64 rows_per_part) {
    Part part = part_of(rows, width, rows_per_part);
    if (part.column >= width) return;
    A weight = 0, bias = 0;
    for (i64 row = part.start; row < part.stop; row++) {
        A d = load(dy + row * width + part.column);
        weight += d * ((load(x + row * width + part.column) - mean[row]) * rstd[row]);
        bias += d;
    }
    weights[part.index * width + part.column] = weight;
    biases[part.index * width + part.column] = bias;
}

// sums (parts, width): each part's sums of x
extern "C" __global__ void column_sum_parts(const T* x, A* sums, i64 rows, i64 width, i64 rows_per_part) {
    Part part = part_of(rows, width, rows_per_part);
    if (part.column >= width) return;
    A sum = 0;
    for (i64 row = part.start; row < part.stop; row++) sum += load(x + row * width + part.column);
    sums[part.index * width + part.column] = sum;
}

// out (+)= the parts' sums, in their order, rounded once. Any grid.
extern "C" __global__ void combine_parts(const A* sums, G* out, i64 width, i64 parts, int add) {
    for (i64 c = first_index(); c < width; c += index_stride()) {
        A total = 0;
        for (i64 part = 0; part < parts; part++) total += sums[part * width + c];
        store(out + c, add ? (A)load(out + c) + total : total);
    }
}

// out[r, h] = sum over d of x[r, h, d] * y[r, h, d]; one warp a dot, grid = ceil(rows * heads / WARPS)
extern "C" __global__ void row_dot(const T* x, const T* y, A* out, i64 rows, i64 heads, i64 size, i64 xs0, i64 xs1,
                                   i64 xs2, i64 ys0, i64 ys1, i64 ys2, i64 os0, i64 os1) {
    i64 dot = first_index() / WARP;
    int lane = threadIdx.x % WARP;
    if (dot >= rows * heads) return;  // a whole warp
    i64 row = dot / heads, head = dot - row * heads;
    x += row * xs0 + head * xs1;
    y += row * ys0 + head * ys1;
    A sum = 0;
    for (i64 d = lane; d < size; d += WARP) sum += load(x + d * xs2) * load(y + d * ys2);
    sum = warp_sum(sum);
    if (lane == 0) out[row * os0 + head * os1] = sum;
}

// --- attention: scores, p and dp (heads, rows, keys), the last axis contiguous; grid = heads * rows

// scores becomes softmax(scale * scores) over the keys that a row sees, and 0 where it sees none. lse takes
// log(sum(exp(scale * scores))), or gives it back where replay (Dao et al. 2022, section 3.1).
extern "C" __global__ void causal_softmax(T* scores, A* lse, i64 heads, i64 rows, i64 keys, i64 first_row, A scale,
                                          int replay, i64 s0, i64 s1, i64 ls0, i64 ls1) {
    i64 head = blockIdx.x / rows, row = blockIdx.x - head * rows;
    if (head >= heads) return;
    scores += head * s0 + row * s1;
    lse += head * ls0 + row * ls1;
    i64 seen = first_row + row + 1 < keys ? first_row + row + 1 : keys;

    A shift, total = 1;
    if (replay) {
        shift = *lse;
    } else {
        shift = -infinity();
        for (i64 k = threadIdx.x; k < seen; k += BLOCK) shift = larger(shift, load(scores + k) * scale);
        shift = block_max(shift);
        A sum = 0;
        for (i64 k = threadIdx.x; k < seen; k += BLOCK) sum += exp_of(load(scores + k) * scale - shift);
        total = block_sum(sum);
        if (threadIdx.x == 0) *lse = shift + log_of(total);
    }
    for (i64 k = threadIdx.x; k < keys; k += BLOCK)
        store(scores + k, k < seen ? exp_of(load(scores + k) * scale - shift) / total : (A)0);
}

// dp = (dp - delta) * p * scale
extern "C" __global__ void softmax_backward(const T* p, T* dp, const A* delta, i64 heads, i64 rows, i64 keys, A scale,
                                            i64 ps0, i64 ps1, i64 dps0, i64 dps1, i64 ds0, i64 ds1) {
    i64 head = blockIdx.x / rows, row = blockIdx.x - head * rows;
    if (head >= heads) return;
    p += head * ps0 + row * ps1;
    dp += head * dps0 + row * dps1;
    A along = delta[head * ds0 + row * ds1];
    for (i64 k = threadIdx.x; k < keys; k += BLOCK) store(dp + k, (load(dp + k) - along) * load(p + k) * scale);
}

// --- loss

constexpr i64 IGNORE = -100;  // constants.IGNORE

// losses[row] = logsumexp(logits[row]) - logits[row, target]; where gradient, logits becomes
// scale * (softmax - onehot). An ignored row has loss and gradient 0; a target that is no class makes both NaN.
extern "C" __global__ void cross_entropy(T* logits, const i64* targets, A* losses, i64 rows, i64 vocabulary, A scale,
                                         int gradient) {
    i64 row = blockIdx.x;
    if (row >= rows) return;
    logits += row * vocabulary;
    i64 target = targets[row];
    if (target < 0 || target >= vocabulary) {
        A value = target == IGNORE ? (A)0 : not_a_number();
        if (threadIdx.x == 0) losses[row] = value;
        for (i64 v = threadIdx.x; gradient && v < vocabulary; v += BLOCK) store(logits + v, value);
        return;
    }

    A top = -infinity();
    for (i64 v = threadIdx.x; v < vocabulary; v += BLOCK) top = larger(top, load(logits + v));
    top = block_max(top);
    A chosen = load(logits + target) - top;  // before the barriers of block_sum; the gradient is written behind them
    A sum = 0;
    for (i64 v = threadIdx.x; v < vocabulary; v += BLOCK) sum += exp_of(load(logits + v) - top);
    A total = block_sum(sum);

    if (threadIdx.x == 0) losses[row] = log_of(total) - chosen;
    if (!gradient) return;
    A factor = scale / total;
    for (i64 v = threadIdx.x; v < vocabulary; v += BLOCK) {
        A slope = exp_of(load(logits + v) - top) * factor;
        store(logits + v, v == target ? slope - scale : slope);
    }
}
